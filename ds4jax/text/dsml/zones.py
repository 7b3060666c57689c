"""How the next token of a reply is to be drawn: the structure of calls greedily, what they carry as the request says."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from ds4jax.text.dsml.parser import DsmlParser
from ds4jax.text.special import DSML

LONG_PAYLOAD = 64
"""Characters from which on a string no longer waits for the host: the end of a short one is exact, a long one is written at full speed."""

_TELLING = re.compile(rb'[<"\\]')  # without one of these, nothing begins or ends, and nothing is escaped


class CallZones:
    """Follow a reply token by token, as `DsmlParser` reads it.

    Structure is all of a block but its payload: the values that are strings, and the strings in JSON values. Two characters of an end
    tag are structure again, as ds4 has it; so is the mark of an opening tag, which nothing else has.

    is_greedy: whether the next token is structure. waits: whether the one behind it can differ in that, so that the next has to be
    read first. Both depend on the tokens alone. Text outside blocks and long payload do not wait: what begins or ends there is
    noticed with its first two characters, when the token behind them is already being drawn as if nothing had happened.

    Args:
        token_bytes: gives the bytes of a token.
        opening: of a block, with which the prompt ends.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], opening: str = "") -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parser = DsmlParser(str)
        self.is_greedy = self.waits = False
        self._read(opening)

    def take(self, token: int) -> None:
        """Take the next token. Costs little where nothing can change, as it stands in the way of the next step of all."""
        data = self._token_bytes(token)
        if self.waits or self._parser.has_pending or _TELLING.search(data):
            self._read(self._decoder.decode(data))

    def _read(self, text: str) -> None:
        parser = self._parser
        parser.feed(text)
        begun, n_payload = parser.begun, parser.n_payload
        self.is_greedy = (parser.is_inside and n_payload is None) or DSML in begun
        self.waits = self.is_greedy or len(begun) >= len("</") or (n_payload is not None and n_payload < LONG_PAYLOAD)

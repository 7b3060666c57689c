"""Finished responses that later requests may continue or fetch, kept in memory within bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds4jax.errors import RequestError
from ds4jax.serving.http.responses_tools import Form
from ds4jax.text.chat import Message

MOST_RESPONSES = 1000
MOST_CHARACTERS = 64 << 20


class ResponseNotFoundError(RequestError):
    """The response that a request names is not stored here."""

    def __init__(self, response_id: str, param: str) -> None:
        super().__init__(
            f"{param}: no response {response_id!r} is stored here. This server keeps the latest {MOST_RESPONSES}, until it restarts, "
            "and none that was made with `store` false; send the whole conversation as `input` instead.",
            param,
        )


@dataclass(frozen=True)
class StoredResponse:
    """A response as the JSON text that its client got, and the conversation up to and with it, without its instructions.

    forms: of the tools that could be called, by the names that the model uses.
    """

    response: bytes
    messages: tuple[Message, ...]
    forms: Mapping[str, Form] = field(default_factory=dict)

    @property
    def n_characters(self) -> int:
        """Size, roughly. Messages that conversations share are counted for each of them."""
        texts = [text or "" for message in self.messages for text in (message.content, message.reasoning)]
        texts += [call.arguments for message in self.messages for call in message.tool_calls]
        return len(self.response) + sum(map(len, texts))


class ResponseStore:
    """The latest responses; the oldest go first.

    `put` and `delete` belong on the event loop; `get` is a single look-up, and so safe on the threads that read bodies.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_characters = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, and drop the oldest ones that no longer fit; one that is too large for itself is not kept."""
        self._stored[response_id] = stored
        self._n_characters += stored.n_characters
        while len(self._stored) > self._most or self._n_characters > self._most_characters:
            _, dropped = self._stored.popitem(last=False)
            self._n_characters -= dropped.n_characters

    def get(self, response_id: str, param: str) -> StoredResponse:
        """Find a response. Raises ResponseNotFoundError naming the field that asked for it."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise ResponseNotFoundError(response_id, param)
        return stored

    def delete(self, response_id: str, param: str) -> None:
        """Forget a response. Raises ResponseNotFoundError."""
        self._n_characters -= self.get(response_id, param).n_characters
        del self._stored[response_id]

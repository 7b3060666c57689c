"""Compile a grammar in a process of its own first, where it is one of those that llguidance's own limits do not bound.

To intersect automata can take hours and all memory there is, in a thread that nothing can stop: twenty patterns under `allOf` are
enough. A process can be stopped. It costs 0.2 s, once for each grammar, so those that intersect nothing are spared it.

This very file is what the process runs, as a script that needs nothing of ours.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

import llguidance

LONGEST_S = 3  # of a processor
_ENDED_BY_LIMITS = (-signal.SIGXCPU, -signal.SIGABRT)  # of time; of memory, as llguidance's allocator takes it
_LARGEST_BYTES = 1 << 30
_REMEMBERED = 200  # verdicts, by the text of grammars

_INTERSECTS = re.compile(r'"allOf"|"patternProperties"|&')
# Where two of them meet in one value, as they may in any schema that has two, both automata are intersected.
_AUTOMATON = re.compile(r'"(?:pattern|format|multipleOf)"')
_ESCAPE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_TOKEN_ID = re.compile(r"<\[[^\]]*\]>")  # of the real vocabulary
_SPECIAL = 256  # a token of the vocabulary here that is no byte


def parser_limits() -> llguidance.LLParserLimits:
    """Bound what llguidance does bound: what compiling may build, and what a step may cost."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=300_000, step_lexer_fuel=100_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


def needs_trial(text: str) -> bool:
    """Whether a grammar, in Lark or in llguidance's own JSON, may intersect automata. True for some that do not."""
    text = _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), text).replace("\\", "")  # a schema may stand in a string
    return bool(_INTERSECTS.search(text)) or len(_AUTOMATON.findall(text)) > 1


def complaint(text: str, specials: tuple[str, ...]) -> str | None:
    """Compile a grammar in another process, and tell why it cannot be; None if it can.

    specials: the literals of the special tokens, which it may name.
    """
    try:
        return _verdict(text, specials)
    except subprocess.CalledProcessError as error:
        return f"the process that was to try it ended with status {error.returncode}; send the request again"


@functools.lru_cache(_REMEMBERED)
def _verdict(text: str, specials: tuple[str, ...]) -> str | None:
    """Try a grammar, or remember what came of it. Raises CalledProcessError, which is not remembered: the grammar may be in order."""
    command = [sys.executable, "-P", __file__]  # -P: the modules beside this file are none of its own
    given = json.dumps({"text": text, "specials": specials, "seconds": LONGEST_S}).encode()
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode in _ENDED_BY_LIMITS:
        return "compiling it takes too much time or memory"
    done.check_returncode()
    told: str | None = json.loads(done.stdout)
    return told


class _Bytes:
    """The smallest vocabulary in which every text can be written, as llguidance wants it described."""

    def __init__(self, specials: Sequence[str]) -> None:
        names = [name.encode() for name in ("<end>", *specials)]
        self.tokens = [*(bytes([byte]) for byte in range(_SPECIAL)), *names]
        self.special_token_ids = list(range(_SPECIAL, len(self.tokens)))
        self.eos_token_id = self.bos_token_id = _SPECIAL

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _main() -> None:
    """Read a grammar, compile it within the limits, and write what is wrong with it."""
    given = json.load(sys.stdin)
    # Time is counted in that of a processor: on a busy machine, a small grammar takes long too.
    resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"] + 1))
    for limit, most in ((resource.RLIMIT_AS, _LARGEST_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (most, most))
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(given["specials"])))
    text = _TOKEN_ID.sub(f"<[{_SPECIAL}]>", given["text"])
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    json.dump(matcher.get_error() if matcher.is_error() else None, sys.stdout)


if __name__ == "__main__":
    _main()

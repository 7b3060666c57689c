"""Log probabilities of a prompt (`echo` beside `logprobs`): the model draws it token by token, and may draw nothing else. No I/O.

A prompt that is read in chunks leaves only the logits of its last token. Here each of its tokens costs a step, as if it had been
generated; but nothing is needed for it that other requests do not need too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import Constraint, GenerateRequest, Token
from ds4jax.serving.http.logprobs import Scored, scored
from ds4jax.text.stream import Utf8Decoder
from ds4jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class KnownText:
    """A grammar of texts that begin with these tokens, at least one, and go on as they like."""

    ids: tuple[int, ...]
    n_vocab: int
    end_id: int = -1  # nothing is ever complete

    @property
    def first_mask(self) -> bytes:
        """The first token alone."""
        return self.mask(0)

    @property
    def begin(self) -> Callable[[], _Reader]:
        """Makes the reader of a new text."""
        return lambda: _Reader(self)

    def mask(self, position: int) -> bytes:
        """Allow what may stand at a position of the text."""
        n_bytes = -(-self.n_vocab // 32) * 4
        if position >= len(self.ids):
            return b"\xff" * n_bytes
        token = self.ids[position]
        return (1 << token).to_bytes(n_bytes, "little")


class _Reader:
    """Counts the tokens of a text."""

    def __init__(self, text: KnownText) -> None:
        self._text, self._n_read = text, 0

    def advance(self, token: int) -> bytes:
        """Take the next token; return the mask of those that may come behind it."""
        self._n_read += 1
        return self._text.mask(self._n_read)


def drawing_its_prompt(request: GenerateRequest, n_wanted: int, n_vocab: int) -> GenerateRequest:
    """Turn all of a prompt but its first token into what is drawn first, before n_wanted more.

    Raises RequestError for what would then mean something else.
    """
    if n_wanted <= 1:  # who scores a text asks for one token, and counts on one: an end would have no entry
        request = replace(request, stop_token_ids=frozenset())
    known, penalties = request.prompt[1:], request.adjustments
    if request.constraint is not None or penalties.frequency_penalty or penalties.presence_penalty:
        what = "a form of the answer" if request.constraint else "frequency_penalty and presence_penalty"
        raise RequestError(f"echo: together with logprobs, not supported beside {what}; leave one of them out", "echo")
    if ends := request.stop_token_ids.intersection(known):
        what = f"has the token {min(ends)}, which ends a text, so that what follows it can have no log probabilities"
        raise RequestError(f"prompt: {what}; send ignore_eos, or other stop_token_ids", "prompt")
    if not known:
        return request
    return replace(
        request,
        prompt=request.prompt[:1],
        max_tokens=n_wanted + len(known),
        adjustments=replace(penalties, min_tokens=penalties.min_tokens + len(known) if penalties.min_tokens else 0),
        constraint=Constraint(KnownText(known, n_vocab)),
    )


class PromptScores:
    """Takes the tokens that are drawn of a prompt.

    text: the prompt as it is shown, without the BOS that it may have been given.
    """

    def __init__(self, request: GenerateRequest, text: str, tokenizer: Tokenizer) -> None:
        known = request.constraint.grammar if request.constraint is not None else None
        self._n_left = len(known.ids) if isinstance(known, KnownText) else 0
        self._tokenizer, self._decoder, self._n_characters = tokenizer, Utf8Decoder(), 0
        self.n_prompt = len(request.prompt) + self._n_left
        first = tokenizer.token_bytes(request.prompt[0])
        # The first token follows nothing, so the model says nothing of it.
        self.tokens: list[Scored] = [Scored(first, None, (), 0, 0)]
        if request.prompt[0] != tokenizer.bos_id or text.startswith(first.decode(errors="replace")):
            self._pass(first)

    @property
    def n_characters(self) -> int:
        """Characters of the tokens taken."""
        return self._n_characters

    @property
    def n_drawn(self) -> int:
        """Tokens taken that the engine has drawn: all but the first."""
        return len(self.tokens) - 1

    @property
    def is_whole(self) -> bool:
        """Whether what is drawn now is no longer the prompt."""
        return self._n_left == 0

    def take(self, event: Token) -> None:
        """Take the next token of the prompt."""
        self._n_left -= 1
        assert event.logprobs is not None
        start = self._n_characters
        end = self._pass(self._tokenizer.token_bytes(event.token))
        self.tokens.append(scored(event, event.logprobs, self._tokenizer, start, end))

    def _pass(self, data: bytes) -> int:
        self._n_characters += len(self._decoder.feed(data))
        return self._n_characters + self._decoder.is_inside

"""Fields that the OpenAI-style bodies share: sampling, stop strings and length, read and checked by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from ds4jax.errors import ContextLengthError, RequestError
from ds4jax.serving.engine.api import MOST_BIASES, MOST_LOGPROBS, Adjustments, GenerateRequest, SamplingParams
from ds4jax.serving.http.prompts import check_ids
from ds4jax.serving.http.unsupported import UnsupportedFields
from ds4jax.text.tokenizer import Tokenizer

Number = int | float
N = TypeVar("N", int, float)

_DEFAULTS = SamplingParams()
_SEED_RANGE = 1 << 63
_ENGINE_SEEDS = 1 << 31  # as many as the engine itself draws from; larger and negative ones fold into them
_ENGINE_TOP_K = (1 << 31) - 1  # far beyond any vocabulary; the engine's field is 32 bits wide
_LARGEST = 1 << 64  # of whole numbers; JSON has them with thousands of digits, which Python refuses to write
MOST_STOPS, LONGEST_STOP = 64, 1024  # strings, characters
MOST_CHOICES = 128


class StreamOptions(msgspec.Struct):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class CommonBody(UnsupportedFields):
    """Fields of chat and text completions alike. Absent and null mean the same: the default.

    Whole numbers are typed as floats too, since some clients have no integers and send 16.0.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    seed: Number | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_cache_key: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings; empty ones can end nothing and are dropped."""
        return checked_stops("stop", [self.stop] if isinstance(self.stop, str) else self.stop or [])

    def stop_tokens(self, tokenizer: Tokenizer, *ids: int | None) -> frozenset[int]:
        """Collect the token ids that end a completion: of `ids` those the vocabulary has, or none with `ignore_eos`; and the client's own.

        Raises RequestError naming one that is no token.
        """
        asked = self.stop_token_ids or []
        check_ids(asked, "stop_token_ids", tokenizer)
        return frozenset(asked) | (frozenset() if self.ignore_eos else frozenset(i for i in ids if i is not None))

    def adjustments(self, tokenizer: Tokenizer, max_tokens: int | None) -> Adjustments:
        """Read what is to be done to the logits before tokens are drawn. Raises RequestError naming a field that is out of range.

        max_tokens: of the completion, which a minimum may not exceed.
        """
        return Adjustments(
            logit_bias=_biases(self.logit_bias or {}, tokenizer),
            repetition_penalty=_number("repetition_penalty", self.repetition_penalty, 1.0, least=0.01, most=100),
            frequency_penalty=_number("frequency_penalty", self.frequency_penalty, 0.0, least=-2, most=2),
            presence_penalty=_number("presence_penalty", self.presence_penalty, 0.0, least=-2, most=2),
            min_tokens=_whole("min_tokens", self.min_tokens, 0, least=0, most=max_tokens),
        )

    def sampling(self) -> SamplingParams:
        """Read the sampling fields. Raises RequestError naming one that is out of range."""
        temperature = _number("temperature", self.temperature, _DEFAULTS.temperature, least=0)
        top_p = _number("top_p", self.top_p, _DEFAULTS.top_p, least=0, most=1)
        top_k = _whole("top_k", self.top_k, _DEFAULTS.top_k, least=-1)
        min_p = _number("min_p", self.min_p, _DEFAULTS.min_p, least=0, most=1)
        seed = None if self.seed is None else _whole("seed", self.seed, 0, least=-_SEED_RANGE, most=_SEED_RANGE - 1) % _ENGINE_SEEDS
        if top_p == 0:  # leaves the likeliest token alone, which is what greedy means
            temperature, top_p = 0.0, 1.0
        top_k = min(max(top_k, 0), _ENGINE_TOP_K)
        return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def choice_count(n: Number | None) -> int:
    """Read how many answers one prompt is to have. Raises RequestError naming the field."""
    return _whole("n", n, 1, least=1, most=MOST_CHOICES)


def choice_requests(request: GenerateRequest, n: int, n_logprobs: int | None) -> list[GenerateRequest]:
    """Ask for n answers to one prompt, each with a seed of its own, and for log probabilities, unless n_logprobs is None."""
    seed = request.sampling.seed
    seeds = [None if seed is None else (seed + i) % _ENGINE_SEEDS for i in range(n)]
    return [replace(request, sampling=replace(request.sampling, seed=seed, logprobs=n_logprobs)) for seed in seeds]


def top_logprobs(name: str, asked: Number | None) -> int:
    """Read how many of the best tokens are to be shown beside each. Raises RequestError naming the field."""
    return _whole(name, asked, 0, least=0, most=MOST_LOGPROBS)


def checked_stops(name: str, given: Sequence[str]) -> list[str]:
    """Check stop strings, and drop the empty ones. Raises RequestError naming the field."""
    # Every piece of text is searched for all of them: without a bound one request could keep the server busy.
    if len(given) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in given):
        raise RequestError(f"{name}: expected at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters each", name)
    return [stop for stop in given if stop]


def completion_limit(name: str, asked: Number | None, *, n_prompt: int, n_ctx: int, default: int, param: str) -> int:
    """Decide how many tokens a completion may have.

    Args:
        name: the field that holds `asked`.
        n_prompt, n_ctx, default: tokens of the prompt, of a slot, and of a completion when the request names none.
        param: the field that holds the prompt, for the error.

    Only the default is cut to the room that is left: to cut what a client asked for would pass for the model's own length.
    Raises RequestError when `asked` is no positive whole number, ContextLengthError when prompt and completion do not fit.
    """
    n_completion = None if asked is None else _whole(name, asked, 0, least=1)
    if n_prompt + (1 if n_completion is None else n_completion) > n_ctx:
        raise ContextLengthError(n_ctx, n_prompt, n_completion, param)
    return min(default, n_ctx - n_prompt) if n_completion is None else n_completion


def _biases(asked: Mapping[str, Number], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`, whose keys are token ids in strings. Biases of zero are dropped."""
    if len(asked) > MOST_BIASES:
        raise RequestError(f"logit_bias: got {len(asked)} tokens, expected at most {MOST_BIASES}", "logit_bias")
    biases = {}
    for key, value in asked.items():
        if re.fullmatch("[0-9]{1,9}", key) is None or int(key) >= tokenizer.n_vocab:
            text = f"logit_bias: got the key {key[:20]!r}, expected a token id in a string, 0 to {tokenizer.n_vocab - 1}"
            raise RequestError(text, "logit_bias")
        biases[int(key)] = _number("logit_bias", value, 0.0, least=-100, most=100)
    return tuple((token, bias) for token, bias in biases.items() if bias)


def _number(name: str, value: Number | None, default: float, *, least: float, most: float | None = None) -> float:
    if value is None:
        return default
    try:
        return float(_in_range(name, value, least, most))
    except OverflowError:  # a whole number of hundreds of digits
        raise RequestError(f"{name}: the number is too large; send a smaller one", name) from None


def _whole(name: str, value: Number | None, default: int, *, least: int, most: int | None = None) -> int:
    if value is None:
        return default
    if value != int(value):
        raise RequestError(f"{name}: got {value}, expected a whole number", name)
    if abs(value) > _LARGEST:
        raise RequestError(f"{name}: the number is too large; send a smaller one", name)
    return _in_range(name, int(value), least, most)


def _in_range(name: str, value: N, least: N, most: N | None) -> N:
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise RequestError(f"{name}: got {value}, expected {wanted}", name)
    return value

"""Plain types that cross the boundary between the engine and whoever drives it. No arrays, no jax.

The HTTP edge sees an engine only as the `EngineClient` protocol below, so every test of the edge can run
against a scripted engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MOST_LOGPROBS = 20  # best tokens that can be reported beside a drawn one
MOST_BIASES = 300  # tokens of a request


class FinishReason(StrEnum):
    """Why a request ended, as the engine knows it (stop strings and tool calls are found above it)."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # max_tokens, or the slot's context, is used up
    CANCELLED = "cancelled"  # the caller went away
    ERROR = "error"  # a step failed, or its logits were unusable


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's next token is drawn. All of it is data of a step, none of it a shape.

    temperature <= 0 is greedy (lowest id wins ties). top_k 0, top_p 1 and min_p 0 switch those filters off.
    seed None means: the engine picks one; the same seed and the same logits give the same tokens.
    logprobs: report every token's log probability and those of so many best tokens (0 to MOST_LOGPROBS); None reports nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.05
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to a request's logits before a token is drawn, in vLLM's order and by its formulas.

    logit_bias: (token id, what is added to its logit), each id once, at most MOST_BIASES.
    repetition_penalty: positive logits of tokens in the prompt or the text are divided by it, negative ones multiplied.
    frequency_penalty: taken from a token's logit for each time that it was generated; presence_penalty: taken once.
    min_tokens: before so many tokens were generated, no stop token is drawn.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0


NO_ADJUSTMENTS = Adjustments()


class Matcher(Protocol):
    """Follows one text along a grammar. Used by one thread at a time, not always the same."""

    def advance(self, token: int) -> bytes | None:
        """Take the next token; return the mask of those that may come behind it, or None where the text is complete.

        A mask has a bit for each token id, in little-endian words of 32 bits. Raises Ds4jaxError where the text cannot go on.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar over the model's vocabulary."""

    @property
    def first_mask(self) -> bytes:
        """The tokens that a text may begin with."""
        ...

    @property
    def end_id(self) -> int:
        """The token that ends a text, which masks allow where the text may end."""
        ...

    @property
    def begin(self) -> Callable[[], Matcher]:
        """Makes the matcher of a new text."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the reply of a request has to look like, or a part of it.

    after: a token such as the one that ends the reasoning. The grammar holds for what is drawn behind it, and before it the text cannot
    end unless it may_end_before. None, or a prompt that ends with that token: the grammar holds from the first token.
    A text that is complete by the grammar ends the request, whatever its minimum length.
    """

    grammar: CompiledGrammar
    after: int | None = None
    may_end_before: bool = False


class Zones(Protocol):
    """Follows the text of one request, and says where its temperature does not count. Runs on the engine's thread, so it must be quick.

    Both answers are about the next token, depend on the tokens taken alone, and are there before the first one is taken.
    """

    @property
    def is_greedy(self) -> bool:
        """Whether it is the likeliest one. Only where it waits."""
        ...

    @property
    def waits(self) -> bool:
        """Whether it has to be read before the one behind it is drawn. Where it has not, a change comes into force one token late."""
        ...

    def take(self, token: int) -> None:
        """Take the next token."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One API call's work for the engine.

    prompt: token ids, at least one. max_tokens: None means as many as the slot's context allows.
    A sampled token in stop_token_ids ends the request; it is not delivered as a Token event but is counted nowhere.
    zones: begins to follow a text of which parts are drawn greedily; None where all of it is drawn as `sampling` says.
    marks: numbers of leading tokens that other prompts are likely to share, such as those of a system prompt.
    conversation: what the client calls it, if anything: a new prompt of it may take the place of its last one sooner than of others'.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    adjustments: Adjustments = NO_ADJUSTMENTS
    constraint: Constraint | None = None
    zones: Callable[[], Zones] | None = None
    marks: tuple[int, ...] = ()
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request got a slot; prefill begins. n_cached tokens of the prompt were already in the slot."""

    request_id: int
    n_prompt: int
    n_cached: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A quantum of the prompt is done: n_done of n_prompt tokens (cached ones included) are in the cache."""

    request_id: int
    n_done: int
    n_prompt: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of what the model itself gave a drawn token, before adjustments and temperature.

    top: (id, log probability) of the best tokens, as many as were asked for, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; logprobs where the request wants them."""

    request_id: int
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a request; there is exactly one. n_generated counts the delivered tokens."""

    request_id: int
    reason: FinishReason
    n_prompt: int
    n_cached: int
    n_generated: int
    error: str | None = None


Event = Started | Prefilled | Token | Finish
Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, and gauges of this moment.

    steps counts decode launches by bucket; rows counts live rows by bucket, so occupancy of a bucket is rows / (steps * bucket).
    batches counts decode launches by their live rows. prompt_tokens: of the prompts that got a slot, cached_tokens: those of them that
    were there already. reuses: requests by what they gained from: "live" (a slot continued as it was left), "rewind" or "fork".
    snapshots: those taken. prefill_chunks counts prefill launches, prefill_rows the prompts in them, prefill_padding their tokens that were
    computed for nobody. kv_tokens: those that running requests hold in the cache now.
    """

    n_slots: int
    n_ctx: int
    n_running: int
    n_waiting: int
    n_prefilling: int
    steps: dict[int, int]
    rows: dict[int, int]
    prefill_chunks: int
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: dict[str, int]
    failed_steps: int
    compile_misses: int
    coalesce_wait_us: int
    batches: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    prefill_padding: int = 0
    prefill_rows: int = 0
    coalesce_windows: int = 0
    kv_tokens: int = 0
    reuses: dict[str, int] = field(default_factory=dict)
    snapshots: int = 0
    reused_tokens: dict[str, int] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)
    failed_saves: int = 0

    @property
    def occupancy(self) -> float:
        """Live rows / padded rows over all decode steps; 0 before the first."""
        padded = sum(bucket * n for bucket, n in self.steps.items())
        return sum(self.rows.values()) / padded if padded else 0.0


class EngineClient(Protocol):
    """What the HTTP edge may ask of an engine. All methods are thread safe and return at once."""

    @property
    def n_ctx(self) -> int: ...

    def submit(self, request: GenerateRequest, sink: Sink, n_more: int = 0) -> int:
        """Queue a request; events reach `sink` in order, on the engine's thread (it must not block).

        n_more: requests that are to follow it at once. Where not all of them fit, this one is refused already.
        Raises QueueFullError, EngineStoppedError, ContextLengthError or RequestError.
        """
        ...

    def cancel(self, request_id: int) -> None:
        """End a request early, queued or running; its Finish (cancelled) still comes. Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def alive(self) -> bool:
        """Whether the engine's thread runs and its last step did not hang."""
        ...

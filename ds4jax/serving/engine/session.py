"""One inference timeline: where it is, what was fed to its slot, and what it may do next."""

from __future__ import annotations

import bisect
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property

from ds4jax.errors import Ds4jaxError
from ds4jax.model.mask import NEVER
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, Matcher, SamplingParams, Zones
from ds4jax.serving.engine.device import MASKED, UNMASKED, Chunk, MaskRule, Row

_GREEDY = SamplingParams(temperature=0.0, seed=0)
_ORDER = itertools.count()
_MOST_LONGER = 64  # tokens that an answer may lose to a prompt which is kept in more tokens than it was sent in


class State(StrEnum):
    """What a session waits for."""

    WAITING = "waiting"  # for a slot
    LOADING = "loading"  # for the beginning of its prompt to come from disk into its slot
    PREFILLING = "prefilling"  # for its next prompt chunk to be launched
    PENDING = "pending"  # for its next decode step to be launched; the last one may still be unread
    IN_FLIGHT = "in_flight"  # for a result, without which nothing of it can be launched
    MASKING = "masking"  # for the mask of its next token, which its last one decides
    IDLE = "idle"  # for its user's next call (manual sessions only)
    FINISHED = "finished"


class Session:
    """Follow one timeline from its queue to its end.

    A session is driven by a GenerateRequest or, without one, manual: a notebook user feeds it call by call. `tokens` are the
    prompt and everything sampled or supplied since; the first `n_fed` of them were given to the device, in launch order.
    That holds even while sampled tokens are still unknown here, because a driven session feeds them on the device:
    n_fed may then run ahead of len(tokens), and is caught up with before the slot is released.
    """

    def __init__(self, session_id: int, n_ctx: int, request: GenerateRequest | None = None) -> None:
        self.id = session_id
        self.request = request
        self.n_ctx = n_ctx
        self.state = State.IDLE if request is None else State.WAITING
        self.slot: int | None = None
        self.tokens: list[int] = [] if request is None else list(request.prompt)
        self.prompt_end = len(self.tokens)
        self.n_fed = 0
        self.n_cached = 0
        self.n_generated = 0
        self.queued = 0  # when its prompt began to wait for its next piece to be launched: an order, not a time
        self.n_unread = 0  # launches whose result was not read yet
        self.intact = True  # the slot holds what was fed; False after a failure
        self.counts_as_active = False  # manual sessions: others wait a window for it
        self.pending_since_us = 0
        self.idle_since_us = 0
        self.stops: list[int] = []  # where prefill pauses for a snapshot, ascending
        self.save_stops: list[int] = []  # where it pauses to be saved on disk, ascending
        self.cold_at: int | None = None  # which of those is of use to other prompts
        self.awaited_slot: int | None = None  # whose contents are being saved before it gets it
        self.n_loaded = 0  # tokens that came from disk
        self.n_longer = 0  # tokens by which the prompt grew when its beginning was taken as another one had it
        self.builder: tuple[Session, int] | None = None  # who computes the beginning of this prompt, and how much of it
        self.error: Ds4jaxError | None = None  # why a manual session ended
        self.sampling = _GREEDY
        self._constraint = None if request is None else request.constraint
        self._zones = None if request is None or request.zones is None else request.zones()
        self._in_answer = False  # of a constrained request: its next token is one that the grammar allows
        self._n_sampled = 0  # tokens whose sampling was launched
        self._limit = 0
        if request is not None:
            self._in_answer = self._constraint is not None and self._constraint.after in (None, request.prompt[-1])
            room = n_ctx - len(request.prompt)
            self._limit = room if request.max_tokens is None else min(room, request.max_tokens)
            self.sampling = request.sampling if request.sampling.seed is not None else replace(request.sampling, seed=secrets.randbits(31))
            self._as_asked, self._greedily = self.sampling, replace(self.sampling, temperature=0.0)
            if self._zones is not None and self._zones.is_greedy:
                self.sampling = self._greedily

    @property
    def is_manual(self) -> bool:
        """Whether a notebook user supplies every token."""
        return self.request is None

    @property
    def conversation(self) -> str | None:
        """What the client calls the conversation, if anything."""
        return self.request.conversation if self.request is not None else None

    @property
    def is_active(self) -> bool:
        """Whether it counts as an active generation, for quanta and windows."""
        if self.is_manual:
            return self.counts_as_active and self.state is not State.FINISHED
        return self.state in (State.PENDING, State.IN_FLIGHT, State.MASKING)

    @property
    def waits_for_host(self) -> bool:
        """Whether its next step can be launched only when the last one was read."""
        return self.is_manual or self._in_answer or (self._zones is not None and self._zones.waits)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def history(self) -> Sequence[int] | None:
        """What the slot holds, once every launch was read; None if that is unknown."""
        return self.tokens[: self.n_fed] if self.intact else None

    # ------------------------------------------------------------ another beginning
    def may_begin_with(self, n_tokens: int, n_covered: int) -> bool:
        """Whether its first n_covered tokens may give way to n_tokens others: the answer must have room as before."""
        room = self.n_ctx - self.prompt_end - (n_tokens - n_covered)
        return n_covered < self.prompt_end and room >= min(self._limit, self.n_ctx - self.prompt_end - _MOST_LONGER)

    def begin_with(self, tokens: Sequence[int], n_covered: int) -> None:
        """Replace the first n_covered tokens of the prompt by others of the same text. Counts that others see stay those of the prompt."""
        self.tokens[:n_covered] = tokens
        self.n_longer = len(self.tokens) - self.prompt_end
        self.prompt_end = len(self.tokens)
        self._limit = min(self._limit, self.n_ctx - self.prompt_end)

    def seen(self, n_tokens: int) -> int:
        """Convert a number of tokens in the slot to one of the prompt as it was sent."""
        return max(n_tokens - self.n_longer, 0)

    # ------------------------------------------------------------ launches
    def load(self, slot: int, n_cached: int) -> None:
        """Move into a slot that is being filled with the first n_cached tokens of the prompt."""
        self.slot, self.n_cached, self.n_loaded, self.state = slot, n_cached, n_cached, State.LOADING

    def start(self, slot: int, n_cached: int) -> None:
        """Move into a slot that holds the first n_cached tokens of the prompt."""
        self.slot, self.n_cached, self.n_fed = slot, n_cached, n_cached
        if not self.is_manual:
            self._wait_for_chunk()

    def _wait_for_chunk(self) -> None:
        """Stand at the end of those whose prompts are to be read on."""
        self.state, self.queued = State.PREFILLING, next(_ORDER)

    @property
    def n_unfed(self) -> int:
        """Tokens of the prompt that are still to be launched."""
        return self.prompt_end - self.n_fed

    @property
    def n_until_stop(self) -> int:
        """Tokens of the prompt up to the next stop, or its end."""
        return min(stop for stop in (*self.stops, *self.save_stops, self.prompt_end) if stop > self.n_fed) - self.n_fed

    def stop_before(self, position: int, spacing: int) -> int:
        """Make sure of a stop not more than `spacing` tokens before a position that is still to come; returns where."""
        ahead = [stop for stop in self.stops if self.n_fed < stop <= position]
        if position - max(ahead, default=self.n_fed) < spacing:
            return max(ahead, default=self.n_fed)
        bisect.insort(self.stops, position)
        return position

    @property
    def awaits_builder(self) -> bool:
        """Whether somebody is still computing the beginning of the prompt."""
        if self.builder is None:
            return False
        other, position = self.builder
        return other.state is State.PREFILLING and other.n_fed < position

    def next_chunk(self, n_tokens: int) -> Chunk:
        """Make a row of a prefill launch of the next n_tokens of the prompt."""
        assert self.slot is not None
        tokens = self.tokens[self.n_fed : min(self.n_fed + n_tokens, self.prompt_end)]
        return Chunk(self.slot, tokens, self.sampling, self.mask_rule)

    def chunk_launched(self, n_tokens: int, now_us: int) -> None:
        """Note that a chunk was enqueued; the last one also samples the first token."""
        self.n_fed += n_tokens
        self.n_unread += 1
        if self.n_unfed == 0:
            self._sampling_launched(now_us)
        else:
            self._wait_for_chunk()

    def next_row(self) -> Row:
        """Make the row of the next decode step; a driven session's token is taken where it was sampled, on the device."""
        assert self.slot is not None
        return Row(self.slot, self.tokens[-1] if self.is_manual else None, self.sampling, self.mask_rule)

    def row_launched(self, now_us: int) -> None:
        """Note that a decode step was enqueued."""
        self.n_fed += 1
        self.n_unread += 1
        self._sampling_launched(now_us)

    def _sampling_launched(self, now_us: int) -> None:
        """Be pending again at once, unless the host must supply the next token or the last one is under way."""
        self._n_sampled += 1
        self.pending_since_us = now_us
        self.state = State.IN_FLIGHT if self.waits_for_host or self._n_sampled == self._limit else State.PENDING

    # ------------------------------------------------------------ results
    def take_token(self, token: int) -> FinishReason | None:
        """Take a sampled token of a driven session; says why the session ends with it, if it does."""
        assert self.request is not None
        self.tokens.append(token)
        if token in self.request.stop_token_ids or (self._in_answer and token == self._constraint_end):
            return FinishReason.STOP
        self.n_generated += 1
        if self._zones is not None:
            self._follow(self._zones, token)
        if self._in_answer:
            self.state = State.MASKING  # whether that was the last token, the grammar says
            return None
        if self._constraint is not None and token == self._constraint.after:
            self._in_answer = True
            if self.n_unread:  # the step that draws the answer's first token is under way; its mask was there all the time
                self.state = State.IN_FLIGHT
        return self._reason_to_end()

    def _follow(self, zones: Zones, token: int) -> None:
        """Let the zone of a token decide how the next one is drawn, and whether that may be launched before this one is read.

        A row that ran ahead has its next token drawn as asked, even if its launch is still to come: when a step is launched depends on
        the others, and the text must not.
        """
        waited = self.waits_for_host
        zones.take(token)
        if not waited:
            if zones.waits and self.n_unread:
                self.state = State.IN_FLIGHT
            return
        self.sampling = self._greedily if zones.is_greedy else self._as_asked
        if self._n_sampled < self._limit:
            self.state = State.PENDING

    def _reason_to_end(self) -> FinishReason | None:
        return FinishReason.LENGTH if self.n_generated == self._limit else None

    def finish_event(self, reason: FinishReason, error: str | None = None) -> Finish:
        """Make the last event of a driven session."""
        return Finish(self.id, reason, self.seen(self.prompt_end), self.seen(self.n_cached), self.n_generated, error)

    # ------------------------------------------------------------ grammars
    @property
    def first_mask(self) -> bytes | None:
        """The tokens that its answer may begin with; None where it may begin with any."""
        return None if self._constraint is None else self._constraint.grammar.first_mask

    @property
    def mask_rule(self) -> MaskRule:
        """When the mask of its slot holds for its next step."""
        if self._in_answer:
            return MASKED
        if self._constraint is None or self._constraint.after is None:
            return UNMASKED
        return MaskRule(self._constraint.after, NEVER if self._constraint.may_end_before else self._constraint.grammar.end_id)

    @property
    def _constraint_end(self) -> int | None:
        return None if self._constraint is None else self._constraint.grammar.end_id

    @cached_property
    def _matcher(self) -> Matcher:
        assert self._constraint is not None
        return self._constraint.grammar.begin()

    def follow_grammar(self) -> bytes | None:
        """Take the last token along the grammar (`Matcher.advance`); the only method that another thread may run."""
        return self._matcher.advance(self.tokens[-1])

    def take_mask(self, mask: bytes | None, now_us: int) -> FinishReason | None:
        """Go on with what may come next, None if nothing may; says why the session ends, if it does."""
        reason = FinishReason.STOP if mask is None else self._reason_to_end()
        if reason is None:
            self.state, self.pending_since_us = State.PENDING, now_us
        return reason

    # ------------------------------------------------------------ manual calls
    def feed_prompt(self, tokens: Sequence[int]) -> None:
        """Append tokens to be prefilled. Prefilling is not generating, so nobody waits for this session until it decodes."""
        self.tokens.extend(tokens)
        self.prompt_end = len(self.tokens)
        self.counts_as_active = False
        self._wait_for_chunk()

    def feed_token(self, token: int, now_us: int) -> None:
        """Append one token to be decoded."""
        self.tokens.append(token)
        self.state, self.counts_as_active, self.pending_since_us = State.PENDING, True, now_us

    def returned(self, now_us: int) -> None:
        """Note that a call's result reached the user, whose turn it is now."""
        self.state, self.idle_since_us = State.IDLE, now_us

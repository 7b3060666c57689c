"""The engine without its thread: requests and notebook sessions over a device, one step at a time.

`EngineCore.step` is plan, run, deliver, and it runs ONE STEP AHEAD of the host: a launch is enqueued before the result of
the previous one is read, so the device never waits for Python. What follows from that:

- At most one launch is unread when a step is planned, two for the moment between a launch and the read behind it.
- A row that ends is found one step late. Its next step is already enqueued; that step's token is thrown away. A row whose last
  token is known in advance (max_tokens, context full) is not launched again.
- Prefill chunks are read one behind as well, for nothing but the wait: without it a long prompt would be enqueued
  whole, and a cancelled or a short request would stand in line behind all of it.
- A slot is given back when its last launch was read. Device ordering alone would allow the next session in earlier, but then a
  failure of the old step, which shows only at that read, could not be told from damage to the new session.
- A row whose next token a grammar decides does not run ahead: it sits out the step that is launched before its token is read. Its mask is
  computed beside this thread while that step runs, so the others never wait for it.
- The failure of a launch is kept until its turn to be read, so results and failures reach a request in one order.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4jax.config import EngineConfig
from ds4jax.errors import (
    ContextLengthError,
    DecodeFailedError,
    DecodeInFlightError,
    Ds4jaxError,
    EngineStoppedError,
    QueueFullError,
    RequestError,
)
from ds4jax.serving.engine.api import EngineStats, Event, FinishReason, GenerateRequest, Prefilled, Started, Token
from ds4jax.serving.engine.buckets import nearest, prefill_shape
from ds4jax.serving.engine.checks import check_adjustments, check_sampling, check_tokens
from ds4jax.serving.engine.counters import Counters
from ds4jax.serving.engine.device import Device, DeviceStepError
from ds4jax.serving.engine.disk import POLL_US, Disk, SavedSessions
from ds4jax.serving.engine.keeping import Keeping
from ds4jax.serving.engine.kvstore import Found
from ds4jax.serving.engine.log import log_batch
from ds4jax.serving.engine.masks import MaskWorkers
from ds4jax.serving.engine.pipeline import Outcome, Pipeline
from ds4jax.serving.engine.scheduler import Decode, Idle, Plan, Prefill, Turns, WaitUntil, plan
from ds4jax.serving.engine.session import Session, State
from ds4jax.serving.engine.slots import Choice, SlotTable

UNUSABLE_LOGITS = "the logits of this session were NaN or all equal"
ENGINE_CLOSED = "the engine is closed; open a new one"
SESSION_CLOSED = "this session is closed; open another with engine.open_session()"


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a manual session's call: logits (float32 [V]) or the error to raise."""

    request_id: int
    result: npt.NDArray[np.float32] | Exception


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought. wait_until_us: when to step again; None: not before something new arrives."""

    events: tuple[Event | Returned, ...]
    wait_until_us: int | None


def monotonic_us() -> int:
    """Read the clock that all times of the engine refer to, in microseconds."""
    return time.monotonic_ns() // 1000


class EngineCore:
    """Own the sessions of one device. Not thread safe, except `new_session` and `check_capacity`, which touch no state.

    saved: the sessions on disk, if any are kept there. texts: of the tokens, by id, for prompts of the same text as what is there.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        clock_us: Callable[[], int] = monotonic_us,
        saved: SavedSessions | None = None,
        texts: Sequence[bytes] = (),
    ) -> None:
        self._device, self._config, self._clock_us = device, config, clock_us
        self._ids = itertools.count(1)
        self._live: dict[int, Session] = {}
        self._waiting: deque[Session] = deque()
        self._slots = SlotTable(device.n_slots, device.n_snapshots, device.prefill_buckets[0], texts)
        self._pipeline = Pipeline(device, clock_us)
        self._masks = MaskWorkers()
        self._events: list[Event | Returned] = []
        self._turns = Turns()
        self._window_opened_us: int | None = None
        self._counters = Counters()
        self._keeping = Keeping(device, self._slots, self._counters, config.prefill_quantum)
        self._disk = None if saved is None else Disk(saved, device, self._slots, self._pipeline, clock_us)

    # ------------------------------------------------------------ requests
    def new_session(self, request: GenerateRequest) -> Session:
        """Check a request and number it. Raises RequestError or ContextLengthError."""
        n_ctx = self._device.n_ctx
        if not request.prompt:
            raise RequestError("prompt: got no tokens, expected at least one", "prompt")
        if len(request.prompt) >= n_ctx:
            raise ContextLengthError(n_ctx, len(request.prompt), None, "prompt")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError(f"max_tokens: got {request.max_tokens}, expected at least 1", "max_tokens")
        check_tokens(request.prompt, self._device.n_vocab, "prompt")
        check_sampling(request.sampling)
        check_tokens(tuple(request.stop_token_ids), self._device.n_vocab, "stop_token_ids")
        check_adjustments(request.adjustments, self._device.n_vocab)
        if request.constraint is not None and request.constraint.after is not None:
            check_tokens((request.constraint.after,), self._device.n_vocab, "constraint.after")
        return Session(next(self._ids), n_ctx, request)

    def check_capacity(self, n_live: int, n_new: int = 1) -> None:
        """Raise QueueFullError if n_new more do not fit into slots and queue beside n_live requests and sessions."""
        n_most = len(self._slots) + self._config.max_waiting
        if n_live + n_new > n_most:
            raise QueueFullError(max(n_live - len(self._slots), 0), n_most=n_most)

    def enqueue(self, session: Session) -> None:
        """Put a new session at the end of the queue."""
        self._live[session.id] = session
        self._waiting.append(session)

    def submit(self, request: GenerateRequest) -> int:
        """Queue a request and return its id. Raises RequestError, ContextLengthError or QueueFullError."""
        session = self.new_session(request)
        self.check_capacity(len(self._live))
        self.enqueue(session)
        return session.id

    def cancel(self, request_id: int) -> None:
        """End a request, wherever it is; its Finish (cancelled) is among the events of the next step. Unknown ids are ignored."""
        session = self._live.get(request_id)
        if session is not None and not session.is_manual:
            self._finish(session, FinishReason.CANCELLED)

    def close(self) -> tuple[Event | Returned, ...]:
        """End everything that lives, and save it if there is a folder for it; returns the last events."""
        self._masks.close()
        for session in list(self._live.values()):
            if session.is_manual:
                self._end_manual(session, EngineStoppedError(ENGINE_CLOSED))
            else:
                self._finish(session, FinishReason.CANCELLED)
        self._read_all_but(0)
        if self._disk is not None:
            self._disk.close()
        return self._take_events()

    # ------------------------------------------------------------ manual sessions
    @property
    def n_manual(self) -> int:
        """Manual sessions that hold a slot."""
        return sum(session.is_manual for session in self._live.values())

    def open_session(self) -> Session:
        """Give a slot to a notebook user. Raises QueueFullError if none is free or requests wait for one."""
        choice = None if self._waiting else self._slots.choose(())
        if choice is None:
            raise QueueFullError(len(self._waiting))
        session = Session(next(self._ids), self._device.n_ctx)
        self._live[session.id] = session
        self._move_in(session, choice)
        if session.error is not None:
            raise session.error
        return session

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Feed tokens to a manual session; a Returned event brings the logits after the last one. Raises RequestError."""
        self._check_idle(session)
        if not tokens:
            raise RequestError("prefill: got no tokens, expected at least one", "tokens")
        check_tokens(tokens, self._device.n_vocab, "tokens")
        self._check_room(session, len(tokens))
        session.feed_prompt(tokens)

    def decode(self, session: Session, token: int) -> None:
        """Feed one token to a manual session; a Returned event brings the logits. Raises DecodeInFlightError or RequestError."""
        self._check_idle(session)
        check_tokens((token,), self._device.n_vocab, "token")
        self._check_room(session, 1)
        session.feed_token(token, self._clock_us())

    def close_session(self, session: Session) -> None:
        """End a manual session. Its tokens stay in the slot for a prompt that continues them."""
        self._end_manual(session, RequestError(SESSION_CLOSED))

    def _check_idle(self, session: Session) -> None:
        if session.finished:
            raise session.error or RequestError(SESSION_CLOSED)
        if session.state is not State.IDLE:
            raise DecodeInFlightError

    def _check_room(self, session: Session, n: int) -> None:
        if session.n_fed + n > session.n_ctx:
            raise RequestError(
                f"the session holds {session.n_fed} of {session.n_ctx} tokens, so {n} more do not fit; "
                "feed fewer, or open the engine with a larger ctx",
                "tokens",
            )

    # ------------------------------------------------------------ the step
    def step(self, now_us: int) -> Step:
        """Plan, run, deliver: enqueue the next launch, then read the result of the one before."""
        self._take_masks()
        self._admit()
        chunks, packs = self._device.prefill_buckets, self._device.pack_buckets
        todo = plan(list(self._slots.residents()), now_us, self._config, self._turns, chunks[-1], packs)
        self._watch_window(todo, now_us)
        if isinstance(todo, WaitUntil):
            return Step(self._take_events(), todo.us)
        worked = self._read_all_but(0) if isinstance(todo, Idle) else self._launch(todo)
        polls = self._visit_disk(decoding=isinstance(todo, Decode))
        return Step(self._take_events(), now_us if worked or self._masks else now_us + POLL_US if polls else None)

    def stats(self) -> EngineStats:
        """Count what happened since start and what is going on."""
        if self._disk is not None:
            self._counters.saves, self._counters.failed_saves = self._disk.saves.saved, self._disk.saves.n_failed
        return self._counters.snapshot(self._device, list(self._slots.residents()), len(self._waiting))

    def _admit(self) -> None:
        """Move waiting requests into free slots, first come, first served.

        One whose beginning somebody is just computing waits for that, and others may pass: it is sooner done with a copy of it.
        """
        for session in list(self._waiting):
            if session.awaits_builder or (self._disk is not None and self._disk.holds(session)):
                continue
            choice = self._slots.choose(session.tokens, session.conversation)
            if choice is None:
                return
            if choice.n_retold is not None and not session.may_begin_with(choice.n_cached, choice.n_retold):
                choice = self._slots.choose(session.tokens, session.conversation, retold=False) or choice
            session.builder = self._slots.builder_of(session.tokens, choice.n_cached) if self._device.n_snapshots else None
            if session.builder is not None:
                continue
            found = None
            if self._disk is not None:
                if self._disk.awaits(session, choice.n_covered):
                    continue
                found = self._disk.loads.found(session, choice.n_covered)
                if found is not None:
                    choice = self._slots.choose((), session.conversation) or choice
                if not self._is_vacant(choice, session):
                    continue
                self._disk.loads.take(session)
            self._waiting.remove(session)
            self._admit_to(session, choice, found)

    def _admit_to(self, session: Session, choice: Choice, found: Found | None) -> None:
        """Give a slot to a request, as chosen, with what was found of it on disk."""
        n_cached, reuse = choice.n_cached, choice.reuse
        if found is not None:
            session.begin_with(found.entry.tokens.tolist(), found.n_covered)
            n_cached, reuse = found.entry.header.n_tokens, "disk"
        elif choice.n_retold is not None:
            session.begin_with(self._slots.left(choice.slot)[0], choice.n_retold)
        self._counters.admitted(session.seen(session.prompt_end), session.seen(n_cached), reuse)
        self._events.append(Started(session.id, session.seen(session.prompt_end), session.seen(n_cached)))
        self._move_in(session, choice, found)

    def _is_vacant(self, choice: Choice, session: Session) -> bool:
        """Whether a slot can be had now; if not, what it holds is being saved."""
        vacant = []
        self._try(lambda: vacant.append(self._disk is None or self._disk.is_vacant(choice, session)))
        return vacant == [True]

    def _move_in(self, session: Session, choice: Choice, found: Found | None = None) -> None:
        """Give a slot to a session, emptied if it holds anything else; what was found on disk comes there beside the next steps."""
        self._slots.take(choice, session)
        if found is None:
            session.start(choice.slot, choice.n_cached)
        else:
            session.load(choice.slot, found.entry.header.n_tokens)
        if not self._try(lambda: self._prepare(choice, session), session):
            return
        self._keeping.plan(session, choice)
        if self._disk is not None:
            self._disk.moved_in(session, choice, found)
        if choice.reuse == "live" and not session.is_manual:  # the state at the end of a turn, which the next token destroys
            self._try(lambda: self._keeping.keep(session))

    def _prepare(self, choice: Choice, session: Session) -> None:
        """Bring a slot to where its session begins."""
        if choice.must_clear:
            self._device.clear(choice.slot)
        if choice.snapshot is not None and choice.source is not None:
            self._device.restore(choice.snapshot, choice.source, choice.slot)
        self._device.adjust(choice.slot, session.request)
        if (first_mask := session.first_mask) is not None:
            self._device.mask(choice.slot, first_mask)

    def _visit_disk(self, *, decoding: bool) -> bool:
        """Go on with what is being saved and loaded; says whether there is any."""
        if (disk := self._disk) is None:
            return False
        self._try(lambda: disk.advance_saves(decoding=decoding))
        loading = [session for session in self._slots.residents() if session.state is State.LOADING]
        self._try(lambda: self._begin_loaded(disk.advance_loads(decoding=decoding)), *loading)
        return disk.wants_step()

    def _begin_loaded(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            assert session.slot is not None
            session.start(session.slot, session.n_cached)
            self._keeping.keep(session)

    def _keep_those_of(self, launched: Prefill | Decode) -> None:
        """Keep states behind a step that was just launched, in memory and on disk."""
        if self._disk is not None:
            self._disk.launched(launched.rows)
        if isinstance(launched, Prefill):
            for session in launched.rows:
                self._keeping.keep_on_the_way(session)

    def _try(self, operation: Callable[[], None], *sessions: Session) -> bool:
        """Ask something of the device beside the steps; a failure ends these sessions. Says whether it went well."""
        try:
            operation()
        except DeviceStepError as error:
            self._fail_step(sessions, error)
            return False
        return True

    def _take_masks(self) -> None:
        """Go on with the sessions whose masks are there, or whose grammar says that they are complete."""
        for session, future in self._masks.take():
            if session.finished:  # cancelled meanwhile
                continue
            if error := future.exception():
                self._finish(session, FinishReason.ERROR, str(error))
                continue
            mask = future.result()
            reason = session.take_mask(mask, self._clock_us())
            if reason is not None:
                self._finish(session, reason)
            elif mask is not None and session.slot is not None:
                self._device.mask(session.slot, mask)

    def _launch(self, todo: Prefill | Decode) -> bool:
        """Enqueue a step and read the one before it; after a failure read all, for nothing may be built upon it."""
        self._turns = self._turns.after(todo)
        launched = self._pipeline.launch(todo)
        self._count(todo)
        if launched:
            self._try(lambda: self._keep_those_of(todo))
        self._read_all_but(1 if launched else 0)
        return True

    def _watch_window(self, todo: Plan, now_us: int) -> None:
        """Note how long windows are open; whoever could have joined a launch and did not is not waited for again."""
        if isinstance(todo, WaitUntil):
            if self._window_opened_us is None:
                self._window_opened_us = now_us
            return
        if isinstance(todo, Decode):
            if self._window_opened_us is not None:
                self._counters.waited(now_us - self._window_opened_us)
            for session in self._slots.residents():
                if session.state is State.IDLE:
                    session.counts_as_active = False
        self._window_opened_us = None

    def _count(self, launched: Prefill | Decode) -> None:
        if isinstance(launched, Prefill):
            shape = prefill_shape(launched.n_tokens, self._device.prefill_buckets, self._device.pack_buckets)
            self._counters.prefilled(launched.n_tokens, shape)
        else:
            self._counters.decoded(len(launched.rows), nearest(self._device.decode_buckets, len(launched.rows)))

    # ------------------------------------------------------------ results
    def _read_all_but(self, keep: int) -> bool:
        """Read launches until `keep` are left; says whether there was anything to read."""
        worked = len(self._pipeline) > keep
        while len(self._pipeline) > keep:
            self._deliver(self._read())
        return worked

    def _read(self) -> Outcome:
        outcome = self._pipeline.read()
        if self._config.batch_log and isinstance(outcome.launch.plan, Decode):
            count = len(outcome.sessions)
            log_batch(count, nearest(self._device.decode_buckets, count), outcome.elapsed_us, ok=outcome.error is None)
        return outcome

    def _deliver(self, outcome: Outcome) -> None:
        """Hand every session of a launch its result, and let go of those that had ended before."""
        if outcome.error is not None:
            self._fail_step(outcome.sessions, outcome.error)
        else:
            for index, session in enumerate(outcome.sessions):
                if not session.finished:
                    self._advance(session, index, outcome)
        for session in outcome.sessions:
            self._release_if_done(session)

    def _advance(self, session: Session, index: int, outcome: Outcome) -> None:
        """Take one session's share of a result."""
        token = outcome.tokens[index]
        if token < 0 and self._disk is not None:
            self._disk.doubt(session)
        if isinstance(outcome.launch.plan, Prefill):
            n_done = outcome.launch.n_done[index]
            if not session.is_manual:
                self._events.append(Prefilled(session.id, session.seen(n_done), session.seen(session.prompt_end)))
            if n_done < session.prompt_end:
                return
        if token < 0:
            self._fail(session, Ds4jaxError(UNUSABLE_LOGITS))
        elif session.is_manual:
            assert outcome.logits is not None
            session.returned(self._clock_us())
            self._events.append(Returned(session.id, outcome.logits[index]))
        else:
            n_before = session.n_generated
            reason = session.take_token(token)
            if session.n_generated > n_before:
                self._counters.generated_tokens += 1
                self._events.append(Token(session.id, token, outcome.logprobs[index]))
            if reason is not None:
                self._finish(session, reason)
            elif session.state is State.MASKING:
                self._masks.start(session)

    # ------------------------------------------------------------ ends
    def _fail_step(self, sessions: Iterable[Session], error: DeviceStepError) -> None:
        """End the sessions of a failed step; all residents if the cache is lost, whose unread steps then mean nothing."""
        self._counters.failed_steps += 1
        if error.cache_lost:
            sessions = list(self._slots.residents())
            while self._pipeline:
                self._read()
            self._slots.forget()
            if self._disk is not None:
                self._disk.forget()
        for session in sessions:
            self._fail(session, DecodeFailedError(error.cause))

    def _fail(self, session: Session, error: Ds4jaxError) -> None:
        """End a session whose slot can no longer be trusted."""
        session.intact = False
        self._distrust(session)
        if session.finished:
            self._release_if_done(session)
        elif session.is_manual:
            self._end_manual(session, error)
        else:
            self._finish(session, FinishReason.ERROR, str(error))

    def _distrust(self, session: Session) -> None:
        """Save nothing of a session that may have gone wrong."""
        if self._disk is not None and session.slot is not None:
            self._disk.saves.distrust(session.slot)

    def _finish(self, session: Session, reason: FinishReason, error: str | None = None) -> None:
        """End a request with its one Finish."""
        self._counters.finished[reason.value] += 1
        self._events.append(session.finish_event(reason, error))
        self._bury(session)

    def _end_manual(self, session: Session, error: Ds4jaxError) -> None:
        """End a manual session; a call that waits raises the error now, any later call raises it then."""
        if session.finished:
            return
        if session.state is not State.IDLE:
            self._events.append(Returned(session.id, error))
        session.error = error
        self._bury(session)

    def _bury(self, session: Session) -> None:
        if session.state is State.WAITING:
            self._waiting.remove(session)
        session.state = State.FINISHED
        del self._live[session.id]
        self._release_if_done(session)

    def _release_if_done(self, session: Session) -> None:
        """Take the slot back as soon as the session has ended and its last launch was read."""
        if session.finished and session.n_unread == 0 and session.slot is not None:
            self._slots.release(session.slot, session.history)
            session.slot = None

    def _take_events(self) -> tuple[Event | Returned, ...]:
        events, self._events = tuple(self._events), []
        return events

"""The engine's thread, and the doors through which other threads reach it.

The life of a request:

 1. `Engine.submit`, on the caller's thread: check and number it, refuse it if the queue is full, put it in the inbox, ring.
 2. The engine's thread wakes, empties the inbox and queues it (`EngineCore.enqueue`).
 3. A step gives it a slot, at best one that holds the beginning of its prompt -> Started.
 4. Steps take its prompt in chunks, taking turns with everybody else's decode steps -> Prefilled, one a chunk.
 5. The last chunk samples its first token; from then on it is a row of every decode step, fed on the device.
 6. Each step's tokens are read while the next step runs -> Token.
 7. A stop token, its last token, `cancel` or a failure ends it -> Finish. When the step that was running then is
    read, the slot is free, and still holds what was fed to it for a prompt that continues from there.

Events are handed to sinks on the engine's thread between steps. All state of the device and of the sessions belongs to that
thread; what others may touch is in this file, behind one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from ds4jax.config import EngineConfig
from ds4jax.errors import DecodeInFlightError, EngineStoppedError
from ds4jax.serving.engine.api import EngineStats, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Sink
from ds4jax.serving.engine.core import ENGINE_CLOSED, EngineCore, Returned, monotonic_us
from ds4jax.serving.engine.device import Device
from ds4jax.serving.engine.disk import SavedSessions
from ds4jax.serving.engine.log import logger
from ds4jax.serving.engine.notebook import Logits, NotebookSession, Operation, stream_tokens
from ds4jax.serving.engine.session import Session

_JOIN_TIMEOUT_S = 60.0  # the longest that a step may keep `close` waiting


class Engine:
    """Serve many requests and notebook sessions over one device. Thread safe; implements `api.EngineClient`.

    Args:
        device: weights, cache and programs; nobody else may use it from now on.
        config: policy (windows, quanta, queue limit, batch log).
        hang_after_s: a step that takes longer makes `alive` say no.
        saved: the sessions on disk, if any are kept there.
        texts: of the tokens, by id, for prompts of the same text as what is there.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        *,
        hang_after_s: float = 30.0,
        saved: SavedSessions | None = None,
        texts: Sequence[bytes] = (),
    ) -> None:
        self._n_ctx = device.n_ctx
        self._core = EngineCore(device, config, saved=saved, texts=texts)
        self._hang_after_us = int(hang_after_s * 1e6)
        self._bell = threading.Condition()  # guards everything below; rung when the inbox has something
        self._inbox: list[tuple[Callable[[EngineCore], Any], Future[Any] | None]] = []
        self._clients: dict[int, tuple[Session, Sink]] = {}  # requests without a Finish
        self._answers: dict[int, Future[Logits]] = {}  # manual sessions with a call running
        self._n_manual = 0  # as of the last step, like the statistics
        self._closing = False
        self._stopped: str | None = None  # why nothing can be asked any more
        self._step_began_us: int | None = None
        self._stats = self._core.stats()
        self._thread = threading.Thread(target=self._run, name="ds4jax-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ requests
    @property
    def n_ctx(self) -> int:
        """Tokens a slot holds."""
        return self._n_ctx

    def submit(self, request: GenerateRequest, sink: Sink, n_more: int = 0) -> int:
        """Queue a request; see `EngineClient.submit`."""
        session = self._core.new_session(request)
        with self._bell:
            self._check_running()
            self._core.check_capacity(len(self._clients) + self._n_manual, 1 + n_more)
            self._clients[session.id] = (session, sink)
            self._post(lambda core: core.enqueue(session))
        return session.id

    def cancel(self, request_id: int) -> None:
        """End a request early; see `EngineClient.cancel`."""
        with self._bell:
            if request_id in self._clients and self._stopped is None:
                self._post(lambda core: core.cancel(request_id))

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last step."""
        return self._stats

    def alive(self) -> bool:
        """Whether the engine's thread runs and its current step does not hang."""
        began_us = self._step_began_us
        return self._thread.is_alive() and (began_us is None or monotonic_us() - began_us < self._hang_after_us)

    # ------------------------------------------------------------ notebooks
    def open_session(self) -> NotebookSession:
        """Take a slot to feed by hand. Raises QueueFullError when none is free, EngineStoppedError when the engine is closed."""
        session: Session = self._wait_for(lambda core: core.open_session())
        return NotebookSession(session, self._wait_for, self._ask)

    def generate_tokens(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] | frozenset[int] = (),
    ) -> Generator[int, None, None]:
        """Generate token ids, one at a time, blocking. Closing the iterator cancels; errors as `notebook.stream_tokens`."""
        prompt = tuple(int(token) for token in prompt_ids)
        return stream_tokens(self, GenerateRequest(prompt, max_tokens, sampling or SamplingParams(), frozenset(stop_ids)))

    def _ask(self, session: Session, operation: Operation) -> Logits:
        """Run an operation that starts a call of a manual session, and wait for the logits that it asked for."""
        answer: Future[Logits] = Future()

        def start(core: EngineCore) -> None:
            try:
                operation(core)
            except Exception as error:  # refused
                self._answer(Returned(session.id, error))

        with self._bell:
            self._check_running()
            if session.id in self._answers:  # here, not in the core: the engine's thread may be in the very step
                raise DecodeInFlightError
            self._answers[session.id] = answer
            self._post(start)
        return answer.result()

    def _wait_for(self, operation: Callable[[EngineCore], Any]) -> Any:
        """Run an operation on the engine's thread and wait for its end; returns or raises what it does."""
        done: Future[Any] = Future()
        with self._bell:
            self._check_running()
            self._post(operation, done)
        return done.result()

    # ------------------------------------------------------------ life
    def close(self) -> None:
        """End all requests (cancelled), make all calls of sessions raise, and stop the thread. Closing twice does nothing."""
        with self._bell:
            self._closing = True
            self._bell.notify()
        if threading.current_thread() is not self._thread:  # a sink may close too; the thread then stops after it
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_running(self) -> None:
        if self._stopped is not None or self._closing:
            raise EngineStoppedError(self._stopped or ENGINE_CLOSED)

    def _post(self, operation: Callable[[EngineCore], Any], done: Future[Any] | None = None) -> None:
        """Put an operation in the inbox; the caller holds the lock."""
        self._inbox.append((operation, done))
        self._bell.notify()

    # ------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        reason = ENGINE_CLOSED
        try:
            wake_us: int | None = None
            while self._sleep(wake_us):
                self._step_began_us = monotonic_us()
                self._take_inbox()
                step = self._core.step(monotonic_us())
                self._step_began_us = None
                self._stats, self._n_manual = self._core.stats(), self._core.n_manual
                self._dispatch(step.events)
                wake_us = step.wait_until_us
            self._dispatch(self._core.close())
        except BaseException as error:  # a bug of ours or of the device: say so to everybody, then stop
            logger.exception("the engine's thread died")
            reason = f"the engine has stopped because of an internal error ({type(error).__name__}: {error}); restart it"
        finally:
            self._step_began_us = None
            self._abandon(reason)

    def _sleep(self, wake_us: int | None) -> bool:
        """Wait until it is time or somebody rings; says whether to go on."""
        with self._bell:
            while not self._inbox and not self._closing:
                remaining_us = None if wake_us is None else wake_us - monotonic_us()
                if remaining_us is not None and remaining_us <= 0:
                    break
                self._bell.wait(None if remaining_us is None else remaining_us / 1e6)
            return not self._closing

    def _take_inbox(self) -> None:
        """Carry out what was asked, in order."""
        with self._bell:
            inbox, self._inbox = self._inbox, []
        for position, (operation, done) in enumerate(inbox):
            try:
                result = operation(self._core)
            except Exception as error:
                if done is None:
                    with self._bell:  # nobody waits for it: a bug, which stops the thread; the rest must still be told
                        self._inbox = inbox[position + 1 :] + self._inbox
                    raise
                done.set_exception(error)
            else:
                if done is not None:
                    done.set_result(result)

    def _dispatch(self, events: Sequence[Event | Returned]) -> None:
        for event in events:
            if isinstance(event, Returned):
                self._answer(event)
            else:
                self._tell(event)

    def _answer(self, event: Returned) -> None:
        with self._bell:
            answer = self._answers.pop(event.request_id)
        if isinstance(event.result, Exception):
            answer.set_exception(event.result)
        else:
            answer.set_result(event.result)

    def _tell(self, event: Event) -> None:
        """Hand an event to its sink; one that raises is dropped, and its request with it."""
        with self._bell:
            client = self._clients.get(event.request_id)
            if isinstance(event, Finish):
                self._clients.pop(event.request_id, None)
        if client is None:
            return
        try:
            client[1](event)
        except Exception:
            logger.exception("the sink of request %d raised; the request is dropped", event.request_id)
            with self._bell:
                if self._clients.pop(event.request_id, None):
                    self._post(lambda core: core.cancel(event.request_id))

    def _abandon(self, reason: str) -> None:
        """Leave nobody waiting: every call raises, every request gets its Finish."""
        with self._bell:
            self._stopped = reason
            inbox, self._inbox = self._inbox, []
            clients, self._clients = self._clients, {}
            answers, self._answers = self._answers, {}
        for done in [done for _, done in inbox if done is not None] + list(answers.values()):
            done.set_exception(EngineStoppedError(reason))
        finish = FinishReason.CANCELLED if reason == ENGINE_CLOSED else FinishReason.ERROR
        for session, sink in clients.values():
            try:
                sink(session.finish_event(finish, None if finish is FinishReason.CANCELLED else reason))
            except Exception:
                logger.exception("the sink of request %d raised", session.id)

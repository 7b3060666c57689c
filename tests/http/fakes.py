"""A scripted engine and a tokenizer small enough to compute by hand: one token a byte, and seven special tokens."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ds4jax.errors import EngineStoppedError, QueueFullError
from ds4jax.serving.engine.api import (
    EngineStats,
    Event,
    Finish,
    FinishReason,
    GenerateRequest,
    Prefilled,
    Sink,
    Started,
    Token,
    TokenLogprobs,
)
from ds4jax.text.bpe import BYTE_OF_LETTER
from ds4jax.text.special import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER
from ds4jax.text.tokenizer import Tokenizer

SPECIALS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, THINK_ID, END_THINK_ID, DSML_ID = range(256, 263)


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer in which text is its UTF-8 bytes, and ids from 256 on are special."""
    letter_of = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    tokens = [*(letter_of[byte] for byte in range(256)), *SPECIALS]
    types = [1] * 256 + [3] * len(SPECIALS)
    return Tokenizer(tokens, types, [], BOS_ID, EOS_ID)


def echo(request: GenerateRequest) -> list[int]:
    """Answer with the bytes of the last turn; a prompt that opens reasoning gets "hm" thought first. Ends with EOS."""
    prompt = request.prompt
    thinks = prompt[-1] == THINK_ID
    turn = [i for i, token in enumerate(prompt) if token in (BOS_ID, USER_ID)]
    text = [token for token in prompt[turn[-1] + 1 if turn else 0 :] if token < 256]
    return [*(b"hm" if thinks else b""), *([END_THINK_ID] if thinks else []), *text, EOS_ID]


def logprobs_of(token: int, n_top: int) -> TokenLogprobs:
    """What the engine reports of a token; one of the best tokens has no probability at all."""
    return TokenLogprobs(-token / 100, tuple(((token + i) % 256, -math.inf if i == 2 else -token / 100 - i) for i in range(n_top)))


@dataclass
class _Run:
    id: int
    request: GenerateRequest
    sink: Sink
    tokens: list[int]
    n_sent: int = 0
    started: bool = False


@dataclass
class EchoEngine:
    """An EngineClient on a thread of its own, scripted by a function from request to tokens.

    gate: if set, every token (and nothing else) takes one permit, so a test decides how far replies get.
    hold: while set, no request gets a slot. fail_after: tokens after which every request fails. refuse: raised by submit.
    """

    script: Callable[[GenerateRequest], Sequence[int]] = echo
    n_ctx: int = 4096
    n_slots: int = 4
    n_cached: int = 0
    gate: threading.Semaphore | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    fail_after: int | None = None
    refuse: Exception | None = None
    queue_limit: int = 100

    def __post_init__(self) -> None:
        self.requests: dict[int, GenerateRequest] = {}
        self.cancels: list[int] = []
        self.finishes: list[Finish] = []
        self._ids = itertools.count(1)
        self._lock = threading.Condition()
        self._waiting: deque[_Run] = deque()
        self._running: list[_Run] = []
        self._cancelled: set[int] = set()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="echo-engine")
        self._thread.start()

    # ------------------------------------------------------------ EngineClient
    def submit(self, request: GenerateRequest, sink: Sink, n_more: int = 0) -> int:
        with self._lock:
            if self.refuse is not None:
                raise self.refuse
            if self._stop:
                raise EngineStoppedError("the engine has stopped")
            n_most = self.n_slots + self.queue_limit
            if len(self._waiting) + len(self._running) + 1 + n_more > n_most:
                raise QueueFullError(len(self._waiting), n_most=n_most)
            run = _Run(next(self._ids), request, sink, list(self.script(request)))
            self.requests[run.id] = request
            self._waiting.append(run)
            return run.id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self.cancels.append(request_id)
            self._cancelled.add(request_id)

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                n_slots=self.n_slots, n_ctx=self.n_ctx, n_running=len(self._running), n_waiting=len(self._waiting), n_prefilling=0,
                steps={1: 2, 4: 3}, rows={1: 2, 4: 9}, prefill_chunks=0, prefill_tokens=0, cached_tokens=60, generated_tokens=0,
                finished={}, failed_steps=0, compile_misses=0, coalesce_wait_us=10_000, coalesce_windows=5,
                batches={1: 2, 2: 1, 3: 1, 4: 1}, prompt_tokens=80, kv_tokens=self.n_slots * self.n_ctx // 4,
            )  # fmt: skip

    def alive(self) -> bool:
        return not self._stop

    # ------------------------------------------------------------ for tests
    def die(self) -> None:
        """Stop the thread in the middle of whatever runs; no Finish comes any more."""
        self._stop = True
        self._thread.join()

    @property
    def n_busy(self) -> int:
        with self._lock:
            return len(self._running) + len(self._waiting)

    @property
    def n_running_tokens(self) -> int:
        """Tokens delivered to requests that still run."""
        with self._lock:
            return sum(run.n_sent for run in self._running)

    # ------------------------------------------------------------ the thread
    def _loop(self) -> None:
        while not self._stop:
            with self._lock:
                events = [*self._drop_cancelled(), *self._admit(), *self._step()]
            for sink, event in events:
                sink(event)
            if not events:
                threading.Event().wait(0.001)

    def _finish(self, run: _Run, reason: FinishReason, error: str | None = None) -> tuple[Sink, Event]:
        finish = Finish(run.id, reason, len(run.request.prompt), self.n_cached, run.n_sent, error)
        self.finishes.append(finish)
        return run.sink, finish

    def _drop_cancelled(self) -> list[tuple[Sink, Event]]:
        gone = [run for run in [*self._waiting, *self._running] if run.id in self._cancelled]
        self._waiting = deque(run for run in self._waiting if run not in gone)
        self._running = [run for run in self._running if run not in gone]
        return [self._finish(run, FinishReason.CANCELLED) for run in gone]

    def _admit(self) -> list[tuple[Sink, Event]]:
        events: list[tuple[Sink, Event]] = []
        while self._waiting and len(self._running) < self.n_slots and not self.hold.is_set():
            run = self._waiting.popleft()
            self._running.append(run)
            n_prompt = len(run.request.prompt)
            events += [(run.sink, Started(run.id, n_prompt, self.n_cached)), (run.sink, Prefilled(run.id, n_prompt, n_prompt))]
        return events

    def _step(self) -> list[tuple[Sink, Event]]:
        events: list[tuple[Sink, Event]] = []
        for run in list(self._running):
            ended: FinishReason | None = None
            if self.fail_after is not None and run.n_sent >= self.fail_after:
                ended = FinishReason.ERROR
            elif run.n_sent == run.request.max_tokens:
                ended = FinishReason.LENGTH
            elif run.tokens[run.n_sent] in run.request.stop_token_ids:
                ended = FinishReason.STOP
            if ended is not None:
                self._running.remove(run)
                events.append(self._finish(run, ended, "batched decode failed: scripted" if ended is FinishReason.ERROR else None))
            elif self.gate is None or self.gate.acquire(blocking=False):
                token, n_top = run.tokens[run.n_sent], run.request.sampling.logprobs
                events.append((run.sink, Token(run.id, token, None if n_top is None else logprobs_of(token, n_top))))
                run.n_sent += 1
        return events


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for a condition; the limit only bounds a test that fails."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(f"never happened: {what}")

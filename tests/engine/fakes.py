"""A scripted device. Its next token is a function of everything its slot was fed, so a mix-up of rows or slots shows as a wrong token."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4jax.model.mask import ALWAYS
from ds4jax.serving.engine.api import NO_ADJUSTMENTS, Adjustments, Event, Finish, GenerateRequest, SamplingParams, Token, TokenLogprobs
from ds4jax.serving.engine.buckets import PrefillShape, chunk_buckets, pack_buckets, prefill_shape, row_buckets
from ds4jax.serving.engine.core import EngineCore, Returned
from ds4jax.serving.engine.device import Chunk, DeviceStepError, MaskRule, Row
from ds4jax.serving.engine.kvstore import Part

V = 97
PIECE = 8  # tokens
DAMAGED = -7  # stands in the history of a slot whose contents went bad


def next_token(history: Sequence[int], seed: int = 0, allowed: Collection[int] = range(V)) -> int:
    """Depend on every token, on their order and on the seed: of what is allowed, the first from some token on."""
    state = 1
    for token in history:
        state = (state * 31 + token + 7) % 1_000_003
    return next(token for i in range(V) if (token := (state + seed + i) % V) in allowed)


def allowed_by(mask: bytes) -> set[int]:
    """The tokens that a mask allows."""
    return {token for token in range(V) if mask[token // 8] >> token % 8 & 1}


def alone(request: GenerateRequest, n_ctx: int) -> list[int]:
    """The tokens that a request must be given, whatever else is going on."""
    history: list[int] = list(request.prompt)
    out: list[int] = []
    while len(history) < n_ctx and len(out) != request.max_tokens:
        token = next_token(history, request.sampling.seed or 0)
        if token in request.stop_token_ids:
            break
        out.append(token)
        history.append(token)
    return out


def logprobs_of(token: int, n_top: int) -> TokenLogprobs:
    """What a token is reported with."""
    return TokenLogprobs(-float(token), tuple((i, -float(i)) for i in range(n_top)))


class FakeClock:
    """A clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_us = 1_000_000

    def __call__(self) -> int:
        return self.now_us


@dataclass
class FakeHandle:
    device: FakeDevice
    index: int
    slots: list[int]
    sampled: list[int]

    def tokens(self) -> list[int]:
        self.device.wait_for_reads()
        self.device.trace.append(("read", self.index))
        if self.index in self.device.fail_read:
            raise self.device.fail(self.index, self.slots, self.device.fail_read[self.index])
        return list(self.sampled)

    def logprobs(self, n_top: Sequence[int | None]) -> list[TokenLogprobs | None]:
        return [None if n is None else logprobs_of(token, n) for token, n in zip(self.sampled, n_top, strict=True)]

    def logits(self) -> npt.NDArray[np.float32]:
        rows = np.zeros((len(self.sampled), V), np.float32)
        rows[np.arange(len(self.sampled)), self.sampled] = 1.0
        return rows


@dataclass
class FakePiece:
    """A copy made when it was enqueued; its owner decides when it is there."""

    device: FakeDevice
    contents: dict[str, npt.NDArray[np.int32]]

    def ready(self) -> bool:
        return self.device.copies_arrive

    def arrays(self) -> dict[str, npt.NDArray[np.int32]]:
        assert self.ready(), "the engine waits for a copy"
        if self.device.fail_copy:
            raise DeviceStepError("copy failed", cache_lost=False)
        return self.contents


@dataclass
class FakeDevice:
    """Steps are numbered from 0 in launch order, prefill chunks included.

    fail_launch, fail_read: step -> whether the cache is lost with it. bad_rows: (step, slot) whose logits are unusable.
    trace: ("decode" | "prefill", step) and ("read", step), in the order of the calls.
    step_slots: the slots of each step. hold_reads(): results stay away until let_go().
    """

    n_slots: int = 4
    n_ctx: int = 64
    n_vocab: int = V
    prefill_buckets: tuple[int, ...] = ()
    pack_buckets: tuple[PrefillShape, ...] | None = None
    fail_launch: dict[int, bool] = field(default_factory=dict)
    fail_read: dict[int, bool] = field(default_factory=dict)
    fail_clear: set[int] = field(default_factory=set)
    bad_rows: set[tuple[int, int]] = field(default_factory=set)
    break_at: int = -1
    compile_misses: int = 0
    n_snapshots: int = 0
    fail_save: bool = False
    copies_arrive: bool = True
    fail_export: bool = False
    fail_import: bool = False
    fail_copy: bool = False

    def __post_init__(self) -> None:
        self.decode_buckets = row_buckets(self.n_slots)
        self.prefill_buckets = self.prefill_buckets or chunk_buckets(self.n_ctx, 16, 4)
        if self.pack_buckets is None:
            self.pack_buckets = pack_buckets(self.n_slots, self.n_ctx, self.prefill_buckets[-1], self.prefill_buckets[0])
        self.trace: list[tuple[str, int]] = []
        self.step_slots: list[list[int]] = []
        self.batches: list[list[Row]] = []
        self.chunks: list[tuple[int, tuple[int, ...]]] = []
        self.cleared: list[int] = []
        self.adjusted: dict[int, Adjustments] = {}
        self.masks: dict[int, bytes] = {}
        self.histories: list[list[int]] = [[] for _ in range(self.n_slots)]
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.saved: list[tuple[int, int]] = []  # slot and position
        self.restored: list[tuple[int, int, int]] = []  # source, target and position
        self.exported: list[tuple[int, int]] = []  # slot and piece
        self.imported: list[tuple[int, int]] = []  # slot and piece
        self._importing: dict[int, list[int]] = {}
        self._last: list[int] = [0] * self.n_slots
        self._gate = threading.Event()
        self._gate.set()

    def hold_reads(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def wait_for_reads(self) -> None:
        assert self._gate.wait(20), "a test forgot let_go()"

    def decode(self, rows: Sequence[Row]) -> FakeHandle:
        index = self._begin("decode", [row.slot for row in rows])
        self.batches.append(list(rows))
        assert len({row.slot for row in rows}) == len(rows) <= self.n_slots and rows
        return FakeHandle(
            self,
            index,
            [row.slot for row in rows],
            [
                self._feed(index, row.slot, [self._last[row.slot] if row.token is None else row.token], row.sampling, row.mask)
                for row in rows
            ],
        )

    def prefill(self, chunks: Sequence[Chunk]) -> FakeHandle:
        slots = [chunk.slot for chunk in chunks]
        index = self._begin("prefill", slots)
        self.chunks += [(chunk.slot, tuple(chunk.tokens)) for chunk in chunks]
        lengths = [len(chunk.tokens) for chunk in chunks]
        assert len(set(slots)) == len(slots) and min(lengths) >= 1 and self.pack_buckets is not None
        prefill_shape(lengths, self.prefill_buckets, self.pack_buckets)  # raises where none holds them
        return FakeHandle(self, index, slots, [self._feed(index, c.slot, c.tokens, c.sampling, c.mask) for c in chunks])

    def clear(self, slot: int) -> None:
        if slot in self.fail_clear:
            raise DeviceStepError("clear failed", cache_lost=False)
        self.cleared.append(slot)
        self.histories[slot] = []

    def adjust(self, slot: int, request: GenerateRequest | None) -> None:
        if slot in self.fail_clear:
            raise DeviceStepError("adjust failed", cache_lost=False)
        self.adjusted[slot] = NO_ADJUSTMENTS if request is None else request.adjustments

    def mask(self, slot: int, mask: bytes) -> None:
        self.masks[slot] = mask

    def save(self, slot: int, entry: int) -> None:
        assert 0 <= entry < self.n_snapshots
        if self.fail_save:
            self.snapshots.clear()
            raise DeviceStepError("save failed", cache_lost=False)
        self.snapshots[entry] = tuple(self.histories[slot])
        self.saved.append((slot, len(self.histories[slot])))

    def restore(self, entry: int, source: int, target: int) -> None:
        """Like the real one: the snapshot knows how far, and the rows come from the source, whatever they are."""
        if target in self.fail_clear:
            raise DeviceStepError("restore failed", cache_lost=False)
        n = len(self.snapshots[entry])
        assert n <= len(self.histories[source]) and DAMAGED not in self.histories[target], "NaN behind the rows would show"
        self.restored.append((source, target, n))
        self.histories[target] = self.histories[source][:n]
        assert tuple(self.histories[target]) == self.snapshots[entry], "the rows belong to other tokens"

    def session_parts(self, n_tokens: int) -> tuple[Part, ...]:
        """Rows are the tokens themselves; the state is a digest of all of them."""
        return (Part("rows", "int32", (n_tokens,)), Part("state", "int32", (2,)))

    def n_pieces(self, n_tokens: int) -> int:
        return -(-n_tokens // PIECE)

    def export_state(self, slot: int) -> FakePiece:
        if self.fail_export:
            raise DeviceStepError("export failed", cache_lost=False)
        return FakePiece(self, {"state": self._state(self.histories[slot])})

    def export_rows(self, slot: int, piece: int, n_tokens: int) -> FakePiece:
        if self.fail_export:
            raise DeviceStepError("export failed", cache_lost=False)
        self.exported.append((slot, piece))
        rows = self.histories[slot][:n_tokens][piece * PIECE : (piece + 1) * PIECE]
        return FakePiece(self, {"rows": np.array(rows, np.int32)})

    def import_rows(self, slot: int, piece: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        if self.fail_import:
            raise DeviceStepError("import failed", cache_lost=False)
        assert self.histories[slot] == [], "the slot is not empty"
        self.imported.append((slot, piece))
        rows = arrays["rows"][piece * PIECE : (piece + 1) * PIECE].tolist()
        self._importing[slot] = (self._importing[slot] if piece else []) + rows

    def import_state(self, slot: int, n_tokens: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        history = self._importing.pop(slot)
        assert len(history) == n_tokens and np.array_equal(self._state(history), arrays["state"]), "rows and state are of two sessions"
        self.histories[slot] = history

    @staticmethod
    def _state(history: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array([len(history), next_token(history)], np.int32)

    def fail(self, index: int, slots: Sequence[int], cache_lost: bool) -> DeviceStepError:
        for slot in slots:
            self.histories[slot] = [DAMAGED]
        if cache_lost:
            self.histories = [[] for _ in range(self.n_slots)]
            self.snapshots.clear()
        return DeviceStepError(f"step {index} broke", cache_lost=cache_lost)

    def _begin(self, kind: str, slots: Sequence[int]) -> int:
        index = len(self.step_slots)
        self.trace.append((kind, index))
        self.step_slots.append(list(slots))
        if index == self.break_at:
            raise ZeroDivisionError("a bug")
        if index in self.fail_launch:
            raise self.fail(index, slots, self.fail_launch[index])
        return index

    def _feed(self, index: int, slot: int, tokens: Sequence[int], sampling: SamplingParams, rule: MaskRule) -> int:
        assert isinstance(sampling.seed, int)
        history = self.histories[slot]
        history.extend(tokens)
        assert len(history) <= self.n_ctx
        holds = rule.after in (ALWAYS, tokens[-1])
        allowed = allowed_by(self.masks[slot]) if holds else {token for token in range(V) if token != rule.barred}
        self._last[slot] = next_token(history, sampling.seed, allowed)
        return -1 if (index, slot) in self.bad_rows else self._last[slot]


class Record:
    """All events, by request."""

    def __init__(self) -> None:
        self.events: list[Event | Returned] = []

    def of(self, request_id: int) -> list[Event | Returned]:
        return [event for event in self.events if event.request_id == request_id]

    def tokens(self, request_id: int) -> list[int]:
        return [event.token for event in self.of(request_id) if isinstance(event, Token)]

    def finish(self, request_id: int) -> Finish:
        events = self.of(request_id)
        finishes = [event for event in events if isinstance(event, Finish)]
        assert len(finishes) == 1 and events[-1] is finishes[0], events
        return finishes[0]

    def result(self, request_id: int) -> object:
        """What the only call of a manual session returned."""
        (event,) = self.of(request_id)
        assert isinstance(event, Returned)
        return event.result


def run(core: EngineCore, clock: FakeClock, record: Record | None = None, max_steps: int = 2000) -> Record:
    """Step until nothing is left to do, moving the clock to wherever the core wants to be called next."""
    record = record or Record()
    for _ in range(max_steps):
        step = core.step(clock.now_us)
        record.events.extend(step.events)
        if step.wait_until_us is None:
            return record
        clock.now_us = max(clock.now_us, step.wait_until_us)
    raise AssertionError("the engine does not come to rest")

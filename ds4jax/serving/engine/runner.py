"""The one owner of device state: weights, cache and programs, behind the `Device` protocol.

Every launch consumes (donates) the cache and returns the next one; the arrays inside are never visible outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ds4jax.errors import StaleCacheError
from ds4jax.model import transfer
from ds4jax.model.mask import n_words
from ds4jax.model.model import Model
from ds4jax.serving.engine import batch
from ds4jax.serving.engine.api import NO_ADJUSTMENTS, GenerateRequest, SamplingParams, TokenLogprobs
from ds4jax.serving.engine.buckets import PrefillShape, nearest, prefill_shape
from ds4jax.serving.engine.copies import Exported, begin_copy
from ds4jax.serving.engine.device import Chunk, DeviceStepError, Row
from ds4jax.serving.engine.kvstore import Part
from ds4jax.serving.engine.log import logger
from ds4jax.serving.engine.programs import (
    Key,
    Program,
    ProgramStore,
    Shapes,
    compile_all,
    init_pool,
    init_state,
    needed_first,
    prefill_key,
)


class DeviceCache:
    """The leaves of all that the slots hold, usable once: whoever takes them for a step names it, and a second taker is told by whom."""

    def __init__(self, leaves: tuple[jax.Array, ...]) -> None:
        self._leaves: tuple[jax.Array, ...] | None = leaves
        self._consumer = ""

    def take(self, step: str) -> tuple[jax.Array, ...]:
        """Hand the leaves to a step. Raises StaleCacheError when another step has them."""
        if self._leaves is None:
            raise StaleCacheError(self._consumer)
        leaves, self._leaves, self._consumer = self._leaves, None, step
        return leaves


class Step:
    """Result of one launch (`device.StepHandle`)."""

    def __init__(self, runner: Runner, tokens: jax.Array, scores: jax.Array, logits: jax.Array, n_row: int) -> None:
        self._runner, self._tokens, self._scores, self._logits, self._n_row = runner, tokens, scores, logits, n_row

    def expect_logprobs(self, samplings: Iterable[SamplingParams]) -> None:
        """Start their copy to the host if any row wants them."""
        if any(sampling.logprobs is not None for sampling in samplings):
            begin_copy(self._scores)

    def tokens(self) -> list[int]:
        """Wait for the sampled tokens; -1 (`sampling.UNUSABLE`) where a row's logits were."""
        return [int(token) for token in self._read(self._tokens)]

    def logprobs(self, n_top: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """Wait for the log probabilities of each live row that wants them, with those of its n_top best tokens."""
        return [None if n is None else batch.read_scores(row, n) for row, n in zip(self._read(self._scores), n_top, strict=True)]

    def logits(self) -> np.ndarray:
        """Wait for the logits: float32 [live rows, V]."""
        return self._read(self._logits)

    def _read(self, array: jax.Array) -> np.ndarray:
        try:
            return np.asarray(array)[: self._n_row]
        except Exception as error:  # asynchronous failures of any kind surface here
            raise self._runner.failed(error, cache_lost=True) from error


class Runner:
    """Slots and programs of one model on one device.

    early: start with the programs that suffice for any traffic and compile the others beside the serving; each joins the buckets
    when it is ready. on_program: called with every program, from a compiling thread for those that come later.
    """

    def __init__(
        self, model: Model, shapes: Shapes, store: ProgramStore, on_program: Callable[[Program], None] | None = None, *, early: bool = False
    ) -> None:
        self.model, self.shapes = model, shapes
        self._store, self._on_program = store, on_program
        self.programs: dict[Key, Program] = {}
        self._decode_buckets: tuple[int, ...] = ()
        self._prefill_buckets: tuple[int, ...] = ()
        self._pack_buckets: tuple[PrefillShape, ...] = ()
        first, later = needed_first(shapes, store) if early else (shapes.keys, ())
        for program in compile_all(shapes, store, first):
            self._adopt(program)
        self.compile_misses = 0
        self._abstract_cache = shapes.abstract_state().cache
        self._row_capacities = transfer.row_capacities(self._abstract_cache)
        self._masks = np.zeros((self.n_slots, n_words(self.n_vocab)), np.uint32)
        self._uploaded_masks: jax.Array | None = None
        self._pool: tuple[jax.Array, ...] = self._new_pool()
        self._cache = self._new_cache()
        self._warm_up()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._later = [self._compiler.submit(self._store.get, shapes, key) for key in later]
        for future in self._later:
            future.add_done_callback(self._adopt_later)

    @property
    def compiling(self) -> bool:
        """Whether a program is still being compiled."""
        return any(not future.done() for future in self._later)

    def close(self) -> None:
        """Compile nothing more; a program that is being compiled is still finished."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ shape
    @property
    def n_slots(self) -> int:
        """Slots allocated."""
        return self.shapes.n_slot

    @property
    def n_ctx(self) -> int:
        """Tokens a slot holds."""
        return self.shapes.n_ctx

    @property
    def n_vocab(self) -> int:
        """Ids below this are tokens."""
        return self.shapes.spec.config.n_vocab

    @property
    def n_snapshots(self) -> int:
        """Snapshots of slots that are kept at a time."""
        return self.shapes.n_snapshot

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Row counts of the decode programs that are ready."""
        return self._decode_buckets

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Chunk lengths of the prefill programs of one row that are ready."""
        return self._prefill_buckets

    @property
    def pack_buckets(self) -> tuple[PrefillShape, ...]:
        """Shapes of the prefill programs of several rows that are ready."""
        return self._pack_buckets

    # ------------------------------------------------------------------ steps
    def decode(self, rows: Sequence[Row]) -> Step:
        """Enqueue one decode step; see `Device.decode`."""
        bucket = nearest(self.decode_buckets, len(rows))
        step = self._launch(("decode", bucket), batch.decode_control(rows, bucket, self.n_slots), len(rows))
        step.expect_logprobs(row.sampling for row in rows)
        return step

    def prefill(self, chunks: Sequence[Chunk]) -> Step:
        """Enqueue one prefill launch; see `Device.prefill`."""
        shape = prefill_shape([len(chunk.tokens) for chunk in chunks], self.prefill_buckets, self.pack_buckets)
        step = self._launch(prefill_key(shape), batch.prefill_control(chunks, shape, self.n_slots), len(chunks))
        step.expect_logprobs(chunk.sampling for chunk in chunks)
        return step

    def clear(self, slot: int) -> None:
        """Enqueue the clearing of a slot."""
        self._set_slot(("clear", 0), slot)

    def adjust(self, slot: int, request: GenerateRequest | None) -> None:
        """Enqueue what a request asks to be done to its logits; see `Device.adjust`. Nothing is enqueued where nothing was and is asked."""
        asks = request is not None and request.adjustments != NO_ADJUSTMENTS
        if not asks and slot not in self._adjusted:
            return
        one = batch.slot_adjustments(request, self.n_vocab)
        self._set_slot(("adjust", 0), slot, (one.seen, one.bias, one.number, one.since))
        (self._adjusted.add if asks else self._adjusted.discard)(slot)

    def mask(self, slot: int, mask: bytes) -> None:
        """Set the mask of a slot; see `Device.mask`. All masks that change between two launches travel in one copy."""
        words = np.frombuffer(mask, np.uint32)[: self._masks.shape[1]]
        self._masks[slot, : len(words)], self._masks[slot, len(words) :] = words, 0
        self._uploaded_masks = None

    def save(self, slot: int, entry: int) -> None:
        """Enqueue a snapshot of a slot; see `Device.save`."""
        program = self._program(("save", 0))
        leaves = self._cache.take(program.name)
        self._cache = DeviceCache(leaves)  # it is only read
        try:
            self._pool = program.executable(leaves, self._pool, np.int32(slot), np.int32(entry))
        except Exception as error:
            self._pool = self._new_pool()
            raise self._recover(error, leaves) from error

    def restore(self, entry: int, source: int, target: int) -> None:
        """Enqueue a return to a snapshot; see `Device.restore`."""
        self._set_slot(("restore", 0), target, self._pool, np.array([entry, source], np.int32))

    # ------------------------------------------------------------------ files
    def session_parts(self, n_tokens: int) -> tuple[Part, ...]:
        """List the arrays of a session; see `Device.session_parts`."""
        return tuple(Part(*part) for part in transfer.parts(self._abstract_cache, n_tokens))

    def n_pieces(self, n_tokens: int) -> int:
        """Count the pieces of the rows of a session."""
        return transfer.n_pieces(n_tokens)

    def export_state(self, slot: int) -> Exported:
        """Enqueue a copy of a slot's state to the host; see `Device.export_state`."""
        return Exported(self._export(("export_state", 0), slot))

    def export_rows(self, slot: int, piece: int, n_tokens: int) -> Exported:
        """Enqueue a copy of some rows to the host; see `Device.export_rows`."""
        arrays = self._export(("export_rows", 0), slot, piece)
        return Exported(arrays, lambda rows: transfer.live_rows(rows, self._row_capacities, piece, n_tokens))

    def import_rows(self, slot: int, piece: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Enqueue a copy of some rows from the host; see `Device.import_rows`."""
        self._set_slot(("import_rows", 0), slot, transfer.rows_of_piece(arrays, self._row_capacities, piece), np.int32(piece))

    def import_state(self, slot: int, n_tokens: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Enqueue a copy of a state from the host; see `Device.import_state`."""
        state = {name: array for name, array in arrays.items() if name not in self._row_capacities}
        self._set_slot(("import_state", 0), slot, state, np.int32(n_tokens))

    def _export(self, key: Key, *where: int) -> dict[str, jax.Array]:
        program = self._program(key)
        leaves = self._cache.take(program.name)
        self._cache = DeviceCache(leaves)  # it is only read
        try:
            arrays: dict[str, jax.Array] = program.executable(leaves, *map(np.int32, where))
        except Exception as error:
            raise self._recover(error, leaves) from error
        return arrays

    def _set_slot(self, key: Key, slot: int, *what: Any) -> None:
        program = self._program(key)
        leaves = self._cache.take(program.name)
        try:
            self._cache = DeviceCache(program.executable(leaves, np.int32(slot), *what))
        except Exception as error:
            raise self._recover(error, leaves) from error

    def _launch(self, key: Key, control: np.ndarray, n_row: int) -> Step:
        program = self._program(key)
        leaves = self._cache.take(program.name)
        try:
            if self._uploaded_masks is None:  # a copy, for the host writes on while the device still reads
                self._uploaded_masks = jax.device_put(self._masks.copy())
            tokens, scores, logits, out = program.executable(self.model.flat.leaves, leaves, self._uploaded_masks, control)
        except Exception as error:
            raise self._recover(error, leaves) from error
        self._cache = DeviceCache(out)
        begin_copy(tokens)
        return Step(self, tokens, scores, logits, n_row)

    def _adopt(self, program: Program) -> None:
        """Let a program join. Assignments only, the buckets last: the engine's thread may read them at any moment."""
        self.programs[program.key] = program
        self._decode_buckets = tuple(n for n in self.shapes.decode_buckets if ("decode", n) in self.programs)
        self._prefill_buckets = tuple(n for n in self.shapes.prefill_buckets if ("prefill", n) in self.programs)
        self._pack_buckets = tuple(pack for pack in self.shapes.pack_buckets if prefill_key(pack) in self.programs)
        if self._on_program:
            self._on_program(program)

    def _adopt_later(self, future: Future[Program]) -> None:
        if future.cancelled():
            return
        if error := future.exception():
            logger.warning("a program could not be compiled; its bucket stays out: %s", str(error).splitlines()[0])
        else:
            self._adopt(future.result())

    def _program(self, key: Key) -> Program:
        if key not in self.programs:
            self.compile_misses += 1
            self.programs[key] = self._store.get(self.shapes, key)
        return self.programs[key]

    # ------------------------------------------------------------------ failures
    def _recover(self, error: Exception, leaves: tuple[jax.Array, ...]) -> DeviceStepError:
        """After a failed launch: keep the cache if the device still has it."""
        lost = any(leaf.is_deleted() for leaf in leaves)
        if not lost:
            self._cache = DeviceCache(leaves)
        return self.failed(error, cache_lost=lost)

    def failed(self, error: Exception, *, cache_lost: bool) -> DeviceStepError:
        """Turn a device's exception into ours; with the cache lost, start with an empty one."""
        if cache_lost:
            self._cache, self._pool = self._new_cache(), self._new_pool()
        lines = str(error).strip().splitlines()
        cause = lines[0] if lines else type(error).__name__
        if "RESOURCE_EXHAUSTED" in cause or "out of memory" in cause.lower():
            cause += f" (device memory is full at {self.n_slots} slots of {self.n_ctx} tokens; start with fewer slots or a smaller context)"
        return DeviceStepError(cause, cache_lost=cache_lost)

    def _new_cache(self) -> DeviceCache:
        with contextlib.suppress(AttributeError):
            del self._cache  # the old arrays go first: there may be no room for both
        self._adjusted: set[int] = set()
        self._uploaded_masks = None  # it may have gone with the cache
        return DeviceCache(tuple(jax.tree.leaves(init_state(self.model.spec, self.n_slots, self.n_ctx))))

    def _new_pool(self) -> tuple[jax.Array, ...]:
        self._pool = ()  # the old arrays go first, as those of the cache do
        return tuple(jax.tree.leaves(init_pool(self.model.spec, self.n_snapshots))) if self.n_snapshots else ()

    def _warm_up(self) -> None:
        """Run every program once with rows that touch no slot (they come from the same constructor as real ones)."""
        outside = self.n_slots
        sampling = SamplingParams(seed=0)
        last: Any = None
        for shape in self.shapes.prefill_shapes:
            if prefill_key(shape) in self.programs:
                last = self._launch(prefill_key(shape), batch.prefill_control([Chunk(outside, [0], sampling)], shape, outside), 1)
        for bucket in self.decode_buckets:
            last = self._launch(("decode", bucket), batch.decode_control([Row(outside, 0, sampling)], bucket, outside), 1)
        self.clear(0)
        self._adjusted.add(0)  # or there would be nothing to take back
        self.adjust(0, None)
        if self.n_snapshots:
            self.save(0, 0)
            self.restore(0, 0, 0)
        if self.shapes.transfers:
            state, rows = self.export_state(0).arrays(), self.export_rows(0, 0, self.n_ctx).arrays()
            self.import_rows(0, 0, rows)
            self.import_state(0, 0, state)
        if last is not None:
            last.tokens()

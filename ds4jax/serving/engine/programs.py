"""The compiled programs of one engine: a decode step a row bucket, a prefill chunk a length bucket, and those that set a slot.

They are compiled ahead of time from shapes alone and kept on disk as executables, so a second start compiles nothing
and traces nothing. The name of a stored program is a hash of everything that decides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.experimental import serialize_executable

from ds4jax.model.adjust import SlotAdjustments, init_adjustments, set_slot
from ds4jax.model.cache import KVCache, clear_slot, init_cache
from ds4jax.model.draw import draw
from ds4jax.model.mask import RowMask, n_words
from ds4jax.model.sampling import RowSampling
from ds4jax.model.snapshot import Snapshots, init_snapshots, restore, save
from ds4jax.model.spec import FlatModel, ModelSpec, abstract_model
from ds4jax.model.steps import decode_step, prefill_chunk
from ds4jax.model.transfer import Arrays, export_rows, export_state, import_rows, import_state
from ds4jax.serving.engine import batch
from ds4jax.serving.engine.buckets import PrefillShape
from ds4jax.serving.engine.log import logger

Leaves = Sequence[Any]
Key = tuple[str, *tuple[int, ...]]  # ("decode", rows), ("prefill", tokens), ("prefill", rows, tokens), or one of SLOT_KEYS
SLOT_KEYS: tuple[Key, ...] = (("clear", 0), ("adjust", 0))
SNAPSHOT_KEYS: tuple[Key, ...] = (("save", 0), ("restore", 0))
TRANSFER_KEYS: tuple[Key, ...] = (("export_state", 0), ("export_rows", 0), ("import_state", 0), ("import_rows", 0))


@dataclass(frozen=True)
class Shapes:
    """What an engine compiles for.

    prefill_buckets: lengths of prefill launches of one row; pack_buckets: shapes of those of several.
    n_snapshot: states of slots that are kept. transfers: whether slots also go to files and come from there.
    """

    spec: ModelSpec
    n_slot: int
    n_ctx: int
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    n_snapshot: int = 0
    transfers: bool = False
    pack_buckets: tuple[PrefillShape, ...] = ()

    @property
    def slot_keys(self) -> tuple[Key, ...]:
        """The programs that set a slot or keep it; no engine can do without them."""
        return (*SLOT_KEYS, *(SNAPSHOT_KEYS if self.n_snapshot else ()), *(TRANSFER_KEYS if self.transfers else ()))

    @property
    def prefill_shapes(self) -> tuple[PrefillShape, ...]:
        """The shapes of all prefill launches."""
        return (*(PrefillShape(1, n) for n in self.prefill_buckets), *self.pack_buckets)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All programs, the ones needed first first."""
        rows = [("decode", n) for n in self.decode_buckets]
        chunks = [("prefill", n) for n in self.prefill_buckets]
        return (*self.slot_keys, *chunks, *rows, *map(prefill_key, self.pack_buckets))

    def abstract_state(self) -> SlotState:
        """Return what the slots hold as shapes."""
        state: SlotState = jax.eval_shape(partial(init_state, self.spec, self.n_slot, self.n_ctx))
        return state

    def abstract_pool(self) -> Snapshots:
        """Return the pool of snapshots as shapes."""
        pool: Snapshots = jax.eval_shape(partial(init_pool, self.spec, self.n_snapshot))
        return pool


def prefill_key(shape: PrefillShape) -> Key:
    """Name the program of a prefill launch."""
    return ("prefill", shape.n_tokens) if shape.n_rows == 1 else ("prefill", *shape)


@dataclass(frozen=True)
class Program:
    """One executable. seconds: spent compiling or loading it; from_disk: it was found, not compiled; size_bytes: of the stored file."""

    key: Key
    executable: Any
    seconds: float
    from_disk: bool
    size_bytes: int
    scratch_bytes: int

    @property
    def name(self) -> str:
        """For logs and errors: decode[4], prefill[512], prefill[4x128]."""
        kind, *sizes = self.key
        return f"{kind}[{'x'.join(map(str, sizes))}]" if any(sizes) else kind


# ---------------------------------------------------------------- what is compiled
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """All that the slots hold: what their sessions have read, and how the next tokens are to be drawn."""

    cache: KVCache
    adjustments: SlotAdjustments


def init_state(spec: ModelSpec, n_slot: int, n_ctx: int) -> SlotState:
    """Return empty slots."""
    return SlotState(init_cache(spec.config, n_slot, n_ctx, spec.kv_quant, spec.dtype), init_adjustments(n_slot, spec.config.n_vocab))


def init_pool(spec: ModelSpec, n_snapshot: int) -> Snapshots:
    """Return a pool of snapshots of empty slots."""
    return init_snapshots(spec.config, n_snapshot, spec.kv_quant, spec.dtype)


def _decode(flat: FlatModel, spec: ModelSpec, tree: Any, leaves: Leaves, state: Leaves, masks: jax.Array, control: jax.Array) -> Any:
    rows, sampling = batch.unpack_decode(control)
    before: SlotState = jax.tree.unflatten(tree, state)
    fed = jnp.where(rows.token < 0, before.cache.next_token.at[rows.slot].get(mode="clip"), rows.token)
    logits, cache = decode_step(flat.merge(leaves), before.cache, rows, spec.compute)
    return _drawn(logits, SlotState(cache, before.adjustments), rows.slot, sampling, batch.unpack_mask(control, masks, fed))


def _prefill(flat: FlatModel, spec: ModelSpec, tree: Any, leaves: Leaves, state: Leaves, masks: jax.Array, control: jax.Array) -> Any:
    rows, sampling = batch.unpack_prefill(control)
    before: SlotState = jax.tree.unflatten(tree, state)
    logits, cache = prefill_chunk(flat.merge(leaves), before.cache, rows, spec.compute)
    fed = jnp.take_along_axis(rows.token, jnp.maximum(rows.n - 1, 0)[:, None], axis=1)[:, 0]
    return _drawn(logits, SlotState(cache, before.adjustments), rows.slot, sampling, batch.unpack_mask(control, masks, fed))


def _drawn(logits: jax.Array, state: SlotState, slot: jax.Array, sampling: RowSampling, mask: RowMask) -> Any:
    """Draw the next tokens and leave them in the cache, where the next step finds them without the host."""
    cache, adjustments = state.cache, state.adjustments
    position = cache.position.at[slot].get(mode="clip")
    token, scores, adjustments = draw(logits, sampling, adjustments, mask, slot, position)
    cache = replace(cache, next_token=cache.next_token.at[slot].set(token, mode="drop"))
    return token, scores, logits, tuple(jax.tree.leaves(SlotState(cache, adjustments)))


def _clear(tree: Any, state_leaves: Sequence[Any], slot: jax.Array) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return tuple(jax.tree.leaves(replace(state, cache=clear_slot(state.cache, slot))))


def _adjust(tree: Any, state_leaves: Sequence[Any], slot: jax.Array, one: Sequence[Any]) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return tuple(jax.tree.leaves(replace(state, adjustments=set_slot(state.adjustments, SlotAdjustments(*one), slot))))


def _save(tree: Any, pool_tree: Any, state_leaves: Leaves, pool_leaves: Leaves, slot: jax.Array, entry: jax.Array) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return tuple(jax.tree.leaves(save(state.cache, jax.tree.unflatten(pool_tree, pool_leaves), slot, entry)))


def _restore(tree: Any, pool_tree: Any, state_leaves: Leaves, target: jax.Array, pool_leaves: Leaves, where: jax.Array) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    cache = restore(state.cache, jax.tree.unflatten(pool_tree, pool_leaves), where[0], where[1], target)
    return tuple(jax.tree.leaves(replace(state, cache=cache)))


def _export(tree: Any, export: Callable[..., dict[str, jax.Array]], state_leaves: Leaves, *where: jax.Array) -> dict[str, jax.Array]:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return export(state.cache, *where)


def _import_state(tree: Any, state_leaves: Leaves, slot: jax.Array, arrays: Arrays, position: jax.Array) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return tuple(jax.tree.leaves(replace(state, cache=import_state(state.cache, slot, arrays, position))))


def _import_rows(tree: Any, state_leaves: Leaves, slot: jax.Array, arrays: Arrays, piece: jax.Array) -> Any:
    state: SlotState = jax.tree.unflatten(tree, state_leaves)
    return tuple(jax.tree.leaves(replace(state, cache=import_rows(state.cache, slot, piece, arrays))))


def _lower_transfer(shapes: Shapes, kind: str, tree: Any, state_leaves: tuple[Any, ...]) -> Any:
    number = jax.ShapeDtypeStruct((), jnp.int32)
    way, _, what = kind.partition("_")
    export, where = (export_state, (number,)) if what == "state" else (export_rows, (number, number))
    exported = partial(_export, tree, export)
    if way == "export":
        return jax.jit(exported).lower(state_leaves, *where)
    arrays = jax.eval_shape(exported, state_leaves, *where)
    take = _import_state if what == "state" else _import_rows
    return jax.jit(partial(take, tree), donate_argnums=0).lower(state_leaves, number, arrays, number)


def lower(shapes: Shapes, key: Key) -> Any:
    """Trace and lower one program from shapes alone. Arguments and results are flat tuples: a stored program holds no types of ours."""
    leaves, tree = jax.tree.flatten(shapes.abstract_state())
    state_leaves = tuple(leaves)
    kind, *sizes = key
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    if kind == "clear":
        return jax.jit(partial(_clear, tree), donate_argnums=0).lower(state_leaves, slot)
    if kind == "adjust":
        one = tuple(jax.tree.leaves(jax.eval_shape(partial(init_adjustments, 1, shapes.spec.config.n_vocab))))
        return jax.jit(partial(_adjust, tree), donate_argnums=0).lower(state_leaves, slot, one)
    if key in TRANSFER_KEYS:
        return _lower_transfer(shapes, kind, tree, state_leaves)
    if kind in ("save", "restore"):
        pool, pool_tree = jax.tree.flatten(shapes.abstract_pool())
        if kind == "save":
            return jax.jit(partial(_save, tree, pool_tree), donate_argnums=1).lower(state_leaves, tuple(pool), slot, slot)
        where = jax.ShapeDtypeStruct((2,), jnp.int32)
        return jax.jit(partial(_restore, tree, pool_tree), donate_argnums=0).lower(state_leaves, slot, tuple(pool), where)
    flat = abstract_model(shapes.spec)
    function: Callable[..., Any] = _decode if kind == "decode" else _prefill
    n_rows, n_tokens = (sizes[0], 0) if kind == "decode" else (1, *sizes)[-2:]
    control = (batch.N_CONTROL + n_tokens, n_rows)
    masks = jax.ShapeDtypeStruct((shapes.n_slot, n_words(shapes.spec.config.n_vocab)), jnp.uint32)
    jitted = jax.jit(partial(function, flat, shapes.spec, tree), donate_argnums=1)
    return jitted.lower(tuple(flat.leaves), state_leaves, masks, jax.ShapeDtypeStruct(control, jnp.int32))


# ---------------------------------------------------------------- compiling and the store on disk
class ProgramStore:
    """Programs on disk, one file each. A file that cannot be used is compiled again and replaced, never an error."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        if directory is None:
            return
        try:  # executables are code: nobody else may write where they are read
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("cannot keep compiled programs in %s (%s); set DS4JAX_CACHE_DIR to a folder to write in", directory, error)
            self.directory = None

    def path(self, shapes: Shapes, key: Key) -> Path | None:
        """Where a program of these shapes is kept."""
        return None if self.directory is None else self.directory / f"{'-'.join(map(str, key))}-{fingerprint(shapes, key)}.xla"

    def has(self, shapes: Shapes, key: Key) -> bool:
        """Whether the program was compiled before."""
        path = self.path(shapes, key)
        return path is not None and path.is_file()

    def get(self, shapes: Shapes, key: Key) -> Program:
        """Load a program, or compile and keep it."""
        path = self.path(shapes, key)
        started = time.perf_counter()
        if path is not None and path.is_file():
            loaded = self._load(path)
            if loaded is not None:
                return Program(key, loaded, time.perf_counter() - started, True, path.stat().st_size, _scratch(loaded))
        executable = lower(shapes, key).compile()
        size = self._save(path, executable) if path is not None and _is_storable() else 0
        return Program(key, executable, time.perf_counter() - started, False, size, _scratch(executable))

    @staticmethod
    def _load(path: Path) -> Any | None:
        try:
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)
        except Exception:  # a damaged or foreign file: whatever it raises, compiling again is the answer
            return None

    @staticmethod
    def _save(path: Path, executable: Any) -> int:
        try:
            data = pickle.dumps(serialize_executable.serialize(executable))
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(data)
            temporary.replace(path)
        except (OSError, ValueError, NotImplementedError):  # a full disk or a backend that cannot serialise: run without the store
            return 0
        return len(data)


def compile_all(shapes: Shapes, store: ProgramStore, keys: Sequence[Key] | None = None, n_jobs: int | None = None) -> Iterator[Program]:
    """Get programs (all of them, or those named), n_jobs at a time; yields each as it is ready, in order."""
    with ThreadPoolExecutor(n_jobs or min(4, os.cpu_count() or 1), thread_name_prefix="compile") as pool:
        yield from pool.map(partial(store.get, shapes), shapes.keys if keys is None else keys)


def needed_first(shapes: Shapes, store: ProgramStore) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Split the programs into those that an engine cannot start without, or has on disk, and the others.

    Padding makes the largest row bucket and one chunk length enough for any traffic; the other buckets only waste less.
    """
    enough = {*shapes.slot_keys, ("prefill", shapes.prefill_buckets[0]), ("decode", shapes.decode_buckets[-1])}
    first = tuple(key for key in shapes.keys if key in enough or store.has(shapes, key))
    return first, tuple(key for key in shapes.keys if key not in first)


def _is_storable() -> bool:
    """Whether a compiled program may be serialised.

    A CPU program that JAX took from its own compilation cache serialises without its code: it loads, and fails when it runs. JAX does
    not say which programs come from there, so while that cache is on it alone keeps them.
    """
    return not (jax.config.values["jax_compilation_cache_dir"] and jax.devices()[0].platform == "cpu")


def _scratch(executable: Any) -> int:
    try:
        return int(executable.memory_analysis().temp_size_in_bytes)
    except Exception:  # not every backend tells
        return 0


def fingerprint(shapes: Shapes, key: Key) -> str:
    """Hash everything that decides a program: model, engine, bucket, versions, device, compiler flags and our own source."""
    device = jax.devices()[0]
    options = ("jax_default", "jax_enable_x64", "jax_disable_most_optimizations")
    shapes = replace(shapes, transfers=False)
    if key not in SNAPSHOT_KEYS:  # to the others, the pool is nothing
        shapes = replace(shapes, n_snapshot=0)
    what = {
        "shapes": asdict(shapes),
        "key": key,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": [device.platform, device.device_kind, device.client.platform_version],
        "cpu": _cpu_features() if device.platform == "cpu" else "",
        "flags": os.environ.get("XLA_FLAGS", ""),
        "options": sorted((k, str(v)) for k, v in jax.config.values.items() if k.startswith(options)),
        "source": _source_hash(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


@cache
def _cpu_features() -> str:
    """Instruction sets of this processor: a stored CPU program may use all of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor() + platform.machine()


@cache
def _source_hash() -> str:
    """Hash the code that programs are traced from."""
    root = Path(__file__).resolve().parents[2]
    files = [*sorted((root / "model").rglob("*.py")), Path(__file__), Path(batch.__file__)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()

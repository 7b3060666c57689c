"""The state of every slot as one pytree: KVCache. It is an argument and a result of each step, and donated.

Per slot and layer: a ring of the last W attention rows; on compressing layers the compressed rows and the unfinished
window (u and z, float32, never rounded); on ratio-4 layers the same again for the indexer's keys. Position p lives
in ring row p mod W and, once its window closes, in compressed row p // ratio.

Rows are stored in the format that the arithmetic rounds to, so storing loses nothing: plain values for
kv_quant="none"; FP8 codes with power-of-two scales and a float16 rotary tail (attention), or packed FP4 (indexer) for
kv_quant="ds4".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.config import ModelConfig
from ds4jax.model import rounding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Rows of every layer and slot in one storage format; each part is [L, S, rows, ...].

    format "f32" or "bf16": part `x`. "fp8": `code` uint8 and `exponent` int8 of the plain channels, `tail` f16 of the rotated ones.
    "fp4": `code` (two values a byte) and `exponent`.
    """

    parts: dict[str, jax.Array]
    format: str = dataclasses.field(metadata={"static": True})
    n_rot: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, format: str, n_layer: int, n_slot: int, n_row: int, width: int, n_rot: int) -> Rows:
        """Return empty rows of `width` values (of which the last n_rot rotate)."""
        shapes = jax.eval_shape(lambda: encode(jnp.zeros((n_layer, n_slot, n_row, width), jnp.float32), format, n_rot))
        # All bits zero, as a cleared slot has them; encoding zeros would also take the memory of unpacked rows for a moment.
        return cls({name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}, format, n_rot)

    @property
    def n_row(self) -> int:
        """Row capacity of a slot."""
        return next(iter(self.parts.values())).shape[2]

    def write(self, layer: jax.Array | int, slot: jax.Array, row: jax.Array, values: jax.Array) -> Rows:
        """Store values [..., width] f32 at (layer, slot, row); slot and row are int32 [...]. Indices out of range write nothing."""
        new = encode(values, self.format, self.n_rot)
        parts = {k: a.at[layer, slot, row].set(new[k], mode="drop") for k, a in self.parts.items()}
        return dataclasses.replace(self, parts=parts)

    def read(self, layer: jax.Array | int, slot: jax.Array, row: jax.Array) -> jax.Array:
        """Return the values [..., width] f32 at (layer, slot, row). Indices out of range give some row: mask it."""
        return decode({k: a.at[layer, slot, row].get(mode="clip") for k, a in self.parts.items()}, self.format, self.n_rot)

    def round(self, values: jax.Array) -> jax.Array:
        """Return values as a write followed by a read would give them."""
        return decode(encode(values, self.format, self.n_rot), self.format, self.n_rot)


def encode(x: jax.Array, format: str, n_rot: int) -> dict[str, jax.Array]:
    """Convert f32 rows [..., width] to the parts of a storage format."""
    if format == "f32":
        return {"x": x}
    if format == "bf16":
        return {"x": x.astype(jnp.bfloat16)}
    if format == "fp8":
        n_plain = x.shape[-1] - n_rot
        code, exponent = rounding.fp8_encode(x[..., :n_plain])
        return {"code": code, "exponent": exponent, "tail": x[..., n_plain:].astype(jnp.float16)}
    code, exponent = rounding.fp4_encode(x)
    return {"code": code, "exponent": exponent}


def decode(parts: dict[str, jax.Array], format: str, n_rot: int) -> jax.Array:
    """Convert the parts of a storage format to f32 rows [..., width]."""
    if format in ("f32", "bf16"):
        return parts["x"].astype(jnp.float32)
    # ds4 keeps rows in f16, so what FP8 or FP4 leaves below 2^-24 is rounded once more.
    if format == "fp8":
        plain = rounding.f16_round(rounding.fp8_decode(parts["code"], parts["exponent"]))
        return jnp.concatenate([plain, parts["tail"].astype(jnp.float32)], axis=-1)
    return rounding.f16_round(rounding.fp4_decode(parts["code"], parts["exponent"]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Unfinished windows of one kind of compressor: u and z, [L, S, C*ratio, C*width] f32 (C = 2 for ratio 4, else 1)."""

    u: jax.Array
    z: jax.Array

    @classmethod
    def empty(cls, n_layer: int, n_slot: int, ratio: int, width: int) -> Window:
        """Return windows before any token: u = 0, z = -inf (weight zero, which entry 0 of ratio 4 relies on)."""
        c = 2 if ratio == 4 else 1
        shape = (n_layer, n_slot, c * ratio, c * width)
        return cls(jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Every slot's state.

    position: tokens in the slot so far, int32 [S]. next_token: what the last step sampled for the slot, int32 [S].
    raw: attention rows, ring of W. comp4, comp128: compressed attention rows. index: indexer keys.
    win4, win128, win_index: unfinished windows.
    Layers of a kind are numbered in their own order (`transformer.LayerIndex`).
    """

    position: jax.Array
    next_token: jax.Array
    raw: Rows
    comp4: Rows
    comp128: Rows
    index: Rows
    win4: Window
    win128: Window
    win_index: Window

    @property
    def n_slot(self) -> int:
        """Slots allocated."""
        return self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Size on the device."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def row_formats(kv_quant: str, dtype: str) -> tuple[str, str]:
    """Return the storage formats of attention rows and of indexer keys."""
    if kv_quant == "ds4":
        return "fp8", "fp4"
    plain = "f32" if dtype == "float32" else "bf16"
    return plain, plain


def init_cache(config: ModelConfig, n_slot: int, n_ctx: int, kv_quant: str, dtype: str) -> KVCache:
    """Return empty slots that hold n_ctx tokens each. Under jax.eval_shape it gives the shapes alone."""
    attention, index = row_formats(kv_quant, dtype)
    n4, n128 = config.n_layer_ratio4, config.n_layer_ratio128
    c4, c128 = max(n_ctx // 4, 1), max(n_ctx // 128, 1)
    k, r, j = config.head_dim, config.n_rot, config.index_dim
    return KVCache(
        position=jnp.zeros(n_slot, jnp.int32),
        next_token=jnp.zeros(n_slot, jnp.int32),
        raw=Rows.zeros(attention, config.n_layer, n_slot, config.n_window, k, r),
        comp4=Rows.zeros(attention, n4, n_slot, c4, k, r),
        comp128=Rows.zeros(attention, n128, n_slot, c128, k, r),
        index=Rows.zeros(index, n4, n_slot, c4, j, r),
        win4=Window.empty(n4, n_slot, 4, k),
        win128=Window.empty(n128, n_slot, 128, k),
        win_index=Window.empty(n4, n_slot, 4, j),
    )


def _slot_axis(cache: KVCache, leaf_fn: Callable[[jax.Array, int], jax.Array]) -> KVCache:
    """Apply leaf_fn(leaf, slot_axis) to every leaf."""
    vectors = {"position", "next_token"}
    return KVCache(**{
        f.name: jax.tree.map(lambda a, axis=0 if f.name in vectors else 1: leaf_fn(a, axis), getattr(cache, f.name))
        for f in dataclasses.fields(cache)
    })  # fmt: skip


def copy_slot(cache: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
    """Make slot `target` an exact copy of slot `source` (a fork)."""

    def copy(a: jax.Array, axis: int) -> jax.Array:
        return a.at[target].set(a[source]) if axis == 0 else a.at[:, target].set(a[:, source])

    return _slot_axis(cache, copy)


def export_slot(cache: KVCache, slot: jax.Array) -> KVCache:
    """Return one slot as a cache of a single slot."""
    return _slot_axis(cache, lambda a, axis: jax.lax.dynamic_index_in_dim(a, slot, axis, keepdims=True))


def import_slot(cache: KVCache, single: KVCache, slot: jax.Array) -> KVCache:
    """Put an exported slot of the same shape into `slot`."""
    new = jax.tree.leaves(single)
    old, tree = jax.tree.flatten(cache)
    placed = [jax.lax.dynamic_update_slice_in_dim(a, b, slot, 0 if a.ndim == 1 else 1) for a, b in zip(old, new, strict=True)]
    return jax.tree.unflatten(tree, placed)


def clear_slot(cache: KVCache, slot: jax.Array) -> KVCache:
    """Make a slot bit-equal to a new one.

    All of it, not just the position: masked rows are still multiplied by a weight of zero, and zero times the NaN that a
    failed session may have left is NaN.
    """
    one = jax.tree.map(lambda a: jnp.zeros_like(a[:1] if a.ndim == 1 else a[:, :1]), cache)
    absent = {name: Window(getattr(one, name).u, jnp.full_like(getattr(one, name).z, -jnp.inf)) for name in ("win4", "win128", "win_index")}
    return import_slot(cache, dataclasses.replace(one, **absent), slot)

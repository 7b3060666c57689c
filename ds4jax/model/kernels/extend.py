"""Put a decode step's token into the cache, in one launch a layer: all that follows the projections of a block's input.

Programs have roles: one normalises the low-rank query, one writes the token's raw row, one feeds the compressor and one
the indexer's. A program touches its own slot alone and writes in place; where a row is unused it writes nothing. State is
read before it is overwritten by the same program: what was read meets in a sum over the whole row in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model import rounding
from ds4jax.model.cache import Rows, Window
from ds4jax.model.kernels.launch import launch

BLOCK = 64  # channels at a time; those that rotate are the last block of a row
PARTS = {"f32": ("x",), "bf16": ("x",), "fp8": ("code", "exponent", "tail"), "fp4": ("code", "exponent")}


@dataclass(frozen=True)
class Pool:
    """A compressor's part of the launch.

    first: columns of `proj` where what is pooled and its gate begin. at: int32 [1], the layer among those of this kind.
    ape [L, ratio, columns], norm [L, width]. ratio: 4 or 128.
    """

    first: tuple[int, int]
    at: jax.Array
    ape: jax.Array
    norm: jax.Array
    window: Window
    rows: Rows
    ratio: int
    mixed: bool = False  # rows pass the Hadamard matrix

    @property
    def statics(self) -> dict[str, Any]:
        """What the kernel must know beforehand."""
        return {"first": self.first, "ratio": self.ratio, "format": self.rows.format, "n_row": self.rows.n_row, "mixed": self.mixed}


def extend(
    proj: jax.Array, layer: jax.Array, at_raw: jax.Array, q_norm: jax.Array, kv_norm: jax.Array, raw: Rows, pools: Sequence[Pool],
    slot: jax.Array, position: jax.Array, *, omega: np.ndarray, eps: float,
) -> tuple[jax.Array, Rows, list[tuple[Window, Rows]]]:  # fmt: skip
    """Extend each row's slot by its token.

    Args:
        proj: f32 [M, C]: the low-rank query [Q], the row [K], then the pools' columns.
        layer: int32 [1], of the norms q_norm [L, Q] and kv_norm [L, K]. at_raw: int32 [1]. slot, position: int32 [M].
        omega: f32 [32] from `rope.frequencies`.

    Returns:
        The normalised query bf16 [M, Q], the raw rows, and each pool's window and rows.
    """
    m, q = proj.shape[0], q_norm.shape[1]
    angle = jnp.asarray(np.repeat(omega, 2))
    operands = [proj, layer, at_raw, slot, position, q_norm, kv_norm, angle]
    for pool in pools:
        operands += [pool.at, pool.ape, pool.norm]
    states = [_parts(raw)] + [[pool.window.u, pool.window.z, *_parts(pool.rows)] for pool in pools]
    state = [a for arrays in states for a in arrays]
    kernel = partial(
        _kernel,
        eps=eps,
        n_slot=state[0].shape[1],
        raw=(raw.format, raw.n_row),
        pools=tuple(pool.statics for pool in pools),
    )
    out = [jax.ShapeDtypeStruct((m, q), jnp.bfloat16), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in state)]
    aliases = {len(operands) + i: 1 + i for i in range(len(state))}
    lora, *state = launch(kernel, (2 + len(pools), m), out, [*operands, *state], name="extend", aliases=aliases)
    new_raw = _with_parts(raw, state[: len(states[0])])
    done, at = [], len(states[0])
    for pool, arrays in zip(pools, states[1:], strict=True):
        u, z, *parts = state[at : at + len(arrays)]
        done.append((Window(u, z), _with_parts(pool.rows, parts)))
        at += len(arrays)
    return lora, new_raw, done


def _parts(rows: Rows) -> list[jax.Array]:
    return [rows.parts[name] for name in PARTS[rows.format]]


def _with_parts(rows: Rows, parts: Sequence[jax.Array]) -> Rows:
    return dataclasses.replace(rows, parts=dict(zip(PARTS[rows.format], parts, strict=True)))


def _kernel(
    proj_ref: Any, layer_ref: Any, at_raw_ref: Any, slot_ref: Any, position_ref: Any, q_norm_ref: Any, kv_norm_ref: Any, angle_ref: Any,
    *refs: Any, eps: float, n_slot: int, raw: tuple[str, int], pools: tuple[dict[str, Any], ...],
) -> None:  # fmt: skip
    n_state = len(PARTS[raw[0]]) + sum(2 + len(PARTS[p["format"]]) for p in pools)
    settings, before, lora_ref, after = refs[: 3 * len(pools)], refs[3 * len(pools) :][:n_state], refs[-n_state - 1], refs[-n_state:]
    role, m = pl.program_id(0), pl.program_id(1)
    layer, slot, position = layer_ref[0], slot_ref[m], position_ref[m]
    n_q, width = q_norm_ref.shape[1], kv_norm_ref.shape[1]
    channel = jnp.arange(BLOCK)

    @pl.when(role == 0)
    def _() -> None:
        x = proj_ref[m, pl.ds(0, n_q)]
        lora_ref[m, :] = (x * _root(jnp.sum(x * x) / n_q + eps) * q_norm_ref[layer, :]).astype(jnp.bfloat16)

    @pl.when((role == 1) & (slot < n_slot))
    def _() -> None:
        def load(block: int, flip: int) -> jax.Array:
            return plt.load(proj_ref.at[m, n_q + block * BLOCK + (channel ^ flip)])

        row = _finished(load, kv_norm_ref, layer, width, angle_ref, position, eps)
        _store(after[: len(PARTS[raw[0]])], raw[0], at_raw_ref[0], slot, position % raw[1], row)

    first = len(PARTS[raw[0]])
    for i, statics in enumerate(pools):
        count = 2 + len(PARTS[statics["format"]])
        state = slice(first, first + count)
        first += count

        @pl.when((role == 2 + i) & (slot < n_slot))
        def _(i: int = i, statics: dict[str, Any] = statics, state: slice = state) -> None:
            mine = settings[3 * i : 3 * i + 3]
            _compress(proj_ref, m, layer, slot, position, mine, angle_ref, before[state], after[state], eps=eps, **statics)


def _compress(
    proj_ref: Any, m: Any, layer: Any, slot: Any, position: Any, settings: Any, angle_ref: Any, before: Any, after: Any,
    *, eps: float, first: tuple[int, int], ratio: int, format: str, n_row: int, mixed: bool,
) -> None:  # fmt: skip
    """Take a token into a window; where it closes the window, write the pooled row (`Compressor.step`)."""
    at_ref, ape_ref, norm_ref = settings
    u_ref, z_ref = before[:2]
    at, lead, width = at_ref[0], ratio if ratio == 4 else 0, norm_ref.shape[1]
    columns = width * (2 if lead else 1)
    place = position % ratio

    def token(column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the token brings to columns: u and z."""
        gate = plt.load(proj_ref.at[m, first[1] + column]) + plt.load(ape_ref.at[layer, place, column])
        return plt.load(proj_ref.at[m, first[0] + column]), gate

    whole = jnp.arange(columns)
    for ref, value in zip(after[:2], token(whole), strict=True):
        plt.store(ref.at[at, slot, lead + place, whole], value)

    @pl.when(place == ratio - 1)
    def _() -> None:
        rows = jnp.arange(lead + ratio)
        channel = jnp.arange(BLOCK)
        last = (rows == lead + ratio - 1)[:, None]

        def load(block: int, flip: int) -> jax.Array:
            """Pool a block of channels: the first half of a leading window's columns, the second of its own."""
            at_channel = block * BLOCK + (channel ^ flip)
            column = at_channel[None, :] + jnp.where(rows >= lead, columns - width, 0)[:, None]
            now_u, now_z = token(at_channel + columns - width)
            u = jnp.where(last, now_u[None, :], plt.load(u_ref.at[at, slot, rows[:, None], column]))
            z = jnp.where(last, now_z[None, :], plt.load(z_ref.at[at, slot, rows[:, None], column]))
            weight = jnp.exp(z - jnp.max(z, axis=0)[None, :])
            return jnp.sum(weight * u, axis=0) / jnp.sum(weight, axis=0)

        row = _finished(load, norm_ref, layer, width, angle_ref, position - (ratio - 1), eps)
        entry = position // ratio

        @pl.when(entry < n_row)
        def _() -> None:
            if format == "fp4":
                _store_fp4(after[2:], at, slot, entry, row)
            else:
                _store(after[2:], format, at, slot, entry, _hadamard(row) if mixed else row)

        if lead:  # the window that closed becomes the previous one
            for i in range(lead):
                for old, new, now in zip(before[:2], after[:2], token(whole), strict=True):
                    value = now if i == lead - 1 else plt.load(old.at[at, slot, lead + i, whole])
                    plt.store(new.at[at, slot, i, whole], value)


def _finished(
    load: Callable[[int, int], jax.Array], norm_ref: Any, layer: Any, width: int, angle_ref: Any, position: Any, eps: float
) -> list[jax.Array]:
    """Normalise and rotate a row given by blocks: load(block, flip) with flip = 1 exchanges the members of pairs."""
    n_block = width // BLOCK
    channel = jnp.arange(BLOCK)
    blocks = [load(b, 0) for b in range(n_block)]
    partner = load(n_block - 1, 1)
    root = _root(sum((jnp.sum(x * x) for x in blocks), jnp.float32(eps * width)) / width)
    blocks = [x * root * norm_ref[layer, pl.ds(b * BLOCK, BLOCK)] for b, x in enumerate(blocks)]
    partner = partner * root * plt.load(norm_ref.at[layer, (n_block - 1) * BLOCK + (channel ^ 1)])
    theta = position.astype(jnp.float32) * angle_ref[:]
    sin = jnp.where(channel % 2 == 0, -jnp.sin(theta), jnp.sin(theta))
    return [*blocks[:-1], blocks[-1] * jnp.cos(theta) + partner * sin]


def _root(x: jax.Array) -> jax.Array:
    return 1 / jnp.sqrt(x)


def _store(refs: Any, format: str, at: Any, slot: Any, row: Any, blocks: Sequence[jax.Array]) -> None:
    """Store an attention row, or an index row that is not rounded."""
    for b, x in enumerate(blocks):
        where = pl.ds(b * BLOCK, BLOCK)
        if format != "fp8":
            refs[0][at, slot, row, where] = x.astype(refs[0].dtype)
        elif b == len(blocks) - 1:
            refs[2][at, slot, row, :] = x.astype(jnp.float16)
        else:
            exponent = rounding.fp8_exponent(jnp.max(jnp.abs(x)))
            scaled = jnp.clip(x * rounding.exp2_int(-exponent), -448.0, 448.0)
            scaled = jnp.where(x != x, x, scaled)  # a clip may lose what is no number
            code = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)
            refs[0][at, slot, row, where] = jnp.where(x == 0, 0, code).astype(jnp.uint8)  # -0.0 becomes 0.0
            refs[1][at, slot, row, b] = exponent.astype(jnp.int8)


def _hadamard_part(blocks: Sequence[jax.Array], column: jax.Array) -> jax.Array:
    """Entries of the row's product with the Hadamard matrix at columns [...]."""
    n = jnp.zeros(column.shape, jnp.float32)
    for b, x in enumerate(blocks):
        i = (b * BLOCK + jnp.arange(BLOCK)).reshape(BLOCK, *[1] * column.ndim)
        odd = jax.lax.population_count(i & column[None]) & 1
        n = n + jnp.sum(jnp.where(odd == 1, -1.0, 1.0) * x.reshape(BLOCK, *[1] * column.ndim), axis=0)
    return n * (1 / float(np.sqrt(BLOCK * len(blocks))))


def _hadamard(blocks: Sequence[jax.Array]) -> list[jax.Array]:
    return [_hadamard_part(blocks, b * BLOCK + jnp.arange(BLOCK)) for b in range(len(blocks))]


def _store_fp4(refs: Any, at: Any, slot: Any, row: Any, blocks: Sequence[jax.Array]) -> None:
    """Mix an index row, round it to FP4 and store it: byte j of a block of 32 holds elements j and j + 16."""
    code_ref, exponent_ref = refs
    n, half = BLOCK * len(blocks) // 32, jnp.arange(16)
    block = jnp.arange(n)
    low, high = (_hadamard_part(blocks, block[:, None] * 32 + 16 * h + half[None, :]) for h in range(2))
    exponent = rounding.fp4_exponent(jnp.maximum(jnp.max(jnp.abs(low), axis=1), jnp.max(jnp.abs(high), axis=1)))
    scale = rounding.exp2_int(-exponent)[:, None]
    packed = _e2m1(low * scale) | _e2m1(high * scale) << 4
    plt.store(code_ref.at[at, slot, row, block[:, None] * 16 + half[None, :]], packed.astype(jnp.uint8))
    plt.store(exponent_ref.at[at, slot, row, block], exponent.astype(jnp.int8))


def _e2m1(x: jax.Array) -> jax.Array:
    """Code of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; the sign on top."""
    size = jnp.abs(x)
    code = sum((size >= t if i % 2 else size > t).astype(jnp.int32) for i, t in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))
    return code | jnp.where(x < 0, 8, 0)

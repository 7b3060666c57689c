"""Put a decode step's token into the cache, in one launch a layer: all that follows the projections of a block's input.

Programs have roles: one normalises the low-rank query, one writes the token's raw row, one feeds the compressor and one
the indexer's. A program touches its own slot alone and writes in place; where a row is unused it writes nothing. State is
read before it is overwritten by the same program: what was read meets in a sum over the whole row in between. And it is
read all at once: a load that follows a store or a sum waits for it, and memory is what these programs wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.cache import Rows, Window
from ds4jax.model.kernels import write
from ds4jax.model.kernels.launch import launch
from ds4jax.model.kernels.write import PARTS

TAKE = 8  # rows of a window that are read together; windows are as many rows, or a multiple of it


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
        return {"first": self.first, "ratio": self.ratio, "format": self.rows.format, "n_row": self.rows.n_row}


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
    assert all(pool.mixed == (pool.rows.format == "fp4") for pool in pools), (
        "rows pass the Hadamard matrix where they become FP4, and only there"
    )
    operands = [proj, layer, at_raw, slot, position, q_norm, kv_norm, jnp.asarray(omega)]
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

    @pl.when(role == 0)
    def _() -> None:
        x, weight = proj_ref[m, pl.ds(0, n_q)], q_norm_ref[layer, :]
        lora_ref[m, :] = (x * (1 / jnp.sqrt(jnp.sum(x * x) / n_q + eps)) * weight).astype(jnp.bfloat16)

    @pl.when((role == 1) & (slot < n_slot))
    def _() -> None:
        shape, angle = write.Shape(width), angle_ref[:]
        weight = shape.load(lambda channel: kv_norm_ref.at[layer, channel])
        row = shape.load(lambda channel: proj_ref.at[m, n_q + channel])
        at = at_raw_ref[0], slot, position % raw[1]
        write.store(after[: len(PARTS[raw[0]])], raw[0], at, write.finish(row, weight, angle, position, shape, eps), shape)

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
    *, eps: float, first: tuple[int, int], ratio: int, format: str, n_row: int,
) -> None:  # fmt: skip
    """Take a token into a window; where it closes the window, write the pooled row (`Compressor.step`)."""
    at_ref, ape_ref, norm_ref = settings
    at, lead, shape, angle = at_ref[0], ratio if ratio == 4 else 0, write.Shape(norm_ref.shape[1]), angle_ref[:]
    columns = shape.width * (2 if lead else 1)
    place, whole = position % ratio, jnp.arange(columns)
    u, z = (plt.load(proj_ref.at[m, f + whole]) for f in first)
    z = z + plt.load(ape_ref.at[layer, place, whole])

    @pl.when(place == ratio - 1)
    def _() -> None:
        weight = shape.load(lambda channel: norm_ref.at[layer, channel])
        # Of the window that closes and becomes the previous one, all but the token: [u or z][row].
        kept = [[plt.load(ref.at[at, slot, lead + i, whole]) for i in range(ratio - 1)] for ref in before[:2]] if lead else []
        row = _pooled(proj_ref, m, ape_ref, layer, before[:2], at, slot, first, ratio, lead, shape)
        row = write.finish(row, weight, angle, position - (ratio - 1), shape, eps)
        entry = position // ratio

        @pl.when(entry < n_row)
        def _() -> None:
            if format == "fp4":
                write.store_mixed(after[2:], (at, slot, entry), row, shape)
            else:
                write.store(after[2:], format, (at, slot, entry), row, shape)

        for ref, rows, token in zip(after[:2], kept, (u, z), strict=False):
            for i, values in enumerate([*rows, token]):
                plt.store(ref.at[at, slot, i, whole], values)

    for ref, token in zip(after[:2], (u, z), strict=True):
        plt.store(ref.at[at, slot, lead + place, whole], token)


def _pooled(
    proj_ref: Any, m: Any, ape_ref: Any, layer: Any, state: Any, at: Any, slot: Any, first: tuple[int, int], ratio: int, lead: int,
    shape: write.Shape,
) -> write.Row:  # fmt: skip
    """Pool a window that its last token closes, channel by channel, as a softmax that begins with the token and takes rows as they come.

    A leading window gives the first half of its columns, the window itself the second.
    """
    own = shape.width if lead else 0
    u = shape.load(lambda channel: proj_ref.at[m, first[0] + own + channel])
    gate = shape.load(lambda channel: proj_ref.at[m, first[1] + own + channel])
    ape = shape.load(lambda channel: ape_ref.at[layer, ratio - 1, own + channel])

    def take(chunk: Any, tiles: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        rows = [(chunk * TAKE + i, own if i >= lead else 0) for i in range(TAKE)]  # number, and first column
        us, zs = (
            [
                shape.load(lambda channel, r=r, c=c, ref=ref: ref.at[at, slot, r, c + channel], mask=r < lead + ratio - 1, other=other)
                for r, c in rows
            ]
            for ref, other in zip(state, (0.0, -jnp.inf), strict=True)
        )
        return [_absorb(tiles[p], [u[p] for u in us], [z[p] for z in zs]) for p in (0, 1)]

    begin = [(g + a, jnp.ones_like(g), v) for g, a, v in zip(gate, ape, u, strict=True)]
    even, odd = jax.lax.fori_loop(0, (lead + ratio) // TAKE, take, begin)
    return even[2] / even[1], odd[2] / odd[1]


def _absorb(tiles: tuple[jax.Array, ...], us: list[jax.Array], zs: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Let values u with logits z join a softmax in progress: the largest logit, the sum of weights, the weighted sum."""
    top, total, value = tiles
    new = top
    for z in zs:
        new = jnp.maximum(new, z)
    old = jnp.exp(top - new)
    total, value = total * old, value * old
    for u, z in zip(us, zs, strict=True):
        weight = jnp.exp(z - new)
        total, value = total + weight, value + weight * u
    return new, total, value

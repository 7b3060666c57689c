"""Compressors: one pooled row for every `ratio` tokens, by a softmax over the window, channel by channel.

Ratio 4 overlaps: a row pools the first half of the channels of the previous window and the second half of its own.
Ratio 128 pools its own window alone. Window w is tokens [w*ratio, (w+1)*ratio); its row rotates at its first token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model.cache import Rows, Window
from ds4jax.model.norm import rms_norm
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.rounding import hadamard
from ds4jax.model.sums import ordered_softmax, ordered_sum
from ds4jax.model.weights import Take


class Compressor(nnx.Module):
    """Weights of one compressor, and its two ways to advance: by a token in each row, or by a chunk.

    width: channels of a finished row (head dim, or indexer dim).
    """

    def __init__(self, config: ModelConfig, take: Take, prefix: str, ratio: int, width: int, *, with_hadamard: bool) -> None:
        self.config, self.ratio, self.width, self.with_hadamard = config, ratio, width, with_hadamard
        self.columns = columns = width * (2 if ratio == 4 else 1)
        self.ape = nnx.Param(take.vector(f"{prefix}_ape.weight", ratio, columns))
        self.norm = nnx.Param(take.vector(f"{prefix}_norm.weight", width))

    @property
    def lead(self) -> int:
        """Rows of the previous window that stand before the current one in the state."""
        return self.ratio if self.ratio == 4 else 0

    def inputs(self, prefix: str) -> dict[str, int]:
        """Name the matrices that project the block's input to what is pooled (u) and its gate, with their rows."""
        return {f"{prefix}_kv.weight": self.columns, f"{prefix}_gate.weight": self.columns}

    def gates(self, gate: jax.Array, position: jax.Array) -> jax.Array:
        """Add to projected gates [M, columns] f32 what the place in the window adds: z at int32 positions [M]."""
        return gate + self.ape.get_value()[position % self.ratio]

    def pool(self, u: jax.Array, z: jax.Array) -> jax.Array:
        """Pool windows: u, z [..., lead + ratio, columns] -> [..., width]."""
        if self.lead:
            u, z = (jnp.concatenate([a[..., : self.lead, : self.width], a[..., self.lead :, self.width :]], axis=-2) for a in (u, z))
        return ordered_sum(ordered_softmax(z, -2) * u, -2)[..., 0, :]

    def finish(self, pooled: jax.Array, entry: jax.Array) -> jax.Array:
        """Turn pooled [..., width] of int32 entries [...] into the row that a cache stores."""
        row = rms_norm(pooled, self.config.rms_eps, self.norm.get_value())
        row = rotate(row, entry * self.ratio, frequencies(self.config, compressed=True))
        return hadamard(row) if self.with_hadamard else row

    def step(
        self, window: Window, rows: Rows, layer: jax.Array, slot: jax.Array, position: jax.Array, u: jax.Array, z: jax.Array
    ) -> tuple[Window, Rows]:
        """Take one token of each row; append the pooled row where its window closes.

        Args:
            layer: index among layers of this kind. slot, position: int32 [B]. u, z: [B, columns].
        """
        at = self.lead + position % self.ratio
        window = Window(window.u.at[layer, slot, at].set(u, mode="drop"), window.z.at[layer, slot, at].set(z, mode="drop"))
        closes = position % self.ratio == self.ratio - 1

        entry = position // self.ratio

        def pooled(window: Window) -> tuple[jax.Array, jax.Array, jax.Array]:
            live_u, live_z = (a.at[layer, slot].get(mode="clip") for a in (window.u, window.z))  # [B, lead + ratio, columns]
            return self.finish(self.pool(live_u, live_z), entry), live_u[:, self.lead :], live_z[:, self.lead :]

        def nothing(window: Window) -> tuple[jax.Array, jax.Array, jax.Array]:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(pooled, window))

        # Most steps close no window of 128; reading those states every step would cost as much as the window attention.
        # States go in, but do not come out: what a branch returns is copied, and that would be the states of all slots.
        row, own_u, own_z = jax.lax.cond(jnp.any(closes), pooled, nothing, window)
        rows = rows.write(layer, slot, jnp.where(closes, entry, rows.n_row), row)
        if self.lead:  # the window that closed becomes the previous one
            first = jnp.where(closes[:, None], jnp.arange(self.lead)[None, :], window.u.shape[2])
            window = Window(
                window.u.at[layer, slot[:, None], first].set(own_u, mode="drop"),
                window.z.at[layer, slot[:, None], first].set(own_z, mode="drop"),
            )
        return window, rows

    def chunk(
        self, window: Window, rows: Rows, layer: jax.Array, slot: jax.Array, start: jax.Array, n: jax.Array, u: jax.Array, z: jax.Array
    ) -> tuple[Window, Rows]:
        """Take a chunk of each row; append the pooled rows of all windows that close in it.

        The live rows of the state and the chunk form one sequence, cut into windows at the state's phase.

        Args:
            layer: index among layers of this kind. slot, start, n: int32 [B], n real tokens from position start.
            u, z: [B, T, columns].
        """
        n_token = u.shape[1]
        n_window = (n_token + self.ratio - 1) // self.ratio  # most that can close, whatever the phase
        phase = start % self.ratio
        closed = (phase + n) // self.ratio  # [B]
        span = self.lead + (n_window + 1) * self.ratio

        index = jnp.arange(span)[None, :] - (self.lead + phase)[:, None]  # [B, span], position in the chunk
        from_state = jnp.arange(span)[None, :] < (self.lead + phase)[:, None]

        def sequence(state: jax.Array, chunk: jax.Array) -> jax.Array:
            old = state.at[layer, slot].get(mode="clip")  # [B, lead + ratio, columns]
            old = jnp.pad(old, ((0, 0), (0, span - old.shape[1]), (0, 0)))
            new = jnp.take_along_axis(chunk, jnp.clip(index, 0, n_token - 1)[:, :, None], axis=1)
            return jnp.where(from_state[:, :, None], old, new)

        seq_u, seq_z = sequence(window.u, u), sequence(window.z, z)
        views = [self._windows(a, n_window) for a in (seq_u, seq_z)]
        number = jnp.arange(n_window)[None, :]
        entry = (start // self.ratio)[:, None] + number  # [B, n_window]
        row = self.finish(self.pool(*views), entry)
        rows = rows.write(layer, slot[:, None], jnp.where(number < closed[:, None], entry, rows.n_row), row)

        # What follows the last closed window stays: its predecessor (ratio 4) and the unfinished rest.
        tail = (closed * self.ratio)[:, None] + jnp.arange(self.lead + self.ratio)[None, :]
        live = tail < (self.lead + phase + n)[:, None]

        def rest(seq: jax.Array, empty: float) -> jax.Array:
            return jnp.where(live[:, :, None], jnp.take_along_axis(seq, tail[:, :, None], axis=1), empty)

        return Window(
            window.u.at[layer, slot].set(rest(seq_u, 0.0), mode="drop"),
            window.z.at[layer, slot].set(rest(seq_z, -jnp.inf), mode="drop"),
        ), rows

    def _windows(self, seq: jax.Array, n_window: int) -> jax.Array:
        """Cut [B, span, columns] into [B, n_window, lead + ratio, columns]; with ratio 4 each window carries its predecessor."""
        b, _, columns = seq.shape
        own = seq[:, self.lead : self.lead + n_window * self.ratio].reshape(b, n_window, self.ratio, columns)
        if not self.lead:
            return own
        previous = seq[:, : n_window * self.ratio].reshape(b, n_window, self.ratio, columns)
        return jnp.concatenate([previous, own], axis=2)

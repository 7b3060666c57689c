"""Hyper-connections: H residual streams, mixed before and after every block by weights that depend on them."""

from __future__ import annotations

import jax
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model.kernels import sinkhorn as kernels
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import matmul
from ds4jax.model.sums import ordered_softmax, ordered_sum, rounded
from ds4jax.model.weights import Take


class HyperConnection(nnx.Module):
    """The mixing around one block (attention or feed-forward).

    fn [2H + H*H, H*D], scale [3], base [2H + H*H]: rows are `pre` (H), `post` (H), then the H x H combination.
    """

    def __init__(self, config: ModelConfig, take: Take, prefix: str) -> None:
        self.config = config
        h = config.n_hc
        n_mix = 2 * h + h * h
        self.fn = nnx.Param(take.matrix(f"{prefix}_fn.weight", n_mix, h * config.n_embd))
        self.scale = nnx.Param(take.vector(f"{prefix}_scale.weight", 3))
        self.base = nnx.Param(take.vector(f"{prefix}_base.weight", n_mix))

    def pre(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Collapse the streams to the block's input.

        Args:
            x: [M, H, D] f32 streams.

        Returns:
            input [M, D], post [M, H] and comb [M, H, H] (first index: from stream), all f32.
        """
        h, eps = self.config.n_hc, self.config.hc_eps
        mix = matmul(rms_norm(x.reshape(x.shape[0], -1), self.config.rms_eps), self.fn.get_value())  # [M, 2H + H*H]
        scale, base = self.scale.get_value(), self.base.get_value()[None, :]
        pre = jax.nn.sigmoid(rounded(mix[:, :h] * scale[0]) + base[:, :h]) + eps
        post = 2 * jax.nn.sigmoid(rounded(mix[:, h : 2 * h] * scale[1]) + base[:, h : 2 * h])
        comb = doubly_stochastic(
            (rounded(mix[:, 2 * h :] * scale[2]) + base[:, 2 * h :]).reshape(-1, h, h), self.config.hc_sinkhorn_iters, eps
        )
        return weighted_sum(pre, x), post, comb  # of the streams as they are, not the normalised ones

    @staticmethod
    def post(out: jax.Array, x: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
        """Spread a block's output over the streams and mix the old streams: post ⊗ out + comb^T x.

        Args:
            out: [M, D]; x: [M, H, D] as it was before `pre`; post: [M, H]; comb: [M, H, H].

        Returns:
            [M, H, D] f32.
        """
        h = x.shape[1]
        mixed = sum(rounded(comb[:, j, :, None] * x[:, j, None, :]) for j in range(h))
        streams = rounded(post[:, :, None] * out[:, None, :]) + mixed
        # Three look at them: on a CPU each would compute them again.
        return jax.lax.optimization_barrier(streams) if jax.default_backend() == "cpu" else streams


def weighted_sum(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Sum streams x [M, H, D] with weights [M, H]: [M, D].

    Written as H products and sums: elementwise code fuses and vectorises where a reduction over so short an axis does not.
    """
    first, *others = (rounded(weight[:, h, None] * x[:, h]) for h in range(x.shape[1]))
    return sum(others, first)


def doubly_stochastic(z: jax.Array, n_iter: int, eps: float) -> jax.Array:
    """Compute `sinkhorn` the way that suits the device."""
    if jax.default_backend() == "gpu" and kernels.fits(z.shape[1]):
        return kernels.sinkhorn(z, n_iter, eps)
    return sinkhorn(z, n_iter, eps)


def sinkhorn(z: jax.Array, n_iter: int, eps: float) -> jax.Array:
    """Make a nearly doubly stochastic matrix: softmax over columns' index, then alternate normalisations.

    The first iteration is softmax + column step; the others are row step + column step. Every denominator carries eps.

    Args:
        z: [M, H, H] f32.

    Returns:
        [M, H, H] f32.
    """
    comb = ordered_softmax(z, 2) + eps
    comb = comb / (ordered_sum(comb, 1) + eps)

    def both(_: int, c: jax.Array) -> jax.Array:
        c = c / (ordered_sum(c, 2) + eps)
        return c / (ordered_sum(c, 1) + eps)

    # A loop, not 19 copies: unrolled, it is a quarter of the program and doubles its compile time.
    return jax.lax.fori_loop(0, n_iter - 1, both, comb)


class HyperHead(nnx.Module):
    """Collapse of the streams before the output projection: like `pre`, without Sinkhorn and with one scale."""

    def __init__(self, config: ModelConfig, take: Take) -> None:
        self.config = config
        self.fn = nnx.Param(take.matrix("output_hc_fn.weight", config.n_hc, config.n_hc * config.n_embd))
        self.scale = nnx.Param(take.vector("output_hc_scale.weight", 1))
        self.base = nnx.Param(take.vector("output_hc_base.weight", config.n_hc))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[M, H, D] f32 streams -> [M, D] f32."""
        mix = matmul(rms_norm(x.reshape(x.shape[0], -1), self.config.rms_eps), self.fn.get_value())
        pre = jax.nn.sigmoid(rounded(mix * self.scale.get_value()[0]) + self.base.get_value()[None, :]) + self.config.hc_eps
        return weighted_sum(pre, x)

"""How weights move: matrices by orthogonalised momentum (Muon), everything else by Adam; one schedule for both."""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import optax

from tools.train_small.weights import Weights

MOMENTUM, WEIGHT_DECAY, CLIP = 0.95, 0.05, 1.0
_RMS_OF_ADAM = 0.2  # an orthogonalised step is scaled to the size that Adam's usually has, so that both share a learning rate
# Adam's shares of the learning rate. Most of what it moves are small numbers (the projections that mix streams, routers, norms); vectors
# of tokens are large ones.
_SHARE, _SHARE_OF_TOKENS = 0.25, 1.0
# Matrices that look rows up, mix streams or route have their own nature: Adam takes them.
_NOT_ORTHOGONAL = ("token_embd.weight", "output.weight", "_ape.weight", "ffn_gate_inp.weight", "indexer.proj.weight")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is moved by orthogonalised momentum."""
    return len(shape) >= 2 and not name.endswith(_NOT_ORTHOGONAL) and "hc_" not in name


def make_optimizer(weights: Weights) -> optax.GradientTransformation:
    """Return the optimizer for these weights; its updates are for a learning rate of -1, see `learning_rate`."""
    decayed = {name: is_matrix(name, w.shape) for name, w in weights.items()}
    labels = {name: "matrix" if matrix else "tokens" if name == "token_embd.weight" else "other" for name, matrix in decayed.items()}
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.multi_transform({"matrix": _orthogonal_momentum(), "tokens": _adam(_SHARE_OF_TOKENS), "other": _adam(_SHARE)}, labels),
        optax.add_decayed_weights(WEIGHT_DECAY, decayed),
    )


def _adam(share: float) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(b1=0.9, b2=0.97), optax.scale(share))


def learning_rate(step: jax.Array, n_step: jax.Array, peak: jax.Array | float) -> jax.Array:
    """Rise for 100 steps (or a tenth of all), then fall along a cosine to 2 % at n_step."""
    warm = jnp.minimum(100.0, 0.1 * n_step)
    done = jnp.clip((step - warm) / jnp.maximum(n_step - warm, 1.0), 0.0, 1.0)
    return peak * jnp.minimum((step + 1) / jnp.maximum(warm, 1.0), 1.0) * (0.02 + 0.98 * 0.5 * (1 + jnp.cos(jnp.pi * done)))


def _orthogonal_momentum() -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised matrix by matrix (after Keller Jordan's Muon)."""

    def init(weights: Weights) -> optax.TraceState:
        return optax.TraceState(trace=jax.tree.map(jnp.zeros_like, weights))

    def update(grads: Weights, state: optax.TraceState, params: Weights | None = None) -> tuple[Weights, optax.TraceState]:
        trace = jax.tree.map(lambda m, g: MOMENTUM * m + g, state.trace, grads)
        ahead = jax.tree.map(lambda m, g: MOMENTUM * m + g, trace, grads)
        leaves, tree = jax.tree.flatten(ahead)
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            by_shape[leaf.shape[-2:]].append(i)
        for shape, members in by_shape.items():  # few shapes: a handful of products instead of one for each matrix
            batch = jnp.concatenate([leaves[i].reshape(-1, *shape) for i in members])
            batch = orthogonalise(batch) * (_RMS_OF_ADAM * max(shape) ** 0.5)
            first = 0
            for i in members:
                n = leaves[i].size // (shape[0] * shape[1])
                leaves[i] = batch[first : first + n].reshape(leaves[i].shape)
                first += n
        return jax.tree.unflatten(tree, leaves), optax.TraceState(trace=trace)

    return optax.GradientTransformation(init, update)


def orthogonalise(g: jax.Array) -> jax.Array:
    """Bring the singular values of matrices [n, a, b] near 1, by five steps of a quintic iteration."""
    tall = g.shape[1] > g.shape[2]
    x = jnp.swapaxes(g, 1, 2) if tall else g
    x = (x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        a = x @ jnp.swapaxes(x, 1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (jnp.swapaxes(x, 1, 2) if tall else x).astype(jnp.float32)

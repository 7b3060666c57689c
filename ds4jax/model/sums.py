"""Sums in one order, whatever stands beside them.

XLA may add in any order, and on a CPU the order hangs on how many rows there are: a session would decode to other bits, and now and then
to other text, in another bucket. Three things are kept from it there: to take a sum apart, to round a product and the sum behind it at
once in some shapes and not in others, and to hand a maximum to a library, whose exponential function is another one, where it is large.
On accelerators kernels see to it that rows do not depend on each other; there these are plain sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

_BELOW_ALL = -3.0e38
_SHORT = 8  # entries that are added term by term: elementwise sums fuse
_LANES = 16  # sums side by side of a long axis


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def ordered_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum x f32 over an axis, which stays with length 1."""
    if not _is_needed():
        return jnp.sum(x, axis=axis, keepdims=True)
    axis, n = axis % x.ndim, x.shape[axis]
    x = rounded(x)
    if n <= _SHORT:
        return _terms(lax.add, x, axis)
    if axis == x.ndim - 1 and n % _LANES == 0 and n > _LANES:
        lanes = _one_after_the_other(x.reshape(*x.shape[:-1], n // _LANES, _LANES), axis)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        return lanes
    return jnp.expand_dims(_one_after_the_other(x, axis), axis)


@ordered_sum.defjvp
def _tangent(axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return ordered_sum(primals[0], axis), jnp.sum(tangents[0], axis=axis, keepdims=True)


def rounded(product: jax.Array) -> jax.Array:
    """Return a product f32 as it is, for a sum: with a maximum between them, the two never become one instruction, which rounds once."""
    return lax.max(product, jnp.float32(_BELOW_ALL)) if _is_needed() else product


def largest(x: jax.Array, axis: int) -> jax.Array:
    """Find the maximum of x f32 over an axis, which stays with length 1. It has no gradient. Where all is -inf it may be -3e38 instead."""
    x = lax.stop_gradient(x)
    if not _is_needed():
        return jnp.max(x, axis=axis, keepdims=True)
    axis = axis % x.ndim
    if x.shape[axis] <= _SHORT:
        return _terms(lax.max, x, axis)
    most = lax.reduce(x, jnp.float32(-jnp.inf), lambda a, b: lax.max(lax.max(a, b), jnp.float32(_BELOW_ALL)), (axis,))
    return jnp.expand_dims(most, axis)


def ordered_softmax(x: jax.Array, axis: int) -> jax.Array:
    """Compute the softmax of x f32 over an axis; entries may be -inf, but not all of them."""
    weight = jnp.exp(x - largest(x, axis))
    return rounded(weight / ordered_sum(weight, axis))


def _is_needed() -> bool:
    return jax.default_backend() == "cpu"


def _terms(join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, axis: int) -> jax.Array:
    return reduce(join, (lax.slice_in_dim(x, i, i + 1, axis=axis) for i in range(x.shape[axis])))


def _one_after_the_other(x: jax.Array, axis: int) -> jax.Array:
    # The maximum changes no sum, but one with it cannot be taken apart and put together in another order.
    return lax.reduce(x, jnp.float32(0), lambda a, b: lax.max(lax.add(a, b), jnp.float32(_BELOW_ALL)), (axis,))

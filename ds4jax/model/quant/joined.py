"""Matrices that meet the same inputs, joined by rows: one product instead of many, and few leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ds4jax.model.quant.matmul import matmul
from ds4jax.model.quant.qtensor import QTensor


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["places"])
@dataclass(frozen=True)
class Joined:
    """Several matrices [n_i, K], joined where their formats agree.

    groups: one packed matrix a format, in order of first appearance. places: for each member its (first, end) columns in the product of
    all groups side by side.
    """

    groups: tuple[QTensor, ...] = field(repr=False)
    places: tuple[tuple[int, int], ...]

    def split(self, y: Array) -> list[Array]:
        """Cut a product [..., sum of n_i] into its members' columns, in the members' order."""
        return [y[..., first:end] for first, end in self.places]


def places(kinds: Sequence[str], rows: Sequence[int]) -> tuple[list[list[int]], tuple[tuple[int, int], ...]]:
    """Plan a join of matrices with these formats and row counts: the members of each group, and every member's columns."""
    groups = [[i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
    found: dict[int, tuple[int, int]] = {}
    at = 0
    for member in (i for group in groups for i in group):
        found[member] = (at, at + rows[member])
        at += rows[member]
    return groups, tuple(found[i] for i in range(len(rows)))


def project(x: Array, w: Joined, *, out_dtype: DTypeLike | None = None) -> Array:
    """Multiply x [..., K] by every member of w: [..., sum of n_i] (see `Joined.split`) in `out_dtype` (default: x.dtype)."""
    products = [matmul(x, group, out_dtype=out_dtype) for group in w.groups]
    return products[0] if len(products) == 1 else jnp.concatenate(products, axis=-1)

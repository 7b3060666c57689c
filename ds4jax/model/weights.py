"""Where a model's leaves come from: the one description that abstract models, loaders and writers share.

A module asks a `Take` for each of its weights by GGUF name and logical shape while it is built. Building with an
abstract take gives shapes before arrays; building with a loading take gives the same tree filled from a file. So the
names stand in one place, beside the mathematics that uses them, and both directions of the binding can be checked:
a tensor that nobody took, and a name that was asked for and is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ds4jax.config import ModelConfig
from ds4jax.model.quant import COLUMNS, PREPARED, Joined, places, suits_columns


@dataclass(frozen=True)
class StackPlan:
    """Layers first .. first + period * repeats - 1: a pattern of `period` layers, repeated."""

    first: int
    period: int
    repeats: int

    def layers(self, offset: int) -> range:
        """Layer numbers of the pattern's member `offset`, one a repeat."""
        return range(self.first + offset, self.first + self.period * self.repeats, self.period)


class Source(Protocol):
    """Fills one leaf from the tensors of one or more layers."""

    def kind(self, name: str) -> str:
        """Return the GGUF type of a tensor."""
        ...

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Return a QTensor of `shape` ([n_out, n_in], or [E, n_out, n_in]), with a leading axis len(layers) if stacked.

        layers: for each layer the tensors of one format that are joined along n_out; rows: n_out of each.
        prepared: the layout to convert to, instead of that of the file.
        """
        ...

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array of `shape` in `dtype` ("float32" or "int32"), with a leading axis len(names) if stacked."""
        ...


class Take:
    """What a module asks for its weights. Names are GGUF's, without `blk.N.` inside a layer.

    kernels: whether experts are taken in the layout that kernels read. columns: whether matrices that gain from it are taken by columns.
    """

    def __init__(
        self, source: Source, plans: Sequence[StackPlan], kernels: bool, layers: range | None = None, *, columns: bool = False
    ) -> None:
        self.source, self.plans, self.kernels, self._layers, self._columns = source, tuple(plans), kernels, layers, columns

    def stacked(self, plan: StackPlan, offset: int) -> LayerTake:
        """Return the take of one member of a stack's pattern."""
        return Take(self.source, (), self.kernels, plan.layers(offset), columns=self._columns)

    def matrix(self, name: str, n_out: int, n_in: int) -> Any:
        """Return a packed matrix [n_out, n_in], in whatever format the file holds."""
        return self._matrix([name], [n_out], (n_out, n_in))

    def lookup(self, name: str, n_row: int, width: int) -> Any:
        """Return a packed matrix [n_row, width] whose rows are looked up, one by one."""
        return self._packed([name], [n_row], (n_row, width), None)

    def joined(self, members: Mapping[str, int], n_in: int) -> Joined:
        """Return packed matrices [n_out, n_in] that meet the same inputs. members: n_out by name."""
        names, rows = list(members), list(members.values())
        groups, columns = places([self._kind(name) for name in names], rows)
        return Joined(
            tuple(self._matrix([names[i] for i in g], [rows[i] for i in g], (sum(rows[i] for i in g), n_in)) for g in groups), columns
        )

    def experts(self, name: str, n_expert: int, n_out: int, n_in: int) -> Any:
        """Return packed matrices [n_expert, n_out, n_in] of routed experts."""
        shape = (n_expert, n_out, n_in)
        if self.kernels:
            return self._packed([name], [n_out], shape, PREPARED.get(self._kind(name)))
        return self._matrix([name], [n_out], shape)

    def vector(self, name: str, *shape: int) -> Any:
        """Return a small float32 array (norms, sinks, scales, biases)."""
        return self.source.array(self._names(name), shape, "float32", stacked=self._layers is not None)

    def table(self, name: str, *shape: int) -> Any:
        """Return an int32 array."""
        return self.source.array(self._names(name), shape, "int32", stacked=self._layers is not None)

    def _matrix(self, names: Sequence[str], rows: Sequence[int], shape: tuple[int, ...]) -> Any:
        kind = self._kind(names[0])
        by_columns = self._columns and suits_columns(kind, *shape[-2:])
        return self._packed(names, rows, shape, COLUMNS[kind] if by_columns else None)

    def _packed(self, names: Sequence[str], rows: Sequence[int], shape: tuple[int, ...], prepared: str | None) -> Any:
        layers = list(zip(*(self._names(name) for name in names), strict=True))
        return self.source.matrix(layers, rows, shape, stacked=self._layers is not None, prepared=prepared)

    def _kind(self, name: str) -> str:
        return self.source.kind(self._names(name)[0])

    def _names(self, name: str) -> list[str]:
        return [name] if self._layers is None else [f"blk.{layer}.{name}" for layer in self._layers]


LayerTake = Take


def plan_stacks(config: ModelConfig, kinds: Mapping[str, str]) -> tuple[StackPlan, ...]:
    """Cut the layers into stacks of repeating patterns.

    Layers are alike when they have the same ratio, router, clamps and tensor types. At each layer the pattern (of one or
    two layers) that covers most is taken.

    Args:
        kinds: type of every tensor of the file by name.
    """
    by_layer: list[dict[str, str]] = [{} for _ in range(config.n_layer)]
    for name, kind in kinds.items():
        head, _, rest = name.partition(".")
        number, _, suffix = rest.partition(".")
        # A hash layer may carry a bias that nobody reads: it does not make the layer different.
        if head == "blk" and number.isdigit() and int(number) < config.n_layer and suffix != "exp_probs_b.bias":
            by_layer[int(number)][suffix] = kind
    signature = [
        (
            config.compress_ratios[n],
            n < config.n_hash_layer,
            config.swiglu_clamp[n],
            config.swiglu_clamp_shared[n],
            sorted(by_layer[n].items()),
        )
        for n in range(config.n_layer)
    ]
    plans: list[StackPlan] = []
    first = 0
    while first < config.n_layer:
        best = StackPlan(first, 1, 1)
        for period in (1, 2):
            repeats = 1
            while signature[first : first + period] == signature[first + period * repeats : first + period * (repeats + 1)]:
                repeats += 1
            if repeats > 1 and period * repeats > best.period * best.repeats:
                best = StackPlan(first, period, repeats)
        plans.append(best)
        first += best.period * best.repeats
    return tuple(plans)

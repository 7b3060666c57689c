"""Fill a model's leaves from a file: tensor by tensor, straight from the map to the device.

Nothing of the file is kept on the host. A stack's leaf is allocated once on the device and filled layer by layer, so
what is held beside the map is one tensor, split into its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.errors import BindingError, ModelFileError
from ds4jax.model.gguf.reader import GGUFFile, TensorInfo
from ds4jax.model.quant import COLUMNS, KINDS, PREPARED, QTensor, arrange, field_shapes, pack, unpack
from ds4jax.model.spec import AbstractSource, FlatModel, ModelSpec, build

STACK_ON_HOST_BYTES = 16 << 20  # smaller tensors are cheaper to stack here than to place one by one on the device
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor name


def load_leaves(file: GGUFFile, spec: ModelSpec, progress: Progress | None = None) -> FlatModel:
    """Load every weight of a file.

    Raises:
        BindingError: tensors and leaves do not match one to one (all differences are listed; nothing was moved yet).
        ModelFileError: a tensor has a type that ds4jax cannot read.
    """
    check_binding(file, spec)
    return FlatModel.of(build(spec, FileSource(file, progress)))


def check_binding(file: GGUFFile, spec: ModelSpec) -> None:
    """Compare the file's tensors with the model's leaves, by name, type and shape."""
    source = _CheckingSource(file)
    build(spec, source)
    left = [name for name in file.tensors if name not in set(source.asked) and not _may_be_ignored(name, spec)]
    problems = (
        [f"missing from the file: {name}" for name in source.missing] + source.wrong + [f"not part of the model: {name}" for name in left]
    )
    if problems:
        shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise BindingError(
            f"{file.path}: tensors and model do not match ({spec.config.name}, {spec.config.n_layer} layers):\n  " + "\n  ".join(shown)
        )


def _may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Hash layers may carry a selection bias: it has no effect there."""
    head, _, rest = name.partition(".")
    number, _, suffix = rest.partition(".")
    return head == "blk" and suffix == "exp_probs_b.bias" and number.isdigit() and int(number) < spec.config.n_hash_layer


class _CheckingSource(AbstractSource):
    """Gives shapes, and notes what a file lacks or has otherwise."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(dict(file.kinds))
        self.file = file
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Check names, types and shapes of a matrix."""
        for names in layers:
            for name, n in zip(names, rows, strict=True):
                self._check([name], (*shape[:-2], n, shape[-1]), KINDS)
        return super().matrix(layers, rows, shape, stacked=stacked, prepared=prepared)

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Check names, types and shapes of a small array."""
        self._check(names, shape, ("I32",) if dtype == "int32" else ("F32", "F16", "BF16"))
        return super().array(names, shape, dtype, stacked=stacked)

    def _check(self, names: Iterable[str], shape: tuple[int, ...], kinds: Sequence[str]) -> None:
        for name in names:
            tensor = self.file.tensors.get(name)
            if tensor is None:
                self.missing.append(name)
            elif tensor.kind not in kinds:
                raise ModelFileError(f"{self.file.path}: tensor {name} has type {tensor.kind}; ds4jax reads {', '.join(kinds)} there")
            elif tensor.shape != shape:
                self.wrong.append(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")


class FileSource:
    """Gives leaves filled from a file."""

    def __init__(self, file: GGUFFile, progress: Progress | None) -> None:
        self.file, self.progress = file, progress
        self.done = 0
        self.total = sum(t.nbytes for t in file.tensors.values())

    def kind(self, name: str) -> str:
        """Return a tensor's type."""
        return self.file.tensors[name].kind

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Return a QTensor on the device."""
        kind = self.kind(layers[0][0])
        to = prepared or kind
        is_small = sum(self.file.tensors[name].nbytes for name in layers[0]) < STACK_ON_HOST_BYTES
        # What is joined by columns shares tiles, so it cannot be placed one by one.
        if to in COLUMNS.values() or (is_small and to not in PREPARED.values()):
            parts = [self._joined(names) for names in layers]
            fields = {k: np.stack([p[k] for p in parts]) if stacked else parts[0][k] for k in parts[0]}
            return jax.tree.map(jnp.asarray, arrange(QTensor(kind, fields), to))
        leaves = {k: jnp.zeros(s.shape, s.dtype) for k, s in field_shapes(to, (len(layers), *shape)).items()}
        for i, names in enumerate(layers):
            row = 0
            for name, n in zip(names, rows, strict=True):
                part_shape = (*shape[:-2], n, shape[-1])
                leaves = _place(leaves, jnp.asarray(self._tensor(name).raw), np.asarray([i, row], np.int32), kind, part_shape, to)
                row += n
        return QTensor(to, leaves if stacked else {k: a[0] for k, a in leaves.items()})

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array on the device."""
        values = [np.asarray(self._tensor(name).values(), dtype) for name in names]
        return jnp.asarray(np.stack(values) if stacked else values[0])

    def _joined(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Split tensors into fields on the host, joined by rows."""
        tensors = [self._tensor(name) for name in names]
        parts = [pack(t.kind, t.raw, t.shape) for t in tensors]
        return {k: np.concatenate([p[k] for p in parts], axis=-2) if len(parts) > 1 else parts[0][k] for k in parts[0]}

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self.file.tensors[name]
        self.done += tensor.nbytes
        if self.progress:
            self.progress(self.done, self.total, name)
        return tensor


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4, 5))
def _place(leaves: dict[str, jax.Array], raw: jax.Array, at: jax.Array, kind: str, shape: tuple[int, ...], to: str) -> dict[str, jax.Array]:
    """Write a tensor's bytes into a stack's leaves, in place. at: layer and first row. The device splits bytes faster."""
    part = arrange(QTensor(kind, unpack(kind, raw, shape)), to)

    def put(a: jax.Array, b: jax.Array) -> jax.Array:
        first = [jnp.int32(0)] * a.ndim
        first[0], first[-2] = at[0], at[1]
        return jax.lax.dynamic_update_slice(a, b[None], first)

    return {k: put(a, part.fields[k]) for k, a in leaves.items()}

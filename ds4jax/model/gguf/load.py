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
from ds4jax.model.quant import KINDS, QTensor, field_shapes, pack
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

    def matrix(self, names: Sequence[str], shape: tuple[int, ...], *, stacked: bool) -> Any:
        """Check names, types and shapes of a matrix."""
        self._check(names, shape, KINDS)
        return super().matrix([n for n in names if n in self.file.tensors] or names, shape, stacked=stacked)

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

    def matrix(self, names: Sequence[str], shape: tuple[int, ...], *, stacked: bool) -> Any:
        """Return a QTensor on the device."""
        kind = self.file.tensors[names[0]].kind
        if not stacked:
            return QTensor(kind, {k: jnp.asarray(a) for k, a in self._fields(names[0]).items()})
        if self.file.tensors[names[0]].nbytes < STACK_ON_HOST_BYTES:
            parts = [self._fields(name) for name in names]
            return QTensor(kind, {k: jnp.asarray(np.stack([part[k] for part in parts])) for k in parts[0]})
        shapes = field_shapes(kind, (len(names), *shape))
        leaves = {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()}
        for i, name in enumerate(names):
            fields = self._fields(name)
            leaves = {k: _place(a, fields[k], np.int32(i)) for k, a in leaves.items()}
        return QTensor(kind, leaves)

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array on the device."""
        values = [np.asarray(self._tensor(name).values(), dtype) for name in names]
        return jnp.asarray(np.stack(values) if stacked else values[0])

    def _fields(self, name: str) -> dict[str, np.ndarray]:
        tensor = self._tensor(name)
        return pack(tensor.kind, tensor.raw, tensor.shape)

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self.file.tensors[name]
        self.done += tensor.nbytes
        if self.progress:
            self.progress(self.done, self.total, name)
        return tensor


@partial(jax.jit, donate_argnums=0)
def _place(stack: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    """Write one layer's part into a stack, in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, part, i, 0)

"""Read a GGUF file: metadata as plain values, tensors as views of the mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ds4jax.config import ModelConfig
from ds4jax.errors import ModelFileError


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. kind: GGUF's type name; shape: logical, slowest axis first; raw: uint8 [..., row bytes], a view of the map."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    raw: np.ndarray

    def values(self) -> np.ndarray:
        """Return the tensor's numbers: float32 for every float and quantised type, int32 for I32."""
        kind = gguf.GGMLQuantizationType[self.kind]
        if kind == gguf.GGMLQuantizationType.I32:
            return self.raw.view(np.int32).reshape(self.shape)
        return gguf.quants.dequantize(self.raw, kind).astype(np.float32, copy=False).reshape(self.shape)


class GGUFFile:
    """A mapped GGUF file. Raises ModelFileError when it cannot be one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelFileError(f"{path}: no such file. Give the path of a DeepSeek V4 GGUF, or fetch one with `ds4jax download`.")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{path}: not a readable GGUF file ({error or type(error).__name__}). Is the download complete?"
            ) from error
        size = self.path.stat().st_size
        for t in self._reader.tensors:
            if int(t.data_offset) + int(t.n_bytes) > size:
                raise ModelFileError(
                    f"{path}: truncated: tensor {t.name} ends at byte {int(t.data_offset) + int(t.n_bytes)}, the file has {size}"
                )

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """All key-value pairs, as Python values."""
        return {key: field.contents() for key, field in self._reader.fields.items()}

    @cached_property
    def config(self) -> ModelConfig:
        """The model's shape, checked."""
        return ModelConfig.from_metadata(self.metadata)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name."""
        found: dict[str, TensorInfo] = {}
        for t in self._reader.tensors:
            if t.name in found:
                raise ModelFileError(f"{self.path}: tensor {t.name} stands in the file twice")
            shape = tuple(int(n) for n in reversed(t.shape))
            raw = t.data.view(np.uint8) if t.data.dtype != np.uint8 else t.data
            found[t.name] = TensorInfo(t.name, t.tensor_type.name, shape, int(t.n_bytes), raw)
        return found

    @property
    def data_offset(self) -> int:
        """Where the tensors' data begin; all before it says what they are."""
        return int(self._reader.data_offset)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of every tensor, in file order."""
        return tuple((t.name, t.kind) for t in self.tensors.values())

"""Tell weights files apart without reading them whole."""

from __future__ import annotations

import hashlib

from ds4jax.model.gguf.reader import GGUFFile

_SAMPLE_BYTES = 4096


def weights_digest(file: GGUFFile) -> str:
    """Return a digest of a file: its metadata and table of tensors, its size, and a sample of every tensor's data.

    Another fine-tune of the same shape differs in every tensor that was trained, another quantization in the table. Reads some megabytes
    of a file of any size. The path is no part of it: copies on several hosts are the same weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    with file.path.open("rb") as raw:
        digest.update(raw.read(file.data_offset))
    digest.update(file.path.stat().st_size.to_bytes(8, "little"))
    for tensor in file.tensors.values():
        data = tensor.raw.reshape(-1)
        middle = max(len(data) // 2 - _SAMPLE_BYTES // 2, 0)
        digest.update(data[middle : middle + _SAMPLE_BYTES])
    return digest.hexdigest()

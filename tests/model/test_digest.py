"""Weights files are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ds4jax.model.gguf.digest import weights_digest
from ds4jax.model.gguf.reader import GGUFFile
from tests.small_model import write_two_layers


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_layers(tmp_path_factory.mktemp("weights") / "m.gguf")


def test_a_copy_elsewhere_is_the_same(weights: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(weights, tmp_path / "other.gguf"))
    assert weights_digest(GGUFFile(copy)) == weights_digest(GGUFFile(weights))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_down_exps.weight", "output_norm.weight"])
def test_other_values_of_one_tensor_are_other_weights(weights: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copy(weights, tmp_path / "other.gguf"))
    data = bytearray(copy.read_bytes())
    tensor = GGUFFile(weights).tensors[name]
    whole = tensor.raw.tobytes()
    start = data.index(whole)
    data[start : start + len(whole)] = bytes(byte ^ 1 for byte in whole)
    copy.write_bytes(data)
    assert weights_digest(GGUFFile(copy)) != weights_digest(GGUFFile(weights))


def test_other_metadata_are_other_weights(weights: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(weights, tmp_path / "other.gguf"))
    copy.write_bytes(copy.read_bytes().replace(b"two layers", b"two lawyer"))
    assert weights_digest(GGUFFile(copy)) != weights_digest(GGUFFile(weights))

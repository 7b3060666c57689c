"""Every tensor of a file is used once and every leaf is filled once, or loading fails with the list of what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4jax.errors import BindingError, ModelFileError
from ds4jax.model.gguf import load
from ds4jax.model.gguf.load import FileSource, check_binding, load_leaves
from ds4jax.model.gguf.reader import GGUFFile, TensorInfo
from ds4jax.model.model import read_spec
from ds4jax.model.spec import AbstractSource, ModelSpec, abstract_model, build
from tests.model.oracle import SETS, SMOOTH

pytestmark = pytest.mark.smoke


class Edited(GGUFFile):
    """A file whose table of tensors is not what it was."""

    def __init__(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        super().__init__(path)
        self.__dict__["tensors"] = tensors


def edited(**changes: TensorInfo | None) -> GGUFFile:
    """Return tiny-smooth with tensors replaced, added (a name it lacks) or dropped (None)."""
    tensors = dict(GGUFFile(SMOOTH.path).tensors) | changes
    return Edited(SMOOTH.path, {name: t for name, t in tensors.items() if t is not None})


def tensor(name: str) -> TensorInfo:
    return GGUFFile(SMOOTH.path).tensors[name]


def problems(file: GGUFFile) -> str:
    with pytest.raises(BindingError) as error:
        check_binding(file, read_spec(file, "none", "float32"))
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["output.weight", "blk.2.indexer.proj.weight", "blk.4.ffn_down_exps.weight", "blk.0.ffn_gate_tid2eid.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:
    assert f"missing from the file: {name}" in problems(edited(**{name: None}))


@pytest.mark.parametrize("name", ["extra.weight", "blk.9.attn_norm.weight", "blk.0.indexer.proj.weight", "blk.x.exp_probs_b.bias"])
def test_a_tensor_nobody_uses_is_named(name: str) -> None:
    assert f"not part of the model: {name}" in problems(edited(**{name: replace(tensor("output_norm.weight"), name=name)}))


def test_a_renamed_tensor_is_named_on_both_sides() -> None:
    text = problems(edited(**{"output_norm.weight": None, "norm.weight": tensor("output_norm.weight")}))
    assert "missing from the file: output_norm.weight" in text and "not part of the model: norm.weight" in text


def test_another_shape_is_named_with_both_shapes() -> None:
    name = "blk.1.attn_sinks.weight"
    text = problems(edited(**{name: replace(tensor(name), shape=(7,))}))
    assert f"{name}: shape [7], expected [4]" in text


def test_a_long_list_is_cut() -> None:
    file = GGUFFile(SMOOTH.path)
    text = problems(edited(**{name: None for name in file.tensors if name.startswith(("blk.3.", "blk.4."))}))
    assert text.count("missing from the file") == 20 and "more" in text.splitlines()[-1]


def test_an_unreadable_type_is_named() -> None:
    name = "blk.0.attn_kv.weight"
    file = edited(**{name: replace(tensor(name), kind="IQ4_XS")})
    with pytest.raises(ModelFileError, match=f"{name} has type IQ4_XS"):
        check_binding(file, read_spec(file, "none", "float32"))


def test_a_bias_in_a_hash_layer_is_allowed() -> None:
    name = "blk.1.exp_probs_b.bias"
    file = edited(**{name: replace(tensor("output_norm.weight"), name=name)})
    check_binding(file, read_spec(file, "none", "float32"))


@pytest.mark.parametrize("name", SETS)
def test_every_tensor_is_asked_for_once_and_loaded_once(name: str) -> None:
    file = GGUFFile(SETS[name].path)
    spec = read_spec(file, "none", "float32")
    source = AbstractSource(dict(file.kinds))
    build(spec, source)
    assert len(source.asked) == len(set(source.asked))
    assert set(file.tensors) - set(source.asked) == {n for n in file.tensors if _is_unused_bias(n, spec)}
    loaded: list[str] = []
    build(spec, FileSource(file, lambda done, total, name: loaded.append(name)))
    assert sorted(loaded) == sorted(source.asked)


def _is_unused_bias(name: str, spec: ModelSpec) -> bool:
    return name.endswith("exp_probs_b.bias") and int(name.split(".")[1]) < spec.config.n_hash_layer


def test_loaded_leaves_have_the_abstract_shapes_and_the_files_numbers() -> None:
    file = GGUFFile(SMOOTH.path)
    spec = read_spec(file, "none", "float32")
    shapes, loaded = abstract_model(spec), load_leaves(file, spec)
    assert [(a.shape, a.dtype) for a in loaded.leaves] == [(s.shape, s.dtype) for s in shapes.leaves]
    model = loaded.merge(loaded.leaves)
    np.testing.assert_array_equal(np.asarray(model.output_norm.get_value()), file.tensors["output_norm.weight"].values())
    sinks = np.stack([file.tensors[f"blk.{layer}.attn_sinks.weight"].values() for layer in range(2)])
    np.testing.assert_array_equal(np.asarray(model.stacks[0].blocks[0].attn.sinks.get_value()), sinks)


def test_large_and_small_tensors_fill_the_same_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile(SETS["tiny-q2"].path)
    spec = read_spec(file, "none", "float32")
    small = load_leaves(file, spec).leaves
    monkeypatch.setattr(load, "STACK_ON_HOST_BYTES", 0)
    large = load_leaves(file, spec).leaves
    for a, b in zip(small, large, strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))

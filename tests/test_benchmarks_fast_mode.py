"""benchmarks/fast_mode.py: what it counts and compares, on shapes that compile in seconds."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fast_mode
from benchmarks.company import Company, Texts, random_prompts, text_prompts
from benchmarks.fast_mode import CHOOSING, ORACLE, Sizes, divergence, in_company, kl, main
from benchmarks.int8 import int8_activations, to_int8
from ds4jax import small_model
from ds4jax.model.gguf.random_blocks import random_blocks
from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.model.quant import QTensor, pack
from ds4jax.text import Tokenizer

ONE_LAYER = replace(CHOOSING, n_layer=1, compress_ratios=(0,), n_hash_layer=1, swiglu_clamp=(10.0,), swiglu_clamp_shared=(10.0,))
SMALL = replace(ONE_LAYER, n_embd=256, n_vocab=64, n_ff=256, n_expert=4)


def test_divergence_of_distributions() -> None:
    right = np.log(np.array([[0.5, 0.25, 0.25], [1.0, 1.0, 2.0]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [3.0, 3.0, 6.0]], np.float32))  # the second row is the same distribution
    np.testing.assert_allclose(kl(right, other), [0.25 * np.log(2), 0.0], atol=1e-7)


def test_int8_rounds_with_a_scale_for_32() -> None:
    x = jnp.concatenate([jnp.linspace(-1.0, 1.0, 32), 127.0 * jnp.ones(31), jnp.array([0.4]), jnp.zeros(32)])[None]
    y = np.asarray(to_int8(x))[0]
    assert np.abs(y[:32] - np.asarray(x)[0, :32]).max() <= 0.5 / 127 + 1e-6
    assert len(np.unique(np.round(y[:32] * 127))) == 32
    np.testing.assert_array_equal(y[32:], [127.0] * 31 + [0.0] + [0.0] * 32)


@pytest.mark.parametrize(("kind", "is_rounded"), [("Q8_0", True), ("F16", False)])
def test_only_what_meets_packed_weights_is_rounded(kind: str, is_rounded: bool) -> None:
    matmul = importlib.import_module("ds4jax.model.quant.matmul").matmul
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 64))
    raw = random_blocks(rng, kind, (16, 64), 0.1) if kind == "Q8_0" else values.astype(np.float16).view(np.uint8)
    w = QTensor(kind, {name: jnp.asarray(field) for name, field in pack(kind, raw, (16, 64)).items()})
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    before = np.asarray(matmul(x, w))
    with int8_activations():
        within = np.asarray(matmul(x, w))
    np.testing.assert_array_equal(matmul(x, w), before)
    np.testing.assert_array_equal(within, matmul(to_int8(x), w) if is_rounded else before)
    assert (within != before).any() == is_rounded


def test_texts_that_part_are_counted() -> None:
    alone = np.arange(15).reshape(3, 5)
    others = alone.copy()
    others[0, 3:], others[2, 1] = 0, 99
    bits = np.zeros((3, 9), np.int32)
    company: Any = SimpleNamespace(
        spec=SimpleNamespace(dtype="bfloat16", kernels=True),
        run=lambda bucket: Texts(alone if bucket == 1 else others, bits),
        count_other_bits=lambda bucket, texts: 1,
    )
    rows = list(in_company("m", company, Sizes(0, 0, 3, 5, (1, 4))))
    assert [(row["what"], row["bucket"], row["value"], row["of"]) for row in rows] == [
        ("rows with other bits", 4, 1, 4),
        ("texts that part", 4, 2, 3),
        ("first token that differs", 4, 1, 5),
        ("the same, median", 4, 2.0, 5),
    ]
    assert {row["arithmetic"] for row in rows} == {"bfloat16, kernels"}


def test_rows_in_company() -> None:
    spec = random_spec(SMALL, "q2", "ds4", "float32")
    prompts = random_prompts(SMALL.n_vocab, 3)
    assert len({len(prompt) for prompt in prompts}) == 3
    company = Company(spec, random_leaves(spec, "q2"), prompts, 4)
    texts = company.run(2)
    assert texts.tokens.shape == (3, 4)
    assert company.count_other_bits(2, texts) == 0
    changed = texts.bits.copy()
    changed[:, -1] += 1
    assert company.count_other_bits(2, replace(texts, bits=changed)) == 2
    # A token that ends texts is the last one that counts.
    ended = Company(spec, random_leaves(spec, "q2"), prompts, 4, stops=[int(texts.tokens[0, 1])]).run(2).tokens
    first = int(np.flatnonzero(texts.tokens[0] == texts.tokens[0, 1])[0])
    assert ended[0].tolist() == [*texts.tokens[0, : first + 1], *[-1] * (3 - first)]


def test_prompts_of_a_chat() -> None:
    tokenizer = Tokenizer.from_metadata(GGUFFile(small_model()).metadata)
    prompts = text_prompts(tokenizer, 20)
    assert len({prompt.tobytes() for prompt in prompts}) == 20
    assert "story" in tokenizer.decode(prompts[0].tolist())


def test_divergence_of_the_fast_mode() -> None:
    rows = {(row["arithmetic"], row["what"]): row["value"] for row in divergence(SMALL, Sizes(12, 8, 0, 0, ()))}
    assert list(rows) == [
        ("float32, int8 rows", "KL: prefill"), ("bfloat16, no kernels", "KL: prefill"), ("bfloat16, no kernels", "KL: decode"),
    ]  # fmt: skip
    assert all(0 < value < 0.1 for value in rows.values())


def test_differences_to_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ORACLE / "tiny-smooth.gguf"
    with np.load(file.with_suffix(".npz")) as known:
        runs = {len(known[f"len{n}_tokens"]): (known[f"len{n}_positions"], known[f"len{n}_logits"]) for n in (5, 130, 300, 600)}

    def logits(tokens: list[int]) -> np.ndarray:
        """Answer as the oracle does, but for one logit of one sequence; NaN where it keeps none."""
        positions, right = runs[len(tokens)]
        out = np.full((len(tokens), right.shape[1]), np.nan, np.float32)
        out[positions] = right
        out[positions[-1], 3] -= 0.25 if len(tokens) == 300 else 0
        return out

    def load(path: Path, *, kv_quant: str, dtype: str) -> Any:
        assert (path, kv_quant, dtype) == (file, "none", "float32")
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(fast_mode, "load_model", load)
    (row,) = fast_mode.against_oracle([file])
    assert row["value"] == pytest.approx(0.25, abs=1e-5)
    assert row["of"] == sum(right.size for _, right in runs.values())


def test_a_shape_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "company", "--random", "huge"])
    assert "--preset: got 'huge'" in capsys.readouterr().err


def test_rows_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_half_way(files: Any) -> Any:
        yield fast_mode.result("m", "float32", "oracle: largest difference", 2e-5, 7)
        raise KeyboardInterrupt

    monkeypatch.setattr(fast_mode, "against_oracle", stopped_half_way)
    with pytest.raises(KeyboardInterrupt):
        main(["--only", "oracle", "--csv", str(tmp_path / "rows.csv")])
    header, row = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()
    assert header == "date,commit,device,jax,model,arithmetic,what,bucket,value,of,command"
    assert ",m,float32,oracle: largest difference,,2e-05,7,python -m benchmarks.fast_mode --only oracle" in row

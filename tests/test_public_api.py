"""What a notebook may do, as it is documented: load, look at logits, open an engine, drive sessions, generate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ds4jax
from ds4jax.config import ModelConfig
from ds4jax.errors import ConfigError, ContextLengthError, DecodeInFlightError, EngineStoppedError, ModelFileError, RequestError
from ds4jax.serving.engine.api import SamplingParams
from tests.model.oracle import SMOOTH
from tests.small_model import TWO_LAYERS, write_two_layers

# Between 33 and 47 tokens: alone, and with what follows in a test, their logits are one program's, of 64 tokens.
TEXT = "The sun came up over the little town, and the people opened their doors and windows. A small boy ran down the road to the sea."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_layers(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> ds4jax.Model:
    return ds4jax.load_model(path, kv_quant="none", dtype="float32")


@pytest.fixture(scope="module")
def engine(model: ds4jax.Model) -> Iterator[ds4jax.Engine]:
    with ds4jax.Engine(model, slots=2, ctx=128, coalesce_us=2000) as engine:
        yield engine


def test_a_model_shows_its_shape_and_vocabulary(model: ds4jax.Model) -> None:
    assert isinstance(model.config, ModelConfig)
    assert (model.config.n_layer, model.config.compress_ratios) == (2, TWO_LAYERS.compress_ratios)
    tokens = model.tokenizer.encode(TEXT)
    assert model.tokenizer.decode(tokens) == TEXT
    assert model.nbytes > 0


def test_logits_of_a_text(model: ds4jax.Model) -> None:
    tokens = model.tokenizer.encode(TEXT)
    logits = model.logits(tokens)
    assert logits.shape == (len(tokens), model.config.n_vocab) and logits.dtype == np.float32
    changed = [*tokens[:-3], *tokens[:3]]  # what follows does not change what was before
    np.testing.assert_array_equal(model.logits(changed)[:-3], logits[:-3])


@pytest.mark.parametrize("tokens", [[], [[1]], [0.5], [-1], [640]])
def test_bad_tokens_are_refused(model: ds4jax.Model, tokens: list[int]) -> None:
    with pytest.raises(RequestError, match="tokens: "):
        model.logits(tokens)


@pytest.mark.smoke
def test_loading_refuses_what_it_cannot_do(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        ds4jax.load_model(tmp_path / "absent.gguf")
    with pytest.raises(ConfigError, match="kv_quant: got 'fp16', expected one of"):
        ds4jax.load_model(path, kv_quant="fp16")
    with pytest.raises(ConfigError, match="dtype: got 'int8', expected one of"):
        ds4jax.load_model(path, kv_quant="none", dtype="int8")


def test_sessions_continue_where_they_are(model: ds4jax.Model, engine: ds4jax.Engine) -> None:
    tokens = model.tokenizer.encode(TEXT)
    want = model.logits(tokens)
    session = engine.open_session()
    for at, logits in ((len(tokens) - 3, session.prefill(tokens[:-2])), (len(tokens) - 2, session.decode(tokens[-2]))):
        assert logits.shape == (model.config.n_vocab,) and logits.dtype == np.float32
        np.testing.assert_allclose(logits, want[at], atol=1e-4)
    assert session.position == len(tokens) - 1 and session.tokens == tuple(tokens[:-1])
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.decode(1)


def test_greedy_generation_follows_the_logits(model: ds4jax.Model, engine: ds4jax.Engine) -> None:
    tokenizer = model.tokenizer
    prompt = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    tokens = list(engine.generate_tokens(prompt, max_tokens=16, sampling=SamplingParams(temperature=0)))
    best = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1)
    assert tokens == best.tolist()
    end = tokens.index(tokenizer.eos_id) if tokenizer.eos_id in tokens else len(tokens)
    text = "".join(engine.generate(TEXT, max_tokens=16, temperature=0))
    assert text == b"".join(map(tokenizer.token_bytes, tokens[:end])).decode(errors="replace")
    assert "".join(engine.generate(TEXT, max_tokens=5, seed=3)) == "".join(engine.generate(TEXT, max_tokens=5, seed=3))


def test_statistics_count_what_was_done(engine: ds4jax.Engine) -> None:
    list(engine.generate(TEXT, max_tokens=4, temperature=0))
    stats = engine.stats()
    assert stats.n_slots == 2 and stats.n_ctx == 128 and stats.compile_misses == 0
    assert stats.generated_tokens > 0 and stats.prefill_tokens > 0 and 0 < stats.occupancy <= 1


def test_a_prompt_longer_than_a_slot_is_refused(engine: ds4jax.Engine) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 128"):
        next(engine.generate_tokens([1] * 128))


def test_a_session_refuses_a_second_decode_in_flight(engines: Callable[[str], ds4jax.Engine]) -> None:
    """The other session holds the window open, so the first decode is still waiting when the second is asked for."""
    engine = engines(SMOOTH.name)
    with engine.open_session() as session, engine.open_session() as other:
        other.decode(1)
        ready = threading.Barrier(2)
        errors: list[Exception] = []

        def decode() -> None:
            ready.wait(10)
            try:
                session.decode(1)
            except DecodeInFlightError as error:
                errors.append(error)

        threads = [threading.Thread(target=decode, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [str(error) for error in errors] == ["session already has a decode in flight"]
        assert session.position == 1


def test_a_closed_engine_says_so(model: ds4jax.Model, engine: ds4jax.Engine) -> None:
    with ds4jax.Engine(model, slots=2, ctx=128) as other:
        session = other.open_session()
    with pytest.raises(EngineStoppedError, match="closed"):
        session.decode(1)
    with pytest.raises(EngineStoppedError, match="closed"):
        next(other.generate(TEXT))


def test_bfloat16_stays_near_float32() -> None:
    """Operands of 8 bits move the logits (deviation 2.5) by about a hundredth of that; tiny-smooth has no choice for rounding to flip."""
    run = SMOOTH.run(130)
    distance = np.abs(SMOOTH.load(dtype="bfloat16").logits(run.tokens)[run.positions] - run.logits)
    assert 1e-3 < np.sqrt(np.mean(distance**2)) < 0.1
    assert distance.max() < 0.6


def test_a_file_that_says_it_is_flash_must_be_flash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.small_model as small

    monkeypatch.setattr(small, "TWO_LAYERS", replace(TWO_LAYERS, name="DeepSeek V4 Flash"))
    with pytest.raises(ConfigError, match="n_layer: got 2, expected 43"):
        ds4jax.load_model(write_two_layers(tmp_path / "flash.gguf"), kv_quant="none")

"""The shape of a model, read from metadata and checked against the published ones."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from ds4jax.cli.presets import TINY, shape_of
from ds4jax.config import FLASH, PRO, EngineConfig, ModelConfig, check_published_shape
from ds4jax.errors import ConfigError
from ds4jax.model.cache import init_cache
from ds4jax.model.gguf.writer import to_metadata


@pytest.mark.parametrize("config", [TINY, FLASH, PRO], ids=lambda config: config.name)
def test_a_shape_survives_its_metadata(config: ModelConfig) -> None:
    check_published_shape(ModelConfig.from_metadata(to_metadata(config)), config)


def test_published_shapes_have_the_published_layers() -> None:
    assert (FLASH.compress_ratios.count(0), FLASH.n_layer_ratio4, FLASH.n_layer_ratio128) == (2, 21, 20)
    assert (PRO.compress_ratios.count(0), PRO.n_layer_ratio4, PRO.n_layer_ratio128) == (0, 30, 31)


def test_a_file_that_claims_a_published_shape_must_have_it_all() -> None:
    wrong = replace(FLASH, n_window=64, expert_scale=2.5)
    with pytest.raises(ConfigError, match=r"(?s)DeepSeek V4 Flash.*n_window: got 64, expected 128.*expert_scale: got 2.5, expected 1.5"):
        check_published_shape(wrong, FLASH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "llama"}, "general.architecture: got 'llama', expected 'deepseek4'"),
        ({"deepseek4.embedding_length": None}, "deepseek4.embedding_length: the file lacks this key"),
        ({"deepseek4.embedding_length": "wide"}, "deepseek4.embedding_length: got 'wide', expected a number"),
        ({"deepseek4.expert_count": 6.5}, "deepseek4.expert_count: got 6.5, expected a whole number"),
        ({"deepseek4.attention.compress_ratios": [0, 4]}, "compress_ratios: got 2 entries, expected at least 6"),
        ({"deepseek4.attention.compress_ratios": [0, 0, 8, 4, 4, 4]}, "layer 2 has 8"),
        ({"deepseek4.expert_gating_func": 2}, "deepseek4.expert_gating_func: got 2, expected 4"),
        ({"deepseek4.attention.value_length": 64}, "deepseek4.attention.value_length: got 64, expected key_length 96"),
        ({"deepseek4.expert_used_count": 7}, "expert_used_count: got 7, expected 1 to 6"),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (to_metadata(TINY) | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_metadata(metadata)


def test_engine_config_names_what_is_impossible() -> None:
    with pytest.raises(ConfigError, match="slots: got 0, expected at least 1"):
        EngineConfig(slots=0)
    with pytest.raises(ConfigError, match="coalesce_us: got 100001"):
        EngineConfig(coalesce_us=100_001)


@pytest.mark.parametrize("kv_quant", ["none", "ds4"])
@pytest.mark.parametrize("n_layer", [1, 2, 3, 4])
def test_a_cache_may_lack_kinds_of_layers(n_layer: int, kv_quant: str) -> None:
    config = shape_of("tiny", n_layer)
    cache = jax.eval_shape(lambda: init_cache(config, 2, 256, kv_quant, "float32"))
    assert cache.n_slot == 2

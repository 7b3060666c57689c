"""What is typed in, and what comes out: the flags of ds4-server, those of the published guide, and the environment."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.cli.ds4_flags import take_ds4_flags
from ds4jax.cli.options import choose_backend, choose_model, engine_config, parse_address, read_number, read_switch
from ds4jax.cli.serve import announce
from ds4jax.config import EngineConfig, ServerConfig
from ds4jax.errors import ConfigError, ModelFileError

pytestmark = pytest.mark.smoke


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "F.gguf"
    path.write_bytes(b"GGUF")
    return path


def no_warning(message: str) -> None:
    raise AssertionError(message)


class TestModel:
    def test_an_existing_file_is_the_weights(self, weights: Path) -> None:
        choice = choose_model(str(weights), None, ())
        assert (choice.path, choice.model_id, choice.aliases) == (weights, "deepseek-v4-flash", ())

    def test_anything_else_is_the_name(self, weights: Path) -> None:
        choice = choose_model("my-model", weights, ["a", "my-model", "b"])
        assert (choice.path, choice.model_id, choice.aliases) == (weights, "my-model", ("a", "b"))

    def test_the_first_served_name_is_the_id(self, weights: Path) -> None:
        assert choose_model(None, weights, ["a", "b"]).model_id == "a"

    def test_nothing_means_the_default_model(self) -> None:
        assert choose_model(None, None, ()).path is None

    def test_two_files(self, weights: Path) -> None:
        with pytest.raises(ConfigError, match="two weights files"):
            choose_model(str(weights), weights, ())

    def test_a_name_without_weights(self) -> None:
        with pytest.raises(ConfigError, match="--model-path FILE"):
            choose_model("deepseek-v4-flash", None, ())

    @pytest.mark.parametrize(("model", "path"), [("missing.gguf", None), ("some/where", None), ("name", Path("missing.gguf"))])
    def test_a_missing_file(self, model: str, path: Path | None) -> None:
        with pytest.raises(ModelFileError, match="no such file.*download"):
            choose_model(model, path, ())


class TestAddress:
    @pytest.mark.parametrize(
        ("listen", "host", "port", "expected"),
        [
            (None, None, None, ("127.0.0.1", 8000)),
            (None, "0.0.0.0", 0, ("0.0.0.0", 0)),
            ("0.0.0.0:8080", None, None, ("0.0.0.0", 8080)),
            ("[::1]:80", None, None, ("::1", 80)),
        ],
    )
    def test_both_spellings(self, listen: str | None, host: str | None, port: int | None, expected: tuple[str, int]) -> None:
        assert parse_address(listen, host, port) == expected

    @pytest.mark.parametrize("listen", ["8080", ":8080", "localhost:", "localhost:http", "localhost:-1", "localhost:70000"])
    def test_not_an_address(self, listen: str) -> None:
        with pytest.raises(ConfigError, match="expected"):
            parse_address(listen, None, None)

    def test_both_ways_at_once(self) -> None:
        with pytest.raises(ConfigError, match="leave out"):
            parse_address("a:1", None, 2)


class TestBackend:
    @pytest.mark.parametrize(
        ("backend", "cpu", "cuda", "gpu", "expected"),
        [
            (None, False, False, None, ("auto", None)),
            ("auto", False, False, "1", ("cuda", 1)),
            ("cpu", True, False, None, ("cpu", None)),
            (None, False, True, "3", ("cuda", 3)),
        ],
    )
    def test_spellings(self, backend: str | None, cpu: bool, cuda: bool, gpu: str | None, expected: tuple[str, int | None]) -> None:
        assert choose_backend(backend, cpu, cuda, gpu) == expected

    def test_contradiction(self) -> None:
        with pytest.raises(ConfigError, match="cpu and cuda"):
            choose_backend("cpu", False, False, "0")

    @pytest.mark.parametrize("gpu", ["0,1", "-1", "first"])
    def test_one_gpu_only(self, gpu: str) -> None:
        with pytest.raises(ConfigError, match="one id"):
            choose_backend(None, False, False, gpu)

    def test_unknown(self) -> None:
        with pytest.raises(ConfigError, match="expected auto, cpu or cuda"):
            choose_backend("vulkan", False, False, None)


class TestEnvironment:
    def test_the_published_configuration(self) -> None:
        env = {"DS4_SERVER_DECODE_COALESCE_US": "5000", "DS4_SERVER_BATCH_LOG": "1"}
        config = engine_config(env, no_warning, slots=32, ctx=1024, queue_limit=None, prefill_chunk=None)
        assert config == EngineConfig(slots=32, ctx=1024, coalesce_us=5000, batch_log=True)

    def test_quanta(self) -> None:
        env = {"DS4_SERVER_PREFILL_QUANTUM": "512", "DS4_SERVER_MIXED_PREFILL_QUANTUM": "64"}
        config = engine_config(env, no_warning, slots=1, ctx=64, queue_limit=7, prefill_chunk=None)
        assert (config.prefill_quantum, config.mixed_prefill_quantum, config.max_waiting) == (512, 64, 7)
        assert engine_config(env, no_warning, slots=1, ctx=64, queue_limit=0, prefill_chunk=256).prefill_quantum == 256

    @pytest.mark.parametrize(("asked", "expected"), [(None, 12), (0, 0), (5, 5)])
    def test_snapshots(self, asked: int | None, expected: int) -> None:
        config = engine_config({}, no_warning, slots=3, ctx=64, queue_limit=None, prefill_chunk=None, snapshots=asked)
        assert config.n_snapshots == expected

    @pytest.mark.parametrize("text", ["-1", "100001", "2ms", "1e3", "٣"])
    def test_a_bad_window_is_a_warning_and_the_default(self, text: str) -> None:
        warnings: list[str] = []
        assert read_number({"W": text}, "W", 2000, 0, 100_000, warnings.append) == 2000
        assert warnings == [f"W={text}: expected a whole number, 0 to 100000; using 2000"]

    @given(st.integers(0, 100_000))
    def test_any_good_window_is_taken(self, us: int) -> None:
        assert read_number({"W": f" {us} "}, "W", 2000, 0, 100_000, no_warning) == us

    @pytest.mark.parametrize(
        ("text", "on"), [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("", False), ("off", False)]
    )
    def test_the_batch_log_goes_by_value(self, text: str, on: bool) -> None:
        assert read_switch({"L": text}, "L", no_warning) is on
        assert read_switch({}, "L", no_warning) is False

    def test_an_unclear_switch_is_off_with_a_warning(self) -> None:
        warnings: list[str] = []
        assert read_switch({"L": "perhaps"}, "L", warnings.append) is False
        assert len(warnings) == 1


class TestDs4Flags:
    def test_flags_without_effect_warn_once_each(self) -> None:
        warnings: list[str] = []
        take_ds4_flags(["-t", "8", "--power=50", "--quality", "--mtp", "m.gguf", "--threads", "9"], warnings.append)
        assert [warning.split()[0] for warning in warnings] == ["--threads", "--power", "--quality", "--mtp"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--ssd-streaming"], "smaller quant"),
            (["--role", "worker"], "load balancer"),
            (["--metal"], "--cpu or --cuda"),
            (["--power"], "value is missing"),
            (["--no-such-flag"], "unknown argument --no-such-flag .*--help"),
            (["stray"], "unknown argument stray"),
        ],
    )
    def test_refusals_say_what_to_do(self, arguments: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            take_ds4_flags(arguments, no_warning)


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_the_request_to_try_says_where_the_key_goes_and_not_which(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    announce("http://127.0.0.1:1", ServerConfig(api_keys=keys))
    told = capsys.readouterr().err
    assert ("-H 'Authorization: Bearer KEY'" in told) == bool(keys) and "secret" not in told

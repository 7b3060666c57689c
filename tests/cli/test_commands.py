"""The commands as a user starts them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ds4jax.cli import download
from ds4jax.cli.main import app
from ds4jax.config import EngineConfig, KVPolicy, ServerConfig
from ds4jax.errors import BackendMismatchError, ModelFileError
from ds4jax.serving.engine.backend import select_backend
from ds4jax.serving.http.serve import reserve
from tests.small_model import write_two_layers

pytestmark = pytest.mark.smoke


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), env=env)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` would have started: no engine is built and no socket opened."""
    seen: dict[str, Any] = {}

    @contextmanager
    def open_engine(path: Path | None, config: EngineConfig, *device: Any, early: bool, **weights: Any) -> Iterator[tuple[Any, str]]:
        disk = weights.pop("disk")
        assert early and weights["random"] is weights["layers"] is None
        seen.update(path=path, engine=config, device=device, disk=disk)
        yield SimpleNamespace(compiling=False), "tokenizer"

    def run_server(engine: Any, tokenizer: str, config: ServerConfig, *, memory: Any, reserved: Any, on_ready: Any) -> None:
        seen.update(server=config, memory=memory)
        on_ready("http://127.0.0.1:8080")

    monkeypatch.setattr("ds4jax.cli.loading.open_engine", open_engine)
    monkeypatch.setattr("ds4jax.serving.http.serve.run", run_server)
    monkeypatch.setattr("ds4jax.serving.http.serve.reserve", lambda host, port: nullcontext())
    monkeypatch.setattr("ds4jax.serving.http.waiting.waiting_room", lambda reserved: nullcontext())
    return seen


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "F.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_help_and_version() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "precompile", "generate", "chat", "inspect", "synth", "download"):
        assert command in result.output
    assert run("--version").output.startswith("ds4jax ")


class TestServe:
    def test_the_first_published_configuration(self, served: dict[str, Any], weights: str) -> None:
        result = run(
            *"serve --listen 0.0.0.0:8080 --gpu 0 --batched-session 32 --model deepseek-v4-flash --model-path".split(), weights,
            env={"DS4_SERVER_DECODE_COALESCE_US": "5000", "DS4_SERVER_BATCH_LOG": "1"},
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert served["path"] == Path(weights)
        assert served["engine"] == EngineConfig(slots=32, coalesce_us=5000, batch_log=True)
        assert served["server"] == ServerConfig(host="0.0.0.0", port=8080, model_id="deepseek-v4-flash")
        assert served["device"][:2] == ("cuda", 0)
        assert "curl http://127.0.0.1:8080/v1/chat/completions" in result.output

    def test_the_second_published_configuration(self, served: dict[str, Any], weights: str) -> None:
        env = {"DS4_SERVER_DECODE_COALESCE_US": "1000", "DS4_SERVER_BATCH_LOG": "0"}
        assert run("serve", "--batched-session", "16", "--gpu", "0", "--model-path", weights, env=env).exit_code == 0
        assert served["engine"] == EngineConfig(slots=16, coalesce_us=1000, batch_log=False)

    def test_a_command_line_of_ds4_server(self, served: dict[str, Any], weights: str) -> None:
        result = run(*f"serve -m {weights} -c 8192 -n 512 --host 0.0.0.0 --port 9000 --cors -t 8 --kv-disk-dir /tmp/kv --cpu".split())
        assert result.exit_code == 0, result.output
        assert (served["engine"].ctx, served["server"].default_max_tokens, served["server"].cors) == (8192, 512, True)
        assert served["device"][:2] == ("cpu", None)
        assert "--threads is ignored" in result.output and "--kv-disk-dir" not in result.output
        assert (served["disk"].folder, served["disk"].policy) == (Path("/tmp/kv"), KVPolicy())

    def test_sessions_on_disk(self, served: dict[str, Any], weights: str) -> None:
        knobs = {
            "disk-space-mb": 100, "cache-min-tokens": 64, "cache-cold-max-tokens": 0, "cache-continued-interval-tokens": 5000,
            "cache-boundary-trim-tokens": 8, "cache-boundary-align-tokens": 512,
        }  # fmt: skip
        flags = " ".join(f"--kv-{name} {value}" for name, value in knobs.items())
        result = run("serve", "-m", weights, *f"--kv-disk-dir kv {flags} --kv-cache-reject-different-quant".split())
        assert result.exit_code == 0, result.output
        assert served["disk"].policy == KVPolicy(*knobs.values()) and served["disk"].folder == Path.cwd() / "kv"
        assert served["disk"].memory is served["memory"], "calls of tools are kept along"
        assert "--kv-cache-reject-different-quant is ignored: it is always so" in result.output
        result = run("serve", "-m", weights, *flags.split())
        assert served["disk"] is None and "no effect without --kv-disk-dir" in result.output
        served.clear()
        result = run("serve", "-m", weights, *"--kv-disk-dir kv --kv-disk-space-mb 0".split())
        assert (result.exit_code, served) == (2, {}) and "--kv-disk-space-mb: got 0" in result.output

    def test_the_memory_of_tool_calls(self, served: dict[str, Any], weights: str) -> None:
        for flags, most in (("", 100_000), ("--tool-memory-max-ids 7", 7), ("--disable-exact-dsml-tool-replay", 0)):
            assert run("serve", "-m", weights, *flags.split()).exit_code == 0
            assert served["server"].tool_memory_max_ids == most

    def test_a_flag_that_is_refused(self, served: dict[str, Any], weights: str) -> None:
        result = run("serve", "-m", weights, "--ssd-streaming")
        assert (result.exit_code, served) == (2, {})
        assert "error: --ssd-streaming: weights are not streamed" in result.output

    def test_an_unknown_flag(self, served: dict[str, Any]) -> None:
        result = run("serve", "--batched-sessions", "4")
        assert (result.exit_code, served) == (2, {})
        assert "unknown argument --batched-sessions" in result.output

    def test_a_taken_port_is_told_before_anything_is_loaded(
        self, served: dict[str, Any], weights: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ds4jax.serving.http.serve.reserve", reserve)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            result = run("serve", "-m", weights, "--port", str(port))
        assert (result.exit_code, served) == (2, {})
        assert f"--port {port}: cannot listen there" in result.output

    def test_api_keys(self, served: dict[str, Any], weights: str, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("two\nthree\n")
        result = run("serve", "-m", weights, "--api-key", "one", "--api-key", "two", "--api-key-file", str(file))
        assert result.exit_code == 0, result.output
        assert served["server"].api_keys == ("one", "two", "three")
        assert "three" not in result.output

    def test_missing_weights(self, served: dict[str, Any]) -> None:
        result = run("serve", "-m", "missing.gguf")
        assert (result.exit_code, served) == (1, {})
        assert "missing.gguf: no such file" in result.output


class TestFiles:
    def test_synth_then_inspect(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        assert run("synth", str(path), "--quant", "q2", "--layers", "3").exit_code == 0
        result = run("inspect", str(path), "--tensors")
        assert result.exit_code == 0, result.output
        assert "3: 2 window only, 1 ratio 4, 0 ratio 128" in result.output
        assert "blk.2.indexer.proj.weight" in result.output
        again = run("synth", str(path))
        assert again.exit_code == 2 and "--force" in again.output

    def test_synth_into_a_missing_folder(self, tmp_path: Path) -> None:
        result = run("synth", str(tmp_path / "no" / "m.gguf"))
        assert result.exit_code == 1
        assert "cannot be written (No such file or directory)" in result.output

    def test_inspect_something_else(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("not weights" * 10)
        result = run("inspect", str(path))
        assert result.exit_code == 1
        assert "not a readable GGUF file" in result.output

    def test_no_file_means_the_small_model(self) -> None:
        result = run("inspect")
        assert result.exit_code == 0, result.output
        assert "8: 2 window only, 3 ratio 4, 3 ratio 128" in result.output

    def test_download_from_a_name_that_is_none(self) -> None:
        with pytest.raises(ModelFileError, match="expected OWNER/NAME"):
            download.fetch("a/b/c", "m.gguf")

    def test_download_without_a_connection(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ModelFileError, match="owner/name/m.gguf: cannot reach Hugging Face"):
            download.fetch("owner/name", "m.gguf", folder=tmp_path)


def test_precompile_takes_what_decides_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    jobs: list[int | None] = []
    monkeypatch.setattr(
        "ds4jax.serving.engine.programs.compile_all", lambda shapes, store, n_jobs: seen.append(shapes) or jobs.append(n_jobs) or []
    )
    path = str(write_two_layers(tmp_path / "m.gguf"))
    result = run(*"precompile --batched-session 2 --ctx 512 --prefill-chunk 256 --snapshots 3 --jobs 1 -m".split(), path)
    assert result.exit_code == 0, result.output
    (shapes,) = seen
    assert (shapes.n_slot, shapes.n_ctx, shapes.prefill_buckets[-1], shapes.n_snapshot) == (2, 512, 256, 3)
    assert run("precompile", "--kv-disk-dir", str(tmp_path / "none"), "-m", path).exit_code == 0
    assert jobs == [1, None]
    assert seen[1].transfers and not shapes.transfers and not (tmp_path / "none").exists()


class TestBackend:
    @pytest.fixture(autouse=True)
    def _keep_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def test_what_there_is(self) -> None:
        assert select_backend("auto") == "cpu"
        assert select_backend("cpu") == "cpu"

    @pytest.mark.parametrize("gpu", [None, 0, 3])
    def test_cuda_that_is_not_there(self, gpu: int | None) -> None:
        with pytest.raises(BackendMismatchError, match="model-backend mismatch: cuda.* this machine has cpu only"):
            select_backend("cuda", gpu)

    def test_a_gpu_beyond_the_visible_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        with pytest.raises(BackendMismatchError, match="GPU 2 was asked for.*CUDA_VISIBLE_DEVICES=4,5"):
            select_backend("cuda", 2)

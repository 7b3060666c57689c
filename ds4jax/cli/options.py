"""Options and environment of `serve`, as plain functions: what was typed in, checked configurations out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds4jax.config import EngineConfig, ServerConfig
from ds4jax.errors import ConfigError, ModelFileError
from ds4jax.text.dsml import TOOLS_MARK
from ds4jax.text.template import ChatTemplate

Warn = Callable[[str], None]
Backend = Literal["auto", "cpu", "cuda"]

COALESCE_US, COALESCE_US_MAX = 2000, 100_000


@dataclass(frozen=True)
class ModelChoice:
    """Which weights to serve, under which names. path None: the small default model."""

    path: Path | None
    model_id: str
    aliases: tuple[str, ...]


def choose_model(model: str | None, model_path: Path | None, served_names: Sequence[str]) -> ModelChoice:
    """Tell weights from names: `--model` is the weights if it is an existing file, else the name to serve under.

    The id is the name given, else the first --served-model-name, else ds4's own id.
    Raises ModelFileError for a file that does not exist, ConfigError for two files or a name without weights.
    """
    name = model
    if model is not None and Path(model).is_file():
        if model_path is not None:
            raise ConfigError(f"two weights files were given: --model {model} and --model-path {model_path}; give one of them")
        model_path, name = Path(model), None
    elif model is not None and model_path is None:
        if "/" in model or model.endswith(".gguf"):
            raise ModelFileError(f"{model}: no such file. Name a GGUF file with --model, or fetch one with ds4jax download")
        raise ConfigError(f"--model {model} is no file, so it names the model; say where the weights are with --model-path FILE")
    if model_path is not None and not model_path.is_file():
        raise ModelFileError(f"{model_path}: no such file. Name a GGUF file with --model-path, or fetch one with ds4jax download")
    names = list(dict.fromkeys([*([name] if name else []), *served_names])) or [ServerConfig.model_id]
    return ModelChoice(model_path, names[0], tuple(names[1:]))


def parse_address(listen: str | None, host: str | None, port: int | None) -> tuple[str, int]:
    """Return where to listen, from `--listen HOST:PORT` or from `--host` and `--port`.

    Raises ConfigError if both ways are used or the port is none. An IPv6 host is written in brackets.
    """
    if listen is None:
        return _check_port(host or ServerConfig.host, ServerConfig.port if port is None else port)
    if host is not None or port is not None:
        raise ConfigError("--listen already says host and port; leave out --host and --port")
    listen_host, colon, listen_port = listen.rpartition(":")
    if not colon or not listen_host or not listen_port.isdecimal():
        raise ConfigError(f"--listen: got {listen!r}, expected HOST:PORT, such as 0.0.0.0:8080")
    return _check_port(listen_host.removeprefix("[").removesuffix("]"), int(listen_port))


def _check_port(host: str, port: int) -> tuple[str, int]:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: got {port}, expected 0 (any free port) to 65535")
    return host, port


def read_api_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Collect the keys of `--api-key` and of the file: one a line, where empty lines and those that start with # do not count.

    Raises ConfigError for a key that cannot be sent in a header, and for a file that cannot be read or holds none: a server that was
    to be closed must not start open.
    """
    found = list(keys)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read ({error}); name a text file with one key a line") from None
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"--api-key-file {file}: there is no key in it; write one a line, or leave the option out")
        found += in_file
    for key in found:
        if not key or not all("!" <= letter <= "~" for letter in key):  # never show it: this goes to a log
            raise ConfigError("--api-key: a key is empty, or has spaces or letters beyond ASCII; choose another")
    return tuple(dict.fromkeys(found))


def read_tool_prompt(path: Path | None) -> str | None:
    """Read the text of `--tool-prompt`. Raises ConfigError if it does not say, just once, where the tools go."""
    if path is None:
        return None
    text = _read_text("--tool-prompt", path)
    if text.count(TOOLS_MARK) != 1:
        found = f"{text.count(TOOLS_MARK)} times"
        raise ConfigError(f"--tool-prompt {path}: {TOOLS_MARK} is there {found}; write it once, where the schemas of the tools go")
    return text


def read_chat_template(value: str | None, of_model: Callable[[], object]) -> str | None:
    """Read the template of `--chat-template`: a file or, by the word gguf, the one that the weights bring along.

    of_model: looks that one up. Raises ConfigError if there is none, or if it cannot render a greeting.
    """
    if value is None:
        return None
    source = of_model() if value == "gguf" else _read_text("--chat-template", Path(value))
    if not isinstance(source, str):
        raise ConfigError("--chat-template gguf: these weights bring no template along; leave the option out, or name a file")
    ChatTemplate(source)
    return source


def _read_text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error}); name a text file") from None


def start_trace(path: Path | None) -> Path | None:
    """Empty the file of `--trace`, or make one that nobody else can read: prompts will be in it.

    Returns its absolute path. Raises ConfigError if it cannot be written, before a model is loaded for minutes.
    """
    if path is None:
        return None
    try:
        path.touch(mode=0o600)
        path.write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be written ({error.strerror}); name a file in a folder that exists") from None
    return path.absolute()


def choose_backend(backend: str | None, cpu: bool, cuda: bool, gpu: str | None) -> tuple[Backend, int | None]:
    """Return the backend that was asked for ("auto" if none) and the GPU's id, if one was named.

    Raises ConfigError where the flags contradict each other or name several GPUs.
    """
    wanted = {name for name, given in (("cpu", cpu), ("cuda", cuda)) if given} | ({backend} if backend else set())
    gpu_id = None
    if gpu is not None:
        if not gpu.isdecimal():
            raise ConfigError(f"--gpu: got {gpu!r}, expected one id, such as 0. A server uses one GPU; start one server for each")
        gpu_id = int(gpu)
        wanted.add("cuda")
    wanted.discard("auto")
    if len(wanted) > 1:
        raise ConfigError(f"contradicting backends: {' and '.join(sorted(wanted))}; choose one of them")
    chosen = wanted.pop() if wanted else "auto"
    match chosen:
        case "auto" | "cpu" | "cuda":
            return chosen, gpu_id
        case _:
            raise ConfigError(f"--backend: got {chosen!r}, expected auto, cpu or cuda")


def engine_config(
    env: Mapping[str, str],
    warn: Warn,
    *,
    slots: int,
    ctx: int,
    queue_limit: int | None,
    prefill_chunk: int | None,
    snapshots: int | None = None,
) -> EngineConfig:
    """Build the engine's configuration from options and DS4_SERVER_* variables.

    --prefill-chunk wins over DS4_SERVER_PREFILL_QUANTUM. A bad variable is worth a warning and the default, as in ds4;
    a bad option raises ConfigError.
    """
    return EngineConfig(
        slots=slots,
        ctx=ctx,
        coalesce_us=read_number(env, "DS4_SERVER_DECODE_COALESCE_US", COALESCE_US, 0, COALESCE_US_MAX, warn),
        prefill_quantum=prefill_chunk or read_number(env, "DS4_SERVER_PREFILL_QUANTUM", EngineConfig.prefill_quantum, 1, None, warn),
        mixed_prefill_quantum=read_number(env, "DS4_SERVER_MIXED_PREFILL_QUANTUM", EngineConfig.mixed_prefill_quantum, 1, None, warn),
        queue_limit=queue_limit,
        snapshots=snapshots,
        batch_log=read_switch(env, "DS4_SERVER_BATCH_LOG", warn),
    )


def read_number(env: Mapping[str, str], name: str, default: int, least: int, most: int | None, warn: Warn) -> int:
    """Return a whole number from the environment; unset or empty: the default; bad: a warning and the default."""
    text = env.get(name, "").strip()
    if not text:
        return default
    value = int(text) if text.isascii() and text.isdecimal() else None
    if value is None or value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        warn(f"{name}={text}: expected a whole number, {bounds}; using {default}")
        return default
    return value


def read_switch(env: Mapping[str, str], name: str, warn: Warn) -> bool:
    """Return whether a variable says 1, true, yes or on; 0, false, no, off, empty and unset mean no."""
    text = env.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text not in ("", "0", "false", "no", "off"):
        warn(f"{name}={text}: expected 1 or 0; using 0")
    return False

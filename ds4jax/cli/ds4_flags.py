"""Flags of ds4-server that do nothing here: accepted with one warning each, or refused with what to do instead.

They are kept apart from the real options so that a command line written for ds4-server starts, or says plainly why it does not,
while `--help` shows only what has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ds4jax.errors import ConfigError


class _Flag(NamedTuple):
    n_values: int
    refused: bool
    message: str


def _ignored(n_values: int, message: str) -> _Flag:
    return _Flag(n_values, False, message)


def _refused(n_values: int, message: str) -> _Flag:
    return _Flag(n_values, True, message)


_NO_SPECULATION = "speculative decoding is not supported; every token is computed by the model itself"
_NO_STREAMING = "weights are not streamed from disk; they must fit the device. Choose a smaller quant or a larger device"
_NO_PIPELINE = "one process serves one device. Start a server for each device and put a load balancer before them"
_NO_STEERING = "activation steering is not supported; leave the flag out"

_FLAGS: dict[str, _Flag] = {
    "--threads": _ignored(1, "XLA sizes its own thread pool"),
    "--power": _ignored(1, "the device always runs at full duty"),
    "--quality": _ignored(0, "there is one set of kernels, and it is exact"),
    "--warm-weights": _ignored(0, "weights are copied to the device at start anyway"),
    "--gpu-vram": _ignored(1, "the memory plan follows from --batched-session and --ctx"),
    "--simulate-used-memory": _ignored(1, "the memory plan uses what the device reports"),
    "--kv-cache-reject-different-quant": _ignored(0, "it is always so: a saved session goes on only with the weights that made it"),
    "--mtp": _ignored(1, _NO_SPECULATION),
    "--mtp-draft": _ignored(1, _NO_SPECULATION),
    "--mtp-margin": _ignored(1, _NO_SPECULATION),
    "--dspark": _ignored(0, _NO_SPECULATION),
    "--dspark-confidence": _ignored(1, _NO_SPECULATION),
    "--dspark-strict": _ignored(0, _NO_SPECULATION),
    "--metal": _refused(0, "there is no Metal backend here; use --cpu or --cuda"),
    "--rocm": _refused(0, "there is no ROCm backend here; use --cpu or --cuda"),
    "--glm-mtp": _refused(0, "GLM models cannot be served"),
    "--glm-mtp-timing": _refused(0, "GLM models cannot be served"),
    "--ssd-streaming": _refused(0, _NO_STREAMING),
    "--ssd-streaming-cold": _refused(0, _NO_STREAMING),
    "--ssd-streaming-cache-experts": _refused(1, _NO_STREAMING),
    "--ssd-streaming-full-layers": _refused(1, _NO_STREAMING),
    "--ssd-streaming-preload-experts": _refused(1, _NO_STREAMING),
    "--cuda-tensor-parallel": _refused(0, _NO_PIPELINE),
    "--role": _refused(1, _NO_PIPELINE),
    "--layers": _refused(1, _NO_PIPELINE),
    "--coordinator": _refused(2, _NO_PIPELINE),
    "--dist-prefill-chunk": _refused(1, _NO_PIPELINE),
    "--dist-prefill-window": _refused(1, _NO_PIPELINE),
    "--dist-activation-bits": _refused(1, _NO_PIPELINE),
    "--dist-replay-check": _refused(0, _NO_PIPELINE),
    "--dir-steering-file": _refused(1, _NO_STEERING),
    "--dir-steering-ffn": _refused(1, _NO_STEERING),
    "--dir-steering-attn": _refused(1, _NO_STEERING),
}
_SHORT = {"-t": "--threads"}


def take_ds4_flags(arguments: Sequence[str], warn: Callable[[str], None]) -> None:
    """Go through the arguments that are no options of `serve`, and warn once of each flag that is ignored.

    Raises ConfigError for a flag that is refused, that lacks its value, or that nobody knows.
    """
    rest = list(arguments)
    warned: set[str] = set()
    while rest:
        written, has_value, _ = rest.pop(0).partition("=")
        name = _SHORT.get(written, written)
        flag = _FLAGS.get(name)
        if flag is None:
            hint = " (an option of ds4jax serve? see ds4jax serve --help)" if written.startswith("-") else ""
            raise ConfigError(f"unknown argument {written}{hint}")
        if flag.refused:
            raise ConfigError(f"{name}: {flag.message}.")
        n_values = flag.n_values - bool(has_value)
        if n_values > len(rest):
            raise ConfigError(f"{name}: a value is missing. It has no effect here ({flag.message}); leave it out")
        del rest[:n_values]
        if name not in warned:
            warned.add(name)
            warn(f"{name} is ignored: {flag.message}")

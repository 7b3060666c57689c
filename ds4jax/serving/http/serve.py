"""Run the app under hypercorn until a signal asks to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config as HypercornConfig
from quart import Quart

from ds4jax.config import ServerConfig
from ds4jax.errors import ConfigError
from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.http.app import EDGE, create_app
from ds4jax.serving.http.edge import Edge
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")

GRACE_S = 10.0
"""How long open replies may go on once the server was asked to stop."""

BACKLOG = 1024
"""Connections that may wait to be accepted."""

_FAREWELL_S = 2.0  # for clients to read how their reply ended
_DROP_ROUNDS, _DROP_ROUND_S = 5, 0.2
_HEADER_LIMIT_BYTES = 64 << 10
_IDLE_CONNECTION_S = 75.0  # longer than the idle pools of common clients and proxies, so that they close first


def run(
    engine: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    memory: ReplayMemory | None = None,
    reserved: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    grace_s: float = GRACE_S,
) -> None:
    """Serve until SIGINT or SIGTERM; blocks. Call it on the main thread.

    The first signal stops new connections and lets open replies end within grace_s seconds; a second one exits at once.
    memory: of the calls of tools, where it is shared. reserved: the address, if it was taken earlier; this closes it. on_ready gets the
    URL once connections are accepted; port 0 takes a free port, and the URL tells which. Raises ConfigError when the address cannot be had.
    """
    listener = listen(config.host, config.port, reserved)
    if on_ready is not None:
        on_ready(url_of(listener))
    asyncio.run(_run_until_signal(create_app(engine, tokenizer, config, memory), listener, grace_s))


def reserve(host: str, port: int) -> socket.socket:
    """Take the address, without accepting connections yet. Raises ConfigError when it cannot be had.

    Loading a model takes minutes: that the port is in use is better said before.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger there
        if family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        reserved.bind((host, port))
    except (OSError, OverflowError) as error:
        reserved.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({reason}); choose another, --port 0 takes a free one"
        ) from None
    return reserved


def listen(host: str, port: int, reserved: socket.socket | None = None) -> socket.socket:
    """Open the listening socket, on the reserved one if there is one. Raises ConfigError when the address cannot be had."""
    listener = reserved or reserve(host, port)
    listener.listen(BACKLOG)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL under which clients reach a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(app: Quart, listener: socket.socket, stop: asyncio.Event, *, grace_s: float = GRACE_S) -> None:
    """Serve on a listening socket, which this takes over, until `stop` is set and open replies have ended.

    After grace_s seconds, replies that still run are ended with an error that says why; clients that do not even read
    that are dropped.
    """
    others = asyncio.all_tasks()
    server = asyncio.create_task(hypercorn_serve(app, hypercorn_config(listener, grace_s), shutdown_trigger=stop.wait))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({server, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    edge: Edge = app.extensions[EDGE]
    _, running = await asyncio.wait({server}, timeout=grace_s)
    if running:
        edge.abort_all()
        _, running = await asyncio.wait({server}, timeout=_FAREWELL_S)
    if running:
        await _drop_connections(others)
    else:
        await server


async def _drop_connections(others: set[asyncio.Task[Any]]) -> None:
    """Cancel every task but `others`, until all have ended.

    Once is not enough: on its way out, a cancelled connection waits again for its client to read what was sent.
    """
    for _ in range(_DROP_ROUNDS):
        tasks = asyncio.all_tasks() - others
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_DROP_ROUND_S)


async def _run_until_signal(app: Quart, listener: socket.socket, grace_s: float) -> None:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # an orderly end is under way and was not fast enough
        log.warning("stopping: open replies have %.0f s to end; a second signal exits at once", grace_s)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await serve(app, listener, stop, grace_s=grace_s)


def hypercorn_config(listener: socket.socket, grace_s: float) -> HypercornConfig:
    """Settings for long streams: nothing ends a connection that still has a reply to come."""
    config = HypercornConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = _IDLE_CONNECTION_S
    config.h11_max_incomplete_size = _HEADER_LIMIT_BYTES
    config.graceful_timeout = grace_s + 2 * _FAREWELL_S  # `serve` is in charge of the end
    config.include_server_header = False
    config.loglevel = "WARNING"
    return config

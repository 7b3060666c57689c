"""An app over a scripted engine, in process and behind a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from quart import Quart

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from ds4jax.serving.http.serve import listen, serve, url_of
from tests.http.fakes import EchoEngine, byte_tokenizer

MakeEngine = Callable[..., EchoEngine]
MakeApp = Callable[..., Quart]
MakeServer = Callable[..., "Server"]


class Server:
    """A server on a thread of its own, with its own loop."""

    def __init__(self, app: Quart, grace_s: float, reserved: socket.socket | None = None) -> None:
        listener = listen("127.0.0.1", 0, reserved)
        self.url = url_of(listener)
        self.port = int(self.url.rsplit(":", 1)[1])
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(app, listener, grace_s)), name="server")
        self._thread.start()
        self._ready.wait()

    async def _main(self, app: Quart, listener: Any, grace_s: float) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await serve(app, listener, self._stop, grace_s=grace_s)

    def ask_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server does not stop"

    def stop(self) -> None:
        if self._thread.is_alive():
            self.ask_to_stop()
            self.join()


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make scripted engines, whose threads end with the test."""
    engines: list[EchoEngine] = []

    def make(**options: Any) -> EchoEngine:
        engines.append(EchoEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.die()


@pytest.fixture
def make_app(make_engine: MakeEngine) -> MakeApp:
    """Make an app over a given engine, or over one that echoes."""

    def make(engine: EchoEngine | None = None, **config: Any) -> Quart:
        return create_app(engine or make_engine(), byte_tokenizer(), ServerConfig(**config))

    return make


@pytest.fixture
def make_server(make_app: MakeApp) -> Iterator[MakeServer]:
    """Make servers behind real sockets."""
    servers: list[Server] = []

    def make(engine: EchoEngine | None = None, *, grace_s: float = 0.0, reserved: socket.socket | None = None, **config: Any) -> Server:
        servers.append(Server(make_app(engine, **config), grace_s, reserved))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()

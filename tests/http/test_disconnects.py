"""Clients that leave: their slots come back, whatever the request was doing, and each request is cancelled once."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from ds4jax.serving.engine.api import FinishReason
from tests.http.conftest import MakeEngine, MakeServer, Server
from tests.http.fakes import EchoEngine, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
APIS = [CHAT, "/v1/messages", "/v1/responses"]


def send(server: Server, *, stream: bool, path: str = CHAT) -> socket.socket:
    prompts = {"prompt": ["a" * 50, "b" * 50]} if path == TEXT else {"messages": [{"content": "x" * 50}], "input": "x" * 50}
    data = json.dumps({**prompts, "stream": stream}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def assert_freed(engine: EchoEngine, n_requests: int = 1) -> None:
    wait_until(lambda: len(engine.finishes) == n_requests, "every request ends")
    assert engine.n_busy == 0
    assert sorted(engine.cancels) == list(range(1, n_requests + 1))
    assert {finish.reason for finish in engine.finishes} == {FinishReason.CANCELLED}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_leaving_while_running(make_server: MakeServer, make_engine: MakeEngine, stream: bool, reset: bool, path: str) -> None:
    engine = make_engine(gate=threading.Semaphore(3))
    sock = send(make_server(engine), stream=stream, path=path)
    wait_until(lambda: engine.n_running_tokens == 3, "three tokens are out")
    if reset:  # as a client that is killed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()
    assert_freed(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_leaving_while_queued(make_server: MakeServer, make_engine: MakeEngine, stream: bool, path: str) -> None:
    engine = make_engine()
    engine.hold.set()
    sock = send(make_server(engine), stream=stream, path=path)
    wait_until(lambda: engine.n_busy == 1, "the request is queued")
    sock.close()
    assert_freed(engine)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_with_several_choices(make_server: MakeServer, make_engine: MakeEngine, stream: bool) -> None:
    engine = make_engine(n_slots=1, gate=threading.Semaphore(2))
    sock = send(make_server(engine), stream=stream, path=TEXT)
    wait_until(lambda: engine.n_running_tokens == 2, "one choice runs, the other is queued")
    sock.close()
    assert_freed(engine, n_requests=2)


def test_leaving_without_reading(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """The server is stuck in a write to this client when it leaves."""
    engine = make_engine(script=lambda request: [*range(97, 123)] * 1000, n_ctx=30_000, gate=threading.Semaphore(20_000))
    sock = send(make_server(engine), stream=True)
    wait_until(lambda: engine.n_running_tokens == 20_000, "the engine waits for the gate", 30)
    sock.close()
    assert_freed(engine)


def test_leaving_at_any_moment(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """Clients leave before, while and after the reply begins; nothing is left over."""
    engine = make_engine(gate=threading.Semaphore(0), queue_limit=1000)
    server = make_server(engine)
    pause = threading.Event()
    for i in range(40):
        sock = send(server, stream=i % 2 == 0)
        pause.wait(0.0005 * (i % 10))
        sock.close()
    wait_until(lambda: engine.n_busy == 0 and len(engine.finishes) == len(engine.requests), "every slot is free again")
    assert sorted(engine.cancels) == sorted(engine.requests)
    engine.gate.release(1000)
    with send(server, stream=False) as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")

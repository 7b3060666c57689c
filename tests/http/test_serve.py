"""Starting and stopping: addresses, signals, and what open replies get to know."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ds4jax.errors import ConfigError
from ds4jax.serving.http.serve import listen, reserve, url_of
from ds4jax.serving.http.waiting import waiting_room
from tests.http.conftest import MakeEngine, MakeServer
from tests.http.fakes import wait_until

ROOT = Path(__file__).parents[2]
SERVE = """
import threading
from tests.http.fakes import EchoEngine, byte_tokenizer
from ds4jax.config import ServerConfig
from ds4jax.serving.http.serve import run
engine = ENGINE
run(engine, byte_tokenizer(), ServerConfig(port=0, keepalive_s=0.05), on_ready=lambda url: print(url, flush=True), grace_s=GRACE)
engine.die()
print("ended", flush=True)
"""

# Far more than sockets hold.
NEVER_READ = "EchoEngine(script=lambda request: [97] * 60_000, n_ctx=60_000)"


def post_stream(port: int) -> socket.socket:
    body = json.dumps({"prompt": "xyz", "stream": True}).encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


@contextmanager
def serving(engine: str = "EchoEngine(gate=threading.Semaphore(1))", grace_s: float = 20) -> Iterator[subprocess.Popen[str]]:
    """Run a server in a process of its own, over the engine that an expression makes."""
    command = [sys.executable, "-c", SERVE.replace("ENGINE", engine).replace("GRACE", str(grace_s))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:")
    return int(url.rsplit(":", 1)[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_server(number: int) -> None:
    with serving() as process, socket.create_connection(("127.0.0.1", port_of(process)), timeout=10) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        # The connection is kept, and must not hold up the end.
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "ended\n"), err


def test_a_second_signal_exits_at_once() -> None:
    with serving() as process, post_stream(port_of(process)) as sock:
        assert sock.recv(1000)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "a second signal exits at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_open_replies_may_end(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(1))
    server = make_server(engine, grace_s=20)
    with post_stream(server.port) as sock:
        wait_until(lambda: engine.n_running_tokens == 1, "the reply has begun")
        server.ask_to_stop()
        engine.gate.release(100)
        data = read_all(sock)
    server.join()
    assert data.count(b'"text":') == 4 and b"data: [DONE]" in data
    assert engine.cancels == []


def test_replies_that_do_not_end_are_told_why(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(1))
    server = make_server(engine, grace_s=0.05)
    with post_stream(server.port) as sock:
        wait_until(lambda: engine.n_running_tokens == 1, "the reply has begun")
        server.ask_to_stop()
        data = read_all(sock)
    server.join()
    assert b"event: error" in data and b"shutting down" in data and b"data: [DONE]" in data
    assert engine.cancels == [1]


def test_a_taken_port_is_told(make_server: MakeServer) -> None:
    with pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", make_server().port)


def test_a_reserved_address_is_taken_but_refuses_clients_until_it_is_served() -> None:
    with reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
        listen("127.0.0.1", port, reserved)
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there"):
            reserve("127.0.0.1", port)


def test_while_the_model_is_loaded_everybody_is_told(make_server: MakeServer) -> None:
    with reserve("127.0.0.1", 0) as reserved, httpx.Client(base_url=url_of(reserved), timeout=10) as client:
        with waiting_room(reserved):
            replies = [client.get(path) for path in ("/live", "/ready", "/health", "/metrics")]
            assert [(reply.status_code, "Retry-After" in reply.headers) for reply in replies] == [(200, False), *[(503, True)] * 3]
            chat = client.post("/v1/chat/completions", content=b"x" * 2_000_000)
            assert (chat.status_code, chat.json()["error"]["code"]) == (503, "loading")
            assert int(chat.headers["Retry-After"]) > 0
            assert client.post("/v1/messages", json={}).json()["type"] == "error"
        with pytest.raises(ConfigError, match="cannot listen there"):
            reserve("127.0.0.1", reserved.getsockname()[1])
        answers: list[httpx.Response] = []
        early = threading.Thread(target=lambda: answers.append(client.get("/ready")))  # may connect before the server is there
        early.start()
        make_server(reserved=reserved)
        early.join()
        assert answers[0].status_code == 200


def test_urls() -> None:
    with listen("127.0.0.1", 0) as v4:
        assert url_of(v4) == f"http://127.0.0.1:{v4.getsockname()[1]}"
    if socket.has_ipv6:
        with listen("::1", 0) as v6:
            assert url_of(v6) == f"http://[::1]:{v6.getsockname()[1]}"


def test_a_client_that_never_reads_does_not_hold_up_the_end() -> None:
    with serving(NEVER_READ, grace_s=0.05) as process:
        port = port_of(process)
        with post_stream(port) as sock:
            assert sock.recv(100)
            health = f"http://127.0.0.1:{port}/health"
            wait_until(lambda: httpx.get(health, trust_env=False).json()["n_running"] == 0, "all is generated, and waits to be read", 30)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "ended\n"), err

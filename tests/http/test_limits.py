"""What the transport refuses before a route sees it."""

from __future__ import annotations

import socket

import pytest

from tests.http.conftest import MakeServer


@pytest.mark.parametrize(("n_bytes", "status"), [(60 << 10, b"200"), (256 << 10, b"431")])
def test_headers_have_a_limit(make_server: MakeServer, n_bytes: int, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", make_server().port), timeout=10) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * n_bytes + b"\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("request_line", [b"NONSENSE\r\n\r\n", b"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n"])
def test_what_is_no_http_is_told_so_and_ends_the_connection(make_server: MakeServer, request_line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", make_server().port), timeout=10) as sock:
        sock.sendall(request_line)
        reply = b""
        while piece := sock.recv(1000):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 400") and b"connection: close" in reply


@pytest.mark.parametrize(("n_sent", "ends"), [(0, True), (10, True), (20, False)])
def test_an_answer_before_the_whole_body_says_that_it_ends_the_connection(make_server: MakeServer, n_sent: int, ends: bool) -> None:
    with socket.create_connection(("127.0.0.1", make_server().port), timeout=10) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n" + b"x" * n_sent)
        reply = b""
        while b"}}" not in reply:
            reply += sock.recv(1000)
        assert reply.startswith(b"HTTP/1.1 404") and (b"connection: close" in reply) is ends
        if not ends:
            sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_web_sockets_are_refused_in_words(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(api_keys=("k",))
    ask = (
        b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"GET /v1/responses HTTP/1.1\r\n" + ask)
        reply = b""
        while b"}}" not in reply:
            piece = sock.recv(1000)
            assert piece, reply
            reply += piece
    assert reply.startswith(b"HTTP/1.1 400") and b"no web sockets" in reply
    assert not caplog.records

"""Streams over real sockets: golden transcripts, comments, errors, slow readers."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http.conftest import MakeEngine, MakeServer, Server
from tests.http.fakes import EOS_ID, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "héy"}]

# Ids and times differ between calls; everything else is fixed. A token is a byte, and é has two.
GOLDEN_CHAT = """\
data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"reasoning_content":"h"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"reasoning_content":"m"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"h"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"é"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"y"},"finish_reason":null}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"m","choices":[],"usage":{"prompt_tokens":8,"completion_tokens":7,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":0,"cache_write_tokens":8},"completion_tokens_details":{"reasoning_tokens":3}}}

data: [DONE]

"""  # noqa: E501

GOLDEN_TEXT = """\
data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":[{"text":"h","index":0,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":[{"text":"é","index":0,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":0,"model":"m","choices":[{"text":"","index":0,"finish_reason":"length"}]}

data: [DONE]

"""


def transcript(server: Server, path: str, body: dict[str, Any]) -> str:
    """Read a whole stream; ids and times are replaced."""
    with httpx.Client(trust_env=False) as client, client.stream("POST", server.url + path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        text = response.read().decode()
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"', '"id":"ID"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


def open_stream(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a streaming request on a bare socket."""
    data = json.dumps({"stream": True, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = sock.recv(65536)
        assert piece, f"the stream ended without {mark!r}: {data!r}"
        data += piece
    return data


def test_the_transcript_of_a_chat_stream(make_server: MakeServer) -> None:
    body = {"model": "m", "messages": HELLO, "stream_options": {"include_usage": True}}
    assert transcript(make_server(), CHAT, body) == GOLDEN_CHAT


def test_the_transcript_of_a_text_stream(make_server: MakeServer) -> None:
    assert transcript(make_server(), TEXT, {"model": "m", "prompt": "héy", "max_tokens": 3}) == GOLDEN_TEXT


def contents(text: str) -> Iterator[tuple[int, str]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["index"], choice.get("text") or choice.get("delta", {}).get("content") or ""


def test_choices_of_several_prompts_mingle_in_one_stream(make_server: MakeServer) -> None:
    texts = {0: "", 1: "", 2: ""}
    for index, text in contents(transcript(make_server(), TEXT, {"prompt": ["one", "two", "three"]})):
        texts[index] += text
    assert texts == {0: "one", 1: "two", 2: "three"}


@pytest.mark.parametrize("stop", ["Z", "YZ", ["YZ", "nowhere"]])
def test_no_part_of_a_stop_string_is_sent(make_server: MakeServer, make_engine: MakeEngine, stop: Any) -> None:
    engine = make_engine()
    text = transcript(make_server(engine), CHAT, {"messages": [{"content": "abYZcd"}], "thinking": False, "stop": stop})
    sent = "".join(piece for _, piece in contents(text))
    assert sent == ("abY" if stop == "Z" else "ab")
    assert '"finish_reason":"stop"' in text and text.endswith("data: [DONE]\n\n")
    assert engine.cancels in ([], [1])  # the engine may have been done already


def test_a_failure_in_a_stream_is_an_error_event_and_an_end(make_server: MakeServer, make_engine: MakeEngine) -> None:
    text = transcript(make_server(make_engine(fail_after=1)), CHAT, {"messages": HELLO, "thinking": False})
    *_, error, done, rest = text.split("\n\n")
    assert error.startswith("event: error\ndata: ")
    body = json.loads(error.split("data: ", 1)[1])["error"]
    assert (body["type"], body["message"]) == ("server_error", "batched decode failed: scripted")
    assert (done, rest) == ("data: [DONE]", "")


def test_headers_come_at_once_and_comments_in_silence(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(0))
    engine.hold.set()
    with open_stream(make_server(engine, keepalive_s=0.05), CHAT, {"messages": HELLO, "stop": "hmm"}) as sock:
        # queued
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        read_until(sock, b": keep-alive\n\n")
        # prefilling
        engine.hold.clear()
        read_until(sock, b": keep-alive\n\n")
        # decoding, but silent: "hm" may become the stop string
        engine.gate.release(2)
        wait_until(lambda: engine.n_busy == 1, "the request runs")
        read_until(sock, b": keep-alive\n\n")
        engine.gate.release(100)
        assert b"[DONE]" in read_until(sock, b"[DONE]")


def test_a_slow_reader_gets_everything_and_holds_up_nobody(make_server: MakeServer, make_engine: MakeEngine) -> None:
    n = 20_000
    engine = make_engine(script=lambda request: [*(b"x" * n), EOS_ID], n_ctx=30_000)
    server = make_server(engine)
    with open_stream(server, TEXT, {"prompt": "slow"}) as slow:
        # The engine finishes although not a byte has been read: megabytes of events wait in the server, not in the engine.
        wait_until(lambda: len(engine.finishes) == 1, "the engine ends the reply of a client that does not read", 30)
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += slow.recv(1 << 20)
    assert data.count(b'"text":"x"') == n


def test_chunked_request_bodies(make_server: MakeServer) -> None:
    def body() -> Iterator[bytes]:
        data = json.dumps({"messages": HELLO, "thinking": False}).encode()
        for i in range(0, len(data), 7):
            yield data[i : i + 7]

    reply = httpx.post(make_server().url + CHAT, content=body(), trust_env=False)
    assert reply.json()["choices"][0]["message"]["content"] == "héy"


def test_a_connection_is_kept_for_the_next_request(make_server: MakeServer) -> None:
    server = make_server()
    with httpx.Client(trust_env=False) as client:
        streams = []
        for stream in (False, True, False, True):
            reply = client.post(server.url + CHAT, json={"messages": HELLO, "stream": stream})
            assert reply.status_code == 200
            streams.append(reply.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(set(streams)) == 1


def test_a_large_body_is_refused_by_length_and_by_chunks(make_server: MakeServer) -> None:
    server = make_server(body_limit_bytes=1000)
    by_length = httpx.post(server.url + CHAT, content=b" " * 2000, trust_env=False)
    by_chunks = httpx.post(server.url + CHAT, content=iter([b" " * 600, b" " * 600]), trust_env=False)
    assert (by_length.status_code, by_chunks.status_code) == (413, 413)
    assert "1000 bytes" in by_length.json()["error"]["message"]

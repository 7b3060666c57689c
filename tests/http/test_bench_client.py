"""The measuring clients: what they count, and what they say when something goes wrong."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.errors import ConfigError
from ds4jax.serving.http.bench_client import Level, Outcome, Workload, events, measure
from tests.http.conftest import MakeEngine, MakeServer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def workload(url: str, **changes: float) -> Workload:
    return Workload(**{"url": url, "n_prompt": 4, "max_tokens": 6, "n_requests": 2, "timeout_s": 20.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("n_clients", [1, 3])
def test_every_token_of_every_request_is_counted(make_server: MakeServer, make_engine: MakeEngine, n_clients: int) -> None:
    engine = make_engine(script=lambda request: [*b"some words that go on"])
    level = measure(workload(make_server(engine).url), n_clients)
    assert level.errors == []
    assert [outcome.n_tokens for outcome in level.outcomes] == [6] * (2 * n_clients)
    assert level.tokens_per_s == pytest.approx(6 * 2 * n_clients / level.wall_s)
    for outcome in level.outcomes:
        assert outcome.ttft_s is not None and 0 < outcome.ttft_s < level.wall_s
        assert len(outcome.gaps_s) == 5 and all(gap >= 0 for gap in outcome.gaps_s)
    prompts = {request.prompt for request in engine.requests.values()}
    assert len(prompts) == 2 * n_clients, "requests that share a prompt measure the prefix cache"
    assert {len(prompt) for prompt in prompts} == {4}
    assert all(request.stop_token_ids == frozenset() for request in engine.requests.values())


def test_the_rate_of_all_clients_together() -> None:
    """One answers from 0 to 4 s, the other from 2 to 6 s: in the two seconds between, each gets two pieces of two tokens."""
    first = Outcome(0, arrivals=[0.0, 1.0, 2.0, 3.0, 4.0], n_tokens=10)
    second = Outcome(1, arrivals=[2.0, 3.0, 4.0, 5.0, 6.0], n_tokens=10)
    assert Level(2, 6.0, [first, second]).full_tokens_per_s == pytest.approx(4.0)
    assert first.gaps_s == [1.0] * 4
    apart = Outcome(1, arrivals=[5.0, 6.0], n_tokens=2)
    assert math.isnan(Level(2, 6.0, [first, apart]).full_tokens_per_s), "they never answered together"
    assert math.isnan(Level(2, 6.0, [first, Outcome(1, error="refused")]).full_tokens_per_s)


def test_a_step_that_fails_is_an_error(make_server: MakeServer, make_engine: MakeEngine) -> None:
    level = measure(workload(make_server(make_engine(script=lambda request: b"abcdefgh", fail_after=3)).url), 2)
    assert len(level.errors) == 4
    assert "batched decode failed: scripted" in level.errors[0]


def test_a_short_answer_is_an_error(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=8)
    (error,) = measure(workload(make_server(engine).url, n_requests=1), 1).errors
    assert "400" in error and "maximum context length is 8" in error


def test_an_answer_that_takes_too_long_is_an_error(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(0))
    (error,) = measure(workload(make_server(engine).url, n_requests=1, timeout_s=0.2), 1).errors
    assert error == "no end within 0.2 s"


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (error,) = measure(workload(f"http://127.0.0.1:{port}", n_requests=1), 1).errors
    assert "ConnectionRefusedError" in error


@contextmanager
def raw_server(reply: bytes) -> Iterator[str]:
    """Answer one connection with fixed bytes, then hang up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (HEAD + b"a\r\ndata: {}\n\n\r\n0\r\n\r\n", "stopped before"),
        (HEAD + b"5\r\n: hi\n\r\n0\r\n\r\n", "stopped before"),
        (HEAD + b"20\r\ndata:", "stopped before"),
        (HEAD + b"xx\r\ndata:", "invalid literal"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nlater", "503 service unavailable: later"),
        (b"", "bytes"),
    ],
)
def test_replies_that_are_none(reply: bytes, says: str) -> None:
    with raw_server(reply) as url:
        (error,) = measure(workload(url, n_requests=1), 1).errors
    assert says in error


@pytest.mark.parametrize("url", ["http://example.org:80", "https://127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1.example.org"])
def test_other_machines_are_not_measured(url: str) -> None:
    with pytest.raises(ConfigError, match="only servers on this machine"):
        workload(url)


@given(texts=st.lists(st.text(max_size=8), max_size=5), cuts=st.lists(st.integers(0, 400), max_size=12), chunked=st.booleans())
def test_events_do_not_depend_on_how_the_bytes_are_cut(texts: list[str], cuts: list[int], chunked: bool) -> None:
    import orjson

    body = b": keep-alive\n\n" + b"".join(b"data: " + orjson.dumps({"text": text}) + b"\n\n" for text in texts) + b"data: [DONE]\n\n"
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[a:b] for a, b in zip(edges, edges[1:], strict=False)]

    async def read() -> list[dict]:
        reader = asyncio.StreamReader()
        reader.feed_data(HEAD if chunked else b"HTTP/1.1 200 OK\r\n\r\n")
        for piece in pieces:
            reader.feed_data(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        reader.feed_eof()
        return [event async for event in events(reader)]

    assert asyncio.run(read()) == [{"text": text} for text in texts]

"""The trace file: everything of a request, on request alone."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from ds4jax.cli.options import start_trace
from ds4jax.errors import ConfigError
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import EOS_ID

CHAT = "/v1/chat/completions"
SECRET = "a secret of the user"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
OPEN, END = '<tool_calls>\n<invoke name="now">\n', "</invoke>\n</tool_calls>"


async def lines(path: Path, n: int = 1) -> list[dict[str, Any]]:
    """Wait for so many lines; they are written after the reply."""
    for _ in range(2000):
        if path.exists() and len(found := path.read_text().splitlines()) >= n:
            return [json.loads(line) for line in found]
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was traced")


@pytest.mark.parametrize("stream", [False, True])
async def test_everything_of_a_request(make_app: MakeApp, make_engine: MakeEngine, tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "trace"
    app = make_app(make_engine(n_cached=3), trace=path)
    body = {**HELLO, "stream": stream, "temperature": 0.5, "max_tokens": 99}
    await (await app.test_client().post(CHAT, json=body)).get_data()
    (record,) = await lines(path)
    (choice,) = record["choices"]
    (attempt,) = choice["attempts"]
    assert record["body"] == body and record["id"].startswith("chatcmpl-") and record["stream"] is stream
    assert attempt["prompt"] == f"<｜begin▁of▁sentence｜><｜User｜>{SECRET}<｜Assistant｜><think>"
    assert attempt["raw"] == f"hm</think>{SECRET}"
    assert (attempt["cache"], attempt["n_cached"], attempt["sampling"]["temperature"], attempt["max_tokens"]) == ("slot", 3, 0.5, 99)
    assert (choice["reasoning"], choice["content"], choice["calls"], choice["finish"]) == ("hm", SECRET, [], "stop")
    assert 0 <= choice["queue_s"] <= choice["ttft_s"] <= choice["total_s"]


async def test_both_tries_of_a_call_that_cannot_be_read(make_app: MakeApp, make_engine: MakeEngine, tmp_path: Path) -> None:
    texts = iter([OPEN + "<oops>", OPEN + END])
    app = make_app(make_engine(script=lambda request: [*next(texts).encode(), EOS_ID]), trace=tmp_path / "trace")
    await app.test_client().post(CHAT, json={**HELLO, "tools": TOOLS, "thinking": False})
    (record,) = await lines(tmp_path / "trace")
    (choice,) = record["choices"]
    first, second = choice["attempts"]
    assert first["raw"] and (OPEN + "<oops>").startswith(first["raw"])
    assert second["raw"] == OPEN + END
    assert second["prompt"].startswith(first["prompt"] + first["raw"])
    assert [call["name"] for call in choice["calls"]] == ["now"] and choice["is_retried"]


async def test_a_body_of_many_lines_is_traced_on_one(make_app: MakeApp, tmp_path: Path) -> None:
    body = {**HELLO, "seed": 12345678901234567, "user": "two\nlines"}
    await make_app(trace=tmp_path / "trace").test_client().post(CHAT, data=json.dumps(body, indent=2).encode())
    (record,) = await lines(tmp_path / "trace")
    assert record["body"] == body


async def test_requests_that_are_refused_are_traced_too(make_app: MakeApp, tmp_path: Path) -> None:
    client = make_app(trace=tmp_path / "trace").test_client()
    await client.post(CHAT, data=b'{"messages": nonsense \xff')
    await client.post(CHAT, json={**HELLO, "temperature": "hot"})
    broken, hot = sorted(await lines(tmp_path / "trace", 2), key=lambda record: record["time"])
    assert broken["body"].startswith('{"messages": nonsense') and "UTF-8" in broken["error"]
    assert hot["path"] == CHAT and hot["error"].startswith("temperature:")


async def test_a_disk_that_fails_costs_no_reply(make_app: MakeApp, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(trace=tmp_path / "gone" / "trace")
    assert (await app.test_client().post(CHAT, json=HELLO)).status_code == 200
    for _ in range(2000):
        if "not written down" in caplog.text:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nobody was told")


@pytest.mark.parametrize("stream", [False, True])
async def test_without_it_no_text_is_kept(
    make_app: MakeApp, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    client = make_app().test_client()
    await (await client.post(CHAT, json={**HELLO, "stream": stream})).get_data()
    await client.post(CHAT, json={**HELLO, "temperature": "hot"})
    await client.post(CHAT, data=SECRET.encode())
    failing = make_app(make_engine(fail_after=2)).test_client()
    await failing.post(CHAT, json=HELLO)
    assert caplog.records and SECRET not in caplog.text


def test_a_trace_starts_empty_and_private(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    assert start_trace(None) is None
    assert start_trace(path) == path and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("of an earlier run")
    start_trace(path)
    assert path.read_bytes() == b""
    with pytest.raises(ConfigError, match="--trace .*cannot be written"):
        start_trace(tmp_path / "no" / "trace")

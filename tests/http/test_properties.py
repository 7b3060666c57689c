"""What holds for any text: a stream says what the whole reply says, and strict JSON agrees with Python's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import ServerConfig
from ds4jax.errors import RequestError
from ds4jax.serving.http.app import create_app
from ds4jax.serving.http.strict_json import decode
from tests.http.conftest import MakeEngine
from tests.http.fakes import byte_tokenizer

TEXT = st.text(alphabet="ab<>/think é🙂", max_size=12)


async def whole_and_streamed(app: Any, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    client = app.test_client()
    reply = await (await client.post("/v1/chat/completions", json=body)).get_json()
    stream = await (await client.post("/v1/chat/completions", json={**body, "stream": True})).get_data(as_text=True)
    streamed = {"content": "", "reasoning_content": "", "finish_reason": ""}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            streamed["finish_reason"] = choice["finish_reason"] or ""
            for kind in ("content", "reasoning_content"):
                streamed[kind] += choice["delta"].get(kind, "")
    choice = reply["choices"][0]
    message = choice["message"]
    whole = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "finish_reason": choice["finish_reason"],
    }
    return whole, streamed


def test_a_stream_says_what_the_whole_reply_says(make_engine: MakeEngine) -> None:
    app = create_app(make_engine(), byte_tokenizer(), ServerConfig())

    @given(text=TEXT, stop=st.lists(TEXT, max_size=2), thinking=st.booleans(), limit=st.integers(1, 40))
    @settings(max_examples=60, deadline=None)
    def check(text: str, stop: list[str], thinking: bool, limit: int) -> None:
        body = {"messages": [{"content": text}], "stop": stop, "thinking": thinking, "max_tokens": limit}
        whole, streamed = asyncio.run(whole_and_streamed(app, body))
        assert whole == streamed
        assert not any(s and s in whole["content"] for s in stop)

    check()


class Body(msgspec.Struct):
    """One field, and whatever else comes with it."""

    x: str


@given(
    text=st.text(), other=st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists)
)
@settings(max_examples=50, deadline=None)
def test_any_well_formed_body_is_read(text: str, other: Any) -> None:
    for ascii_only in (False, True):
        data = json.dumps({"other": other, "x": text}, ensure_ascii=ascii_only)
        assert decode(data.encode(), Body).x == text


@given(data=st.binary(max_size=40) | st.text(alphabet='{}[]",:\\ud8x01', max_size=40).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_anything_else_is_refused_with_a_reason(data: bytes) -> None:
    try:
        decode(data, Body)
    except RequestError as error:
        assert str(error)

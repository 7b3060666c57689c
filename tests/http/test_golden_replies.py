"""Golden transcripts of whole replies, for each API with thoughts and text, and with calls. Those of streams stand with their APIs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import EOS_ID, EchoEngine
from tests.http.test_streaming import transcript
from tests.http.test_tools import CALL, block, says

MESSAGES: list[Any] = [{"role": "user", "content": "go"}]
PARAMETERS: dict[str, Any] = {"type": "object"}
CHAT = ("/v1/chat/completions", {"model": "m", "messages": MESSAGES})
TEXT = ("/v1/completions", {"model": "m", "prompt": "go"})
ANTHROPIC = ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 200})
RESPONSES = ("/v1/responses", {"model": "m", "input": "go", "reasoning": {"summary": "auto"}})
TOOLS: dict[str, list[Any]] = {
    CHAT[0]: [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    ANTHROPIC[0]: [{"name": "weather", "input_schema": PARAMETERS}],
    RESPONSES[0]: [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
}

# Ids and times are replaced. A token is a byte, but for tags, and é has two.
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "http" / "replies.json").read_text(encoding="utf-8"))


def scrubbed(text: str) -> str:
    """Replace what differs between any two replies."""
    text = re.sub(r'"(chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|call_|toolu_)[0-9a-f]{24,32}"', '"ID"', text)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text)


async def whole(app: Any, path: str, body: dict[str, Any]) -> Any:
    response = await app.test_client().post(path, json=body)
    assert response.status_code == 200
    return json.loads(scrubbed(await response.get_data(as_text=True)))


def hello(engine: EchoEngine, path: str) -> EchoEngine:
    engine.script = says("hé" if path == TEXT[0] else "hm</think>hé")
    return engine


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT, ANTHROPIC, RESPONSES])
async def test_thoughts_and_text(make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]) -> None:
    assert await whole(make_app(hello(make_engine(n_cached=2), path)), path, body) == GOLDEN["plain"][path]


@pytest.mark.parametrize(("path", "body"), [CHAT, ANTHROPIC, RESPONSES])
async def test_calls(make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]) -> None:
    app = make_app(make_engine(script=says(f"h</think>O{block(CALL)}")), tool_prompt="{tools}")
    assert await whole(app, path, {**body, "tools": TOOLS[path]}) == GOLDEN["calls"][path]


def test_a_text_stream_with_its_usage(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [*"é".encode(), EOS_ID])
    body = {**TEXT[1], "logprobs": 1, "stream_options": {"include_usage": True}}
    *events, done = transcript(make_server(engine), TEXT[0], body).removesuffix("\n\n").split("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in events] == GOLDEN["text stream"] and done == "data: [DONE]"

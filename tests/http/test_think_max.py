"""The highest effort: which requests get it, on which servers, and how their prompts begin."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from ds4jax.text.chat import Message, render
from ds4jax.text.effort import LEAST_MAX_CTX, MAX_EFFORT, Thinking
from ds4jax.text.segments import Special, Text
from ds4jax.text.special import ASSISTANT, BOS, THINK, USER
from tests.http.conftest import MakeApp, MakeEngine

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NOW = {"type": "function", "function": {"name": "now"}}


def test_the_words_are_those_the_model_was_trained_with() -> None:
    digest = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
    assert hashlib.sha256(MAX_EFFORT.encode()).hexdigest() == digest


def test_they_stand_before_the_system_text() -> None:
    segments = render([Message("system", "be brief"), Message("user", "hi")], thinking=Thinking.MAX)
    head, tail = [Special(BOS), Text(MAX_EFFORT + "be brief")], [Special(USER), Text("hi"), Special(ASSISTANT), Special(THINK)]
    assert segments == head + tail


@pytest.mark.parametrize(
    ("path", "fields", "is_max"),
    [
        (CHAT, {}, False),
        (CHAT, {"reasoning_effort": "xhigh"}, False),
        (CHAT, {"reasoning_effort": "max"}, True),
        (CHAT, {"reasoning_effort": "max", "thinking": False}, False),
        (CHAT, {"reasoning_effort": "max", "model": "deepseek-chat"}, False),
        (CHAT, {"reasoning_effort": "max", "model": "deepseek-chat", "thinking": True}, True),
        (CHAT, {"reasoning_effort": "max", "tools": [NOW], "tool_choice": "required"}, False),
        (CHAT, {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}}, True),
        (MESSAGES, {"output_config": {"effort": "max"}}, True),
        (RESPONSES, {"reasoning": {"effort": "max"}, "input": "hello"}, True),
    ],
)
@pytest.mark.parametrize("n_ctx", [LEAST_MAX_CTX - 1, LEAST_MAX_CTX])
async def test_who_gets_it(make_app: MakeApp, make_engine: MakeEngine, path: str, fields: dict[str, Any], is_max: bool, n_ctx: int) -> None:
    engine = make_engine(n_ctx=n_ctx)
    response = await make_app(engine).test_client().post(path, json={**HELLO, **fields})
    assert response.status_code == 200
    start = bytes(token for token in engine.requests[1].prompt[1 : len(MAX_EFFORT) + 1] if token < 256)
    assert (start == MAX_EFFORT.encode()) == (is_max and n_ctx == LEAST_MAX_CTX)


async def test_counts_are_those_of_the_very_prompt(make_app: MakeApp, make_engine: MakeEngine) -> None:
    for n_ctx in (4096, LEAST_MAX_CTX):
        engine = make_engine(n_ctx=n_ctx)
        client = make_app(engine).test_client()
        body = {**HELLO, "output_config": {"effort": "max"}}
        await client.post(MESSAGES, json=body)
        counted = await (await client.post(f"{MESSAGES}/count_tokens", json=body)).get_json()
        assert counted["input_tokens"] == len(engine.requests[1].prompt)


async def test_an_effort_of_another_type_is_named(make_app: MakeApp) -> None:
    body = {**HELLO, "chat_template_kwargs": {"reasoning_effort": 3}}
    response = await make_app().test_client().post(CHAT, json=body)
    assert (response.status_code, (await response.get_json())["error"]["param"]) == (400, "chat_template_kwargs.reasoning_effort")

"""Prompts of a server that was started with a template, or with other words about tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import byte_tokenizer

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "say <think>"}], "max_tokens": 9}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}<｜Assistant｜><think>{{ '\\n' }}"
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_template_makes_every_prompt(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    body = HELLO if path != RESPONSES else {"input": "say <think>"}
    response = await make_app(engine, chat_template=TEMPLATE).test_client().post(path, json=body)
    assert response.status_code == 200
    prompt = engine.requests[1].prompt
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(prompt) == "<｜begin▁of▁sentence｜>[user] say <think><｜Assistant｜><think>\n"
    assert list(prompt).count(tokenizer.think_id) == 1


async def test_what_follows_a_template_is_reasoning_where_it_says_so(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [*b"hm", byte_tokenizer().end_think_id, *b"ok", byte_tokenizer().eos_id])
    response = await make_app(engine, chat_template=TEMPLATE).test_client().post(CHAT, json=HELLO)
    message = (await response.get_json())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")


async def test_a_refusal_of_the_template_is_a_400(make_app: MakeApp) -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
    body = {"messages": HELLO["messages"] * 2}
    response = await make_app(chat_template=template).test_client().post(CHAT, json=body)
    error = (await response.get_json())["error"]
    assert response.status_code == 400 and error["param"] == "messages" and "one message only" in error["message"]


async def test_tools_in_the_operators_words(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    body = json.dumps({**HELLO, "tools": [{"type": "function", "function": {"name": "now"}}]})
    await make_app(engine, tool_prompt="Use {tools}, please.").test_client().post(CHAT, data=body.encode())
    assert byte_tokenizer().decode(engine.requests[1].prompt).startswith('<｜begin▁of▁sentence｜>Use {"name": "now"}, please.<｜User｜>')

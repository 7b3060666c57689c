"""What the engine is told about the beginnings of prompts, so that it keeps them for others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import byte_tokenizer

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("path", "body", "beginning"),
    [
        (
            "/v1/chat/completions",
            {"messages": [SYSTEM, USER, {"role": "assistant", "content": "hi"}, USER]},
            "<｜begin▁of▁sentence｜>be brief",
        ),
        ("/v1/chat/completions", {"messages": [USER]}, "<｜begin▁of▁sentence｜>"),
        ("/v1/messages", {"system": "be brief", "messages": [USER], "max_tokens": 5}, "<｜begin▁of▁sentence｜>be brief"),
        ("/v1/responses", {"instructions": "be brief", "input": "hello"}, "<｜begin▁of▁sentence｜>be brief"),
    ],
)
async def test_the_system_prompt_is_marked(
    make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any], beginning: str
) -> None:
    engine = make_engine()
    assert (await make_app(engine).test_client().post(path, json=body)).status_code == 200
    (mark,) = engine.requests[1].marks
    assert byte_tokenizer().decode(engine.requests[1].prompt[:mark]) == beginning


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_conversation_has_the_name_that_its_client_gives_it(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    client = make_app(engine).test_client()
    body: dict[str, Any] = (
        {"prompt_cache_key": "mine", "messages": [USER]} if "chat" in path else {"prompt_cache_key": "mine", "input": "hi"}
    )
    await client.post(path, json=body)
    await client.post(path, json=body, headers={"X-Session-Id": "of the header"})
    await client.post(path, json=body | {"prompt_cache_key": None})
    assert [engine.requests[i].conversation for i in (1, 2, 3)] == ["mine", "of the header", None]


async def test_raw_text_has_no_marks(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    await make_app(engine).test_client().post("/v1/completions", json={"prompt": "hello"})
    assert engine.requests[1].marks == ()

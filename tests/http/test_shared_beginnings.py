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


async def test_raw_text_has_no_marks(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    await make_app(engine).test_client().post("/v1/completions", json={"prompt": "hello"})
    assert engine.requests[1].marks == ()

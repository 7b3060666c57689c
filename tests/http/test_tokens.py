"""`/tokenize` and `/detokenize`: both dialects, and that they agree with what the engine would get."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import Quart

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import BOS_ID, END_THINK_ID, byte_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hé"}], "thinking": False}


async def post(app: Quart, path: str, **body: Any) -> tuple[int, Any]:
    response = await app.test_client().post(path, json=body)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [BOS_ID, *"hé".encode()]),
        ({"prompt": "a", "add_special_tokens": False}, [97]),
        ({"content": "a"}, [97]),
        ({"content": "a", "add_special": True}, [BOS_ID, 97]),
        ({"prompt": ""}, [BOS_ID]),
        ({"content": ""}, []),
        ({"content": "</think>"}, [*b"</think>"]),
    ],
)
async def test_text_to_tokens(make_app: MakeApp, body: dict[str, Any], tokens: list[int]) -> None:
    status, reply = await post(make_app(), "/tokenize", model="m", **body)
    assert (status, reply) == (200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens})


async def test_the_text_of_each_token(make_app: MakeApp) -> None:
    _, strings = await post(make_app(), "/tokenize", prompt="aé", return_token_strs=True)
    assert strings["token_strs"] == ["<｜begin▁of▁sentence｜>", "a", "\ufffd", "\ufffd"]
    _, pieces = await post(make_app(), "/tokenize", content="aé", with_pieces=True)
    assert pieces["tokens"] == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]


async def test_a_conversation_has_the_tokens_that_the_engine_gets(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    await post(app, "/v1/chat/completions", **CHAT)
    _, reply = await post(app, "/tokenize", **CHAT)
    assert tuple(reply["tokens"]) == engine.requests[1].prompt and reply["tokens"][-1] == END_THINK_ID


async def test_what_does_not_fit_is_counted(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(n_ctx=10))
    for body in ({"prompt": "x" * 50}, {"messages": [{"content": "x" * 50}]}):
        status, reply = await post(app, "/tokenize", **body)
        assert status == 200 and reply["count"] > 50 and reply["max_model_len"] == 10


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [97, 263]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_a_bad_field_is_named(make_app: MakeApp, path: str, body: dict[str, Any], param: str) -> None:
    status, reply = await post(make_app(), path, **body)
    assert (status, reply["error"]["param"]) == (400, param), reply


async def test_tokens_to_text(make_app: MakeApp) -> None:
    text = "<｜begin▁of▁sentence｜>hé\ufffd"
    assert await post(make_app(), "/detokenize", tokens=[BOS_ID, *"hé".encode(), 0xC3]) == (200, {"prompt": text, "content": text})
    assert (await post(make_app(), "/detokenize", tokens=[]))[1]["prompt"] == ""


def test_there_and_back(make_engine: MakeEngine) -> None:
    app = create_app(make_engine(), byte_tokenizer(), ServerConfig())

    async def round_trip(text: str) -> str:
        _, reply = await post(app, "/tokenize", content=text)
        return (await post(app, "/detokenize", tokens=reply["tokens"]))[1]["content"]

    @given(st.text(st.characters(codec="utf-8"), max_size=20))
    @settings(max_examples=30)
    def check(text: str) -> None:
        assert asyncio.run(round_trip(text)) == text

    check()

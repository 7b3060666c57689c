"""Log probabilities: OpenAI's shapes, each token's entry exactly once, and never apart from its text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from tests.http.conftest import MakeApp, MakeEngine, MakeServer, Server
from tests.http.fakes import EOS_ID, byte_tokenizer
from tests.http.test_tools import CALL, TOOLS, block, says, tokens_of

# What the scripted engine says of "h", with three alternatives, as OpenAI writes it.
ENTRY_OF_H = {
    "token": "h", "logprob": -1.04, "bytes": [104],
    "top_logprobs": [
        {"token": "h", "logprob": -1.04, "bytes": [104]},
        {"token": "i", "logprob": -2.04, "bytes": [105]},
        {"token": "j", "logprob": -9999.0, "bytes": [106]},
    ],
}  # fmt: skip

HELLO: list[Any] = [{"role": "user", "content": "hé"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def post(app: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    response = await app.test_client().post(path, json=body)
    return response.status_code, await response.get_json()


async def streamed(app: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, in order."""
    response = await app.test_client().post(path, json={**body, "stream": True})
    lines = (await response.get_data(as_text=True)).splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


# ---------------------------------------------------------------- chat
async def test_chat_entries_are_as_openai_writes_them(make_app: MakeApp) -> None:
    _, reply = await post(make_app(), CHAT, {"messages": HELLO, "thinking": False, "logprobs": True, "top_logprobs": 3})
    h, first, second = reply["choices"][0]["logprobs"]["content"]
    assert reply["choices"][0]["logprobs"]["refusal"] is None
    assert h == ENTRY_OF_H
    assert [(entry["token"], entry["bytes"]) for entry in (first, second)] == [("\ufffd", [0xC3]), ("\ufffd", [0xA9])]
    assert reply["usage"]["completion_tokens"] == 3


async def test_nobody_gets_what_was_not_asked_for(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    for body in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        _, reply = await post(app, CHAT, {"messages": HELLO, **body})
        assert "logprobs" not in reply["choices"][0]
    _, reply = await post(app, CHAT, {"messages": HELLO, "logprobs": True})
    assert all(entry["top_logprobs"] == [] for entry in reply["choices"][0]["logprobs"]["content"])
    assert [request.sampling.logprobs for request in engine.requests.values()] == [None, None, None, 0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 1, "echo": True, "presence_penalty": 1}, "echo"),
        (TEXT, {"logprobs": 1, "echo": True, "guided_regex": "a"}, "echo"),
        (TEXT, {"logprobs": 1, "echo": True, "prompt": [1, EOS_ID, 2]}, "prompt"),
        (TEXT, {"logprobs": 1, "echo": True, "prompt": [1, 2], "stop_token_ids": [2]}, "prompt"),
        (TEXT, {"logprobs": 1, "max_tokens": 0}, "max_tokens"),
        (TEXT, {"echo": True, "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/messages", {"logprobs": True}, "logprobs"),
        ("/v1/responses", {"top_logprobs": 21, "prompt": None}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_shown_is_refused_by_name(make_app: MakeApp, path: str, fields: dict[str, Any], param: str) -> None:
    status, reply = await post(make_app(), path, {"messages": HELLO, "prompt": "x", "input": "x", "max_tokens": 5, **fields})
    assert status == 400 and param in reply["error"]["message"]


def test_the_official_client_reads_them(make_server: MakeServer) -> None:
    with client_of(make_server()) as client:
        chat = client.chat.completions.create(model="deepseek-chat", messages=HELLO, logprobs=True, top_logprobs=2)
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        assert b"".join(bytes(entry.bytes or []) for entry in chat.choices[0].logprobs.content).decode() == "hé"
        text = client.completions.create(model="m", prompt="hé!", logprobs=1)
        logprobs = text.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs.token_logprobs == [-1.04, -1.95, -1.69, -0.33]
        assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"h": -1.04}
        assert logprobs.text_offset == [0, 1, 1, 2]
        entries = []
        with client.chat.completions.create(model="deepseek-chat", messages=HELLO, logprobs=True, top_logprobs=2, stream=True) as stream:
            for chunk in stream:
                if chunk.choices[0].logprobs is not None:
                    entries += chunk.choices[0].logprobs.content or []
        assert [entry.model_dump() for entry in entries] == [entry.model_dump() for entry in chat.choices[0].logprobs.content]


# ---------------------------------------------------------------- streams
def entry_bytes(choice: dict[str, Any]) -> bytes:
    logprobs = choice["logprobs"]
    if logprobs is None:
        return b""
    if "tokens" in logprobs:
        spelled = [token.removeprefix("bytes:").replace("\\x", "") if token.startswith("bytes:") else "" for token in logprobs["tokens"]]
        return b"".join(bytes.fromhex(hexes) or token.encode() for hexes, token in zip(spelled, logprobs["tokens"], strict=True))
    return b"".join(bytes(entry["bytes"]) for entry in logprobs["content"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_entries_go_out_with_their_text(make_engine: MakeEngine, path: str) -> None:
    app = create_app(make_engine(), byte_tokenizer(), ServerConfig())

    @settings(max_examples=60)
    @given(st.text("ab é🙂", min_size=1, max_size=12), st.lists(st.text("ab é", min_size=2, max_size=3), max_size=2), st.integers(1, 30))
    def check(text: str, stop: list[str], limit: int) -> None:
        body = {"messages": [{"content": text}], "thinking": False, "logprobs": True, "stop": stop, "max_tokens": limit}
        if path == TEXT:
            body |= {"prompt": text, "logprobs": 2}
        chunks = asyncio.run(streamed(app, path, body))
        _, whole = asyncio.run(post(app, path, body))
        said, told = "", b""
        for chunk in chunks:
            said += chunk["text"] if path == TEXT else chunk["delta"].get("content", "")
            told += entry_bytes(chunk)
            if chunk not in chunks[-2:]:
                assert told.decode() == said
        assert told == text.encode()[: whole["usage"]["completion_tokens"]]  # the tokens of a stop string are there, its text is not
        assert told == entry_bytes(whole["choices"][0])
        assert told.decode(errors="replace").startswith(said)

    check()


@pytest.mark.parametrize("thinking", [True, False])
async def test_tokens_of_thoughts_tags_and_calls_have_entries_too(make_app: MakeApp, make_engine: MakeEngine, thinking: bool) -> None:
    said = ("hm</think>" if thinking else "") + "Ok <b" + block(CALL)
    app = make_app(make_engine(script=says(said, said)))
    body = {"messages": HELLO, "tools": TOOLS, "thinking": thinking, "logprobs": True}
    chunks = await streamed(app, CHAT, body)
    _, whole = await post(app, CHAT, body)
    assert b"".join(map(entry_bytes, chunks)) == entry_bytes(whole["choices"][0]) == said.encode()
    assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == len(tokens_of(said))
    started = next(i for i, chunk in enumerate(chunks) if chunk["delta"].get("tool_calls"))
    content = "".join(chunk["delta"].get("content", "") for chunk in chunks[:started])
    assert b"".join(map(entry_bytes, chunks[:started])).decode().endswith(content)


async def test_a_call_that_is_tried_again_shows_the_second_reply(make_app: MakeApp, make_engine: MakeEngine) -> None:
    broken = "\n\n<｜DSML｜tool_calls>\n<｜DSML｜nonsense>"
    app = make_app(make_engine(script=says(broken, "sorry")))
    _, reply = await post(app, CHAT, {"messages": HELLO, "tools": TOOLS, "thinking": False, "logprobs": True})
    choice = reply["choices"][0]
    assert choice["message"]["content"] == "sorry" == entry_bytes(choice).decode()


async def test_a_broken_character_at_the_end_keeps_its_entry(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(script=lambda request: [97, 0xC3, EOS_ID]))
    chunks = await streamed(app, TEXT, {"prompt": "x", "logprobs": 0})
    assert b"".join(map(entry_bytes, chunks)) == b"a\xc3"
    assert [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]] == [0, 1]
    assert "".join(chunk["text"] for chunk in chunks) == "a\ufffd"

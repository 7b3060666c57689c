"""What clients of `/v1/responses` ask to have in their replies: log probabilities, and thoughts that they carry unread."""

from __future__ import annotations

import asyncio
from typing import Any

import openai.types.responses as types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import Quart

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from ds4jax.serving.http.responses_sealed import seal, unseal
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import byte_tokenizer
from tests.http.test_logprobs import ENTRY_OF_H
from tests.http.test_responses import RESPONSES, post, sync_client
from tests.http.test_responses_tools import TOOLS
from tests.http.test_tools import ASK_NOW, CALL, block, prompt_text, says, tokens_of
from tests.http.test_whole_and_streamed import events_of, response_of, without_ids

LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
SEALED: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}


async def streamed(app: Quart, **body: Any) -> list[dict[str, Any]]:
    response = await app.test_client().post(RESPONSES, json={"input": "hello", "stream": True, **body})
    return list(events_of(await response.get_data(as_text=True)))


def told(entries: list[dict[str, Any]]) -> bytes:
    """The bytes of the tokens of some entries."""
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def parts_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


# ---------------------------------------------------------------- log probabilities
async def test_log_probabilities_are_as_openai_writes_them(make_app: MakeApp) -> None:
    _, response = await post(make_app(), input="hé", top_logprobs=3, **LOGPROBS)
    (part,) = parts_of(response)
    assert response["top_logprobs"] == 3 and told(part["logprobs"]) == "hé".encode(), "thoughts and tags are no part of the text"
    assert part["logprobs"][0] == ENTRY_OF_H


@pytest.mark.parametrize(
    ("fields", "n_top", "n_entries"),
    [({}, None, 0), ({"top_logprobs": 0}, None, 0), (LOGPROBS, 0, 5), ({"top_logprobs": 2}, 2, 5), ({"top_logprobs": 0, **LOGPROBS}, 0, 5)],
)
async def test_who_gets_log_probabilities(
    make_app: MakeApp, make_engine: MakeEngine, fields: Any, n_top: int | None, n_entries: int
) -> None:
    engine = make_engine()
    _, response = await post(make_app(engine), **fields)
    assert engine.requests[1].sampling.logprobs == n_top
    entries = parts_of(response)[0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [n_top] * n_entries


def test_every_token_of_the_answer_has_an_entry_and_no_other(make_engine: MakeEngine) -> None:
    """Whatever is held back, cut off or no whole character; calls, tags and stop strings have none."""
    engine = make_engine()
    app = create_app(engine, byte_tokenizer(), ServerConfig())

    async def both(body: dict[str, Any], written: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        engine.script = says(written, written)
        return (await post(app, **body))[1], await streamed(app, **body)

    @settings(max_examples=60)
    @given(
        thoughts=st.sampled_from(["", "hm</think>", "h\n\n</think>\n", "<think>é</think>"]),
        text=st.text("ab é🙂<\n", max_size=8),
        calls=st.sampled_from(["", block(CALL), "\n" + block(CALL, ASK_NOW)]),
        stop=st.lists(st.text("ab é\n", min_size=1, max_size=3), max_size=2),
        limit=st.integers(1, 60),
    )
    def check(thoughts: str, text: str, calls: str, stop: list[str], limit: int) -> None:
        body = {"stop": stop, "max_output_tokens": limit, "tools": TOOLS, "thinking": bool(thoughts), "top_logprobs": 1}
        whole, events = asyncio.run(both(body, thoughts + text + calls))
        last = response_of(events)
        assert without_ids(last) == without_ids(whole)
        for part in parts_of(whole):
            assert told(part["logprobs"]).decode(errors="replace") == part["text"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        dones = [event for event in events if event["type"] == "response.output_text.done"]
        shown = b"".join(told(event["logprobs"]) for event in deltas)
        for event, part in zip(dones, parts_of(last), strict=True):
            assert event["logprobs"] == part["logprobs"]
            assert told(event["logprobs"]).startswith(shown), "each comes once, in order, and at last with the whole text"

    check()


def test_the_official_client_reads_log_probabilities(make_server: MakeServer) -> None:
    with sync_client(make_server()) as client:
        include: list[types.ResponseIncludable] = ["message.output_text.logprobs"]
        with client.responses.stream(model="m", input="hello", include=include, top_logprobs=2) as stream:
            tokens = [entry.token for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs]
            (message,) = stream.get_final_response().output
    assert tokens == list("hello") and message.type == "message"
    part = message.content[0]
    assert part.type == "output_text" and part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 5


# ---------------------------------------------------------------- thoughts that are carried unread
def test_a_client_carries_thoughts_to_a_server_that_keeps_nothing(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """As Codex does: `store` is false, and the next turn goes to any server."""
    written = f"hé</think>Ok{block(CALL)}"
    first, second = make_engine(script=says(written)), make_engine(script=says("so</think>Rain."))
    fields: Any = {"model": "m", "tools": TOOLS, "store": False, **SEALED}
    with sync_client(make_server(first)) as client, client.responses.stream(input="weather?", **fields) as stream:
        added = [event.item for event in stream if event.type == "response.output_item.added"]
        reply = stream.get_final_response()
    assert added[0].type == "reasoning" and added[0].encrypted_content is None, "it has not ended yet"
    thoughts, message, call = reply.output
    assert thoughts.type == "reasoning" and (thoughts.summary, unseal(thoughts.encrypted_content or "")) == ([], "hé")
    assert message.type == "message" and call.type == "function_call"
    history: Any = [{"role": "user", "content": "weather?"}, *(item.to_dict() for item in reply.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    with sync_client(make_server(second)) as client:
        assert client.responses.create(input=history, **fields).output_text == "Rain."
    prompt = [*first.requests[1].prompt, *tokens_of("hé</think>Ok")]
    assert list(second.requests[1].prompt[: len(prompt)]) == prompt, "as if it had been its own"


async def test_thoughts_may_be_both_shown_and_carried(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    _, response = await post(app, reasoning={"summary": "auto"}, **SEALED)
    thoughts = response["output"][0]
    assert thoughts["summary"] == [{"type": "summary_text", "text": "hm"}] and unseal(thoughts["encrypted_content"]) == "hm"
    history = [*response["output"], {"type": "function_call", "name": "now", "call_id": "c"}]
    await post(app, input=[{"content": "x"}, *history, {"type": "function_call_output", "call_id": "c", "output": "y"}])
    assert prompt_text(engine.requests[2]).count("hm") == 1, "they are read once"


async def test_what_another_server_has_sealed_says_nothing_here(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    items = [{"content": "x"}, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB="}, {"role": "assistant", "content": "y"}]
    status, reply = await post(make_app(engine), input=[*items, {"content": "z"}])
    assert status == 200, reply


async def test_thoughts_that_are_cut_are_carried_as_far_as_they_came(make_app: MakeApp) -> None:
    _, response = await post(make_app(), max_output_tokens=1, **SEALED)
    (thoughts,) = response["output"]
    assert (thoughts["status"], unseal(thoughts["encrypted_content"])) == ("incomplete", "h")


@given(st.text())
def test_what_is_sealed_is_read_again(thoughts: str) -> None:
    assert unseal(seal(thoughts)) == thoughts
    assert unseal(thoughts) is None or thoughts.startswith(seal("")[:8])

"""`/v1/responses`: the official client over real sockets, golden transcripts, stored responses, and every form of input."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import openai
import pytest
from quart import Quart

from ds4jax.errors import QueueFullError
from ds4jax.serving.engine.api import FinishReason
from ds4jax.serving.http.responses_sealed import seal
from ds4jax.serving.http.responses_store import ResponseNotFoundError, ResponseStore, StoredResponse
from ds4jax.text.chat import Message
from tests.http.conftest import MakeApp, MakeEngine, MakeServer, Server
from tests.http.fakes import ASSISTANT_ID, BOS_ID, END_THINK_ID, EOS_ID, THINK_ID, USER_ID, wait_until

RESPONSES = "/v1/responses"
SUMMARY = {"reasoning": {"summary": "auto"}}

# Ids and times are replaced, and the response object is checked apart. A token is a byte, and é has two.
GOLDEN = """\
{"type":"response.created","sequence_number":0,"response":"in_progress"}
{"type":"response.in_progress","sequence_number":1,"response":"in_progress"}
{"type":"response.output_item.added","sequence_number":2,"output_index":0,"item":{"id":"rs_ID","type":"reasoning","status":"in_progress","summary":[]}}
{"type":"response.reasoning_summary_part.added","sequence_number":3,"item_id":"rs_ID","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":""}}
{"type":"response.reasoning_summary_text.delta","sequence_number":4,"item_id":"rs_ID","output_index":0,"summary_index":0,"delta":"h"}
{"type":"response.reasoning_summary_text.delta","sequence_number":5,"item_id":"rs_ID","output_index":0,"summary_index":0,"delta":"m"}
{"type":"response.reasoning_summary_text.done","sequence_number":6,"item_id":"rs_ID","output_index":0,"summary_index":0,"text":"hm"}
{"type":"response.reasoning_summary_part.done","sequence_number":7,"item_id":"rs_ID","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":"hm"}}
{"type":"response.output_item.done","sequence_number":8,"output_index":0,"item":{"id":"rs_ID","type":"reasoning","status":"completed","summary":[{"type":"summary_text","text":"hm"}]}}
{"type":"response.output_item.added","sequence_number":9,"output_index":1,"item":{"id":"msg_ID","type":"message","status":"in_progress","role":"assistant","content":[]}}
{"type":"response.content_part.added","sequence_number":10,"item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}
{"type":"response.output_text.delta","sequence_number":11,"item_id":"msg_ID","output_index":1,"content_index":0,"delta":"h","logprobs":[]}
{"type":"response.output_text.delta","sequence_number":12,"item_id":"msg_ID","output_index":1,"content_index":0,"delta":"é","logprobs":[]}
{"type":"response.output_text.done","sequence_number":13,"item_id":"msg_ID","output_index":1,"content_index":0,"text":"hé","logprobs":[]}
{"type":"response.content_part.done","sequence_number":14,"item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"hé","annotations":[],"logprobs":[]}}
{"type":"response.output_item.done","sequence_number":15,"output_index":1,"item":{"id":"msg_ID","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"hé","annotations":[],"logprobs":[]}]}}
{"type":"response.completed","sequence_number":16,"response":"completed"}
"""  # noqa: E501


def sync_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def post(app: Quart, **body: Any) -> tuple[int, Any]:
    response = await app.test_client().post(RESPONSES, json={"input": "hello", **body})
    return response.status_code, await response.get_json()


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """Read a whole stream; every event is named by its type, and numbered."""
    reply = httpx.post(server.url + RESPONSES, json={"input": "hello", "stream": True, **body}, trust_env=False)
    assert reply.status_code == 200, reply.text
    found = []
    for frame in reply.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == len(found) - 1
    return found


# ------------------------------------------------------------ the official client
def test_a_response(make_server: MakeServer, make_engine: MakeEngine) -> None:
    with sync_client(make_server(make_engine(n_cached=3))) as client:
        response = client.responses.create(model="m", input="hello")
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.model) == ("completed", "hello", "m")
    assert [item.type for item in response.output] == ["message"], "nobody asked to see the reasoning"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (9, 8, 17)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_a_stream(make_server: MakeServer) -> None:
    with sync_client(make_server()) as client, client.responses.stream(model="m", input="hello", **SUMMARY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert (text, response.output_text) == ("hello", "hello")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].summary[0].text == "hm"  # type: ignore[union-attr]


async def test_async_response_and_stream(make_server: MakeServer) -> None:
    async with async_client(make_server()) as client:
        response = await client.responses.create(model="m", input="hello", reasoning={"effort": "none"})
        assert (response.output_text, response.usage and response.usage.output_tokens) == ("hello", 5)
        kinds = [event.type async for event in await client.responses.create(model="m", input="hello", stream=True)]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


def test_a_conversation_by_the_id_of_its_last_response(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with sync_client(make_server(engine)) as client:
        first = client.responses.create(model="m", input="one", instructions="first")
        with client.responses.stream(model="m", input="two", previous_response_id=first.id, instructions="second") as stream:
            second = stream.get_final_response()
        third = client.responses.create(model="m", input="three", previous_response_id=second.id)
        assert third.previous_response_id == second.id
        assert client.responses.retrieve(second.id).output_text == "two"
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.responses.create(model="m", input="four", previous_response_id=second.id)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    assert "send the whole conversation" in unknown.value.message
    # Instructions belong to one request alone.
    turns = [USER_ID, *b"one", ASSISTANT_ID, END_THINK_ID, *b"one", EOS_ID, USER_ID, *b"two", ASSISTANT_ID]
    assert engine.requests[2].prompt == (BOS_ID, *b"second", *turns, THINK_ID)
    assert engine.requests[3].prompt == (BOS_ID, *turns, END_THINK_ID, *b"two", EOS_ID, USER_ID, *b"three", ASSISTANT_ID, THINK_ID)


def test_errors_are_the_clients_own(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=30, fail_after=1)
    with sync_client(make_server(engine, strict_model=True)) as client:
        with pytest.raises(openai.BadRequestError) as overflow:
            client.responses.create(model="deepseek-v4-flash", input="x" * 30)
        assert (overflow.value.code, overflow.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.responses.create(model="gpt-4o", input="x")
        assert unknown.value.code == "model_not_found"
        failed = client.responses.create(model="deepseek-v4-flash", input="xy")
        assert failed.status == "failed" and failed.error is not None
        assert (failed.error.code, failed.error.message) == ("server_error", "batched decode failed: scripted")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(failed.id)
        engine.refuse = QueueFullError(16, retry_after_s=0)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="deepseek-v4-flash", input="x")


async def test_breaking_off_a_stream_frees_the_slot(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [97] * 1000, gate=threading.Semaphore(20))
    async with async_client(make_server(engine)) as client:
        stream = await client.responses.create(model="m", input="x", stream=True)
        async for event in stream:
            if event.type == "response.in_progress":
                break
        await stream.close()
    wait_until(lambda: bool(engine.finishes), "the request ends")
    assert (engine.finishes[0].reason, engine.cancels) == (FinishReason.CANCELLED, [1])


# ------------------------------------------------------------ transcripts
def test_the_transcript_of_a_stream(make_server: MakeServer) -> None:
    told = events(make_server(), input="hé", **SUMMARY)
    last = told[-1]["response"]
    for event in told:
        if "response" in event:
            event["response"] = event["response"]["status"]
    lines = "".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n" for event in told)
    assert re.sub(r"(rs|msg)_[0-9a-f]{24}", r"\1_ID", lines) == GOLDEN
    assert last["output"] == [told[8]["item"], told[15]["item"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": 10**30}},
        {"text": {"format": {"type": "text", "a": -(10**30)}}},
        {"text": {"format": {"type": "json_schema", "schema": {"type": "object", "default": 10**30}}}},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f", "a": 10**30}},
    ],
)
async def test_numbers_of_any_size_are_told_back_as_they_came(make_app: MakeApp, fields: dict[str, Any], stream: bool) -> None:
    body = {"input": "x", "stream": stream, "max_output_tokens": 3, **fields}
    response = await make_app().test_client().post("/v1/responses", data=json.dumps(body))
    text = await response.get_data(as_text=True)
    last = json.loads(text.strip().rpartition("data: ")[2])["response"] if stream else json.loads(text)
    assert response.status_code == 200
    if "tools" in fields:
        fields = {**fields, "tools": [{"description": None, "parameters": None, "strict": False, **fields["tools"][0]}]}
    elif fields.get("text", {}).get("format", {}).get("type") == "json_schema":
        fields = {"text": {"format": {"description": None, "strict": False, **fields["text"]["format"]}}}
    assert {name: last[name] for name in fields} == fields


async def test_a_response_has_every_member(make_app: MakeApp) -> None:
    fields = {"temperature": 0.5, "max_output_tokens": 20, "metadata": {"a": "b"}, "instructions": "be", "reasoning": {"effort": "none"}}
    _, response = await post(make_app(), model="m", **fields)
    assert response.pop("id").startswith("resp_")
    assert response["completed_at"] >= response["created_at"]
    del response["created_at"], response["completed_at"], response["output"], response["usage"]
    assert response == {
        "object": "response", "status": "completed", "error": None, "incomplete_details": None, "model": "m", "instructions": "be",
        "max_output_tokens": 20, "metadata": {"a": "b"}, "parallel_tool_calls": True, "previous_response_id": None,
        "reasoning": {"effort": "none", "summary": None}, "store": True, "temperature": 0.5, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled", "background": False, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "max_tool_calls": None, "prompt_cache_key": None, "safety_identifier": None, "service_tier": "default",
        "top_logprobs": 0,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("limit", "types"), [(1, ["reasoning"]), (5, ["reasoning", "message"])])
def test_a_reply_that_is_cut_is_incomplete(make_server: MakeServer, stream: bool, limit: int, types: list[str]) -> None:
    server = make_server()
    if stream:
        last = events(server, max_output_tokens=limit, **SUMMARY)[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = httpx.post(server.url + RESPONSES, json={"input": "hello", "max_tokens": limit, **SUMMARY}, trust_env=False).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in response["output"]] == types
    assert response["output"][-1]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message(make_server: MakeServer, make_engine: MakeEngine) -> None:
    told = events(make_server(make_engine(script=lambda request: [EOS_ID])), thinking=False)
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_failure_in_a_stream_is_a_failed_response(make_server: MakeServer, make_engine: MakeEngine) -> None:
    last = events(make_server(make_engine(fail_after=2)), thinking=False)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "batched decode failed: scripted"}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_the_response_opens_while_it_waits_and_silence_is_filled(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(0))
    engine.hold.set()
    server = make_server(engine, keepalive_s=0.02)
    seen = ""
    with (
        httpx.Client(trust_env=False) as client,
        client.stream("POST", server.url + RESPONSES, json={"input": "x", "stream": True}) as reply,
    ):
        for piece in reply.iter_text():
            seen += piece
            if ": keep-alive" in seen:
                engine.hold.clear()
                engine.gate.release(100)
    assert seen.startswith("event: response.created\n")
    assert seen.index("response.in_progress") < seen.index(": keep-alive\n\n") < seen.index("response.output_text.delta")
    assert "event: response.completed\n" in seen


# ------------------------------------------------------------ bodies
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "minimal"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": False}, False),
        ({"think": False}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"model": "deepseek-chat"}, False),
        ({"model": "deepseek-chat", "reasoning": {"effort": "low"}}, True),
        ({"model": "deepseek-chat", "reasoning": {"summary": "auto"}}, False),
    ],
)
async def test_every_spelling_of_the_thinking_switch(make_app: MakeApp, make_engine: MakeEngine, fields: Any, thinks: bool) -> None:
    engine = make_engine()
    status, _ = await post(make_app(engine), **fields)
    assert status == 200
    assert engine.requests[1].prompt[-1] == (THINK_ID if thinks else END_THINK_ID)


async def test_input_of_every_form(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "<think>"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"type": "compaction", "encrypted_content": "x"},
        "c",
    ]
    status, reply = await post(make_app(engine), input=items, instructions="I", thinking=False, truncation="auto", user="me")
    assert status == 200, reply
    assert engine.requests[1].prompt == (
        BOS_ID, *b"I\n\nD", USER_ID, *b"a<think>", ASSISTANT_ID, END_THINK_ID, *b"b", EOS_ID, USER_ID, *b"c", ASSISTANT_ID, END_THINK_ID,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "wizardry"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": ["a", {"content": [{"type": "input_image", "image_url": "x"}]}]}, "input[1].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "long"}}, "reasoning.generate_summary"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": [{"type": "reasoning", "encrypted_content": seal("hm")[:-1]}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "encrypted_content": seal("hmm")[:-4] + "AAAA"}]}, "input[0].encrypted_content"),
    ],
)
async def test_a_bad_field_is_named(make_app: MakeApp, fields: dict[str, Any], param: str) -> None:
    status, body = await post(make_app(), **fields)
    assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error")
    assert param in body["error"]["message"]


async def test_what_is_not_to_be_stored_is_not(make_app: MakeApp) -> None:
    app = make_app()
    _, response = await post(app, store=False)
    assert response["store"] is False
    status, body = await post(app, previous_response_id=response["id"])
    assert (status, body["error"]["code"]) == (404, "previous_response_not_found")


# ------------------------------------------------------------ the store
def stored(text: str) -> StoredResponse:
    return StoredResponse(b"", (Message("user", text),))


def test_the_oldest_responses_go_first() -> None:
    store = ResponseStore(most=2, most_characters=10)
    for name in ("a", "b", "c"):
        store.put(name, stored("12"))
    with pytest.raises(ResponseNotFoundError):
        store.get("a", "x")
    store.delete("b", "x")
    store.put("d", stored("12345678"))
    assert store.get("c", "x") and store.get("d", "x")
    store.put("e", stored("1"))  # 11 characters with c
    with pytest.raises(ResponseNotFoundError):
        store.get("c", "x")
    store.put("huge", stored("1" * 11))
    for name in ("d", "e", "huge"):
        with pytest.raises(ResponseNotFoundError):
            store.get(name, "x")

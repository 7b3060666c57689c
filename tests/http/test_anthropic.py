"""`/v1/messages`: the official client over real sockets, golden transcripts, and errors in the API's own shape."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import anthropic
import httpx
import pytest
from quart import Quart

from ds4jax.errors import EngineStoppedError, QueueFullError
from ds4jax.serving.engine.api import FinishReason
from tests.http.conftest import MakeApp, MakeEngine, MakeServer, Server
from tests.http.fakes import (
    ASSISTANT_ID,
    BOS_ID,
    END_THINK_ID,
    EOS_ID,
    THINK_ID,
    USER_ID,
    wait_until,
)

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]

# A token is a byte, and é has two.
GOLDEN = """\
event: message_start
data: {"type":"message_start","message":{"id":"ID","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":0}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"h"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"m"}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"ID"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"h"}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"é"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":6,"output_tokens_details":{"thinking_tokens":3}}}

event: message_stop
data: {"type":"message_stop"}

"""  # noqa: E501

# The thoughts are cut, so there is no answer: clients get an empty one.
GOLDEN_CUT = [
    "message_start",
    "content_block_start thinking",
    "content_block_delta thinking_delta",
    "content_block_delta signature_delta",
    "content_block_stop",
    "content_block_start text",
    "content_block_stop",
    "message_delta max_tokens",
    "message_stop",
]


def sync_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def async_client(server: Server) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)


async def post(app: Quart, path: str = MESSAGES, **body: Any) -> tuple[int, Any]:
    response = await app.test_client().post(path, json={"messages": HELLO, "max_tokens": 50, **body})
    return response.status_code, await response.get_json()


def transcript(server: Server, **body: Any) -> str:
    """Read a whole stream; ids are replaced."""
    reply = httpx.post(server.url + MESSAGES, json={"model": "m", "max_tokens": 50, "stream": True, **body}, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return re.sub(r"msg_[0-9a-f]{24}", "ID", reply.text)


def outline(text: str) -> list[str]:
    """Name each event of a stream, with what tells it from others of its type."""
    lines = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        detail = (
            event.get("content_block", {}).get("type") or event.get("delta", {}).get("type") or event.get("delta", {}).get("stop_reason")
        )
        lines.append(f"{event['type']} {detail}" if detail else event["type"])
    return lines


# ------------------------------------------------------------ the official client
def test_a_message(make_server: MakeServer, make_engine: MakeEngine) -> None:
    with sync_client(make_server(make_engine(n_cached=3))) as client:
        message = client.messages.create(model="m", max_tokens=50, messages=HELLO)
    thinking, text = message.content
    assert thinking.type == "thinking" and text.type == "text"
    assert (thinking.thinking, thinking.signature, text.text) == ("hm", message.id, "hello")
    assert message.id.startswith("msg_")
    assert (message.model, message.role, message.stop_reason, message.stop_sequence) == ("m", "assistant", "end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (6, 3, 0, 8)
    assert usage.output_tokens_details is not None and usage.output_tokens_details.thinking_tokens == 3


def test_a_stream(make_server: MakeServer) -> None:
    with sync_client(make_server()) as client, client.messages.stream(model="m", max_tokens=50, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "hello"
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.stop_reason, message.usage.output_tokens, message.usage.input_tokens) == ("end_turn", 8, 9)


async def test_async_message_and_stream(make_server: MakeServer) -> None:
    async with async_client(make_server()) as client:
        message = await client.messages.create(model="m", max_tokens=50, messages=HELLO, thinking={"type": "disabled"})
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello"}]
        async with client.messages.stream(model="m", max_tokens=50, messages=HELLO, thinking={"type": "disabled"}) as stream:
            assert "".join([text async for text in stream.text_stream]) == "hello"


def test_a_reply_can_be_sent_back(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with sync_client(make_server(engine)) as client:
        first = client.messages.create(model="m", max_tokens=50, messages=HELLO)
        again = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
        client.messages.create(model="m", max_tokens=50, messages=again)
    # Thoughts of earlier turns are dropped.
    assert engine.requests[2].prompt == (
        BOS_ID, USER_ID, *b"hello", ASSISTANT_ID, END_THINK_ID, *b"hello", EOS_ID, USER_ID, *b"more", ASSISTANT_ID, THINK_ID,
    )  # fmt: skip


def test_counting_tokens(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=20)
    with sync_client(make_server(engine)) as client:
        assert client.messages.count_tokens(model="m", messages=HELLO).input_tokens == 9
        # What does not fit is counted too.
        assert client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x" * 100}], system="ab").input_tokens == 106
    assert engine.requests == {}


def test_errors_are_the_clients_own(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=30, fail_after=1)
    with sync_client(make_server(engine, strict_model=True)) as client:

        def create(**changes: Any) -> Any:
            return client.messages.create(**{"model": "deepseek-v4-flash", "max_tokens": 5, "messages": HELLO, **changes})

        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 31 tokens > 29 maximum. This model's maximum context"):
            create(messages=[{"role": "user", "content": "x" * 27}])
        with pytest.raises(anthropic.BadRequestError, match="exceed context limit: 9 \\+ 25 > 30, decrease"):
            create(max_tokens=25)
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            create(model="claude")
        with pytest.raises(anthropic.InternalServerError, match="batched decode failed: scripted"):
            create()
        with pytest.raises(anthropic.APIStatusError, match="batched decode failed: scripted"):
            list(create(stream=True))
        engine.refuse = QueueFullError(16, retry_after_s=7)
        with pytest.raises(anthropic.RateLimitError) as full:
            create()
        assert full.value.response.headers["Retry-After"] == "7"


async def test_breaking_off_a_stream_frees_the_slot(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [97] * 1000, gate=threading.Semaphore(20))
    async with async_client(make_server(engine)) as client:
        stream = await client.messages.create(model="m", max_tokens=1000, messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
    wait_until(lambda: bool(engine.finishes), "the request ends")
    assert (engine.finishes[0].reason, engine.cancels) == (FinishReason.CANCELLED, [1])


# ------------------------------------------------------------ transcripts
def test_the_transcript_of_a_stream(make_server: MakeServer, make_engine: MakeEngine) -> None:
    assert transcript(make_server(make_engine(n_cached=2)), messages=[{"role": "user", "content": "hé"}]) == GOLDEN


def test_thoughts_without_an_answer(make_server: MakeServer) -> None:
    assert outline(transcript(make_server(), messages=HELLO, max_tokens=1)) == GOLDEN_CUT


def test_a_failure_in_a_stream_is_an_error_event_and_an_end(make_server: MakeServer, make_engine: MakeEngine) -> None:
    text = transcript(make_server(make_engine(fail_after=1)), messages=HELLO, thinking={"type": "disabled"})
    assert outline(text)[-2:] == ["error", "message_stop"]
    assert 'data: {"type":"error","error":{"type":"api_error","message":"batched decode failed: scripted"}}' in text


def test_silence_is_filled_with_comments_then_with_pings(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(gate=threading.Semaphore(0))
    engine.hold.set()
    server = make_server(engine, keepalive_s=0.02)
    body = {"model": "m", "max_tokens": 50, "stream": True, "messages": HELLO}
    seen = ""
    with httpx.Client(trust_env=False) as client, client.stream("POST", server.url + MESSAGES, json=body) as response:
        for piece in response.iter_text():
            seen += piece
            if ": keep-alive" in seen:
                assert "message_start" not in seen or not engine.hold.is_set()
                engine.hold.clear()  # out of the queue
            if "event: ping" in seen:
                engine.gate.release(100)
    assert seen.index(": keep-alive\n\n") < seen.index("event: message_start") < seen.index('event: ping\ndata: {"type":"ping"}\n\n')
    assert seen.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


# ------------------------------------------------------------ bodies
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": False}, False),
        ({"think": False}, False),
        ({"reasoning_effort": "none"}, False),
        ({"output_config": {"effort": "none"}}, False),
        ({"output_config": {"effort": "low"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"model": "deepseek-chat"}, False),
        ({"model": "deepseek-chat", "thinking": {"type": "enabled"}}, True),
        ({"model": "deepseek-chat", "output_config": {"effort": "high"}}, False),
    ],
)
async def test_every_spelling_of_the_thinking_switch(make_app: MakeApp, make_engine: MakeEngine, fields: Any, thinks: bool) -> None:
    engine = make_engine()
    status, _ = await post(make_app(engine), **fields)
    assert status == 200
    assert engine.requests[1].prompt[-1] == (THINK_ID if thinks else END_THINK_ID)
    assert engine.requests[1].stop_token_ids == ({EOS_ID} if thinks else {EOS_ID, THINK_ID, END_THINK_ID})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(make_app: MakeApp, make_server: MakeServer, stream: bool) -> None:
    fields = {"stop_sequences": ["nowhere", "ll"], "thinking": {"type": "disabled"}}
    if stream:
        text = transcript(make_server(), messages=HELLO, **fields)
        assert '"delta":{"stop_reason":"stop_sequence","stop_sequence":"ll"}' in text
        assert '"text":"e"' in text and '"text":"l"' not in text
    else:
        _, message = await post(make_app(), **fields)
        assert message["content"] == [{"type": "text", "text": "he"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "ll")


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("be kind", b"be kind"),
        ([{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}], b"one\ntwo"),
        ([{"type": "text", "text": "one\n"}, "two"], b"one\ntwo"),
        ([{"type": "text", "text": "x-anthropic-billing-header: a=b"}, {"type": "text", "text": "one"}], b"one"),
        ([{"type": "text", "text": "x-anthropic-billing-header: a=b"}], b""),
        ("", b""),
        (None, b""),
        ([], b""),
    ],
)
async def test_system_prompts_of_every_form(make_app: MakeApp, make_engine: MakeEngine, system: Any, text: bytes) -> None:
    engine = make_engine()
    await post(make_app(engine), system=system, thinking=False)
    assert engine.requests[1].prompt == (BOS_ID, *text, USER_ID, *b"hello", ASSISTANT_ID, END_THINK_ID)


async def test_messages_of_every_form(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "<think>"}]},
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    status, _ = await post(make_app(engine), messages=messages, thinking=False, metadata={"user_id": "me"}, betas=["x"])
    assert status == 200
    assert engine.requests[1].prompt == (
        BOS_ID, USER_ID, *b"a<think>\n\n<system-reminder>\nS\n</system-reminder>", ASSISTANT_ID, END_THINK_ID, *b"b", EOS_ID,
        USER_ID, *b"c", ASSISTANT_ID, END_THINK_ID,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ["a", {"type": "text"}]}]}, "messages[1].content[1]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_bad_field_is_named(make_app: MakeApp, path: str, fields: dict[str, Any], place: str) -> None:
    status, body = await post(make_app(), path, **fields)
    if path == COUNT and place in ("max_tokens", "temperature", "top_k", "stop_sequences") and status == 200:
        return  # what does not change the prompt is not looked at
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert place in body["error"]["message"]


async def test_every_status_has_a_type(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    client = make_app(engine, body_limit_bytes=300, strict_model=True).test_client()
    wanted = {
        (400, "invalid_request_error"): await client.post(MESSAGES, data=b"{"),
        (404, "not_found_error"): await client.post(COUNT, json={"messages": HELLO, "model": "claude"}),
        (405, "invalid_request_error"): await client.get(MESSAGES),
        (413, "request_too_large"): await client.post(MESSAGES, data=b" " * 301),
    }
    engine.refuse = EngineStoppedError("closed")
    wanted[503, "api_error"] = await client.post(MESSAGES, json={"messages": HELLO, "max_tokens": 5})
    for (status, kind), response in wanted.items():
        body = await response.get_json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    unknown = await (await client.get("/v1/messages/batches")).get_json()
    assert unknown["error"]["type"] == "not_found_error"


async def test_overflow_carries_its_sizes(make_app: MakeApp, make_engine: MakeEngine) -> None:
    status, body = await post(make_app(make_engine(n_ctx=9)))
    assert status == 400
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (9, 9)

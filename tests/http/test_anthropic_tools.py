"""Calls of tools through `/v1/messages`: golden transcripts, the official client, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import END_THINK_ID, EOS_ID, byte_tokenizer
from tests.http.test_anthropic import COUNT, MESSAGES, async_client, outline, post, sync_client, transcript
from tests.http.test_tools import ASK_NOW, BROKEN, BROKEN_LATE, CALL, PIECES, block, prompt_text, says, tokens_of
from tests.http.test_whole_and_streamed import events_of, message_of

HELLO: list[Any] = [{"role": "user", "content": "weather?"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "é",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
NOW: dict[str, Any] = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
TOOLS: list[Any] = [WEATHER, NOW]
FIELDS: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 500}

# A token is a byte, but for the tags that are special.
GOLDEN = """\
message_start
0 start {"type":"thinking","thinking":"","signature":""}
0 {"type":"thinking_delta","thinking":"h"}
0 {"type":"thinking_delta","thinking":"m"}
0 {"type":"signature_delta","signature":"ID"}
0 stop
1 start {"type":"text","text":""}
1 {"type":"text_delta","text":"O"}
1 {"type":"text_delta","text":"k"}
1 stop
2 start {"type":"tool_use","id":"ID","name":"weather","input":{}}
2 {"type":"input_json_delta","partial_json":"{"}
2 {"type":"input_json_delta","partial_json":"\\"city\\":\\""}
2 {"type":"input_json_delta","partial_json":"K"}
2 {"type":"input_json_delta","partial_json":"ö"}
2 {"type":"input_json_delta","partial_json":"l"}
2 {"type":"input_json_delta","partial_json":"n"}
2 {"type":"input_json_delta","partial_json":"\\""}
2 {"type":"input_json_delta","partial_json":"}"}
2 stop
3 start {"type":"tool_use","id":"ID","name":"now","input":{}}
3 {"type":"input_json_delta","partial_json":"{"}
3 {"type":"input_json_delta","partial_json":"}"}
3 stop
message_delta {"stop_reason":"tool_use","stop_sequence":null}
message_stop
"""


def lines_of(text: str) -> str:
    """Write each event of a stream in a line, without what every event of its kind has."""
    lines = []
    for event in events_of(text):
        kind = event["type"].removeprefix("content_block_")
        member = event.get("content_block") or event.get("delta")
        shown = "" if member is None else " " + json.dumps(member, ensure_ascii=False, separators=(",", ":"))
        index = event.get("index")
        lines.append(f"{kind}{shown}\n" if index is None else f"{index} {kind}{shown}\n".replace(" delta", "", 1))
    return re.sub("msg_[0-9a-f]{24}|toolu_[0-9a-f]{32}|ID", "ID", "".join(lines))


# ---------------------------------------------------------------- replies
def test_the_transcript_of_calls(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says(f"hm</think>Ok{block(CALL, ASK_NOW)} and more"))
    assert lines_of(transcript(make_server(engine), **FIELDS)) == GOLDEN


async def test_a_whole_reply(make_app: MakeApp, make_engine: MakeEngine) -> None:
    number = CALL.replace('string="true">Köln', 'string="false">123456789012345678901234.50')
    app = make_app(make_engine(script=says(f"hm</think>Ok{block(CALL, ASK_NOW)}", block(ASK_NOW), "</think>" + block(number))))
    _, message = await post(app, **FIELDS)
    ids = [part.pop("id") for part in message["content"] if part["type"] == "tool_use"]
    assert len(set(ids)) == 2 and all(re.fullmatch("toolu_[0-9a-f]{32}", id) for id in ids)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": message["id"]},
        {"type": "text", "text": "Ok"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    _, alone = await post(app, **FIELDS, thinking=False)
    assert [part["type"] for part in alone["content"]] == ["tool_use"]
    long = await app.test_client().post(MESSAGES, json=FIELDS)
    assert '"input":{"city":123456789012345678901234.50}' in await long.get_data(as_text=True)


# ---------------------------------------------------------------- requests
async def test_what_the_model_reads_of_tools(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says("</think>Hi"))
    app = make_app(engine)
    await post(app, **FIELDS, system="Be brief.")
    prompt = prompt_text(engine.requests[1])
    assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n")
    assert (
        '\n{"name":"weather","description":"é","parameters":{"type": "object"}}\n{"name":"now","parameters":{"type": "object"}}\n' in prompt
    )
    assert prompt.endswith("parameters.<｜User｜>weather?<｜Assistant｜><think>")
    _, counted = await post(app, COUNT, **FIELDS, system="Be brief.")
    assert counted == {"input_tokens": len(engine.requests[1].prompt)}


async def test_without_tools_calls_are_text(make_app: MakeApp, make_engine: MakeEngine) -> None:
    text = "Ok" + block(ASK_NOW)
    for fields in ({"tool_choice": {"type": "none"}}, {"tools": []}, {"tools": None, "tool_choice": {"type": "auto"}}):
        engine = make_engine(script=says(text))
        _, message = await post(make_app(engine), **{**FIELDS, **fields}, thinking=False)
        assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": text}], "end_turn")
        assert "## Tools" not in prompt_text(engine.requests[1])


@pytest.mark.parametrize(
    ("choice", "opening", "rest"),
    [
        ({"type": "any"}, "<｜DSML｜invoke", ' name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
        ({"type": "tool", "name": "now"}, '<｜DSML｜invoke name="now">\n', "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call(make_app: MakeApp, make_engine: MakeEngine, choice: Any, opening: str, rest: str, stream: bool) -> None:
    engine = make_engine(script=says(rest))
    response = await make_app(engine).test_client().post(MESSAGES, json={**FIELDS, "tool_choice": choice, "stream": stream})
    text = await response.get_data(as_text=True)
    assert prompt_text(engine.requests[1]).endswith(f"<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n{opening}")
    assert '"name":"now"' in text and '"stop_reason":"tool_use"' in text and '"type":"text"' not in text
    assert END_THINK_ID in engine.requests[1].stop_token_ids, "there is no reasoning"


@pytest.mark.parametrize("kind", ["auto", "any"])
async def test_one_call_at_a_time(make_app: MakeApp, make_engine: MakeEngine, kind: str) -> None:
    calls = block(CALL, ASK_NOW)
    engine = make_engine(script=says("</think>" + calls if kind == "auto" else calls.partition("<｜DSML｜invoke")[2]))
    _, message = await post(make_app(engine), **FIELDS, tool_choice={"type": kind, "disable_parallel_tool_use": True})
    assert [part["name"] for part in message["content"] if part["type"] == "tool_use"] == ["weather"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_bad_field_is_named(make_app: MakeApp, path: str, fields: dict[str, Any], place: str) -> None:
    status, body = await post(make_app(), path, **{**FIELDS, **fields})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith(f"{place}: ")


# ---------------------------------------------------------------- the history
async def test_thoughts_stay_while_tools_are_at_work(make_app: MakeApp, make_engine: MakeEngine) -> None:
    """And go once a conversation that has no tools has another turn of the user."""
    said = {"role": "assistant", "content": [{"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "a"}]}
    call = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
    called = {"role": "assistant", "content": [{"type": "thinking", "thinking": "q", "signature": ""}, call]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}, {"type": "text", "text": "so?"}]}
    engine = make_engine(script=says(*["</think>x"] * 3))
    app = make_app(engine)
    await post(app, messages=[*HELLO, said, *HELLO])
    await post(app, messages=[*HELLO, said, *HELLO], tools=TOOLS)
    await post(app, messages=[*HELLO, said, *HELLO, called, result])
    plain, with_tools, in_a_loop = (prompt_text(request) for request in engine.requests.values())
    turn = "<｜User｜>weather?<｜Assistant｜>"
    assert plain.endswith(f"{turn}</think>a<｜end▁of▁sentence｜>{turn}<think>")
    assert with_tools.endswith(f"{turn}<think>r</think>a<｜end▁of▁sentence｜>{turn}<think>")
    assert in_a_loop.endswith(
        f"{turn}<think>r</think>a<｜end▁of▁sentence｜>{turn}<think>q</think>{block(ASK_NOW)}<｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>noon</tool_result>\n\nso?<｜Assistant｜><think>"
    )


async def test_results_stand_in_the_order_of_their_calls(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says("</think>x"))
    calls = [{"type": "tool_use", "id": i, "name": "now", "input": {}} for i in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": i, "content": f"of {i}", "is_error": i == "b"} for i in ("b", "a")]
    status, _ = await post(
        make_app(engine), messages=[*HELLO, {"role": "assistant", "content": calls}, {"role": "user", "content": results}], tools=TOOLS
    )
    assert status == 200
    assert prompt_text(engine.requests[1]).endswith(
        "<｜User｜><tool_result>of a</tool_result>\n\n<tool_result>Error: of b</tool_result><｜Assistant｜><think>"
    )


# ---------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("broken", [BROKEN, BROKEN_LATE])
async def test_a_call_that_cannot_be_read_is_tried_again_once(make_app: MakeApp, make_engine: MakeEngine, broken: str) -> None:
    engine = make_engine(script=says(broken, f"oh</think>Now{block(ASK_NOW)}"))
    _, message = await post(make_app(engine), **FIELDS)
    assert [part["type"] for part in message["content"]] == ["thinking", "text", "tool_use"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("oh", "Now")
    assert "could not be read" in prompt_text(engine.requests[2])


async def test_a_second_failure_is_the_reply(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(script=says(BROKEN, BROKEN, BROKEN_LATE, BROKEN_LATE)))
    _, message = await post(app, **FIELDS)
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": BROKEN.removeprefix("</think>")}], "end_turn")
    status, body = await post(app, **FIELDS)
    assert (status, body["error"]["type"]) == (500, "api_error") and "cannot be read" in body["error"]["message"]


def test_a_stream_tells_what_cannot_be_read(make_server: MakeServer, make_engine: MakeEngine) -> None:
    server = make_server(make_engine(script=says(BROKEN, BROKEN_LATE)))
    message = message_of(list(events_of(transcript(server, **FIELDS))))
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": BROKEN.removeprefix("</think>")}], "end_turn")
    late = transcript(server, **FIELDS)
    assert outline(late)[-4:] == ["content_block_start tool_use", "content_block_delta input_json_delta", "error", "message_stop"]
    assert "cannot be read" in late


@pytest.mark.parametrize("stops", [[], ["öl"]])
def test_a_call_that_is_cut_never_ends(make_server: MakeServer, make_engine: MakeEngine, stops: list[str]) -> None:
    """A stream has told its beginning; what stands of its arguments is no JSON."""
    text = "</think>" + block(CALL)
    limit = 500 if stops else len(tokens_of(text.partition("öln")[0]))
    fields = {**FIELDS, "max_tokens": limit, "stop_sequences": stops}
    engine = make_engine(script=says(text, text))
    server = make_server(engine)
    streamed = message_of(list(events_of(transcript(server, **fields))))
    call, answer = streamed["content"]
    assert (call["type"], call["input"]) == ("tool_use", '{"city":"K') and answer == {"type": "text", "text": ""}
    with sync_client(server) as client:
        whole = client.messages.create(model="m", **fields)
    assert [part.to_dict() for part in whole.content] == [{"type": "text", "text": ""}]
    assert whole.stop_reason == streamed["stop_reason"] == ("stop_sequence" if stops else "max_tokens")


def test_a_stream_says_what_the_whole_reply_says(make_engine: MakeEngine) -> None:
    reply: list[int] = []
    app = create_app(make_engine(script=lambda request: [*reply, EOS_ID]), byte_tokenizer(), ServerConfig())

    async def both(body: dict[str, Any]) -> tuple[int, Any, str]:
        client = app.test_client()
        whole = await client.post(MESSAGES, json=body)
        stream = await client.post(MESSAGES, json={**body, "stream": True})
        return whole.status_code, await whole.get_json(), await stream.get_data(as_text=True)

    @given(text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join), thinking=st.booleans(), limit=st.integers(1, 80))
    @settings(max_examples=40, deadline=None)
    def check(text: str, thinking: bool, limit: int) -> None:
        reply[:] = tokens_of(text)
        status, whole, stream = asyncio.run(both({**FIELDS, "thinking": thinking, "max_tokens": limit}))
        if status == 500:
            assert outline(stream)[-2:] == ["error", "message_stop"]
            return
        streamed = message_of(list(events_of(stream)))
        assert whole["stop_reason"] == streamed["stop_reason"]
        assert comparable(whole["content"]) == comparable(streamed["content"])

    check()


def comparable(content: list[dict[str, Any]]) -> list[Any]:
    """Drop ids and calls that were cut, and read arguments that are text."""
    found: list[Any] = []
    for part in content:
        if part["type"] != "tool_use":
            found.append(part.get("text") or part.get("thinking"))
            continue
        try:
            arguments = json.loads(part["input"]) if isinstance(part["input"], str) else part["input"]
        except ValueError:
            continue
        found.append((part["name"], arguments))
    return found


# ---------------------------------------------------------------- the official client
def test_the_official_client_runs_tools(make_server: MakeServer, make_engine: MakeEngine) -> None:
    written = f"hm</think>Ok{block(CALL, ASK_NOW)}"
    engine = make_engine(script=says(written, "so</think>Rain."))
    messages = list(HELLO)
    with sync_client(make_server(engine)) as client:
        reply = client.messages.create(model="m", max_tokens=500, messages=messages, tools=TOOLS)
        calls = [part for part in reply.content if part.type == "tool_use"]
        assert reply.stop_reason == "tool_use" and [call.input for call in calls] == [{"city": "Köln"}, {}]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]},
        ]
        final = client.messages.create(model="m", max_tokens=500, messages=messages, tools=TOOLS)
    assert [part.type for part in final.content] == ["thinking", "text"] and final.stop_reason == "end_turn"
    prompt = [*engine.requests[1].prompt, *tokens_of(written)]
    assert list(engine.requests[2].prompt[: len(prompt)]) == prompt, "the cache of the slot fits"


def test_the_official_client_puts_a_stream_together(make_server: MakeServer, make_engine: MakeEngine) -> None:
    written = f"hm</think>Ok{block(CALL, ASK_NOW)}"
    engine = make_engine(script=says(written, "</think>Rain."))
    with sync_client(make_server(engine)) as client:
        with client.messages.stream(model="m", max_tokens=500, messages=HELLO, tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
        calls = [part for part in message.content if part.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Köln"}), ("now", {})]
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]} for call in calls]
        history: Any = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        with client.messages.stream(model="m", max_tokens=500, messages=history, tools=TOOLS) as stream:
            assert "".join(stream.text_stream) == "Rain."
    prompt = [*engine.requests[1].prompt, *tokens_of(written)]
    assert list(engine.requests[2].prompt[: len(prompt)]) == prompt


async def test_the_official_client_async(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says(' name="weather">\n</｜DSML｜invoke>', BROKEN_LATE))
    async with async_client(make_server(engine)) as client:
        reply = await client.messages.create(model="m", max_tokens=500, messages=HELLO, tools=TOOLS, tool_choice={"type": "any"})
        assert [(part.name, part.input) for part in reply.content if part.type == "tool_use"] == [("weather", {})]
        async with client.messages.stream(model="m", max_tokens=500, messages=HELLO, tools=TOOLS) as stream:
            with pytest.raises(anthropic.APIStatusError, match="cannot be read"):
                await stream.get_final_message()

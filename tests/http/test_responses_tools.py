"""Calls of tools through `/v1/responses`: golden transcripts, the official client, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from ds4jax.serving.http.responses_thoughts import HiddenThoughts
from ds4jax.serving.http.tool_use import NO_IMAGE
from ds4jax.text.chat import Message
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import END_THINK_ID, EOS_ID, byte_tokenizer
from tests.http.test_responses import RESPONSES, SUMMARY, async_client, events, post, sync_client
from tests.http.test_tools import ASK_NOW, BROKEN, BROKEN_LATE, CALL, PIECES, block, prompt_text, says, tokens_of
from tests.http.test_whole_and_streamed import events_of, response_of, without_ids

WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "é", "parameters": {"type": "object"}, "strict": False}
NOW: dict[str, Any] = {"type": "function", "name": "now"}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TOOLS: list[Any] = [WEATHER, NOW]
FIELDS: dict[str, Any] = {"input": "weather?", "tools": TOOLS, "max_output_tokens": 500}
PATCHED = CALL.replace("weather", "patch").replace('"city"', '"input"').replace("Köln", '*** "x"')

# A token is a byte, but for the tags that are special. Ids are replaced, and the response objects are checked apart.
GOLDEN = """\
{"type":"created","sequence_number":0,"response":"in_progress"}
{"type":"in_progress","sequence_number":1,"response":"in_progress"}
{"type":"output_item.added","sequence_number":2,"output_index":0,"item":{"id":"rs_ID","type":"reasoning","status":"in_progress","summary":[]}}
{"type":"reasoning_summary_part.added","sequence_number":3,"item_id":"rs_ID","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":""}}
{"type":"reasoning_summary_text.delta","sequence_number":4,"item_id":"rs_ID","output_index":0,"summary_index":0,"delta":"h"}
{"type":"reasoning_summary_text.done","sequence_number":5,"item_id":"rs_ID","output_index":0,"summary_index":0,"text":"h"}
{"type":"reasoning_summary_part.done","sequence_number":6,"item_id":"rs_ID","output_index":0,"summary_index":0,"part":{"type":"summary_text","text":"h"}}
{"type":"output_item.done","sequence_number":7,"output_index":0,"item":{"id":"rs_ID","type":"reasoning","status":"completed","summary":[{"type":"summary_text","text":"h"}]}}
{"type":"output_item.added","sequence_number":8,"output_index":1,"item":{"id":"msg_ID","type":"message","status":"in_progress","role":"assistant","content":[]}}
{"type":"content_part.added","sequence_number":9,"item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}
{"type":"output_text.delta","sequence_number":10,"item_id":"msg_ID","output_index":1,"content_index":0,"delta":"O","logprobs":[]}
{"type":"output_text.done","sequence_number":11,"item_id":"msg_ID","output_index":1,"content_index":0,"text":"O","logprobs":[]}
{"type":"content_part.done","sequence_number":12,"item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"O","annotations":[],"logprobs":[]}}
{"type":"output_item.done","sequence_number":13,"output_index":1,"item":{"id":"msg_ID","type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"O","annotations":[],"logprobs":[]}]}}
{"type":"output_item.added","sequence_number":14,"output_index":2,"item":{"id":"fc_ID","type":"function_call","status":"in_progress","call_id":"call_ID","name":"weather","arguments":""}}
{"type":"function_call_arguments.delta","sequence_number":15,"item_id":"fc_ID","output_index":2,"delta":"{"}
{"type":"function_call_arguments.delta","sequence_number":16,"item_id":"fc_ID","output_index":2,"delta":"\\"city\\":\\""}
{"type":"function_call_arguments.delta","sequence_number":17,"item_id":"fc_ID","output_index":2,"delta":"K"}
{"type":"function_call_arguments.delta","sequence_number":18,"item_id":"fc_ID","output_index":2,"delta":"ö"}
{"type":"function_call_arguments.delta","sequence_number":19,"item_id":"fc_ID","output_index":2,"delta":"l"}
{"type":"function_call_arguments.delta","sequence_number":20,"item_id":"fc_ID","output_index":2,"delta":"n"}
{"type":"function_call_arguments.delta","sequence_number":21,"item_id":"fc_ID","output_index":2,"delta":"\\""}
{"type":"function_call_arguments.delta","sequence_number":22,"item_id":"fc_ID","output_index":2,"delta":"}"}
{"type":"function_call_arguments.done","sequence_number":23,"item_id":"fc_ID","output_index":2,"name":"weather","arguments":"{\\"city\\":\\"Köln\\"}"}
{"type":"output_item.done","sequence_number":24,"output_index":2,"item":{"id":"fc_ID","type":"function_call","status":"completed","call_id":"call_ID","name":"weather","arguments":"{\\"city\\":\\"Köln\\"}"}}
{"type":"output_item.added","sequence_number":25,"output_index":3,"item":{"id":"fc_ID","type":"function_call","status":"in_progress","call_id":"call_ID","name":"now","arguments":""}}
{"type":"function_call_arguments.delta","sequence_number":26,"item_id":"fc_ID","output_index":3,"delta":"{"}
{"type":"function_call_arguments.delta","sequence_number":27,"item_id":"fc_ID","output_index":3,"delta":"}"}
{"type":"function_call_arguments.done","sequence_number":28,"item_id":"fc_ID","output_index":3,"name":"now","arguments":"{}"}
{"type":"output_item.done","sequence_number":29,"output_index":3,"item":{"id":"fc_ID","type":"function_call","status":"completed","call_id":"call_ID","name":"now","arguments":"{}"}}
{"type":"completed","sequence_number":30,"response":"completed"}
"""  # noqa: E501

GOLDEN_CUSTOM = """\
{"type":"output_item.added","sequence_number":2,"output_index":0,"item":{"id":"ctc_ID","type":"custom_tool_call","status":"in_progress","call_id":"call_ID","name":"patch","input":""}}
{"type":"custom_tool_call_input.delta","sequence_number":3,"item_id":"ctc_ID","output_index":0,"delta":"*** \\"x\\""}
{"type":"custom_tool_call_input.done","sequence_number":4,"item_id":"ctc_ID","output_index":0,"input":"*** \\"x\\""}
{"type":"output_item.done","sequence_number":5,"output_index":0,"item":{"id":"ctc_ID","type":"custom_tool_call","status":"completed","call_id":"call_ID","name":"patch","input":"*** \\"x\\""}}
{"type":"completed","sequence_number":6,"response":"completed"}
"""  # noqa: E501


def lines_of(told: list[dict[str, Any]]) -> str:
    """Write each event in a line; what is told of the whole response is its status."""
    lines = []
    for event in told:
        shown = {**event, "type": event["type"].removeprefix("response.")}
        if "response" in event:
            shown["response"] = event["response"]["status"]
        lines.append(json.dumps(shown, separators=(",", ":"), ensure_ascii=False) + "\n")
    return re.sub("(rs|msg|fc|ctc)_[0-9a-f]{24}", r"\1_ID", re.sub("call_[0-9a-f]{32}", "call_ID", "".join(lines)))


def types_of(told: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


# ---------------------------------------------------------------- replies
def test_the_transcript_of_calls(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says(f"h</think>O{block(CALL, ASK_NOW)} and more"))
    told = events(make_server(engine), **FIELDS, **SUMMARY)
    assert lines_of(told) == GOLDEN
    response = told[-1]["response"]
    assert response["output"] == [event["item"] for event in told if event["type"] == "response.output_item.done"]
    told_back = [{"description": None, "parameters": None, "strict": False, **tool} for tool in TOOLS]
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == (told_back, "auto", True)


def test_the_transcript_of_free_text(make_server: MakeServer, make_engine: MakeEngine) -> None:
    told = events(make_server(make_engine(script=says("hm</think>" + block(PATCHED)))), input="go", tools=[PATCH])
    assert lines_of(told[2:]) == GOLDEN_CUSTOM


async def test_a_whole_response(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(script=says(f"hm</think>Ok{block(CALL, ASK_NOW)}")))
    _, response = await post(app, **FIELDS, parallel_tool_calls=True, tool_choice="auto")
    message, *calls = response["output"]
    assert (response["status"], message["type"], message["content"][0]["text"]) == ("completed", "message", "Ok")
    assert [(call["type"], call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("function_call", "weather", '{"city":"Köln"}', "completed"),
        ("function_call", "now", "{}", "completed"),
    ]
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    kept = await (await app.test_client().get(f"{RESPONSES}/{response['id']}")).get_json()
    assert kept == response


async def test_a_namespace_is_part_of_the_name_for_the_model_alone(make_app: MakeApp, make_engine: MakeEngine) -> None:
    written = ASK_NOW.replace("now", "time__now") + PATCHED.replace("patch", "time__patch") + ASK_NOW
    engine = make_engine(script=says("</think>" + block(written), "</think>x"))
    app = make_app(engine)
    tools = [{"type": "namespace", "name": "time__", "description": "t", "tools": [NOW, PATCH]}, NOW]
    _, response = await post(app, **{**FIELDS, "tools": tools})
    now, patch, bare = response["output"]
    assert (now["namespace"], now["name"], now["type"]) == ("time__", "now", "function_call")
    assert (patch["namespace"], patch["name"], patch["type"]) == ("time__", "patch", "custom_tool_call")
    assert bare["name"] == "now" and "namespace" not in bare
    assert '\n{"name":"time__now"}\n{"name":"time__patch",' in prompt_text(engine.requests[1])
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "1"} for item in response["output"]]
    results[1]["type"] = "custom_tool_call_output"
    status, _ = await post(app, input=["weather?", *response["output"], *results], tools=tools)
    assert status == 200 and block(written) in prompt_text(engine.requests[2])


async def test_a_search_for_tools(make_app: MakeApp, make_engine: MakeEngine) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": {"type": "object"}}
    asked = CALL.replace("weather", "tool_search")
    engine = make_engine(script=says("</think>" + block(asked), "</think>" + block(ASK_NOW.replace("now", "time__now"))))
    app = make_app(engine)
    _, first = await post(app, **{**FIELDS, "tools": [search]})
    (call,) = first["output"]
    assert (call["type"], call["execution"], call["arguments"]) == ("tool_search_call", "client", {"city": "Köln"})
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "status": "completed",
        "execution": "client",
        "tools": [{"type": "namespace", "name": "time__", "tools": [{**NOW, "defer_loading": True}]}],
    }
    _, second = await post(app, input=[found], tools=[search], previous_response_id=first["id"])
    assert (second["output"][0]["namespace"], second["output"][0]["name"]) == ("time__", "now")
    ends = '<tool_result>You can call these tools too:\n{"name":"time__now"}</tool_result><｜Assistant｜><think>'
    assert prompt_text(engine.requests[2]).endswith(ends)
    written = [*engine.requests[1].prompt, *tokens_of("</think>" + block(asked))]
    assert list(engine.requests[2].prompt[: len(written)]) == written, "what was found changes nothing before it"


async def test_other_arguments_than_free_text(make_app: MakeApp, make_engine: MakeEngine) -> None:
    surrogate = '<｜DSML｜invoke name="patch"><｜DSML｜parameter name="input" string="false">"\\ud800"</｜DSML｜parameter></｜DSML｜invoke>'
    engine = make_engine(script=says("</think>" + block(CALL.replace("weather", "patch"), surrogate)))
    _, response = await post(make_app(engine), input="go", tools=[PATCH])
    assert [item["input"] for item in response["output"]] == ['{"city":"Köln"}', '{"input":"\\ud800"}']


# ---------------------------------------------------------------- requests
async def test_what_the_model_reads_of_tools(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says("</think>Hi"))
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "web_search_preview_2025_03_11"}, {"type": "image_generation"}]
    _, response = await post(make_app(engine), instructions="Be brief.", input="go", tools=[*hosted, WEATHER, NOW, PATCH])
    prompt = prompt_text(engine.requests[1])
    assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n")
    assert (
        '\n{"name":"weather","description":"é","parameters":{"type": "object"}}\n{"name":"now"}\n{"name":"patch",'
        '"description":"Edit files.\\n\\n`input` has to follow this grammar (lark):\\nstart: /.+/","parameters":{"type":"object",' in prompt
    )
    assert "web_search" not in prompt and "image_generation" not in prompt, "a model that is not told of them does without"
    assert response["tools"][0] == hosted[0], "the response repeats what was asked"


async def test_without_tools_calls_are_text(make_app: MakeApp, make_engine: MakeEngine) -> None:
    text = "Ok" + block(ASK_NOW)
    for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}, {"tools": [{"type": "web_search"}]}):
        engine = make_engine(script=says(text))
        _, response = await post(make_app(engine), **{**FIELDS, **fields}, thinking=False)
        assert [item["content"][0]["text"] for item in response["output"]] == [text]
        assert "## Tools" not in prompt_text(engine.requests[1])


@pytest.mark.parametrize(
    ("choice", "opening", "rest"),
    [
        ("required", "<｜DSML｜invoke", ' name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
        ({"type": "function", "name": "now"}, '<｜DSML｜invoke name="now">\n', "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
        ({"type": "custom", "name": "now"}, '<｜DSML｜invoke name="now">\n', "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
    ],
)
async def test_a_forced_call(make_server: MakeServer, make_engine: MakeEngine, choice: Any, opening: str, rest: str) -> None:
    engine = make_engine(script=says(rest))
    response = events(make_server(engine), **FIELDS, tool_choice=choice)[-1]["response"]
    assert prompt_text(engine.requests[1]).endswith(f"<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n{opening}")
    assert [(item["type"], item["name"]) for item in response["output"]] == [("function_call", "now")]
    assert response["tool_choice"] == choice
    assert END_THINK_ID in engine.requests[1].stop_token_ids, "there is no reasoning"


async def test_one_call_at_a_time(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says("</think>" + block(CALL, ASK_NOW)))
    _, response = await post(make_app(engine), **FIELDS, parallel_tool_calls=False)
    assert [item["name"] for item in response["output"]] == ["weather"] and response["parallel_tool_calls"] is False


SEARCHED = {"type": "tool_search_call", "call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [NOW, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": [NOW]}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [SEARCHED, {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "x"}]}]}, "input[1].tools[0].type"),
    ],
)
async def test_a_bad_field_is_named(make_app: MakeApp, fields: dict[str, Any], param: str) -> None:
    status, body = await post(make_app(), **{**FIELDS, **fields})
    assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error")
    assert body["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}], "a" + NO_IMAGE),
        ([{"id": 1}], '[{"id":1}]'),
        ([], ""),
        (None, ""),
    ],
)
async def test_what_a_tool_gave(make_app: MakeApp, make_engine: MakeEngine, output: Any, text: str) -> None:
    engine = make_engine(script=says("</think>x"))
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    status, _ = await post(make_app(engine), input=["a", call, {"type": "function_call_output", "call_id": "c", "output": output}])
    assert status == 200
    assert prompt_text(engine.requests[1]).endswith(f"<tool_result>{text}</tool_result><｜Assistant｜><think>")


# ---------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("broken", [BROKEN, BROKEN_LATE])
async def test_a_call_that_cannot_be_read_is_tried_again_once(make_app: MakeApp, make_engine: MakeEngine, broken: str) -> None:
    engine = make_engine(script=says("no" + broken, f"oh</think>Now{block(ASK_NOW)}", "</think>x"))
    app = make_app(engine)
    _, response = await post(app, **FIELDS, **SUMMARY)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][0]["summary"][0]["text"] == "oh"
    result = {"type": "function_call_output", "call_id": response["output"][2]["call_id"], "output": "noon"}
    await post(app, input=[result], previous_response_id=response["id"], tools=TOOLS)
    assert prompt_text(engine.requests[3]).endswith(
        f"<think>oh</think>Now{block(ASK_NOW)}<｜end▁of▁sentence｜><｜User｜><tool_result>noon</tool_result><｜Assistant｜><think>"
    ), "what could not be read is forgotten"


def test_a_stream_tells_what_cannot_be_read(make_server: MakeServer, make_engine: MakeEngine) -> None:
    server = make_server(make_engine(script=says(BROKEN, BROKEN_LATE)))
    response = response_of(events(server, **FIELDS))
    assert [item["content"][0]["text"] for item in response["output"]] == [BROKEN.removeprefix("</think>")]
    late = events(server, **FIELDS)
    assert types_of(late)[-4:] == ["output_item.added", "function_call_arguments.delta", "output_item.done", "failed"]
    assert (late[-2]["item"]["status"], late[-2]["item"]["arguments"]) == ("incomplete", "{")
    assert "cannot be read" in response_of(late)["error"]["message"]


@pytest.mark.parametrize(
    ("call", "before", "told"),
    [
        (CALL, "öln", {"type": "function_call", "name": "weather", "arguments": '{"city":"K'}),
        (PATCHED, "x", {"type": "custom_tool_call", "name": "patch", "input": ""}),
        (CALL.replace("weather", "tool_search"), "öln", {"type": "tool_search_call", "execution": "client", "arguments": {}}),
    ],
)
@pytest.mark.parametrize("by", ["length", "stop string"])
def test_a_call_that_is_cut_is_incomplete(
    make_server: MakeServer, make_engine: MakeEngine, call: str, before: str, told: dict[str, Any], by: str
) -> None:
    """Streamed or not; nothing says that it is done, and nobody has to answer it."""
    text = "</think>" + block(ASK_NOW, call)
    tools: Any = [WEATHER, NOW, PATCH, {"type": "tool_search", "execution": "client"}]
    limit, stop = (len(tokens_of(text.partition(before)[0])), "") if by == "length" else (500, before)
    server = make_server(make_engine(script=says(text, text, "</think>x")))
    streamed = events(server, input="go", tools=tools, max_output_tokens=limit, stop=stop)
    assert sum(event["type"].endswith(("arguments.done", "input.done")) for event in streamed) == 1, "of the first call"
    with sync_client(server) as client:
        whole = client.responses.create(model="m", input="go", tools=tools, max_output_tokens=limit, extra_body={"stop": stop})
        assert without_ids(whole.to_dict()["output"]) == without_ids(response_of(streamed)["output"])
        assert whole.status == streamed[-1]["response"]["status"] == ("incomplete" if by == "length" else "completed")
        first, cut, *_ = without_ids(whole.to_dict()["output"])
        assert (first["status"], cut) == ("completed", {**told, "status": "incomplete"})
        assert client.responses.create(model="m", input="so?", previous_response_id=whole.id).output_text == "x"


def test_a_stream_says_what_the_whole_response_says(make_engine: MakeEngine) -> None:
    reply: list[int] = []
    app = create_app(make_engine(script=lambda request: [*reply, EOS_ID]), byte_tokenizer(), ServerConfig())

    async def both(body: dict[str, Any]) -> tuple[Any, Any]:
        client = app.test_client()
        whole = await (await client.post(RESPONSES, json=body)).get_json()
        stream = await (await client.post(RESPONSES, json={**body, "stream": True})).get_data(as_text=True)
        return whole, response_of(list(events_of(stream)))

    @given(
        text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
        thinking=st.booleans(),
        limit=st.integers(1, 80),
        kind=st.sampled_from([NOW, PATCH]),
    )
    @settings(max_examples=40, deadline=None)
    def check(text: str, thinking: bool, limit: int, kind: dict[str, Any]) -> None:
        reply[:] = tokens_of(text)
        tools = [{**kind, "name": "f"}]
        whole, streamed = asyncio.run(both({"input": "a", "tools": tools, "thinking": thinking, "max_output_tokens": limit, **SUMMARY}))
        del whole["usage"], streamed["usage"]  # a second try is paid for
        assert without_ids(whole) == without_ids(streamed)

    check()


# ---------------------------------------------------------------- the official client
def test_the_official_client_runs_tools(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """By sending the conversation again, as it does that stores nothing here."""
    written = f"hm</think>Ok{block(CALL, ASK_NOW)}"
    engine = make_engine(script=says(written, "so</think>Rain."))
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    with sync_client(make_server(engine)) as client:
        reply = client.responses.create(model="m", input=history, tools=TOOLS, store=False, reasoning={"summary": "auto"})
        history += [item.to_dict() for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}, {}]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        final = client.responses.create(model="m", input=history, tools=TOOLS, store=False)
    assert final.output_text == "Rain."
    prompt = [*engine.requests[1].prompt, *tokens_of(written)]
    assert list(engine.requests[2].prompt[: len(prompt)]) == prompt, "the cache of the slot fits"


def test_thoughts_that_were_not_shown_are_not_lost(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """Agents keep conversations themselves, and many never ask to see thoughts."""
    turns = [f"hm</think>Ok{block(CALL)}", "so</think>Rain.", "er</think>Bye."]
    engine = make_engine(script=says(*turns, *turns))
    server = make_server(engine)
    with sync_client(server) as client:

        def ask(history: list[Any], **fields: Any) -> list[Any]:
            reply = client.responses.create(model="m", input=history, tools=TOOLS, store=False, **fields)
            return [item.to_dict() for item in reply.output if item.type != "reasoning"]

        history: list[Any] = [{"role": "user", "content": "weather?"}]
        history += ask(history)
        history.append({"type": "function_call_output", "call_id": history[-1]["call_id"], "output": "rain"})
        history += ask(history)
        history.append({"role": "user", "content": "bye"})
        ask(history)
        first, _, last = (request.prompt for request in engine.requests.values())
        assert prompt_text(engine.requests[3]).count("<think>") == 3
        written = [*first, *tokens_of(turns[0])]
        assert list(last[: len(written)]) == written and "<think>so</think>Rain." in prompt_text(engine.requests[3])
        # What a client has changed, or was shown and does not send, is left as it is.
        engine.script = says("</think>x", turns[0], "</think>x")
        history[0]["content"] = "weather!"
        ask(history)
        assert prompt_text(engine.requests[4]).count("<think></think>") == 2
        shown = [{"role": "user", "content": "rain?"}]
        shown += ask(shown, reasoning={"summary": "auto"})
        ask([*shown, {"type": "function_call_output", "call_id": shown[-1]["call_id"], "output": "rain"}])
        assert "<think></think>Ok" in prompt_text(engine.requests[6])


def test_the_oldest_thoughts_go_first() -> None:
    hidden = HiddenThoughts(most_characters=10)
    turns = [[Message("user", name), Message("assistant", "x", reasoning="12345")] for name in "abc"]
    asked = [[turn[0], replace(turn[1], reasoning=None)] for turn in turns]
    hidden.remember("be", turns[0])
    hidden.remember("be", turns[1])
    hidden.remember("be", turns[0])  # twice is once
    assert hidden.recall("be", asked[1]) == turns[1]
    assert hidden.recall("be", asked[0]) == turns[0]
    hidden.remember("be", turns[2])
    assert [hidden.recall("be", turn) == whole for turn, whole in zip(asked, turns, strict=True)] == [True, False, True]
    hidden.remember("be", [Message("user", "d"), Message("assistant", "x")])
    assert hidden.recall("be", [*asked[2], *asked[0]]) == [*turns[2], *asked[0]], "it depends on all that stands before"
    assert hidden.recall(None, asked[0]) == asked[0], "and on the instructions"


def test_the_official_client_continues_a_stored_response(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """Thoughts that nobody asked to see are kept too."""
    written = f"hm</think>{block(CALL, ASK_NOW)}"
    engine = make_engine(script=says(written, "so</think>Rain.", "</think>Bye."))
    with sync_client(make_server(engine)) as client:
        with client.responses.stream(model="m", input="weather?", tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_response()
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
        assert [item.type for item in first.output] == ["function_call"] * 2
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = client.responses.create(model="m", input=results, tools=TOOLS, previous_response_id=first.id)
        assert second.output_text == "Rain."
        third = client.responses.create(model="m", input="bye", tools=TOOLS, previous_response_id=second.id)
        assert third.output_text == "Bye."
        with pytest.raises(openai.BadRequestError, match="no call before it has"):
            client.responses.create(model="m", input=results, tools=TOOLS)
    prompt = [*engine.requests[1].prompt, *tokens_of(written)]
    assert list(engine.requests[2].prompt[: len(prompt)]) == prompt
    assert list(engine.requests[3].prompt[: len(engine.requests[2].prompt)]) == list(engine.requests[2].prompt)


async def test_the_official_client_async(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=says("hm</think>" + block(PATCHED), "</think>Done."))
    tools: Any = [PATCH, {"type": "web_search"}]
    async with async_client(make_server(engine)) as client:
        stream = await client.responses.create(model="m", input="fix it", tools=tools, stream=True)
        told = [event async for event in stream]
        assert told[-1].type == "response.completed"
        (call,) = told[-1].response.output
        assert call.type == "custom_tool_call" and (call.name, call.input) == ("patch", '*** "x"')
        result: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}]
        done = await client.responses.create(model="m", input=result, tools=tools, previous_response_id=told[-1].response.id)
    assert done.output_text == "Done."
    assert prompt_text(engine.requests[2]).endswith(
        f"hm</think>{block(PATCHED)}<｜end▁of▁sentence｜><｜User｜><tool_result>ok</tool_result><｜Assistant｜><think>"
    )

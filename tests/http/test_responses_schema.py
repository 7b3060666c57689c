"""Every event and object of `/v1/responses` is one that its published schemas know: OpenResponses', and those of OpenAI's client."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openresponses_types.types as published
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError
from quart import Quart

from tests.http.conftest import MakeApp, MakeEngine
from tests.http.test_responses import RESPONSES
from tests.http.test_responses_tools import PATCH, PATCHED, TOOLS
from tests.http.test_tools import ASK_NOW, BROKEN_LATE, CALL, block, says
from tests.http.test_whole_and_streamed import events_of

OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
EVERYTHING = {
    "model": "m", "instructions": "be", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1,
    "frequency_penalty": -1, "parallel_tool_calls": False, "max_output_tokens": 30, "top_logprobs": 2, "prompt_cache_key": "k",
    "safety_identifier": "s", "store": False, "truncation": "auto", "service_tier": "auto", "max_tool_calls": 3,
    "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
}  # fmt: skip

NAMED = {"type": "function", "name": "weather"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("hm</think>hé", {}),
    "every field": ("hm</think>hé", EVERYTHING),
    "thoughts shown": ("hm</think>hé", {"reasoning": {"summary": "detailed"}}),
    "thoughts carried": ("hm</think>hé", {"include": ["reasoning.encrypted_content"]}),
    "no thoughts": ("hé", {"reasoning": {"effort": "none"}}),
    "nothing": ("", {"thinking": False}),
    "calls": (f"hm</think>Ok{block(CALL, ASK_NOW)}", {"tools": TOOLS, "include": EVERYTHING["include"]}),
    "a named call": (CALL.partition("\n")[2] + "</｜DSML｜tool_calls>", {"tools": TOOLS, "tool_choice": NAMED}),
    "a required call": (CALL + "</｜DSML｜tool_calls>", {"tools": TOOLS, "tool_choice": "required"}),
    "structured": ('hm</think>{"a": 1}', {"text": {"format": FORMAT}}),
    "any object": ('hm</think>{"a": 1}', {"text": {"format": {"type": "json_object"}}}),
    "cut thoughts": ("hm</think>hé", {"max_output_tokens": 1, "reasoning": {"summary": "auto"}, "include": EVERYTHING["include"]}),
    "a cut answer": ("hm</think>hello", {"max_output_tokens": 5}),
    "a cut call": (f"</think>{block(CALL)}", {"tools": TOOLS, "max_output_tokens": 75}),
    "a broken call": (f"</think>{block(BROKEN_LATE)}", {"tools": TOOLS}),
}  # fmt: skip


@cache
def event_schemas() -> dict[str, type[BaseModel]]:
    """The schema of each type of event: `XStreamingEvent` has one value of `type`."""
    models = [model for name, model in vars(published).items() if name.endswith("StreamingEvent")]
    return {next(iter(model.model_fields["type"].annotation)).value: model for model in models}


def with_published_formats(value: Any) -> Any:
    """Replace the schema of a format by null, the one value that the published schema of a response has for it."""
    if isinstance(value, dict):
        is_format = value.get("type") == "json_schema"
        return {k: None if is_format and k == "schema" else with_published_formats(v) for k, v in value.items()}
    return [with_published_formats(item) for item in value] if isinstance(value, list) else value


async def both(app: Quart, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    client = app.test_client()
    whole = await client.post(RESPONSES, json={"input": "go", **body})
    stream = await client.post(RESPONSES, json={"input": "go", **body, "stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200), await whole.get_data(as_text=True)
    return await whole.get_json(), list(events_of(await stream.get_data(as_text=True)))


def check_events(events: list[dict[str, Any]]) -> None:
    for event in events:
        event_schemas()[event["type"]].model_validate(with_published_formats(event))
        OPENAI_EVENT.validate_json(json.dumps(event))


@pytest.mark.parametrize("case", CASES)
async def test_events_and_responses_follow_the_schemas(make_app: MakeApp, make_engine: MakeEngine, case: str) -> None:
    written, body = CASES[case]
    response, events = await both(make_app(make_engine(script=says(*[written] * 4))), body)
    check_events(events)
    published.ResponseResource.model_validate(with_published_formats(response))
    Response.model_validate_json(json.dumps(response))
    assert events[-1]["response"]["status"] == response["status"]
    if case == "a cut call":
        assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "incomplete")]


async def test_a_failed_response_follows_them_too(make_app: MakeApp, make_engine: MakeEngine) -> None:
    response, events = await both(make_app(make_engine(fail_after=4)), {"reasoning": {"summary": "auto"}})
    assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
    check_events(events)
    published.ResponseResource.model_validate(response)


async def test_calls_of_other_types_follow_openais_own(make_app: MakeApp, make_engine: MakeEngine) -> None:
    """OpenResponses knows functions alone."""
    written = f"</think>{block(PATCHED)}"
    response, events = await both(make_app(make_engine(script=says(written, written))), {"tools": [PATCH]})
    for event in events:
        OPENAI_EVENT.validate_json(json.dumps(event))
    assert Response.model_validate_json(json.dumps(response)).output[0].type == "custom_tool_call"


def test_the_schemas_can_say_no() -> None:
    with pytest.raises(ValidationError):
        check_events([{"type": "response.output_text.delta", "sequence_number": 0, "item_id": "a", "output_index": 0, "delta": "x"}])

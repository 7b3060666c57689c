"""The OpenAPI document: valid, whole, true of what the server answers, and a source of requests that must not break it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from quart import Quart

from ds4jax.serving.http.openapi import document
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import EOS_ID, echo

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_calls>\n<invoke name="now">\n</invoke>\n</tool_calls>'


async def fetch(app: Quart) -> dict[str, Any]:
    response = await app.test_client().get("/openapi.json")
    assert response.status_code == 200
    body: dict[str, Any] = await response.get_json()
    return body


def check(openapi: dict[str, Any], name: str, value: Any) -> None:
    """Hold a value against a schema of the document."""
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": openapi["components"]})


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_document_is_valid(needs_key: bool) -> None:
    validate(document(needs_key=needs_key))


async def test_every_route_is_in_it_and_nothing_else(make_app: MakeApp) -> None:
    app = make_app()
    routes = {
        (method, re.sub("<(?:.*?:)?(.*?)>", "{\\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    described = {(method.upper(), path) for path, operations in (await fetch(app))["paths"].items() for method in operations}
    assert described == routes


async def test_keys_are_asked_for_where_they_are_needed(make_app: MakeApp) -> None:
    app = make_app(api_keys=("key",))
    assert (await app.test_client().get("/openapi.json")).status_code == 401
    paths = (await (await app.test_client().get("/openapi.json", headers={"x-api-key": "key"})).get_json())["paths"]
    assert paths["/live"]["get"]["security"] == []
    assert paths["/v1/messages"]["post"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "401" in paths["/v1/messages"]["post"]["responses"]


async def test_bodies_have_the_fields_that_are_read_and_none_that_is_refused(make_app: MakeApp) -> None:
    schemas = (await fetch(make_app()))["components"]["schemas"]
    chat, text = (set(schemas[name]["properties"]) for name in ("ChatBody", "CompletionBody"))
    assert {"messages", "temperature", "thinking", "tools", "logprobs", "n"} <= chat
    assert {"prompt", "echo", "best_of"} <= text
    assert not chat & {"functions", "best_of", "suffix"} and not text & {"tools", "suffix"}


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("/v1/chat/completions", HELLO, "ChatCompletion"),
        ("/v1/chat/completions", {**HELLO, "logprobs": True, "n": 2, "max_tokens": 1}, "ChatCompletion"),
        ("/v1/chat/completions", {**HELLO, "n": -1}, "OpenAIError"),
        ("/v1/chat/completions", {"messages": [{"content": "x" * 5000}]}, "OpenAIError"),
        ("/v1/completions", {"prompt": "hi", "logprobs": 1}, "TextCompletion"),
        ("/v1/responses", {"input": "hi", "reasoning": {"summary": "auto"}}, "Response"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, "Response"),
        ("/v1/messages", {**HELLO, "max_tokens": 99}, "Message"),
        ("/v1/messages", {**HELLO, "max_tokens": 99, "stop_sequences": ["l"]}, "Message"),
        ("/v1/messages", {}, "AnthropicError"),
        ("/v1/messages/count_tokens", HELLO, "TokenCount"),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, "Tokenized"),
        ("/tokenize", {"prompt": "hi", "with_pieces": True}, "Tokenized"),
        ("/detokenize", {"tokens": [104, 105]}, "Detokenized"),
    ],
)
async def test_replies_are_what_it_says(make_app: MakeApp, path: str, body: dict[str, Any], schema: str) -> None:
    app = make_app()
    reply = await (await app.test_client().post(path, json=body)).get_json()
    check(await fetch(app), schema, reply)


async def test_calls_are_what_it_says(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(script=lambda request: [*CALL.encode(), EOS_ID]))
    body = {**HELLO, "tools": TOOLS, "thinking": False}
    reply = await (await app.test_client().post("/v1/chat/completions", json=body)).get_json()
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    check(await fetch(app), "ChatCompletion", reply)


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("/v1/chat/completions", {**HELLO, "stream_options": {"include_usage": True}}, "ChatCompletionChunk"),
        ("/v1/completions", {"prompt": "hi"}, "TextCompletion"),
        ("/v1/responses", {"input": "hi"}, "ResponseEvent"),
        ("/v1/messages", {**HELLO, "max_tokens": 99}, "MessageEvent"),
    ],
)
async def test_events_are_what_it_says(make_app: MakeApp, path: str, body: dict[str, Any], schema: str) -> None:
    app = make_app()
    text = await (await app.test_client().post(path, json={**body, "stream": True})).get_data(as_text=True)
    openapi = await fetch(app)
    described = openapi["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert described["properties"]["data"]["contentSchema"] == {"$ref": f"#/components/schemas/{schema}"}
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    assert events
    for event in events:
        check(openapi, schema, json.loads(event))


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/models", "ModelList"),
        ("/v1/models/deepseek-v4-flash", "Model"),
        ("/v1/models/none", "OpenAIError"),
        ("/health", "Health"),
        ("/live", "Status"),
        ("/ready", "Status"),
        ("/version", "Version"),
        ("/server_info", "ServerInfo"),
        ("/get_load", "Load"),
    ],
)
async def test_what_operators_read_is_what_it_says(make_app: MakeApp, path: str, schema: str) -> None:
    app = make_app()
    check(await fetch(app), schema, await (await app.test_client().get(path)).get_json())


def test_no_request_made_from_it_breaks_the_server(make_server: MakeServer, make_engine: MakeEngine) -> None:
    """Send what the schemas allow and, where they allow more than the server takes, see it refused in the documented way."""
    # Imported here, because that takes seconds, and not everyone who collects the tests runs this one.
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

    server = make_server(make_engine(n_ctx=256, script=lambda request: echo(request) * 256), default_max_tokens=16)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    cases = st.one_of([result.ok().as_strategy() for result in schema.get_all_operations() if isinstance(result, Ok)])

    @settings(
        max_examples=200, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(case=cases)
    def send(case: schemathesis.Case) -> None:
        case.validate_response(
            case.call(timeout=20),
            checks=[not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    send()

"""What an answer has to look like: how every API asks for it, and that a real model then gives it to the official clients."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from ds4jax import Engine
from ds4jax.config import ServerConfig
from ds4jax.serving.engine.api import Constraint
from ds4jax.serving.http.app import create_app
from tests.http.conftest import MakeApp, MakeEngine, Server
from tests.http.fakes import DSML_ID, END_THINK_ID, EOS_ID
from tests.model.oracle import SMOOTH

HELLO = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": HELLO, "thinking": False})
TEXT = ("/v1/completions", {"prompt": "hello"})
MESSAGES = ("/v1/messages", {"messages": HELLO, "thinking": False, "max_tokens": 50})
RESPONSES = ("/v1/responses", {"input": "hello", "reasoning": {"effort": "none"}})
APIS = [CHAT, TEXT, MESSAGES, RESPONSES]
EVERY_API = pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


async def asked(app: Any, engine: Any, path: str, body: dict[str, Any]) -> Constraint | None:
    """Post a body; what the engine was asked for."""
    response = await app.test_client().post(path, json=body)
    assert response.status_code == 200, await response.get_data()
    constraint: Constraint | None = list(engine.requests.values())[-1].constraint
    return constraint


def may_begin_with(constraint: Constraint | None) -> set[str]:
    """The first characters of the answers that are allowed; "" stands for no character at all."""
    assert constraint is not None
    mask = constraint.grammar.first_mask
    return {"" if i == EOS_ID else chr(i) for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1}


EITHER = [
    ({"response_format": {"type": "json_object"}}, {"{"}),
    ({"response_format": {"type": "json_object", "schema": {"type": "null"}}}, {"n"}),
    ({"response_format": WRAPPED}, {"{"}),
    ({"response_format": FLAT}, {"{"}),
    ({"json_schema": SCHEMA}, {"{"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"{"}),
    ({"structured_outputs": {"json": '{"type":"null"}'}}, {"n"}),
    ({"structured_outputs": {"json_object": True}}, {"{"}),
    ({"structured_outputs": {"regex": "[ab]x?"}}, {"a", "b"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"y", "n"}),
    ({"structured_outputs": {"grammar": 'root ::= "q" | "r"'}}, {"q", "r"}),
    ({"structured_outputs": {"regex": "c*", "json": None, "json_object": False, "backend": "auto"}}, {"c", ""}),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, {"{"}),
    ({"guided_json": json.dumps(SCHEMA)}, {"{"}),
    ({"guided_regex": "[ab]x?"}, {"a", "b"}),
    ({"guided_choice": ["yes", "no"]}, {"y", "n"}),
    ({"guided_grammar": 'start: "q" | "r"'}, {"q", "r"}),
    ({"grammar": 'root ::= "q" | "r"'}, {"q", "r"}),
]


@EVERY_API
async def test_every_spelling_means_the_same_everywhere(
    make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine = make_engine()
    app = make_app(engine)
    for fields, first in EITHER:
        assert may_begin_with(await asked(app, engine, path, body | fields)) == first, fields


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (RESPONSES, {"text": {"format": FLAT}}),
        (MESSAGES, {"output_config": {"format": FLAT}}),
        (MESSAGES, {"output_format": FLAT}),
    ],
)
async def test_the_apis_own_places(make_app: MakeApp, make_engine: MakeEngine, api: Any, fields: dict[str, Any]) -> None:
    engine = make_engine()
    path, body = api
    assert may_begin_with(await asked(make_app(engine), engine, path, body | fields)) == {"{"}


@EVERY_API
async def test_absent_null_and_neutral_ask_for_nothing(make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]) -> None:
    engine = make_engine()
    app = make_app(engine)
    neutral = {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None, "json_schema": {}, "grammar": ""}
    own = {"text": {"format": {"type": "text"}}, "output_config": {"format": None}}
    for fields in ({}, neutral, own if path in ("/v1/responses", "/v1/messages") else {}):
        assert await asked(app, engine, path, body | fields) is None


async def test_it_holds_behind_the_reasoning(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    for thinks, after in ((True, END_THINK_ID), (False, None)):
        constraint = await asked(app, engine, CHAT[0], {"messages": HELLO, "thinking": thinks, "response_format": WRAPPED})
        assert constraint is not None and (constraint.after, constraint.grammar.end_id) == (after, EOS_ID)


async def test_beside_tools_a_call_is_as_good_and_a_forced_call_comes_instead(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    body = CHAT[1] | {"response_format": WRAPPED, "tools": [TOOL]}
    assert may_begin_with(await asked(app, engine, CHAT[0], body)) == {"{", "\n"}
    assert may_begin_with(await asked(app, engine, CHAT[0], body | {"tool_choice": "none"})) == {"{"}
    assert may_begin_with(await asked(app, engine, CHAT[0], body | {"tool_choice": "required"})) == {" "}
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert may_begin_with(await asked(app, engine, CHAT[0], body | named)) == {"<"}


@pytest.mark.parametrize(
    ("api", "tools"),
    [
        (CHAT, [STRICT]),
        (MESSAGES, [{"name": "f", "input_schema": SCHEMA, "strict": True}]),
        (RESPONSES, [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]),
    ],
)
async def test_strict_tools_are_held_to_their_schemas_once_a_call_begins(
    make_app: MakeApp, make_engine: MakeEngine, api: Any, tools: list[dict[str, Any]]
) -> None:
    engine = make_engine()
    app = make_app(engine)
    path, body = api
    constraint = await asked(app, engine, path, body | {"tools": tools})
    assert constraint is not None and (constraint.after, constraint.may_end_before) == (DSML_ID, True)
    assert may_begin_with(constraint) == {"t"}
    loose = json.loads(json.dumps(tools).replace('"strict": true', '"strict": false'))
    assert await asked(app, engine, path, body | {"tools": loose}) is None


async def test_choices_of_one_prompt_share_a_grammar(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    await asked(make_app(engine), engine, CHAT[0], CHAT[1] | {"n": 3, "response_format": WRAPPED})
    grammars = [request.constraint.grammar for request in engine.requests.values() if request.constraint]
    assert len(grammars) == 3 and len(set(map(id, grammars))) == 1


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": "n"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "strong"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"minItems": "x"}}}, "response_format.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "root ::= nobody"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "a" * 200_000}, "guided_regex"),
    ({"guided_choice": [], "guided_regex": "a"}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"json_schema": {"type": "integer", "multipleOf": 999_983}}, "json_schema"),
    ({"grammar": "start: nobody"}, "grammar"),
]


@EVERY_API
async def test_what_cannot_be_enforced_is_refused_in_the_apis_own_shape(make_app: MakeApp, path: str, body: dict[str, Any]) -> None:
    app = make_app()
    for fields, param in REFUSED:
        response = await app.test_client().post(path, json=body | fields)
        reply = await response.get_json()
        assert response.status_code == 400, fields
        assert param in reply["error"]["message"]
        if path == "/v1/messages":
            assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
        else:
            assert (reply["error"]["param"], reply["error"]["type"]) == (param, "invalid_request_error")


async def test_a_strict_schema_must_be_enforceable_in_full(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    schema = {"type": "string", "format": "colour"}
    for strict, status in ((True, 400), (False, 200), (None, 200)):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
        response = await app.test_client().post(CHAT[0], json=CHAT[1] | {"response_format": form})
        assert response.status_code == status


# ---------------------------------------------------------------- a real model
class Person(BaseModel):
    name: Literal["Ann", "Bob", "Zoë"]
    age: int = Field(ge=0, le=150)
    likes: list[Literal["tea", "cake"]] = Field(max_length=2)


class Guess(BaseModel):
    """What this client sends whole: of numbers and lists it tells the bounds in words alone."""

    name: Literal["Ann", "Bob", "Zoë"]
    sure: bool


@pytest.fixture(scope="module")
def real(engines: Callable[[str], Engine]) -> Iterator[tuple[Server, Engine]]:
    """A server over a small model with random weights, which by itself writes nothing that makes sense."""
    engine = engines(SMOOTH.name)
    server = Server(create_app(engine, engine.model.tokenizer, ServerConfig(default_max_tokens=400, tool_prompt="{tools}")), 0.0)
    yield server, engine
    server.stop()
    assert engine.stats().compile_misses == 0
    assert engine.stats().n_running == 0


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


ASK: list[Any] = [{"role": "user", "content": "Who?"}]
OFF = {"thinking": False}


def test_openai_parse(real: tuple[Server, Engine]) -> None:
    server, engine = real
    ends_thoughts: dict[str, int] = {str(engine.model.tokenizer.end_think_id): 100}  # this model would go on thinking
    with openai_client(server) as client:
        for seed in range(3):
            for extra, bias in ((OFF, {}), ({}, ends_thoughts)):
                parsed = client.chat.completions.parse(
                    model="m", messages=ASK, response_format=Person, seed=seed, extra_body=extra, logit_bias=bias
                )
                assert isinstance(parsed.choices[0].message.parsed, Person)
                assert parsed.choices[0].finish_reason == "stop"


def test_openai_stream(real: tuple[Server, Engine]) -> None:
    with (
        openai_client(real[0]) as client,
        client.chat.completions.stream(model="m", messages=ASK, response_format=Person, seed=4, extra_body=OFF) as stream,
    ):
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_openai_responses(real: tuple[Server, Engine]) -> None:
    with openai_client(real[0]) as client:
        response = client.responses.parse(model="m", input="Who?", text_format=Person, extra_body=OFF)
    assert isinstance(response.output_parsed, Person)
    assert response.text is not None and response.text.format is not None and response.text.format.type == "json_schema"


def test_text_completions_and_vllms_fields(real: tuple[Server, Engine]) -> None:
    with openai_client(real[0]) as client:
        for fields, allowed in (
            ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
            ({"guided_regex": "(ab|c)d"}, ("abd", "cd")),
            ({"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "min_tokens": 30}, ("yes", "no")),
        ):
            reply = client.completions.create(model="m", prompt="Well:", n=3, extra_body=fields)
            assert all(choice.text in allowed and choice.finish_reason == "stop" for choice in reply.choices)


def test_anthropic_parse(real: tuple[Server, Engine]) -> None:
    with anthropic.Anthropic(base_url=real[0].url, api_key="none", max_retries=0) as client:
        message = client.messages.parse(model="m", max_tokens=400, messages=ASK, thinking={"type": "disabled"}, output_format=Guess)
    assert isinstance(message.parsed_output, Guess)
    assert message.stop_reason == "end_turn"


async def test_the_async_clients_parse_whole_replies_and_streams(real: tuple[Server, Engine]) -> None:
    server, _ = real
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        parsed = await client.responses.parse(model="m", input="Who?", text_format=Person, extra_body=OFF)
        assert isinstance(parsed.output_parsed, Person)
        async with client.responses.stream(model="m", input="Who?", text_format=Person, extra_body=OFF) as told:
            assert isinstance((await told.get_final_response()).output_parsed, Person)
        async with client.chat.completions.stream(model="m", messages=ASK, response_format=Person, extra_body=OFF) as said:
            assert isinstance((await said.get_final_completion()).choices[0].message.parsed, Person)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        fields: Any = {"model": "m", "max_tokens": 400, "messages": ASK, "thinking": {"type": "disabled"}, "output_format": Guess}
        assert isinstance((await other.messages.parse(**fields)).parsed_output, Guess)
        async with other.messages.stream(**fields) as stream:
            assert isinstance((await stream.get_final_message()).parsed_output, Guess)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Person"}}])
def test_openai_strict_tools(real: tuple[Server, Engine], choice: Any) -> None:
    with openai_client(real[0]) as client:
        for seed in range(2):
            parsed = client.chat.completions.parse(
                model="m",
                messages=ASK,
                tools=[openai.pydantic_function_tool(Person)],
                tool_choice=choice,
                parallel_tool_calls=False,
                seed=seed,
            )
            (call,) = parsed.choices[0].message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, Person)
            assert parsed.choices[0].finish_reason == "tool_calls"


async def test_many_at_once_and_those_that_leave(real: tuple[Server, Engine]) -> None:
    server, engine = real
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def structured(seed: int) -> str:
            reply = await client.chat.completions.parse(model="m", messages=ASK, response_format=Person, seed=seed, extra_body=OFF)
            assert isinstance(reply.choices[0].message.parsed, Person)
            return reply.choices[0].message.content or ""

        async def free(seed: int) -> str:
            reply = await client.completions.create(model="m", prompt="Once", seed=seed, max_tokens=40)
            return reply.choices[0].text

        async def leaves() -> None:
            stream = await client.completions.create(
                model="m", prompt="x", stream=True, max_tokens=500, extra_body={"guided_regex": "(a|b)*", "ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

        alone = [await structured(1), await free(1)]
        *together, _, _ = await asyncio.gather(structured(1), free(1), *map(structured, range(2, 7)), leaves(), leaves())
        assert together[:2] == alone
    for _ in range(2000):
        if engine.stats().n_running == 0:
            break
        await asyncio.sleep(0.005)
    assert engine.stats().n_running == 0


def test_scores_of_a_prompt_are_those_of_the_model(real: tuple[Server, Engine]) -> None:
    """What `echo` and `logprobs` give is what the logits say that a session by hand gets; and the text goes on as an ordinary one."""
    server, engine = real
    tokenizer = engine.model.tokenizer
    ids = [tokenizer.bos_id, *np.random.default_rng(7).integers(8, 512, 40).tolist()]
    fields: Any = {"model": "m", "prompt": ids, "max_tokens": 5, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    with openai_client(server) as client:
        scored = client.completions.create(echo=True, logprobs=1, **fields)
        plain = client.completions.create(logprobs=1, **fields)
    got, after = scored.choices[0].logprobs, plain.choices[0].logprobs
    assert got is not None and got.token_logprobs is not None and got.tokens is not None and after is not None
    assert got.tokens[len(ids) :] == after.tokens
    assert scored.choices[0].text == tokenizer.decode(ids) + plain.choices[0].text
    expected = []
    with engine.open_session() as session:
        for token, following in itertools.pairwise(ids):
            logits = session.decode(token).astype(np.float64)
            expected.append(logits[following] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    assert got.token_logprobs[0] is None
    np.testing.assert_allclose(got.token_logprobs[1 : len(ids)], expected, atol=1e-4)

"""What holds for each API alike: every stream has its end, nothing of a prompt is logged, and text is never a special token."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import pytest

from ds4jax.errors import QueueFullError
from ds4jax.serving.engine.api import GenerateRequest, SamplingParams
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import ASSISTANT_ID, EOS_ID, SPECIALS, USER_ID
from tests.http.test_tools import BROKEN, block, says, tokens_of

SECRET = "xyzzy"


def body_of(path: str, text: str) -> dict[str, Any]:
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    return {**prompt.get(path, {"messages": [{"role": "user", "content": text}]}), "max_tokens": 300, "thinking": False}


APIS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
EVERY_API = pytest.mark.parametrize("path", APIS)
TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "weather"}},
    "/v1/messages": {"name": "weather", "input_schema": {"type": "object"}},
    "/v1/responses": {"type": "function", "name": "weather"},
}


# ---------------------------------------------------------------- sampling
FORCED = {"/v1/messages": {"type": "any"}}


@pytest.mark.parametrize("path", TOOLS)
async def test_the_structure_of_calls_is_drawn_greedily(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    async def ask(**fields: Any) -> GenerateRequest:
        engine = make_engine(script=says("Hi"))
        body = {**body_of(path, "hello"), "tools": [TOOLS[path]], **fields}
        await make_app(engine).test_client().post(path, json=body)
        return engine.requests[1]

    free = await ask()
    assert free.zones is not None and free.sampling.temperature == 1.0
    zones = free.zones()
    said = []
    for token in tokens_of(block('<｜DSML｜invoke name="weather">\n')):
        zones.take(token)
        said.append(zones.is_greedy)
    assert said == [False] * 3 + [True] * (len(said) - 4) + [False], "from the first mark to the end of the block"
    assert not free.zones().is_greedy, "each choice has its own"
    forced = await ask(tool_choice=FORCED.get(path, "required"))
    assert forced.zones is not None and forced.zones().is_greedy
    for nothing_to_do in (await ask(temperature=0), await ask(top_p=0), await ask(tools=[])):
        assert nothing_to_do.zones is None


# ---------------------------------------------------------------- streams
def check_end(path: str, stream: str, message: str) -> None:
    """Hold the end of a stream that failed against the API: an error event, and then what the API ends with."""
    *_, last_but_one, last = stream.removesuffix("\n\n").split("\n\n")
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert last_but_one.startswith("event: error\ndata: ") and last == "data: [DONE]"
        assert message in json.loads(last_but_one.split("data: ", 1)[1])["error"]["message"]
    elif path == "/v1/messages":
        assert last_but_one.startswith("event: error\ndata: ") and last.startswith("event: message_stop\n")
        assert message in json.loads(last_but_one.split("data: ", 1)[1])["error"]["message"]
    else:
        assert last.startswith("event: response.failed\n")
        assert message in json.loads(last.split("data: ", 1)[1])["response"]["error"]["message"]


@EVERY_API
@pytest.mark.parametrize("n_before", [0, 2])
def test_a_stream_ends_as_its_api_says_when_a_step_fails(
    make_server: MakeServer, make_engine: MakeEngine, path: str, n_before: int
) -> None:
    server = make_server(make_engine(fail_after=n_before))
    reply = httpx.post(server.url + path, json={**body_of(path, "hello"), "stream": True}, trust_env=False)
    assert reply.status_code == 200
    check_end(path, reply.text, "batched decode failed")


@EVERY_API
def test_a_stream_ends_as_its_api_says_when_the_engine_dies(make_server: MakeServer, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine(gate=threading.Semaphore(2))
    server = make_server(engine, keepalive_s=0.02)
    body, seen = {**body_of(path, "hello"), "stream": True}, ""
    with httpx.Client(trust_env=False) as client, client.stream("POST", server.url + path, json=body) as reply:
        for piece in reply.iter_text():
            seen += piece
            if engine.n_running_tokens == 2 and engine.alive():
                engine.die()
    check_end(path, seen, "the engine stopped")


@EVERY_API
def test_a_stream_says_when_it_waits(make_server: MakeServer, make_engine: MakeEngine, path: str) -> None:
    """By the clock, and not by what the engine does: in the queue there is nothing that it does."""
    engine = make_engine()
    engine.hold.set()
    server = make_server(engine, keepalive_s=0.02)
    seen = ""
    with (
        httpx.Client(trust_env=False) as client,
        client.stream("POST", server.url + path, json={**body_of(path, "Q"), "stream": True}) as reply,
    ):
        for piece in reply.iter_text():
            seen += piece
            if seen.count(": keep-alive\n\n") + seen.count("event: ping\n") >= 2:
                engine.hold.clear()
    assert '"Q"' in seen.rpartition("keep-alive")[2], "and then it is answered"


@EVERY_API
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_back(make_app: MakeApp, make_engine: MakeEngine, path: str, stream: bool) -> None:
    engine = make_engine(refuse=QueueFullError(16, retry_after_s=3))
    response = await make_app(engine).test_client().post(path, json={**body_of(path, "x"), "stream": stream})
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
    assert (await response.get_json())["error"]["message"]


# ---------------------------------------------------------------- the log
@EVERY_API
@pytest.mark.parametrize("stream", [False, True])
async def test_no_log_has_text_of_a_prompt_or_a_reply(
    make_app: MakeApp, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    """Whatever becomes of the request, and however much is logged."""
    caplog.set_level(logging.DEBUG, logger="ds4jax")
    body = {**body_of(path, SECRET), "stream": stream}
    tools = {"tools": [TOOLS[path]]} if path in TOOLS else {}
    written = says(SECRET + block(BROKEN.replace("weather", SECRET)), SECRET)
    for engine, more in (
        (make_engine(), {}),
        (make_engine(), {"stop": SECRET, "metadata": {SECRET: SECRET}}),
        (make_engine(fail_after=1), {}),
        (make_engine(n_ctx=20), {"user": SECRET}),
        (make_engine(), {"temperature": SECRET}),
        (make_engine(refuse=QueueFullError(16)), {}),
        (make_engine(script=written), tools),
    ):
        response = await make_app(engine).test_client().post(path, json=body | more)
        await response.get_data()
    await make_app().test_client().post(path, data=json.dumps(body).replace("}", "") + SECRET)
    assert caplog.records and not [record.getMessage() for record in caplog.records if SECRET in record.getMessage()]


# ---------------------------------------------------------------- prompts and fields
@EVERY_API
async def test_special_tokens_in_text_of_users_are_text(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    said = "a".join(SPECIALS)
    response = await make_app(engine).test_client().post(path, json=body_of(path, said))
    assert response.status_code == 200
    prompt = bytes(token if token < 256 else 0 for token in engine.requests[1].prompt)
    assert said.encode() in prompt, "byte by byte"
    assert tokens_of(said)[0] >= 256, "text of ours would have become those tokens"


@pytest.mark.parametrize("path", TOOLS)
async def test_special_tokens_in_what_a_tool_gave_are_text(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    said = "".join(SPECIALS)
    function = {"name": "weather", "arguments": "{}"}
    histories: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": said},
        ],
        "/v1/messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": said}]},
        ],
        "/v1/responses": [
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": said},
        ],
    }
    messages = [{"role": "user", "content": "x"}, *histories[path]]
    body = {"messages": messages, "input": messages, "max_tokens": 9, "tools": [TOOLS[path]]}
    response = await make_app(engine).test_client().post(path, json=body)
    assert response.status_code == 200, await response.get_data()
    prompt = engine.requests[1].prompt
    assert said.encode() in bytes(token if token < 256 else 0 for token in prompt)
    assert (prompt.count(USER_ID), prompt.count(ASSISTANT_ID), prompt.count(EOS_ID)) == (2, 2, 1), "those of the turns alone"


@EVERY_API
async def test_sampling_fields_reach_the_engine(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "max_tokens": 16}
    response = await make_app(engine).test_client().post(path, json=body_of(path, "x") | fields)
    assert response.status_code == 200
    assert engine.requests[1].sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7)
    assert engine.requests[1].max_tokens == 16

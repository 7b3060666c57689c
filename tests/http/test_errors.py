"""Errors: each in OpenAI's shape, each naming the field or the place."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from ds4jax.errors import EngineStoppedError, QueueFullError
from ds4jax.text.tokenizer import Tokenizer
from tests.http.conftest import MakeApp, MakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
F = {"function": {"name": "f"}}
HELLO = [{"role": "user", "content": "hello"}]


def check_shape(body: dict[str, Any]) -> dict[str, Any]:
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"[]", "expected object"),
        (b'{"messages":[]', "byte 14"),
        (b'{"messages":[],"temperature":NaN}', "byte 29"),
        (b'{"messages":[],"temperature":Infinity}', "byte 29"),
        (b'{"messages":[{"content":"a\x01b"}]}', "byte 26"),
        (b'{"messages":[],"unknown":"a\nb"}', "byte 27"),
        (rb'{"messages":[{"content":"\ud800"}]}', r"\ud800 at byte 25"),
        (rb'{"messages":[{"content":"\\\ud83dx"}]}', r"\ud83d at byte 27"),
        (rb'{"messages":[{"content":"\udc00"}]}', "byte 31"),
        (b'{"messages":[{"content":"\xff"}]}', "byte 25"),
        (b'{"messages":[],"unknown":"\xed\xa0\x80"}', "byte 26"),
        (b'{"messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"messages":[]} x', "byte 17"),
    ],
)
async def test_broken_json_names_the_place(make_app: MakeApp, data: bytes, says: str) -> None:
    response = await make_app().test_client().post(CHAT, data=data)
    error = check_shape(await response.get_json())
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


@pytest.mark.parametrize("depth", [100, 300, 600, 900, 950, 975, 990, 1100])
@pytest.mark.parametrize("field", ["guided_json", "json_schema", "structured_outputs", "tool_choice", "metadata", "text"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_deep_json_is_read_or_refused_but_never_breaks_the_reply(make_app: MakeApp, path: str, field: str, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    value = {"tool_choice": '{"type":"function","name":"f","function":{"name":"f"},"z":%s}', "text": '{"format":{"type":"text","z":%s}}'}
    tools = '[{"type":"function","name":"f","function":{"name":"f"}}]'
    body = f'{{"input":"x","messages":[{{"content":"x"}}],"tools":{tools},"{field}":{value.get(field, "%s") % deep}}}'
    response = await make_app().test_client().post(path, data=body)
    text = await response.get_data(as_text=True)  # what is told back may be too deep for a reader of Python's
    assert response.status_code == 200 or any(word in check_shape(json.loads(text))["message"] for word in ("deep", "recursion"))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"stop": ["a" * 1025]}, "stop"),
        (CHAT, {"stop": ["a"] * 65}, "stop"),
        (CHAT, {"messages": ["x"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": 3}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": 3}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function.name"),
        (CHAT, {"messages": [*HELLO, {"tool_calls": [{"function": {"name": "f"}}]}]}, "messages[1].tool_calls"),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": 10**400}, "temperature"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"top_k": 1.5}, "top_k"),
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"seed": 1 << 64}, "seed"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": True}, "max_tokens"),
        (CHAT, {"max_tokens": 10**4299}, "max_tokens"),  # one more digit, and it is no JSON for us
        (CHAT, {"max_completion_tokens": -5}, "max_completion_tokens"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"stop": ["a", 5]}, "stop[1]"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"thinking": "maybe"}, "thinking"),
        (CHAT, {"thinking": {"type": "maybe"}}, "thinking"),
        (CHAT, {"think": 1}, "think"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        (CHAT, {"tools": {}}, "tools"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (CHAT, {"functions": [F]}, "functions"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {"five": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"263": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias"),
        (CHAT, {"presence_penalty": 2.5}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -3}, "frequency_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"stop_token_ids": [1, 263]}, "stop_token_ids[1]"),
        (CHAT, {"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        (CHAT, {"min_tokens": -1}, "min_tokens"),
        (CHAT, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt[0]"),
        (TEXT, {"prompt": [1, 99999]}, "prompt[1]"),
        (TEXT, {"prompt": [1, "a"]}, "prompt[0]"),
        (TEXT, {"prompt": [1.5]}, "prompt[0]"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"best_of": 3}, "best_of"),
    ],
)
async def test_a_bad_field_is_named(make_app: MakeApp, path: str, fields: dict[str, Any], param: str) -> None:
    body = {"messages": HELLO, **fields} if path == CHAT else {"prompt": "x", **fields}
    response = await make_app().test_client().post(path, json=body)
    error = check_shape(await response.get_json())
    assert (response.status_code, error["param"]) == (400, param), error
    assert param in error["message"]


@pytest.mark.parametrize(
    "fields", [{"messages": [{"role": "x" * 100_000}]}, {"reasoning_effort": "x" * 100_000}, {"presence_penalty": 10**4000}]
)
async def test_an_error_does_not_send_back_all_that_was_sent(make_app: MakeApp, fields: dict[str, Any]) -> None:
    response = await make_app().test_client().post(CHAT, json={"messages": HELLO, **fields})
    error = check_shape(await response.get_json())
    assert response.status_code == 400
    assert error["param"] in error["message"]
    assert "expected" in error["message"][-300:]
    assert len(error["message"]) < 2100


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
async def test_a_packed_body_is_refused_in_words(make_app: MakeApp, path: str) -> None:
    response = await make_app().test_client().post(path, data=b"\x1f\x8b...", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert "'gzip'" in (await response.get_json())["error"]["message"]


async def test_fields_that_ask_for_nothing_are_fine(make_app: MakeApp) -> None:
    body = {
        "messages": HELLO, "n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "logit_bias": {},
        "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "store": True, "stop": None,
    }  # fmt: skip
    response = await make_app().test_client().post(CHAT, json=body)
    assert response.status_code == 200


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_is_told_as_agents_expect_it(
    make_app: MakeApp, make_engine: MakeEngine, path: str, param: str, stream: bool
) -> None:
    engine = make_engine(n_ctx=20)
    body = {"messages": [{"content": "x" * 16}], "prompt": "x" * 19, "stream": stream}
    response = await make_app(engine).test_client().post(path, json=body)
    assert response.status_code == 400
    assert (await response.get_json())["error"] == {
        "message": "This model's maximum context length is 20 tokens. However, you requested 21 tokens "
        f"(20 in the {param}, 1 in the completion). Please reduce the length of the {param} or completion.",
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
        "n_prompt_tokens": 20,
        "n_ctx": 20,
    }
    assert engine.requests == {}


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
async def test_text_that_can_never_fit_is_refused_unencoded(
    make_app: MakeApp, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    def encode(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError("this takes seconds for megabytes")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    response = (
        await make_app(make_engine(n_ctx=20)).test_client().post(path, json={"messages": [{"content": "x" * 30}], "prompt": ["x" * 30]})
    )
    error = check_shape(await response.get_json())
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert f"requested at least 31 tokens (at least 30 in the {param}, 1 in the completion)" in error["message"]


async def test_an_explicit_length_must_fit_too(make_app: MakeApp, make_engine: MakeEngine) -> None:
    client = make_app(make_engine(n_ctx=20)).test_client()
    fits = await client.post(TEXT, json={"prompt": "x" * 9, "max_tokens": 10})
    over = await client.post(TEXT, json={"prompt": "x" * 9, "max_tokens": 11})
    assert (fits.status_code, over.status_code) == (200, 400)
    assert "requested 21 tokens (10 in the prompt, 11 in the completion)" in (await over.get_json())["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_retry(make_app: MakeApp, make_engine: MakeEngine, stream: bool) -> None:
    engine = make_engine(refuse=QueueFullError(16, retry_after_s=3))
    response = await make_app(engine).test_client().post(CHAT, json={"messages": HELLO, "stream": stream})
    error = check_shape(await response.get_json())
    assert (response.status_code, response.headers["Retry-After"], error["code"]) == (429, "3", "queue_full")


async def test_a_stopped_engine_is_unavailable(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(refuse=EngineStoppedError("the engine was closed"))
    client = make_app(engine).test_client()
    response = await client.post(CHAT, json={"messages": HELLO})
    assert (response.status_code, check_shape(await response.get_json())["type"]) == (503, "server_error")
    engine.die()
    assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 503
    health = await client.get("/health")
    assert (health.status_code, (await health.get_json())["status"]) == (503, "engine stopped")


async def test_a_bug_is_a_500_without_its_message(make_app: MakeApp, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(refuse=ZeroDivisionError("secret"))
    response = await make_app(engine).test_client().post(CHAT, json={"messages": HELLO})
    error = check_shape(await response.get_json())
    assert (response.status_code, error["type"]) == (500, "server_error")
    assert "secret" not in error["message"]
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records)


async def test_what_went_wrong_by_itself_is_one_line_of_the_log(
    make_app: MakeApp, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": HELLO, "max_tokens": 5}
    assert (await make_app(make_engine(fail_after=1)).test_client().post("/v1/messages", json=body)).status_code == 500
    assert (await make_app(make_engine(refuse=EngineStoppedError("closed"))).test_client().post(CHAT, json=body)).status_code == 503
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 2 and "scripted" in lines[0] and "closed" in lines[1]
    assert not any(record.exc_info for record in caplog.records)


async def test_what_the_framework_refuses_has_our_shape_too(make_app: MakeApp) -> None:
    client = make_app(body_limit_bytes=100).test_client()
    unknown = await client.get("/v1/nothing")
    method = await client.get(CHAT)
    large = await client.post(CHAT, data=b" " * 101)
    assert [r.status_code for r in (unknown, method, large)] == [404, 405, 413]
    for response in (unknown, method, large):
        assert check_shape(await response.get_json())["type"] == "invalid_request_error"
    assert "POST" in method.headers["Allow"]


async def test_models_are_strict_only_on_request(make_app: MakeApp) -> None:
    body = {"messages": HELLO, "model": "gpt-4o"}
    assert (await make_app().test_client().post(CHAT, json=body)).status_code == 200
    strict = make_app(strict_model=True, aliases=("flash",)).test_client()
    refused = await strict.post(CHAT, json=body)
    error = check_shape(await refused.get_json())
    assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    for model in ("flash", "deepseek-v4-flash", "deepseek-chat", None):
        assert (await strict.post(CHAT, json={**body, "model": model})).status_code == 200


async def test_one_line_a_request_and_no_text(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ds4jax.http")
    await make_app().test_client().post(CHAT, json={"messages": HELLO})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ds4jax.http"]
    assert "prompt=9 cached=0 completion=8 finish=stop" in line
    assert "hello" not in line

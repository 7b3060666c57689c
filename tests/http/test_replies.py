"""Replies that do not stream: shapes, counts, thinking, stops."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from quart import Quart

from ds4jax.serving.engine.api import GenerateRequest
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import ASSISTANT_ID, BOS_ID, END_THINK_ID, EOS_ID, THINK_ID, USER_ID, EchoEngine

HELLO = [{"role": "user", "content": "hello"}]


async def post(app: Quart, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    response = await app.test_client().post(path, json=body)
    return response.status_code, await response.get_json()


async def chat(app: Quart, **body: Any) -> dict[str, Any]:
    status, reply = await post(app, "/v1/chat/completions", {"messages": HELLO, **body})
    assert status == 200, reply
    return reply


async def test_a_chat_reply_has_every_member(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(n_cached=3)
    reply = await chat(make_app(engine), thinking=False, model="my-model")
    assert reply.pop("id").startswith("chatcmpl-")
    assert isinstance(reply.pop("created"), int)
    # The prompt is BOS, User, five bytes, Assistant, </think>.
    assert reply == {
        "object": "chat.completion",
        "model": "my-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 5,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 6},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert engine.requests[1].prompt == (BOS_ID, USER_ID, *b"hello", ASSISTANT_ID, END_THINK_ID)


async def test_reasoning_comes_apart_from_the_answer(make_app: MakeApp) -> None:
    reply = await chat(make_app())
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
    assert reply["usage"]["completion_tokens"] == 8  # h m </think> h e l l o
    assert reply["model"] == "deepseek-v4-flash"


async def test_reasoning_cut_by_its_length_stays_reasoning(make_app: MakeApp) -> None:
    choice = (await chat(make_app(), max_tokens=1))["choices"][0]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "reasoning_content": "h"},
        "finish_reason": "length",
    }


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, True),
        ({"think": False}, False),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True, "model": "deepseek-chat"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "thinking": True}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"chat_template_kwargs": {"other": 1}}, True),
        ({"model": "deepseek-chat"}, False),
        ({"model": "deepseek-reasoner"}, True),
        ({"model": "deepseek-chat", "thinking": True}, True),
        ({"model": "deepseek-chat", "thinking": None}, True),
        ({"model": "deepseek-chat", "reasoning_effort": "high"}, False),
        ({"model": "deepseek-reasoner", "think": False}, False),
        ({"thinking": False, "think": True}, False),
    ],
)
async def test_every_spelling_of_the_thinking_switch(
    make_app: MakeApp, make_engine: MakeEngine, fields: dict[str, Any], thinks: bool
) -> None:
    engine = make_engine()
    await chat(make_app(engine), **fields)
    assert engine.requests[1].prompt[-1] == (THINK_ID if thinks else END_THINK_ID)
    assert engine.requests[1].stop_token_ids == ({EOS_ID} if thinks else {EOS_ID, THINK_ID, END_THINK_ID})


@pytest.mark.parametrize(
    ("stop", "content", "finish", "n_generated"),
    [
        ("ll", "he", "stop", 4),
        (["zz", "lo"], "hel", "stop", 5),
        (["lo", "ll"], "he", "stop", 4),
        (["", "nowhere"], "hello", "stop", 5),
        ("lox", "hello", "stop", 5),
        ([], "hello", "stop", 5),
        (None, "hello", "stop", 5),
    ],
)
async def test_stop_strings(make_app: MakeApp, stop: Any, content: str, finish: str, n_generated: int) -> None:
    reply = await chat(make_app(), thinking=False, stop=stop)
    assert reply["choices"][0]["message"]["content"] == content
    assert reply["choices"][0]["finish_reason"] == finish
    assert reply["usage"]["completion_tokens"] == n_generated


async def test_a_stop_string_cancels_the_rest_once(make_app: MakeApp, make_engine: MakeEngine) -> None:
    # The gate holds the engine until it is cancelled, however slow the edge is.
    engine = make_engine(script=lambda request: list(b"stop" * 500), gate=threading.Semaphore(10))
    reply = await chat(make_app(engine), thinking=False, stop="top")
    assert reply["choices"][0]["message"]["content"] == "s"
    assert engine.cancels == [1]


async def test_a_finished_reply_is_never_cancelled(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    await chat(make_app(engine))
    assert engine.cancels == []


async def test_sampling_fields_reach_the_engine(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = make_app(engine)
    await chat(app, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, max_tokens=16.0)
    await chat(app, top_p=0, top_k=-1, seed=-1, max_completion_tokens=3, max_tokens=2)
    await chat(app, temperature=None, seed=None, top_k=10**18)
    first, second, third = (engine.requests[i] for i in (1, 2, 3))
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 40)
    assert (first.sampling.min_p, first.sampling.seed, first.max_tokens) == (0.1, 7, 16)
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.top_k) == (0.0, 1.0, 0)
    assert third.sampling.top_k == (1 << 31) - 1, "the engine's field has 32 bits"
    assert second.sampling.seed is not None and second.sampling.seed >= 0
    assert second.max_tokens == 3
    assert (third.sampling.temperature, third.sampling.seed, third.max_tokens) == (1.0, None, 4096 - 9)


async def test_messages_of_every_form(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    messages = [
        {"role": "developer", "content": "S"},
        {"content": ["a", {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning_content": "r", "content": None},
        {"role": "user", "content": "<think>", "name": "ignored"},
    ]
    await chat(make_app(engine), messages=messages, thinking=False, unknown_field={"x": 1})
    # Text that looks like a special token stays text.
    assert engine.requests[1].prompt == (
        BOS_ID, *b"S", USER_ID, *b"ab", ASSISTANT_ID, END_THINK_ID, EOS_ID, USER_ID, *b"<think>", ASSISTANT_ID, END_THINK_ID,
    )  # fmt: skip


async def test_a_failed_step_is_an_error_finish(make_app: MakeApp, make_engine: MakeEngine) -> None:
    reply = await chat(make_app(make_engine(fail_after=2)), thinking=False)
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("error", "he")
    assert choice["error"]["message"] == "batched decode failed: scripted"


async def test_an_engine_that_dies_ends_the_reply(make_app: MakeApp, make_engine: MakeEngine) -> None:
    def script(request: Any) -> list[int]:
        engine._stop = True  # as a thread that ends without a word
        return [0]

    engine: EchoEngine = make_engine()
    engine.script = script
    choice = (await chat(make_app(engine, keepalive_s=0.05)))["choices"][0]
    assert choice["finish_reason"] == "error"
    assert "engine stopped" in choice["error"]["message"]


async def test_text_completions_are_raw(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    status, reply = await post(make_app(engine), "/v1/completions", {"prompt": "a<think>", "max_tokens": 4, "thinking": True})
    assert status == 200
    assert reply.pop("id").startswith("cmpl-")
    assert isinstance(reply.pop("created"), int)
    assert reply.pop("usage")["total_tokens"] == 13
    assert reply == {
        "object": "text_completion",
        "model": "deepseek-v4-flash",
        "choices": [{"text": "a<th", "index": 0, "finish_reason": "length"}],
    }
    assert engine.requests[1].prompt == (BOS_ID, *b"a<think>")
    assert engine.requests[1].stop_token_ids == {EOS_ID}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([BOS_ID, 97], ["a"]),
        ([[BOS_ID, 97], [BOS_ID, 98, 99]], ["a", "bc"]),
        (["x", [BOS_ID, 121]], ["x", "y"]),
    ],
)
async def test_prompts_of_every_form(make_app: MakeApp, prompt: Any, texts: list[str]) -> None:
    _, reply = await post(make_app(), "/v1/completions", {"prompt": prompt})
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    assert reply["usage"]["completion_tokens"] == len("".join(texts))


async def test_many_prompts_are_submitted_all_or_none(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(n_slots=1, queue_limit=2)
    engine.hold.set()
    engine.submit(GenerateRequest((97,), 1), lambda event: None)
    app = make_app(engine)
    status, reply = await post(app, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (status, reply["error"]["code"]) == (429, "queue_full")
    assert len(engine.requests) == 1, "none was submitted that another client might have been refused for"
    # More than all slots and the queue hold: trying again later cannot help.
    status, reply = await post(app, "/v1/completions", {"prompt": ["a", "b", "c", "d"]})
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert "at most 3 at once" in reply["error"]["message"]
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": HELLO, "thinking": False})],
)
async def test_ignore_eos_goes_on_to_the_limit(make_app: MakeApp, make_engine: MakeEngine, path: str, fields: dict[str, Any]) -> None:
    engine = make_engine(script=lambda request: [*b"one", EOS_ID, *b"two"])
    _, reply = await post(make_app(engine), path, {**fields, "ignore_eos": True, "max_tokens": 7})
    choice = reply["choices"][0]
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 7)
    text = choice.get("text") or choice["message"]["content"]
    assert text.startswith("one") and text.endswith("two")
    assert engine.requests[1].stop_token_ids == frozenset()

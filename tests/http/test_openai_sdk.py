"""The official OpenAI client against a real socket, sync and async, streaming and not."""

from __future__ import annotations

import threading

import openai
import pytest

from ds4jax.errors import QueueFullError
from ds4jax.serving.engine.api import FinishReason
from tests.http.conftest import MakeEngine, MakeServer, Server
from tests.http.fakes import wait_until


def sync_client(server: Server, **options: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=options.get("max_retries", 0))


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_chat(make_server: MakeServer) -> None:
    with sync_client(make_server()) as client:
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], temperature=0, seed=1)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("hello", "hm")  # type: ignore[attr-defined]
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.usage.total_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (17, 0)


def test_chat_stream(make_server: MakeServer) -> None:
    content, reasoning, finishes, usages = "", "", [], []
    with (
        sync_client(make_server()) as client,
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True, stream_options={"include_usage": True}
        ) as stream,
    ):
        for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                finishes.append(choice.finish_reason)
            usages.append(chunk.usage)
    assert (content, reasoning) == ("hello", "hm")
    assert finishes[-1] == "stop" and set(finishes[:-1]) == {None}
    assert usages[-1] is not None and usages[-1].completion_tokens == 8
    assert set(usages[:-1]) == {None}


def test_text_completions(make_server: MakeServer) -> None:
    with sync_client(make_server()) as client:
        reply = client.completions.create(model="m", prompt=["one", "two"], max_tokens=10)
        assert [choice.text for choice in reply.choices] == ["one", "two"]
        with client.completions.create(model="m", prompt="three", stop="e", stream=True) as stream:
            chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "thr"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_async_chat_and_stream(make_server: MakeServer) -> None:
    async with async_client(make_server()) as client:
        reply = await client.chat.completions.create(model="deepseek-chat", messages=[{"role": "user", "content": "a"}])
        assert (reply.choices[0].message.content, reply.model) == ("a", "deepseek-chat")
        stream = await client.chat.completions.create(model="deepseek-chat", messages=[{"role": "user", "content": "abc"}], stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "abc"


async def test_breaking_off_a_stream_frees_the_slot(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [97] * 1000, gate=threading.Semaphore(20))
    async with async_client(make_server(engine)) as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
    wait_until(lambda: bool(engine.finishes), "the request ends")
    assert (engine.finishes[0].reason, engine.cancels) == (FinishReason.CANCELLED, [1])


def test_errors_are_the_clients_own(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=30, fail_after=1)
    with sync_client(make_server(engine, strict_model=True)) as client:
        with pytest.raises(openai.BadRequestError) as overflow:
            client.completions.create(model="deepseek-v4-flash", prompt="x" * 30)
        assert (overflow.value.code, overflow.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="gpt-4o", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.APIError, match="batched decode failed"):
            list(client.completions.create(model="deepseek-v4-flash", prompt="xy", stream=True))
        engine.refuse = QueueFullError(16, retry_after_s=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="deepseek-v4-flash", prompt="x")


def test_models(make_server: MakeServer) -> None:
    with sync_client(make_server(aliases=("team/flash",))) as client:
        assert [model.id for model in client.models.list()] == ["deepseek-v4-flash", "team/flash"]
        model = client.models.retrieve("team/flash")
        assert (model.id, model.context_length, model.max_model_len) == ("team/flash", 4096, 4096)  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4o")

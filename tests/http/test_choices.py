"""Several choices of one prompt: each its own, told by index in one stream, ending together where one fails; and echoed prompts."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from ds4jax.serving.engine.api import FinishReason, GenerateRequest
from tests.http.conftest import MakeApp, MakeEngine, MakeServer
from tests.http.fakes import BOS_ID, EOS_ID, EchoEngine, wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def by_seed(request: GenerateRequest) -> list[int]:
    """Say as many x as the seed."""
    return [120] * (request.sampling.seed or 0)


async def post(app: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    response = await app.test_client().post(path, json=body)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_each_choice_has_a_seed_and_the_prompt_counts_once(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine(script=lambda request: [*by_seed(request), EOS_ID], n_cached=2)
    _, reply = await post(make_app(engine), path, {"messages": HELLO, "thinking": False, "prompt": "hello", "n": 3, "seed": 7})
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in reply["choices"]]
    assert texts == ["x" * 7, "x" * 8, "x" * 9]
    prompts = {request.prompt for request in engine.requests.values()}
    assert reply["usage"]["prompt_tokens"] == len(*prompts)
    assert (reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]) == (24, 2)


async def test_without_a_seed_each_choice_gets_its_own_from_the_engine(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine()
    await post(make_app(engine), TEXT, {"prompt": "a", "n": 2})
    assert [request.sampling.seed for request in engine.requests.values()] == [None, None]


async def test_choices_of_several_prompts_stand_prompt_by_prompt(make_app: MakeApp) -> None:
    _, reply = await post(make_app(), TEXT, {"prompt": ["a", "bc"], "n": 2, "best_of": 2})
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "a"), (1, "a"), (2, "bc"), (3, "bc")]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2 + 3, 6)


def test_a_stream_tells_them_all_with_their_index(make_server: MakeServer, make_engine: MakeEngine) -> None:
    server = make_server(make_engine(script=lambda request: [*by_seed(request), EOS_ID]))
    said, finishes, roles, usage = ["", ""], {}, [], None
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="deepseek-chat", messages=HELLO, n=2, seed=4)
        with client.chat.completions.create(
            model="deepseek-chat", messages=HELLO, n=2, seed=4, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                usage = chunk.usage
                for choice in chunk.choices:
                    roles += [choice.index] * bool(choice.delta.role)
                    said[choice.index] += choice.delta.content or ""
                    if choice.finish_reason:
                        finishes[choice.index] = choice.finish_reason
    assert said == ["xxxx", "xxxxx"] == [choice.message.content for choice in whole.choices]
    assert sorted(roles) == [0, 1] and finishes == {0: "stop", 1: "stop"}
    assert usage == whole.usage and usage is not None and usage.completion_tokens == 9


class FailsOne(EchoEngine):
    """An engine whose second request fails after two tokens, while the others go on for ever."""

    def _step(self) -> list[Any]:
        for run in self._running:
            if run.id == 2 and run.n_sent == 2:
                self._running.remove(run)
                return [self._finish(run, FinishReason.ERROR, "batched decode failed: scripted")]
        return super()._step()


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_ends_them_all(make_app: MakeApp, stream: bool) -> None:
    engine = FailsOne(script=lambda request: [97] * 1_000_000, n_ctx=2_000_000)
    try:
        response = await make_app(engine).test_client().post(TEXT, json={"prompt": "x", "n": 3, "stream": stream})
        text = await response.get_data(as_text=True)
        if stream:
            errors = [json.loads(line[6:])["error"] for line in text.splitlines() if line.startswith('data: {"error"')]
            assert len(errors) == 3 and text.endswith("data: [DONE]\n\n")
        else:
            choices = json.loads(text)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["error"] * 3
            assert all("scripted" in choice["error"]["message"] for choice in choices)
        wait_until(lambda: engine.n_busy == 0, "the others are cancelled")
    finally:
        engine.die()


def test_leaving_ends_them_all(make_server: MakeServer, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [97] * 1_000_000, n_ctx=2_000_000, gate=threading.Semaphore(20))
    with openai.OpenAI(base_url=make_server(engine).url + "/v1", api_key="none") as client:
        stream = client.completions.create(model="m", prompt="x", n=3, stream=True)
        next(iter(stream))
        stream.close()
    wait_until(lambda: len(engine.finishes) == 3, "all end")
    assert sorted(engine.cancels) == [1, 2, 3]


async def test_more_than_the_server_holds(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(n_slots=1, queue_limit=2)
    engine.hold.set()
    status, reply = await post(make_app(engine), CHAT, {"messages": HELLO, "n": 4})
    assert (status, reply["error"]["param"]) == (400, "n")
    assert "at most 3 at once" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 0}, "n"), (CHAT, {"n": 129}, "n"), (CHAT, {"n": 1.5}, "n"), (TEXT, {"n": -1}, "n"), (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"best_of": 3, "n": 2}, "best_of"), (TEXT, {"suffix": "x"}, "suffix"), ("/v1/responses", {"n": 2}, "n"),
        ("/v1/messages", {"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_what_is_refused(make_app: MakeApp, path: str, fields: dict[str, Any], param: str) -> None:
    status, reply = await post(make_app(), path, {"messages": HELLO, "prompt": "x", "input": "x", "max_tokens": 5, **fields})
    assert status == 400 and reply["error"]["message"].startswith(f"{param}:")


# ---------------------------------------------------------------- echo
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("aé", ["aéaé"]), (["a", "b"], ["aa", "bb"]), ([97, 98], ["abab"]), ([[BOS_ID, 97]], ["<｜begin▁of▁sentence｜>aa"])],
)
async def test_echo_shows_the_prompt_first(make_app: MakeApp, prompt: Any, texts: list[str]) -> None:
    app = make_app()
    body = {"prompt": prompt, "echo": True}
    _, reply = await post(app, TEXT, body)
    assert [choice["text"] for choice in reply["choices"]] == texts
    stream = await (await app.test_client().post(TEXT, json={**body, "stream": True})).get_data(as_text=True)
    said = [""] * len(texts)
    for line in stream.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            said[choice["index"]] += choice["text"]
    assert said == texts


async def test_an_echo_is_shown_even_if_nothing_follows(make_app: MakeApp, make_engine: MakeEngine) -> None:
    app = make_app(make_engine(script=lambda request: [EOS_ID]))
    stream = await (await app.test_client().post(TEXT, json={"prompt": "ab", "echo": True, "n": 2, "stream": True})).get_data(as_text=True)
    assert stream.count('"text":"ab"') == 2

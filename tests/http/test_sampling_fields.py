"""Fields that shape what is drawn and when a text ends: how they reach the engine, and what of them is decided above it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.serving.engine.api import Adjustments
from ds4jax.text.stream import TextStream
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import EOS_ID, THINK_ID

HELLO = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": HELLO, "thinking": False})
TEXT = ("/v1/completions", {"prompt": "hello"})
MESSAGES = ("/v1/messages", {"messages": HELLO, "thinking": False, "max_tokens": 50})
RESPONSES = ("/v1/responses", {"input": "hello", "reasoning": {"effort": "none"}})
EVERY_API = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT, MESSAGES, RESPONSES], ids=lambda x: x if isinstance(x, str) else "")


async def post(app: Any, path: str, body: dict[str, Any]) -> Any:
    response = await app.test_client().post(path, json=body)
    assert response.status_code == 200, await response.get_data()
    return await response.get_json()


@EVERY_API
async def test_every_api_hands_them_to_the_engine(make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]) -> None:
    engine = make_engine()
    fields = {
        "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"97": -100, "98": 2.5, "99": 0},
        "min_tokens": 3.0, "stop_token_ids": [99],
    }  # fmt: skip
    await post(make_app(engine), path, body | fields)
    request = engine.requests[1]
    assert request.adjustments == Adjustments(((97, -100.0), (98, 2.5)), 1.2, -1.0, 0.5, 3)
    assert {99, EOS_ID} <= request.stop_token_ids


@EVERY_API
async def test_absent_and_null_ask_for_nothing(make_app: MakeApp, make_engine: MakeEngine, path: str, body: dict[str, Any]) -> None:
    engine = make_engine()
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos")
    app = make_app(engine)
    await post(app, path, body)
    await post(app, path, body | dict.fromkeys(names))
    assert engine.requests[1].adjustments == engine.requests[2].adjustments == Adjustments()
    assert engine.requests[1].stop_token_ids == engine.requests[2].stop_token_ids


async def test_a_stop_token_ends_the_text_and_is_not_shown(make_app: MakeApp) -> None:
    path, body = TEXT
    choice = (await post(make_app(), path, body | {"stop_token_ids": [ord("l")]}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("he", "stop")


async def test_ignoring_the_end_leaves_the_clients_own_stops(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=lambda request: [*b"one", EOS_ID, *b"two", 0])
    path, body = CHAT
    reply = await post(make_app(engine), path, body | {"ignore_eos": True, "stop_token_ids": [ord("w"), THINK_ID]})
    assert engine.requests[1].stop_token_ids == {ord("w"), THINK_ID}
    assert reply["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("min_tokens", "text", "finish"), [(0, "", "stop"), (3, "xyx", "stop"), (4, "xyxy", "stop"), (6, "xyxyxy", "length")]
)
@pytest.mark.parametrize("api", [CHAT, TEXT])
async def test_no_stop_string_ends_a_text_that_must_be_longer(
    make_app: MakeApp, make_engine: MakeEngine, api: Any, min_tokens: int, text: str, finish: str
) -> None:
    engine = make_engine(script=lambda request: b"xyxyxyxy")
    path, body = api
    stop = ["y" if min_tokens == 3 else "xy"] if min_tokens else ["x"]
    choice = (await post(make_app(engine), path, body | {"stop": stop, "min_tokens": min_tokens, "max_tokens": 6}))["choices"][0]
    got = choice["text"] if "text" in choice else choice["message"]["content"]
    assert (got, choice["finish_reason"]) == (text, finish)


@settings(max_examples=60)
@given(st.text("ab é", max_size=20), st.integers(0, 25), st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
def test_stop_strings_count_from_the_token_after_the_minimum(text: str, min_tokens: int, stops: list[str]) -> None:
    """Told byte by byte: what the first tokens have made of the text stays, and the rest ends as a text of its own would."""
    stream = TextStream(thinking=False, stops=stops)
    data = text.encode()
    got = "".join(delta.text for n, byte in enumerate(data, 1) for delta in stream.feed(bytes([byte]), may_stop=n > min_tokens))
    got += "".join(delta.text for delta in stream.finish())
    kept = data[:min_tokens].decode(errors="ignore")
    rest = text[len(kept) :]
    cut = min((at for stop in stops if (at := rest.find(stop)) >= 0), default=len(rest))
    assert got == kept + rest[:cut]

"""API keys and pages of other origins: who is let in, and in which shape the others are told."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.cli.options import read_api_keys
from ds4jax.config import ServerConfig
from ds4jax.errors import ConfigError
from ds4jax.serving.http.access import ApiKeys
from tests.http.conftest import MakeApp, MakeEngine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
KEYS = ("first-key", "second-key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "bearer  second-key "}, 200),
        ({"x-api-key": "second-key"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-key2"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"Authorization": "first-key"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "ключ"}, 401),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_key_opens_the_door(make_app: MakeApp, make_engine: MakeEngine, path: str, headers: dict[str, str], status: int) -> None:
    engine = make_engine()
    response = await make_app(engine, api_keys=KEYS).test_client().post(path, json={**HELLO, "max_tokens": 9}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert engine.requests == {}
        assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_the_refusal_has_the_shape_of_each_api(make_app: MakeApp) -> None:
    client = make_app(api_keys=KEYS).test_client()
    openai = await (await client.post(CHAT, json=HELLO)).get_json()
    assert (openai["error"]["type"], openai["error"]["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "wants an API key" in openai["error"]["message"]
    anthropic = await (await client.post(MESSAGES, json=HELLO, headers={"x-api-key": "guess"})).get_json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    assert "is not one of this server's" in anthropic["error"]["message"]
    assert "guess" not in json.dumps(anthropic) and "first-key" not in json.dumps(anthropic)


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/live", 200), ("/ready", 200), ("/health", 200), ("/metrics", 401), ("/nothing", 401)]
)
async def test_what_needs_no_key(make_app: MakeApp, path: str, status: int) -> None:
    assert (await make_app(api_keys=KEYS).test_client().get(path)).status_code == status


async def test_a_page_of_another_origin_can_send_its_key(make_app: MakeApp) -> None:
    client = make_app(api_keys=KEYS, cors=True).test_client()
    preflight = await client.options(CHAT, headers={"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization"})
    assert preflight.status_code == 204
    assert "authorization" in preflight.headers["Access-Control-Allow-Headers"].lower()
    refused = await client.post(CHAT, json=HELLO)
    assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, "*")


@given(keys=st.lists(st.text(min_size=1), min_size=1, max_size=3), given_key=st.text())
def test_a_key_is_accepted_if_it_is_one_of_them(keys: list[str], given_key: str) -> None:
    own = ApiKeys(keys)
    assert own.accept(given_key) == (given_key in keys)
    assert all(own.accept(key) for key in keys)


@pytest.mark.parametrize("given_key", ["first-key", "second-key", "f", "wrong" * 100])
def test_comparing_takes_as_long_whatever_is_sent(monkeypatch: pytest.MonkeyPatch, given_key: str) -> None:
    """Every key is compared, by the one function that takes the same time for any two digests."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ApiKeys(KEYS).accept(given_key)
    assert compared == [(32, 32)] * len(KEYS)


def test_keys_stay_out_of_what_is_printed() -> None:
    assert "first-key" not in repr(ServerConfig(api_keys=KEYS))


def test_keys_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\n second-key \n\nthird-key\nfirst-key\n")
    assert read_api_keys([], None) == ()
    assert read_api_keys(["first-key"], file) == ("first-key", "second-key", "third-key")


@pytest.mark.parametrize(
    ("keys", "content", "says"),
    [
        ([], None, "cannot be read"),
        ([], b"# none\n\n", "no key in it"),
        ([], b"\xff\xfe", "cannot be read"),
        ([""], b"a", "empty"),
        (["a b"], b"a", "spaces"),
    ],
)
def test_a_server_that_was_to_be_closed_does_not_start_open(tmp_path: Path, keys: list[str], content: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_api_keys(keys, file)


async def test_options_needs_no_key(make_app: MakeApp) -> None:
    response: Any = await make_app(api_keys=KEYS).test_client().options("/anything")
    assert response.status_code == 204

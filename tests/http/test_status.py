"""What operators ask a server, while it is well, busy, dead and closing."""

from __future__ import annotations

from typing import Any

import pytest
from quart import Quart

from ds4jax.serving.http.app import EDGE
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import EchoEngine, wait_until

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def get(app: Quart, path: str) -> tuple[int, Any]:
    response = await app.test_client().get(path)
    return response.status_code, await response.get_json()


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/health"])
async def test_a_server_that_is_well(make_app: MakeApp, path: str) -> None:
    status, body = await get(make_app(), path)
    assert (status, body["status"]) == (200, "ok")


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/health"])
async def test_an_engine_that_stopped(make_app: MakeApp, make_engine: MakeEngine, path: str) -> None:
    engine = make_engine()
    app = make_app(engine)
    engine.die()
    status, body = await get(app, path)
    assert status == 503 and "stopped" in body["status"]


async def test_a_closing_server_is_alive_but_not_ready(make_app: MakeApp) -> None:
    app = make_app()
    app.extensions[EDGE].abort_all()
    assert (await get(app, "/live"))[0] == 200
    status, body = await get(app, "/ready")
    assert status == 503 and "shutting down" in body["status"]


async def test_version(make_app: MakeApp) -> None:
    status, body = await get(make_app(), "/version")
    assert status == 200 and body["version"][0].isdigit()


async def test_server_info_says_how_it_was_started_and_no_secret(make_app: MakeApp) -> None:
    app = make_app(aliases=("flash",), default_max_tokens=100, api_keys=("secret-key",))
    response = await app.test_client().get("/server_info", headers={"x-api-key": "secret-key"})
    body = await response.get_json()
    assert body["models"] == ["deepseek-v4-flash", "flash"]
    assert (body["default_max_tokens"], body["needs_api_key"], body["engine"]["n_slots"]) == (100, True, 4)
    assert body["engine"]["buckets"] == [1, 4]
    assert "secret-key" not in await response.get_data(as_text=True)


async def test_load_counts_what_runs_and_what_waits(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine: EchoEngine = make_engine()
    app = make_app(engine)
    engine.hold.set()
    async with app.test_client().request("/v1/chat/completions", method="POST") as client:
        await client.send(b'{"messages": [{"content": "x"}]}')
        await client.send_complete()
        for _ in range(1000):
            load = (await get(app, "/get_load"))[1]
            if load["load"]:
                break
        assert (load["load"], load["num_waiting_reqs"], load["num_slots"]) == (1, 1, 4)
        engine.hold.clear()
        wait_until(lambda: not engine.n_busy, "the request ends")

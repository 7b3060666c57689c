"""Everything around the completions: health, metrics, CORS, and what importing the edge loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.http.conftest import MakeApp

ROOT = Path(__file__).parents[2]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_importing_the_edge_loads_no_jax() -> None:
    code = "import sys, ds4jax.serving.http.serve as s; assert s.run; print(sorted({'jax', 'flax', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert result.stdout.strip() == "[]"


async def test_health(make_app: MakeApp) -> None:
    response = await make_app().test_client().get("/health")
    assert response.status_code == 200
    assert await response.get_json() == {"status": "ok", "n_slots": 4, "n_ctx": 4096, "n_running": 0, "n_waiting": 0}


async def test_metrics(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()
    await app.test_client().post("/v1/chat/completions", json=HELLO)
    values = {}
    for one in (app, other):
        response = await one.test_client().get("/metrics")
        assert response.content_type.startswith("text/plain")
        text = (await response.get_data(as_text=True)).splitlines(keepends=True)
        for family in text_string_to_metric_families("".join(text)):
            for sample in family.samples:
                values[one, sample.name, *sample.labels.values()] = sample.value
    assert values[app, "ds4jax_choices_total", "chat", "stop"] == 1
    assert values[app, "ds4jax_time_to_first_token_seconds_count", "chat"] == 1
    assert values[app, "ds4jax_slots"] == 4
    assert values[app, "ds4jax_decode_rows_total", "4"] == 9
    assert (other, "ds4jax_choices_total", "chat", "stop") not in values


async def test_cors_is_there_on_request_alone(make_app: MakeApp) -> None:
    for cors in (False, True):
        client = make_app(cors=cors).test_client()
        preflight = await client.options("/anything/at/all")
        assert (preflight.status_code, await preflight.get_data()) == (204, b"")
        stream = await client.post("/v1/chat/completions", json={**HELLO, "stream": True})
        failed = await client.get("/nothing")
        for response in (preflight, stream, failed):
            assert response.headers.get("Access-Control-Allow-Origin") == ("*" if cors else None)


async def test_a_model_object_has_what_clients_look_for(make_app: MakeApp) -> None:
    client = make_app(default_max_tokens=100).test_client()
    model = await (await client.get("/v1/models/deepseek-v4-flash")).get_json()
    assert model["object"] == "model"
    assert model["context_length"] == model["max_model_len"] == 4096
    assert model["top_provider"] == {"context_length": 4096, "max_completion_tokens": 100, "is_moderated": False}
    assert "temperature" in model["supported_parameters"]

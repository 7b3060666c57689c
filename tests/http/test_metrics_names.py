"""What a scraper reads after real requests: our series and those that vLLM has, with its names, types and labels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from quart import Quart

from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import EOS_ID, EchoEngine, wait_until

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "thinking": False}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
OPEN, END = '<tool_calls>\n<invoke name="now">\n', "</invoke>\n</tool_calls>"

VLLM_TYPES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
}


async def scrape(app: Quart) -> dict[str, Metric]:
    text = await (await app.test_client().get("/metrics")).get_data(as_text=True)
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """The one sample that has this name and, among others, these labels."""
    (found,) = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == sample_name and labels.items() <= sample.labels.items()
    ]
    return found


async def test_the_series_of_vllm(make_app: MakeApp) -> None:
    app = make_app(model_id="flash")
    client = app.test_client()
    for body in (HELLO, {**HELLO, "max_tokens": 2, "n": 2}):
        assert (await client.post(CHAT, json=body)).status_code == 200
    families = await scrape(app)
    assert {name: families[name].type for name in VLLM_TYPES} == VLLM_TYPES
    for name in VLLM_TYPES:
        for sample in families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("flash", "0")
    assert value(families, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(families, "vllm:request_success_total", finished_reason="length") == 2
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(families, "vllm:time_to_first_token_seconds_count") == 3
    assert value(families, "vllm:request_queue_time_seconds_count") == 3
    assert value(families, "vllm:e2e_request_latency_seconds_count") == 3
    gaps = len("hello") - 1 + 2 * (2 - 1)
    assert value(families, "vllm:inter_token_latency_seconds_count") == gaps
    assert value(families, "vllm:time_per_output_token_seconds_count") == gaps
    assert value(families, "vllm:kv_cache_usage_perc") == 0.25
    assert value(families, "vllm:prefix_cache_hits_total") == 60
    assert value(families, "vllm:prefix_cache_queries_total") == value(families, "vllm:prompt_tokens_total") == 80


async def test_our_series_of_batches(make_app: MakeApp) -> None:
    families = await scrape(make_app())
    assert value(families, "ds4jax_decode_padding_rows_total", bucket="1") == 0
    assert value(families, "ds4jax_decode_padding_rows_total", bucket="4") == 3 * 4 - 9
    sizes = {bound: value(families, "ds4jax_decode_batch_size_bucket", le=bound) for bound in ("1.0", "2.0", "4.0", "+Inf")}
    assert sizes == {"1.0": 2, "2.0": 3, "4.0": 5, "+Inf": 5}
    assert value(families, "ds4jax_decode_batch_size_sum") == 11
    assert value(families, "ds4jax_coalesce_windows_total") == 5
    assert value(families, "ds4jax_coalesce_wait_seconds_total") == 0.01
    assert value(families, "ds4jax_compile_misses_total") == 0


async def test_a_client_that_leaves_is_an_abort(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine: EchoEngine = make_engine()
    app = make_app(engine)
    engine.hold.set()
    async with app.test_client().request(CHAT, method="POST") as client:
        await client.send(b'{"messages": [{"content": "x"}]}')
        await client.send_complete()
        while not engine.n_busy:
            await asyncio.sleep(0.001)
        await client.disconnect()
    engine.hold.clear()
    wait_until(lambda: not engine.n_busy, "the request ends")
    families = await scrape(app)
    assert value(families, "ds4jax_disconnects_total", endpoint="chat") == 1
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(families, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(families, "vllm:time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("replies", "repairs", "retries", "failures"),
    [
        ([OPEN + END], 0, 0, 0),
        ([OPEN], 1, 0, 0),
        ([OPEN + "<oops>", OPEN + END], 0, 1, 0),
        ([OPEN + "<oops>", OPEN + "<oops>"], 0, 1, 1),
    ],
)
async def test_what_became_of_calls(
    make_app: MakeApp, make_engine: MakeEngine, replies: list[str], repairs: int, retries: int, failures: int
) -> None:
    texts = iter(replies)
    app = make_app(make_engine(script=lambda request: [*next(texts).encode(), EOS_ID]))
    await app.test_client().post(CHAT, json={**HELLO, "tools": TOOLS})
    families = await scrape(app)
    counted = [value(families, f"ds4jax_tool_{what}_total") for what in ("repairs", "retries", "failures")]
    assert counted == [repairs, retries, failures]
    assert value(families, "vllm:request_success_total", finished_reason="error" if failures else "stop") == 1

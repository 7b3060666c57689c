"""How soon a slot is free again: nothing more is computed for a request that was cancelled than what was under way already."""

from __future__ import annotations

import pytest

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import GenerateRequest, SamplingParams, Started
from ds4jax.serving.engine.core import EngineCore
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, run

VICTIM = GenerateRequest(tuple(range(40)), 20, SamplingParams(seed=0))  # three quanta, then steps
HEIR = GenerateRequest((50, 51), 3, SamplingParams(seed=0))


@pytest.mark.parametrize("n_steps", range(1, 12))
def test_the_next_in_line_gets_the_slot_after_at_most_one_launch_that_was_under_way(n_steps: int) -> None:
    device, clock = FakeDevice(n_slots=1), FakeClock()
    core = EngineCore(device, EngineConfig(slots=1, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4), clock)
    victim, heir = core.submit(VICTIM), core.submit(HEIR)
    record = Record()
    for _ in range(n_steps):
        record.events += core.step(clock.now_us).events
    n_launched, n_read = (sum(kind in kinds for kind, _ in device.trace) for kinds in (("prefill", "decode"), ("read",)))
    assert n_launched - n_read <= 1, "it runs ahead by one launch"
    n_chunks = len(device.chunks)
    core.cancel(victim)
    n_more = 0
    while not any(isinstance(event, Started) for event in record.of(heir)):
        record.events += core.step(clock.now_us).events
        n_more += 1
        assert n_more <= 2
    run(core, clock, record)
    later = [kind for kind, step in device.trace if kind != "read" and step >= n_launched]
    assert later[0] == "prefill" and device.chunks[n_chunks:] == [(0, HEIR.prompt)], "nothing more of the victim"
    assert record.tokens(heir) == alone(HEIR, device.n_ctx)

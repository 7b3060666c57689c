"""What a failing device leaves behind: the batch's requests end, everybody else and every later request is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import Event, Finish, FinishReason, GenerateRequest, SamplingParams, Started, Token
from ds4jax.serving.engine.core import EngineCore, monotonic_us
from ds4jax.serving.engine.programs import Key
from ds4jax.serving.engine.runner import DeviceCache, Runner
from tests.model.oracle import SMOOTH, engine_config

TOKENS = SMOOTH.run(600).tokens
PROMPTS = [tuple(TOKENS[:40]), tuple(TOKENS[100:117]), tuple(TOKENS[200:290])]
N = 60  # long enough that all three run together


@pytest.fixture(scope="module")
def runner(own_runner: Runner) -> Runner:
    return own_runner


@pytest.fixture(scope="module")
def expected(runner: Runner) -> dict[tuple[int, ...], list[int]]:
    """What each prompt is continued with when nothing fails."""
    return {prompt: Driver(runner).tokens_of(prompt) for prompt in PROMPTS}


class Driver:
    """An engine without its thread over a real device."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.core = runner, EngineCore(runner, CONFIG)
        self.events: list[Event] = []
        for slot in range(runner.n_slots):  # a new engine believes its slots to be empty
            runner.clear(slot)

    def submit(self, prompt: Sequence[int]) -> int:
        return self.core.submit(GenerateRequest(tuple(prompt), N, SamplingParams(temperature=0.0, seed=0)))

    def run(self, n_steps: int | None = None) -> None:
        """Step until nothing is left to do, or so many times."""
        while n_steps is None or (n_steps := n_steps - 1) >= 0:
            step = self.core.step(monotonic_us())
            self.events += step.events  # type: ignore[arg-type]
            if step.wait_until_us is None:
                return

    def tokens(self, request: int) -> list[int]:
        return [e.token for e in self.events if isinstance(e, Token) and e.request_id == request]

    def finish(self, request: int) -> Finish:
        (finish,) = [e for e in self.events if isinstance(e, Finish) and e.request_id == request]
        return finish

    def tokens_of(self, prompt: Sequence[int]) -> list[int]:
        """Run one request to its end."""
        request = self.submit(prompt)
        self.run()
        assert self.finish(request).reason is FinishReason.LENGTH
        return self.tokens(request)


CONFIG: EngineConfig = engine_config(SMOOTH.name)


def break_once(runner: Runner, monkeypatch: pytest.MonkeyPatch, key: Key, message: str, *, consume: bool) -> None:
    """Make a program fail the next time it is launched, before or after the device has taken the cache."""
    program = runner.programs[key]

    def broken(*args: object) -> object:
        monkeypatch.setitem(runner.programs, key, program)
        if consume:
            program.executable(*args)
        raise RuntimeError(message)

    monkeypatch.setitem(runner.programs, key, dataclasses.replace(program, executable=broken))


@pytest.mark.parametrize("consume", [False, True], ids=["cache kept", "cache lost"])
@pytest.mark.parametrize("key", [("decode", 4), ("prefill", 64)])
def test_a_failed_step_ends_its_batch_and_the_next_request_is_exact(
    runner: Runner, expected: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch, key: Key, consume: bool
) -> None:
    driver = Driver(runner)
    break_once(runner, monkeypatch, key, "INTERNAL: the device fell over\nand more", consume=consume)
    requests = [driver.submit(prompt) for prompt in PROMPTS]
    driver.run()
    failed = [r for r in requests if driver.finish(r).reason is FinishReason.ERROR]
    assert failed and all(driver.finish(r).error == "batched decode failed: INTERNAL: the device fell over" for r in failed)
    if key[0] == "decode":
        assert failed == requests
    elif not consume:
        assert len(failed) == 1
    for request, prompt in zip(requests, PROMPTS, strict=True):
        want = expected[prompt]
        assert driver.tokens(request) == (want if request not in failed else want[: len(driver.tokens(request))])
    assert driver.core.stats().n_running == 0
    for prompt in PROMPTS:
        assert driver.tokens_of(prompt) == expected[prompt]


def test_a_full_device_says_what_to_do(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(runner)
    break_once(runner, monkeypatch, ("decode", 1), "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.", consume=True)
    request = driver.submit(PROMPTS[0])
    driver.run()
    error = driver.finish(request).error
    assert error is not None and "RESOURCE_EXHAUSTED" in error and "start with fewer slots or a smaller context" in error


def test_a_nan_ends_its_request_alone_and_its_slot_is_clean_again(runner: Runner, expected: dict[tuple[int, ...], list[int]]) -> None:
    driver = Driver(runner)
    requests = [driver.submit(prompt) for prompt in PROMPTS]
    driver.run(8)
    poison(runner, slot=1)
    driver.run()
    assert driver.finish(requests[1]).reason is FinishReason.ERROR
    assert "NaN" in (driver.finish(requests[1]).error or "")
    for i in (0, 2):
        assert driver.tokens(requests[i]) == expected[PROMPTS[i]]
    again = [driver.submit(PROMPTS[1]) for _ in range(runner.n_slots)]  # so that one of them gets the poisoned slot
    driver.run()
    assert all(driver.tokens(request) == expected[PROMPTS[1]] for request in again)


def poison(runner: Runner, slot: int) -> None:
    """Put NaN into a slot's attention rows."""
    leaves = runner._cache.take("poison")
    state = jax.tree.unflatten(jax.tree.structure(runner.shapes.abstract_state()), leaves)
    raw = dataclasses.replace(state.cache.raw, parts={"x": state.cache.raw.parts["x"].at[:, slot].set(jnp.nan)})
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, raw=raw))
    runner._cache = DeviceCache(tuple(jax.tree.leaves(state)))


def test_a_request_that_continues_another_reuses_its_slot_and_is_exact(runner: Runner) -> None:
    driver = Driver(runner)
    prompt = PROMPTS[0]
    prompt += tuple(driver.tokens_of(prompt)) + tuple(TOKENS[300:310])
    driver.events.clear()
    continued = driver.tokens_of(prompt)
    (started,) = [e for e in driver.events if isinstance(e, Started)]
    assert started.n_cached == len(PROMPTS[0]) + N - 1  # the last token was sampled, never fed
    assert continued == Driver(runner).tokens_of(prompt)

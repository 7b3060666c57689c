"""Constrained requests over a scripted device: what they are given, when they wait, and what they cost the others."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import EngineConfig
from ds4jax.errors import GrammarError, RequestError
from ds4jax.serving.engine import masks
from ds4jax.serving.engine.api import Constraint, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from ds4jax.serving.engine.core import EngineCore
from ds4jax.serving.engine.loop import Engine
from tests.engine.fakes import FakeClock, FakeDevice, Record, V, alone, next_token, run

N_CTX = 64
END, MARKER = 90, 91
GREEDY = SamplingParams(seed=0)


def mask_of(allowed: Collection[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(16, "little")


@dataclass
class Rule:
    """A grammar: after each text the tokens whose sum with it is divisible by a number, and the end after every third token.

    A text of `longest` tokens is complete. fail_at: the length behind which it cannot go on. hold: while set, no mask gets ready.
    """

    divisor: int = 3
    longest: int = 100
    fail_at: int = -1
    end_id: int = END
    hold: threading.Event | None = None
    begun: list[weakref.ref[_Text]] = field(default_factory=list)

    def begin(self) -> _Text:
        text = _Text(self)
        self.begun.append(weakref.ref(text))
        return text

    def allowed(self, text: Sequence[int]) -> set[int]:
        plain = {token for token in range(END) if (token + sum(text)) % self.divisor == 0}
        return plain | ({self.end_id} if len(text) % 3 == 2 and self.end_id < V else set())

    @property
    def first_mask(self) -> bytes:
        return mask_of(self.allowed(()))


class _Text:
    def __init__(self, rule: Rule) -> None:
        self.rule, self.tokens = rule, list[int]()

    def advance(self, token: int) -> bytes | None:
        assert token in self.rule.allowed(self.tokens), "the device drew what the mask forbids"
        self.tokens.append(token)
        if self.rule.hold is not None:
            assert self.rule.hold.wait(20), "a test forgot to let go"
        if len(self.tokens) == self.rule.fail_at:
            raise GrammarError("scripted")
        return None if len(self.tokens) == self.rule.longest else mask_of(self.rule.allowed(self.tokens))


def expected(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """What a constrained request must be given, alone or not."""
    assert request.constraint is not None
    rule, after = request.constraint.grammar, request.constraint.after
    assert isinstance(rule, Rule)
    history, out, answer = list(request.prompt), list[int](), list[int]() if after in (None, request.prompt[-1]) else None
    limit = min(N_CTX - len(history), request.max_tokens or N_CTX)
    while True:
        free = {token for token in range(V) if token != END or request.constraint.may_end_before}
        allowed = free if answer is None else rule.allowed(answer)
        token = next_token(history, request.sampling.seed or 0, allowed)
        if token in request.stop_token_ids or (answer is not None and token == END):
            return out, FinishReason.STOP
        out.append(token)
        history.append(token)
        if answer is not None:
            answer.append(token)
            if len(answer) == rule.fail_at:
                return out, FinishReason.ERROR
            if len(answer) == rule.longest:
                return out, FinishReason.STOP
        elif token == after:
            answer = []
        if len(out) == limit:
            return out, FinishReason.LENGTH


def engine_over(device: FakeDevice) -> tuple[EngineCore, FakeClock]:
    clock = FakeClock()
    config = EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=8, mixed_prefill_quantum=4, queue_limit=50)
    return EngineCore(device, config, clock), clock


constraints = st.builds(
    lambda divisor, longest, fail_at, after, may_end: Constraint(Rule(divisor, longest, fail_at), after, may_end),
    st.integers(1, 6),
    st.sampled_from([1, 2, 7, 100]),
    st.sampled_from([-1, -1, 1, 4]),
    st.sampled_from([None, MARKER, 5, 40]),
    st.booleans(),
)
requests = st.builds(
    lambda prompt, max_tokens, seed, stops, constraint: GenerateRequest(
        prompt, max_tokens, SamplingParams(seed=seed), stops, constraint=constraint
    ),
    st.lists(st.integers(0, 8), min_size=1, max_size=20).map(tuple),
    st.none() | st.integers(1, 12),
    st.integers(0, 50),
    st.frozensets(st.integers(0, 20), max_size=3),
    st.none() | constraints,
)


@settings(max_examples=100)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_everybody_is_given_what_they_would_be_given_alone(asked: list[GenerateRequest], n_slots: int, data: st.DataObject) -> None:
    core, clock = engine_over(FakeDevice(n_slots=n_slots, n_ctx=N_CTX))
    ids = [core.submit(request) for request in asked]
    record = Record()
    for _ in range(data.draw(st.integers(0, 12))):
        record.events.extend(core.step(clock.now_us).events)
    gone = data.draw(st.frozensets(st.sampled_from(ids), max_size=2))
    for request_id in gone:
        core.cancel(request_id)
    run(core, clock, record, max_steps=20_000)
    for request_id, request in zip(ids, asked, strict=True):
        tokens, finish = record.tokens(request_id), record.finish(request_id)
        if finish.reason is FinishReason.CANCELLED:
            assert request_id in gone
        elif request.constraint is not None:
            assert (tokens, finish.reason) == expected(request)
        else:
            assert tokens == alone(request, N_CTX)
    assert core.stats().n_running == 0
    core.close()


def ask(core: EngineCore, rule: Rule, n: int, *, after: int | None = None, prompt: tuple[int, ...] = (1, 2)) -> tuple[int, GenerateRequest]:
    request = GenerateRequest(prompt, n, GREEDY, constraint=Constraint(rule, after))
    return core.submit(request), request


@pytest.fixture
def masks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask is there when it is looked for, however busy the machine is: what is left is the order of the steps."""
    monkeypatch.setattr(masks, "WAIT_S", 20)


@pytest.mark.usefixtures("masks_in_time")
def test_a_constrained_row_waits_for_its_token_and_the_others_run_ahead() -> None:
    device = FakeDevice(n_slots=2, n_ctx=N_CTX)
    core, clock = engine_over(device)
    ask(core, Rule(2, 6), 20)
    core.submit(GenerateRequest((3,), 30, GREEDY))
    run(core, clock)
    decodes = [slots for (kind, step) in device.trace if kind == "decode" for slots in [device.step_slots[step]]]
    assert all(1 in slots for slots in decodes[1:]), "the free row is in every step"
    both = [i for i, slots in enumerate(decodes) if slots == [0, 1]]
    assert both and all(b - a == 2 for a, b in zip(both, both[1:], strict=False)), "the other in every second one"


@pytest.mark.usefixtures("masks_in_time")
def test_alone_it_is_read_before_it_goes_on_and_two_go_together() -> None:
    device = FakeDevice(n_slots=2, n_ctx=N_CTX)
    core, clock = engine_over(device)
    ids = [ask(core, Rule(2), 9, prompt=(n,))[0] for n in (1, 2)]
    record = run(core, clock)
    assert all(len(record.tokens(i)) > 2 for i in ids)
    steps = [(kind, step) for kind, step in device.trace if (kind if kind != "read" else "decode") != "prefill"]
    launched = [step for kind, step in steps if kind == "decode"]
    for step in launched[1:]:
        assert steps.index(("read", step - 1)) < steps.index(("decode", step)), "nothing is launched on what is not known"
    assert sum(len(device.step_slots[step]) == 2 for step in launched) >= len(launched) - 4, "but for the first and the last steps"


def test_reasoning_runs_ahead_up_to_its_end_and_no_further() -> None:
    device = FakeDevice(n_slots=1, n_ctx=N_CTX)
    core, clock = engine_over(device)
    thoughts, _ = expected(GenerateRequest((1, 2), 40, GREEDY, constraint=Constraint(Rule(), MARKER)))
    n_thoughts = 6
    after = thoughts[n_thoughts - 1]
    assert after not in thoughts[: n_thoughts - 1]
    request_id, request = ask(core, Rule(3, 4), 40, after=after)
    record = run(core, clock)
    tokens = record.tokens(request_id)
    assert (tokens, record.finish(request_id).reason) == expected(request)
    assert tokens[:n_thoughts] == thoughts[:n_thoughts]
    trace = device.trace[device.trace.index(("decode", 1)) :]
    order = [entry for entry in trace if entry[0] in ("decode", "read")]
    for step in range(1, n_thoughts):  # the step after a token of the reasoning is launched before that token is read
        assert order.index(("decode", step + 1)) < order.index(("read", step))
    for step in range(n_thoughts + 1, max(step for kind, step in order if kind == "decode")):
        assert order.index(("read", step)) < order.index(("decode", step + 1))


def test_a_slow_mask_holds_up_nobody_else() -> None:
    hold = threading.Event()
    device = FakeDevice(n_slots=2, n_ctx=N_CTX)
    core, clock = engine_over(device)
    slow, request = ask(core, Rule(2, 5, hold=hold), 20)
    free = core.submit(GenerateRequest((3,), 30, GREEDY))
    record = Record()
    while not any(event.request_id == free and isinstance(event, Finish) for event in record.events):
        record.events.extend(core.step(clock.now_us).events)
    assert len(record.tokens(slow)) == 1
    hold.set()
    run(core, clock, record, max_steps=20_000)
    assert (record.tokens(slow), record.finish(slow).reason) == expected(request)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_leaving_while_a_mask_is_computed_frees_everything(end: str) -> None:
    hold = threading.Event()
    rule = Rule(2, hold=hold)
    device = FakeDevice(n_slots=1, n_ctx=N_CTX)
    core, clock = engine_over(device)
    request_id, _ = ask(core, rule, 20)
    record = Record()
    while not record.tokens(request_id):
        record.events.extend(core.step(clock.now_us).events)
    if end == "close":
        record.events.extend(core.close())
        hold.set()
    else:
        core.cancel(request_id)
        other = core.submit(GenerateRequest((5,), 3, GREEDY))
        while not record.tokens(other):  # in the very slot
            record.events.extend(core.step(clock.now_us).events)
        hold.set()
        run(core, clock, record, max_steps=20_000)
        assert record.tokens(other) == alone(GenerateRequest((5,), 3, GREEDY), N_CTX)
    assert record.finish(request_id).reason is FinishReason.CANCELLED
    core.close()
    del core
    for _ in range(1000):  # the worker may still be on its way out
        gc.collect()
        if all(text() is None for text in rule.begun):
            break
        threading.Event().wait(0.005)
    assert rule.begun and all(text() is None for text in rule.begun)


def test_a_text_that_cannot_go_on_ends_with_the_reason_and_its_slot_is_as_good_as_before() -> None:
    device = FakeDevice(n_slots=1, n_ctx=N_CTX)
    core, clock = engine_over(device)
    request_id, request = ask(core, Rule(2, fail_at=3), 20)
    record = run(core, clock)
    finish = record.finish(request_id)
    assert (record.tokens(request_id), finish.reason) == expected(request)
    assert finish.error is not None and "scripted" in finish.error
    again = core.submit(GenerateRequest((*request.prompt, *record.tokens(request_id)), 3, GREEDY))
    assert run(core, clock).finish(again).n_cached == len(request.prompt) + 2  # all that was fed


def test_a_text_that_is_complete_at_its_last_token_was_not_cut() -> None:
    core, clock = engine_over(FakeDevice(n_slots=1, n_ctx=N_CTX))
    whole, _ = ask(core, Rule(1, longest=3, end_id=V), 3)
    cut, _ = ask(core, Rule(1, longest=4, end_id=V), 2)
    record = run(core, clock)
    assert record.finish(whole).reason is FinishReason.STOP
    assert record.finish(cut).reason is FinishReason.LENGTH


def test_a_marker_that_is_no_token_is_refused() -> None:
    core, _ = engine_over(FakeDevice())
    with pytest.raises(RequestError) as refused:
        ask(core, Rule(), 5, after=V)
    assert refused.value.param == "constraint.after"


def test_the_thread_comes_back_for_masks() -> None:
    with Engine(FakeDevice(n_slots=2, n_ctx=N_CTX), EngineConfig(slots=2, ctx=N_CTX)) as engine:
        done = threading.Event()
        events: list[Event] = []

        def sink(event: Event) -> None:
            events.append(event)
            if isinstance(event, Finish):
                done.set()

        request = GenerateRequest((1, 2), 20, GREEDY, constraint=Constraint(Rule(2, 9)))
        engine.submit(request, sink)
        assert done.wait(20)
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert ([event.token for event in events if isinstance(event, Token)], finish.reason) == expected(request)

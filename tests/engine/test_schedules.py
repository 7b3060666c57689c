"""Any schedule: every request is given exactly its own tokens and one Finish, and all slots come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ds4jax.config import EngineConfig
from ds4jax.errors import QueueFullError
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, Prefilled, SamplingParams, Started, Token
from ds4jax.serving.engine.core import EngineCore, Returned
from ds4jax.serving.engine.session import Session, State
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, next_token, run

N_CTX = 24
# Prompts that begin alike are what slots and snapshots are mixed up over.
LONG = [tuple((i * step) % 5 for i in range(20)) for step in (1, 2, 3)]
ERRORS = ("batched decode failed: step", "the logits of this session")


class Schedules(RuleBasedStateMachine):
    """Submit, cancel, call, break and step in any order; compare with each request run alone."""

    @initialize(
        n_slots=st.integers(1, 4), window_us=st.sampled_from([0, 2000]), every=st.integers(1, 4), n_snapshots=st.sampled_from([0, 1, 3, 9])
    )
    def build(self, n_slots: int, window_us: int, every: int, n_snapshots: int) -> None:
        self.clock, self.record = FakeClock(), Record()
        self.device = FakeDevice(n_slots, N_CTX, prefill_buckets=(2, 8), n_snapshots=n_snapshots)
        config = EngineConfig(
            slots=n_slots, ctx=N_CTX, coalesce_us=window_us, prefill_quantum=8, mixed_prefill_quantum=2, decode_steps_per_prefill=every
        )
        self.core = EngineCore(self.device, config, self.clock)
        self.asked: dict[int, GenerateRequest] = {}
        self.cancelled: set[int] = set()
        self.manual: list[Session] = []
        self.calls: dict[int, list[tuple[int, ...]]] = {}
        self.broken = False

    # Few token values: prompts then often continue what a slot holds, and stop tokens are often sampled.
    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=N_CTX - 1).map(tuple),
        max_tokens=st.none() | st.integers(1, 8),
        seed=st.integers(0, 3),
        stops=st.frozensets(st.integers(0, 96), max_size=12),
    )
    def submit(self, prompt: tuple[int, ...], max_tokens: int | None, seed: int, stops: frozenset[int]) -> None:
        self._submit(GenerateRequest(prompt, max_tokens, SamplingParams(seed=seed), stops))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 96), max_size=2))
    def continue_conversation(self, data: st.DataObject, extra: list[int]) -> None:
        """Ask again with what an earlier request had said, as a chat client does."""
        earlier = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        prompt = (*earlier.prompt, *alone(earlier, N_CTX), *extra)[: N_CTX - 1]
        self._submit(GenerateRequest(prompt, 3, SamplingParams(seed=0)))

    def _submit(self, request: GenerateRequest) -> None:
        try:
            request_id = self.core.submit(request)
        except QueueFullError:
            assert self.core.stats().n_waiting > 0
        else:
            self.asked[request_id] = request

    @rule(
        prompt=st.sampled_from(LONG),
        n=st.integers(4, 20),
        extra=st.lists(st.integers(0, 2), max_size=2),
        mark=st.integers(0, 20),
        n_times=st.integers(1, 3),
        n_steps=st.integers(0, 12),
    )
    def begin_alike(self, prompt: tuple[int, ...], n: int, extra: list[int], mark: int, n_times: int, n_steps: int) -> None:
        """Ask what begins like something else, perhaps several times at once, perhaps while that is still read."""
        for _ in range(n_times):
            self._submit(GenerateRequest((*prompt[:n], *extra), 2, SamplingParams(seed=1), marks=(mark,)))
        self.step(n_steps, 0)

    @rule(fails=st.booleans())
    def snapshots_fail(self, fails: bool) -> None:
        self.device.fail_save = fails

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.core.cancel(request_id)
        self.cancelled.add(request_id)

    @rule()
    def open_session(self) -> None:
        try:
            session = self.core.open_session()
        except QueueFullError:
            return
        self.manual.append(session)
        self.calls[session.id] = []

    @precondition(lambda self: any(s.state is State.IDLE and s.n_fed < N_CTX - 2 for s in self.manual))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), min_size=1, max_size=2))
    def call(self, data: st.DataObject, tokens: list[int]) -> None:
        session = data.draw(st.sampled_from([s for s in self.manual if s.state is State.IDLE and s.n_fed < N_CTX - 2]))
        if len(tokens) == 1:
            self.core.decode(session, tokens[0])
        else:
            self.core.prefill(session, tokens)
        self.calls[session.id].append(tuple(session.tokens))

    @precondition(lambda self: self.manual)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        self.core.close_session(data.draw(st.sampled_from(self.manual)))

    @rule(ahead=st.integers(0, 4), cache_lost=st.booleans(), at_read=st.booleans())
    def break_a_step(self, ahead: int, cache_lost: bool, at_read: bool) -> None:
        (self.device.fail_read if at_read else self.device.fail_launch)[len(self.device.step_slots) + ahead] = cache_lost
        self.broken = True

    @rule(ahead=st.integers(0, 4), slot=st.integers(0, 3))
    def spoil_a_row(self, ahead: int, slot: int) -> None:
        self.device.bad_rows.add((len(self.device.step_slots) + ahead, slot))
        self.broken = True

    @rule(n=st.integers(1, 6), pause_us=st.sampled_from([0, 1, 1999, 5000]))
    def step(self, n: int, pause_us: int) -> None:
        for _ in range(n):
            self.record.events += self.core.step(self.clock.now_us).events
            self.clock.now_us += pause_us

    @invariant()
    def no_step_is_read_before_its_time(self) -> None:
        """Reads come in launch order, and never more than two launches are unread."""
        n_launched = n_read = 0
        for what, index in self.device.trace:
            if what == "read":
                assert index >= n_read
                n_read = index + 1
            else:
                n_launched += 1
            assert n_launched - n_read <= 2 or self.device.fail_launch

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for session in self.manual:
            self.core.close_session(session)
        run(self.core, self.clock, self.record)
        stats = self.core.stats()
        assert stats.n_running == stats.n_waiting == stats.n_prefilling == 0
        for request_id, request in self.asked.items():
            self._check(request_id, request)
        for session_id, calls in self.calls.items():
            self._check_calls(session_id, calls)
        for _ in range(self.device.n_slots):
            self.core.open_session()

    def _check(self, request_id: int, request: GenerateRequest) -> None:
        events, finish = self.record.of(request_id), self.record.finish(request_id)
        order = "".join({Started: "s", Prefilled: "p", Token: "t", Finish: "f"}[type(event)] for event in events)  # type: ignore[index]
        assert order.lstrip("s").lstrip("p").lstrip("t") == "f" and order.count("s") <= 1
        tokens, expected = self.record.tokens(request_id), alone(request, N_CTX)
        assert finish.n_generated == len(tokens) and finish.n_prompt == len(request.prompt)
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == expected
            limit = min(N_CTX - len(request.prompt), request.max_tokens or N_CTX)
            assert finish.reason is (FinishReason.LENGTH if len(tokens) == limit else FinishReason.STOP)
        else:
            assert tokens == expected[: len(tokens)]
            assert request_id in self.cancelled if finish.reason is FinishReason.CANCELLED else self.broken
            assert finish.error is None or finish.error.startswith(ERRORS)

    def _check_calls(self, session_id: int, calls: list[tuple[int, ...]]) -> None:
        """Every call returned once: the logits of its history, or an error, which is then the last."""
        results = [event.result for event in self.record.of(session_id) if isinstance(event, Returned)]
        assert len(results) == len(calls)
        for position, (history, result) in enumerate(zip(calls, results, strict=True)):
            if isinstance(result, Exception):
                assert position == len(calls) - 1
            else:
                assert int(result.argmax()) == next_token(history)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

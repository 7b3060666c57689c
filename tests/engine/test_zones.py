"""Requests of which parts are drawn greedily: what they are given does not depend on company, and what they wait for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.serving.engine.api import Constraint, FinishReason, GenerateRequest, SamplingParams
from ds4jax.serving.engine.device import MaskRule
from ds4jax.text.dsml import CallZones
from ds4jax.text.dsml.zones import LONG_PAYLOAD
from tests.engine.fakes import FakeDevice, Record, V, alone, next_token, run
from tests.engine.test_grammar import MARKER, N_CTX, Rule, engine_over
from tests.http.fakes import byte_tokenizer

HOT = SamplingParams(temperature=1.5, seed=3)


@dataclass
class Toss:
    """Zones that change with the tokens, in all ways that they may."""

    waits: bool = False
    is_greedy: bool = False
    n_taken: int = 0

    def take(self, token: int) -> None:
        self.n_taken += 1
        self.waits = token % 3 != 0
        self.is_greedy = self.waits and token % 2 == 0


class HotDevice(FakeDevice):
    """Draws otherwise where it draws greedily."""

    def _feed(self, index: int, slot: int, tokens: Sequence[int], sampling: SamplingParams, rule: MaskRule) -> int:
        assert isinstance(sampling.seed, int)
        return super()._feed(index, slot, tokens, replace(sampling, seed=seed_of(sampling)), rule)


def seed_of(sampling: SamplingParams) -> int:
    return (sampling.seed or 0) + (40 if sampling.temperature <= 0 else 0)


def expected(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """What a request must be given: a zone counts for the next token if the one before was waited for, and for the one behind it if not."""
    history, out, zones = list(request.prompt), list[int](), request.zones and request.zones()
    constraint = request.constraint
    rule = None if constraint is None else constraint.grammar
    assert rule is None or isinstance(rule, Rule)
    answer: list[int] | None = [] if constraint is not None and constraint.after in (None, request.prompt[-1]) else None
    is_greedy = zones is not None and zones.is_greedy
    while True:
        allowed: Collection[int] = range(V)
        if rule is not None and answer is not None:
            allowed = rule.allowed(answer)
        elif constraint is not None and not constraint.may_end_before:
            allowed = set(range(V)) - {constraint.grammar.end_id}
        sampling = replace(request.sampling, temperature=0.0) if is_greedy else request.sampling
        token = next_token(history, seed_of(sampling), allowed)
        if token in request.stop_token_ids or (constraint is not None and answer is not None and token == constraint.grammar.end_id):
            return out, FinishReason.STOP
        out.append(token)
        history.append(token)
        if zones is not None:
            waited = zones.waits or answer is not None
            zones.take(token)
            is_greedy = waited and zones.is_greedy
        if answer is not None:
            answer.append(token)
        elif constraint is not None and token == constraint.after:
            answer = []
        if len(out) == min(N_CTX - len(request.prompt), request.max_tokens or N_CTX):
            return out, FinishReason.LENGTH


requests = st.builds(
    lambda prompt, n, seed, stops, zones, constraint: GenerateRequest(
        prompt, n, replace(HOT, seed=seed), stops, zones=zones, constraint=constraint
    ),
    st.lists(st.integers(0, 8), min_size=1, max_size=20).map(tuple),
    st.none() | st.integers(1, 12),
    st.integers(0, 50),
    st.frozensets(st.integers(0, 20), max_size=3),
    st.sampled_from([Toss, Toss, lambda: Toss(waits=True, is_greedy=True), None]),
    st.sampled_from([None, None, Constraint(Rule(2), MARKER), Constraint(Rule(3), 5, may_end_before=True), Constraint(Rule(3))]),
)


@settings(max_examples=100)
@given(st.lists(requests, min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_everybody_is_given_what_they_would_be_given_alone(asked: list[GenerateRequest], n_slots: int, data: st.DataObject) -> None:
    core, clock = engine_over(HotDevice(n_slots=n_slots, n_ctx=N_CTX))
    record, ids = Record(), list[int]()
    for request in asked:
        ids.append(core.submit(request))
        for _ in range(data.draw(st.integers(0, 4))):
            record.events.extend(core.step(clock.now_us).events)
    gone = data.draw(st.frozensets(st.sampled_from(ids), max_size=2))
    for request_id in gone:
        core.cancel(request_id)
    run(core, clock, record, max_steps=20_000)
    for request_id, request in zip(ids, asked, strict=True):
        finish = record.finish(request_id)
        if finish.reason is FinishReason.CANCELLED:
            assert request_id in gone
        else:
            assert (record.tokens(request_id), finish.reason) == expected(request)
    assert core.stats().n_running == 0
    core.close()


# ---------------------------------------------------------------- calls
TOKENIZER = byte_tokenizer()
DSML = "｜DSML｜"


class Writer(FakeDevice):
    """Writes a given text in slot 0, whatever is fed; other slots do as they always do."""

    def script(self, prompt: Sequence[int], text: str) -> None:
        self.text, self.n_prompt = TOKENIZER.encode_rendered(text), len(prompt)

    def _feed(self, index: int, slot: int, tokens: Sequence[int], sampling: SamplingParams, rule: MaskRule) -> int:
        token = super()._feed(index, slot, tokens, sampling, rule)
        if slot != 0:
            return token
        position = len(self.histories[0]) - self.n_prompt
        self._last[0] = self.text[position] if 0 <= position < len(self.text) else ord(".")
        return self._last[0]


def write(text: str, n_others: int = 0) -> tuple[Writer, list[bool]]:
    """Run a request that is given this text, perhaps beside others; say of each token whether it was drawn greedily."""
    device = Writer(n_slots=1 + n_others, n_ctx=1024, n_vocab=TOKENIZER.n_vocab)
    core, clock = engine_over(device)
    prompt, n = (1, 2, 3), len(TOKENIZER.encode_rendered(text))
    device.script(prompt, text)
    request = GenerateRequest(prompt, n, HOT, zones=lambda: CallZones(TOKENIZER.token_bytes))
    written = core.submit(request)
    others = [GenerateRequest((i,), n, HOT) for i in range(n_others)]
    ids = [core.submit(other) for other in others]
    record = run(core, clock)
    assert record.tokens(written) == device.text
    assert [record.tokens(i) for i in ids] == [alone(other, 1024) for other in others]
    greedy = [row.sampling.temperature == 0 for batch in device.batches for row in batch if row.slot == 0]
    return device, [False, *greedy]  # the first one was drawn by the prefill


def greedy_text(text: str, n_others: int = 0) -> str:
    """Put a star in the place of each token that is drawn greedily."""
    _, greedy = write(text, n_others)
    tokens = TOKENIZER.encode_rendered(text)
    pieces = zip(tokens, greedy, strict=True)
    return b"".join(b"*" if is_greedy else TOKENIZER.token_bytes(token) for token, is_greedy in pieces).decode(errors="replace")


def call(value: str, string: str = "true") -> str:
    return (
        f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="{string}">{value}</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>"
    )


STARS = "*" * len(TOKENIZER.encode_rendered(call("").partition("tool_calls>")[2].partition("</")[0]))
"""From behind the opening tag of a block to the value of its first parameter."""
END = "*" * len(TOKENIZER.encode_rendered(call("").partition("</")[2]))
LONG = "x" * LONG_PAYLOAD


@pytest.mark.parametrize("n_others", [0, 2])
@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("Hi " + call("Koe"), f"Hi <{DSML}t{'*' * 10}{STARS}Koe</{END}"),
        (call("</div>"), f"<{DSML}t{'*' * 10}{STARS}</*iv></{END}"),
        # Behind long payload one token more is drawn as asked.
        (call(LONG + "</div>"), f"<{DSML}t{'*' * 10}{STARS}{LONG}</div></{DSML}{END[1:]}"),
        (call('["a", 1]', "false"), f'<{DSML}t{"*" * 10}{STARS}***a"******{END}'),
        (call(f'["{LONG}", 1]', "false"), f'<{DSML}t{"*" * 10}{STARS}***{LONG}",*****{END}'),
    ],
)
def test_structure_is_drawn_greedily(text: str, drawn: str, n_others: int) -> None:
    assert greedy_text(text, n_others) == drawn


def test_long_payload_runs_ahead_and_structure_waits() -> None:
    text = call(LONG + "y" * 50)
    device, greedy = write(text)
    at = {entry: i for i, entry in enumerate(device.trace)}
    launched = [at.get(("decode", step + 1), len(at)) for step in range(len(greedy))]
    ahead = "".join(".>"[launch < at["read", step]] for step, launch in enumerate(launched))
    n_before = len(TOKENIZER.encode_rendered(call("").partition("</")[0]))
    # The first two tokens are "<" and the mark; a long string runs ahead up to the "</" behind it.
    n_ahead = len(text.partition(LONG)[2].partition("/")[0] + "/")
    assert ahead == ">>" + "." * (n_before + LONG_PAYLOAD - 2) + ">" * n_ahead + "." * len(END)


def test_calls_slow_nobody_else_down() -> None:
    device, _ = write(call("Koe"), 2)
    for slot in (1, 2):
        steps = [i for i, batch in enumerate(device.batches) if slot in [row.slot for row in batch]]
        assert steps == list(range(steps[0], steps[-1] + 1)), "in every step from its first to its last"
    called = [i for i, batch in enumerate(device.batches) if 0 in [row.slot for row in batch]]
    assert max(b - a for a, b in pairwise(called)) == 2, "the call goes along in every second one"

"""The numbers stay right through the public engine: prompts in uneven chunks, and token by token beside other sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ds4jax import Engine
from tests.model.oracle import LENGTHS, SERVED, SETS, TOLERANCE, Run

EngineOf = Callable[[str], Engine]
# Where calls end: positions whose logits every set keeps, so that the pieces cross every window and compressor boundary.
ENDS = {
    5: ((1, 4, 5), (2, 3, 5)),
    130: ((1, 4, 130), (3, 128, 129, 130), (127, 130)),
    300: ((1, 4, 131, 258, 299, 300), (5, 12, 41, 128, 256, 300)),
    600: ((1, 4, 131, 258, 299, 342, 385, 513, 557, 600), (5, 12, 128, 256, 384, 512, 595, 598, 600)),
}


def check(got: np.ndarray, run: Run, position: int) -> None:
    """Compare the logits [V] after a position with the reference: all of them if it is kept, the best token anyway."""
    assert got.argmax() == run.argmax[position], f"another best token after position {position}"
    if position in run.positions:
        worst = np.abs(got - run.at(position)).max()
        assert worst <= TOLERANCE, f"logits after position {position} differ by up to {worst:.1e}"


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", SERVED)
def test_prefill_in_uneven_pieces(engines: EngineOf, name: str, n: int) -> None:
    run = SETS[name].run(n)
    for ends in ENDS[n]:
        with engines(name).open_session() as session:
            for start, end in zip((0, *ends), ends, strict=False):
                assert end - 1 in run.positions
                check(session.prefill(run.tokens[start:end]), run, end - 1)
            assert session.tokens == tuple(run.tokens)


@pytest.mark.parametrize("name", SERVED)
def test_decode_from_the_first_token_in_every_bucket(engines: EngineOf, name: str) -> None:
    """Sequences of 600, 300, 130 and 5 tokens start together, so the batch shrinks through all buckets that its engine has.

    The one packed in few bits decodes slowly: it begins with 300, behind which no layer does anything new.
    """
    engine = engines(name)
    lengths = [n for n in sorted(LENGTHS, reverse=True) if n < 600 or name != "tiny-q2"][: engine.runner.n_slots]
    before = engine.stats()
    decode_together(engine, {n: (SETS[name].run(n), 0) for n in lengths})
    after = engine.stats()
    rows = {b: after.rows[b] - before.rows.get(b, 0) for b in after.rows if b <= len(lengths)}
    assert sum(rows.values()) == sum(lengths) and all(rows.values()), f"some bucket was never used: {rows}"


@pytest.mark.parametrize("name", SERVED)
def test_decode_after_prefill_beside_others(engines: EngineOf, name: str) -> None:
    """Sessions that stand at different phases of their windows share batches; each continues its own prompt."""
    engine = engines(name)
    starts = (127, 250, 17)[: engine.runner.n_slots]
    run = SETS[name].run(300)
    decode_together(engine, {start: (run, start) for start in starts})


def decode_together(engine: Engine, work: dict[int, tuple[Run, int]]) -> None:
    """Decode each run from its start on a thread of its own, checking every step."""
    ready = threading.Barrier(len(work))
    errors: list[BaseException] = []

    def follow(run: Run, start: int) -> None:
        try:
            with engine.open_session() as session:
                if start:
                    check(session.prefill(run.tokens[:start]), run, start - 1)
                ready.wait(60)
                for position in range(start, len(run.tokens)):
                    check(session.decode(run.tokens[position]), run, position)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=job, daemon=True) for job in work.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)

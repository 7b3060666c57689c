"""The numbers are right: whole sequences in one chunk, against the oracle's logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compiler import AS_USERS
from tests.model.oracle import IN_ONE_CHUNK, LENGTHS, SETS, SMOOTH, AllLogits, assert_exact


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> dict[str, AllLogits]:
    """Compile the programs of all sets that are asked for, on all cores."""
    mine = (item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module)
    names = sorted({item.callspec.params["name"] for item in mine})

    def compiled(name: str) -> AllLogits:
        return AllLogits(SETS[name].load(), options=AS_USERS if name == SMOOTH.name else None)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(compiled, names), strict=True))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", IN_ONE_CHUNK)
def test_logits_and_best_tokens(programs: dict[str, AllLogits], name: str, n: int) -> None:
    run = SETS[name].run(n)
    assert_exact(programs[name](run.tokens), run)

"""What cannot be packed for the device is refused at the door, and the engine lives on."""

from typing import Any

import pytest

from ds4jax.config import EngineConfig
from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import GenerateRequest, SamplingParams
from ds4jax.serving.engine.loop import Engine
from tests.engine.fakes import FakeDevice


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_k": 10**18}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"min_p": float("-inf")}, "min_p"),
    ],
)
def test_sampling_that_no_step_could_carry(sampling: dict[str, Any], field: str) -> None:
    with Engine(FakeDevice(), EngineConfig()) as engine:
        with pytest.raises(RequestError, match=field):
            engine.submit(GenerateRequest((1,), 4, SamplingParams(**sampling)), lambda event: None)
        assert len(list(engine.generate_tokens([1], 3))) == 3


@pytest.mark.parametrize("token", [-1, 97, 10**20])
def test_ids_that_are_no_tokens(token: int) -> None:
    with Engine(FakeDevice(), EngineConfig()) as engine:
        session = engine.open_session()
        for call in (lambda: session.prefill([1, token]), lambda: session.decode(token), lambda: next(engine.generate_tokens([token], 3))):
            with pytest.raises(RequestError, match=str(token)):
                call()
        assert session.prefill([1, 2]) is not None

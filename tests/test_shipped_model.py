"""The small model that comes with the package, asked a few questions of each kind: `ds4jax eval` in its shortest form.

Another training writes other words. What is asserted holds for any model that deserves to be shipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ds4jax
from ds4jax.evals import measures
from ds4jax.evals.measures import GREEDY, Subject
from ds4jax.evals.run import Question
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.text import Message

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """The model in the engine that the notebooks open."""
    with ds4jax.Engine(ds4jax.load_model(ds4jax.small_model()), slots=2, ctx=512) as engine:
        yield Subject(engine, 2)


def test_the_file_is_small_and_says_whose_it_is() -> None:
    assert ds4jax.small_model().stat().st_size <= 20e6
    metadata = GGUFFile(ds4jax.small_model()).metadata
    assert metadata["general.license"] == "mit"
    assert "SmolLM2-135M-Instruct (Apache-2.0)" in str(metadata["general.description"])


def test_it_writes_text(subject: Subject) -> None:
    assert measures.stories_without_loops(subject, 2, n_token=50) == 2


def test_it_greets(subject: Subject) -> None:
    (reply,) = subject.ask([Question((Message("user", "Hello!"),), GREEDY, 40)])
    assert reply.stopped and "help" in reply.content


def test_it_calls_tools(subject: Subject) -> None:
    readable, _ = measures.tool_calls(subject, 2)
    assert readable == 2


def test_it_closes_its_thoughts(subject: Subject) -> None:
    assert measures.thoughts_closed(subject, 1) == 1


def test_a_reply_is_the_same_alone_and_in_company(subject: Subject) -> None:
    assert measures.same_in_company(subject, 2, n_token=12) == 2

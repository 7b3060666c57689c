"""All measures of one model, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds4jax.evals import measures
from ds4jax.evals.measures import Subject


@dataclass(frozen=True)
class Sizes:
    """How many questions of each kind."""

    texts: int
    stories: int
    tools: int
    recall: int
    thinking: int
    company: int
    company_tokens: int


FULL = Sizes(texts=48, stories=50, tools=100, recall=50, thinking=60, company=100, company_tokens=48)
QUICK = Sizes(texts=4, stories=6, tools=8, recall=6, thinking=6, company=4, company_tokens=16)


@dataclass(frozen=True)
class Row:
    """One result. of: the number of tries (None: `value` is no count). bar: the share that the small model of the package must reach."""

    name: str
    value: float
    of: int | None = None
    bar: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        return None if self.bar is None or self.of is None else self.value >= self.bar * self.of


def evaluate(subject: Subject, sizes: Sizes) -> Iterator[Row]:
    """Measure everything, and yield rows as they are known."""
    yield Row("perplexity of held-out answers", measures.perplexity(subject, sizes.texts))
    yield Row("stories without loops", measures.stories_without_loops(subject, sizes.stories), sizes.stories, 0.9)
    readable, exact = measures.tool_calls(subject, sizes.tools)
    yield Row("tool calls that can be read", readable, sizes.tools, 0.9)
    yield Row("tool calls exactly as wanted", exact, sizes.tools)
    for distance in (500, 1500):
        yield Row(f"keys recalled after {distance} tokens", measures.recalled(subject, sizes.recall, distance), sizes.recall, 0.9)
    yield Row("thoughts closed", measures.thoughts_closed(subject, sizes.thinking), sizes.thinking, 0.95)
    company = measures.same_in_company(subject, sizes.company, sizes.company_tokens)
    yield Row("same greedy reply alone and in company", company, sizes.company, 1.0)

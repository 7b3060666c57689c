"""One API call, read and checked: what the engine is to do, and what the reply needs to know. No API's shape."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds4jax.errors import Ds4jaxError, RequestError
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http.tool_use import ToolUse


@dataclass(frozen=True)
class Call:
    """A checked API call.

    id: as the client sees it; model: as the client named it; requests: one for each choice of the reply; n: how many choices in a row
    answer the same prompt;
    opens_reasoning: the prompt ends inside `<think>`; stop_strings: found above the engine, in the text; tool_use: None if the reply may
    call no tools; scored_prompts: the prompt of each choice as it is shown, where its tokens are drawn so that they get log
    probabilities; retries_calls: whoever words the reply can start anew once, if the model wrote a call that cannot be read.
    """

    endpoint: str
    id: str
    model: str
    requests: Sequence[GenerateRequest]
    opens_reasoning: bool = False
    stop_strings: Sequence[str] = field(default_factory=tuple)
    stream: bool = False
    include_usage: bool = False
    tool_use: ToolUse | None = None
    retries_calls: bool = False
    n: int = 1
    scored_prompts: Sequence[str] = field(default_factory=tuple)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply shows log probabilities."""
        return self.requests[0].sampling.logprobs is not None


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(f"The model `{model}` is not served here; use one of: {', '.join(served)}.", "model")


class GenerationFailedError(Ds4jaxError):
    """The engine could not finish the reply, and the API has no other way to say so in a reply that does not stream."""


def new_id(prefix: str, separator: str = "-") -> str:
    """Make an id that no other call has, in this process or another."""
    return f"{prefix}{separator}{uuid.uuid4().hex[:24]}"

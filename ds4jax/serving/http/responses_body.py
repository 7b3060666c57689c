"""`/v1/responses`: the body of a request. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http import conversation, strict_json
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.conversation import ConversationBody, Served
from ds4jax.serving.http.params import Number, choice_requests, top_logprobs
from ds4jax.serving.http.responses_echo import read_echo
from ds4jax.serving.http.responses_input import Item, forms_of_results, read_input
from ds4jax.serving.http.responses_store import ResponseStore, StoredResponse
from ds4jax.serving.http.responses_thoughts import HiddenThoughts
from ds4jax.serving.http.responses_tools import Form, ToolEntry, read_tools
from ds4jax.serving.http.thinking import Effort, resolve
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text.chat import Message

SUMMARIES = ("auto", "concise", "detailed")
SEALED_THOUGHTS, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
"""What can be asked for in `include`; of other things this server has none."""

_NOTHING = StoredResponse(b"", ())


class Reasoning(msgspec.Struct):
    """`reasoning` of a request; generate_summary is the older name of summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(msgspec.Struct):
    """`text` of a request."""

    format: dict[str, Any] | None = None


class ResponsesBody(ConversationBody, kw_only=True):
    """The body of a responses request."""

    input: str | list[str | Item]
    instructions: str | None = None
    max_output_tokens: Number | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: Number | None = None
    safety_identifier: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


@dataclass(frozen=True)
class ResponseCall(Call):
    """A checked call of this API.

    messages: the conversation without its instructions, for whoever continues it; echo: members of the request that a response repeats;
    shows_reasoning: the client asked to see it; seals_reasoning: it asked for what it can send back instead; is_kept: the response may
    be continued by its id; forms: how calls are told, by the name of their tool.
    """

    messages: tuple[Message, ...] = ()
    echo: Mapping[str, Any] = field(default_factory=dict)
    shows_reasoning: bool = False
    seals_reasoning: bool = False
    is_kept: bool = True
    forms: Mapping[str, Form] = field(default_factory=dict)
    instructions: str | None = None

    @property
    def has_reasoning_item(self) -> bool:
        """Whether the client gets the reasoning in any form."""
        return self.shows_reasoning or self.seals_reasoning


def read(data: bytes, served: Served, store: ResponseStore, hidden: HiddenThoughts) -> ResponseCall:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault, and ResponseNotFoundError."""
    body = strict_json.decode(data, ResponsesBody)
    reject_unsupported(body, honoured=("tools", "tool_choice", "top_logprobs"))
    _reject_more(body)
    reasoning = body.reasoning or Reasoning()
    summary = _summary(reasoning)
    thinks = resolve(body, body.model, Effort("reasoning.effort", reasoning.effort, decides=True))
    tools = read_tools(body.tools or [], body.tool_choice, parallel=body.parallel_tool_calls is not False)
    earlier = _NOTHING if body.previous_response_id is None else store.get(body.previous_response_id, "previous_response_id")
    messages = tuple(hidden.recall(body.instructions, [*earlier.messages, *read_input(body.input, earlier.messages)]))
    instructions = [Message("system", body.instructions)] if body.instructions else []
    prompt = conversation.render([*instructions, *messages], served, thinks=thinks, param="input", tool_use=tools.use)
    limit_name = "max_tokens" if body.max_output_tokens is None else "max_output_tokens"
    form = body.text.format if body.text else None
    request = conversation.request_of(
        prompt,
        body,
        served,
        limit=(limit_name, getattr(body, limit_name)),
        param="input",
        tool_use=tools.use,
        form=("text.format", form),
    )
    include = body.include or []
    n_logprobs = top_logprobs("top_logprobs", body.top_logprobs)
    wants_logprobs = n_logprobs > 0 or LOGPROBS in include
    is_kept = body.store is not False
    return ResponseCall(
        endpoint="responses",
        id=new_id("resp", "_"),
        model=body.model or served.config.model_id,
        requests=choice_requests(request, 1, n_logprobs if wants_logprobs else None),
        opens_reasoning=prompt.opens_reasoning,
        stop_strings=body.stop_strings,
        stream=bool(body.stream),
        tool_use=tools.use,
        retries_calls=not body.stream,
        messages=messages,
        echo={
            **read_echo(data),
            "background": False,
            "frequency_penalty": request.adjustments.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": request.max_tokens if getattr(body, limit_name) is not None else None,
            "max_tool_calls": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": request.adjustments.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": is_kept,
            "temperature": request.sampling.temperature,
            "top_logprobs": n_logprobs,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
        },
        shows_reasoning=summary is not None,
        seals_reasoning=SEALED_THOUGHTS in include,
        is_kept=is_kept,
        forms={**earlier.forms, **forms_of_results(body.input), **tools.forms},
        instructions=body.instructions,
    )


def _summary(reasoning: Reasoning) -> str | None:
    name = "summary" if reasoning.summary is not None else "generate_summary"
    summary: str | None = getattr(reasoning, name)
    if summary is not None and summary not in SUMMARIES:
        raise RequestError(f"reasoning.{name}: got {summary!r}, expected one of {', '.join(SUMMARIES)}", f"reasoning.{name}")
    return summary


def _reject_more(body: ResponsesBody) -> None:
    """Refuse fields of this API alone that would change the answer, or where it can be found."""
    for name, asked, instead in (
        ("conversation", body.conversation is not None, "send the conversation as `input`, or name its last response"),
        ("background", bool(body.background), "leave it out, and stream"),
        ("prompt", body.prompt is not None, "send the text itself as `input`"),
    ):
        if asked:
            raise RequestError(f"{name}: not supported; {instead}", name)

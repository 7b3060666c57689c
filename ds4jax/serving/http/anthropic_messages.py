"""`/v1/messages`: the body of a request. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http import conversation, strict_json
from ds4jax.serving.http.anthropic_tools import ToolChoice, ToolEntry, tool_use
from ds4jax.serving.http.anthropic_turns import Content, Turn, read_turns
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.conversation import ConversationBody, Prompt, Served
from ds4jax.serving.http.params import checked_stops
from ds4jax.serving.http.structured import read_grammar
from ds4jax.serving.http.thinking import Effort, resolve
from ds4jax.serving.http.tool_use import ToolUse
from ds4jax.serving.http.unsupported import reject_unsupported


class OutputConfig(msgspec.Struct):
    """`output_config` of a request."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(ConversationBody, kw_only=True):
    """The body of a messages request."""

    messages: list[Turn]
    system: Content = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


def read(data: bytes, served: Served) -> Call:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = _decode(data)
    use = tool_use(body.tools or [], body.tool_choice)
    prompt = _render(body, served, use)
    request = conversation.request_of(
        prompt, body, served, limit=("max_tokens", body.max_tokens), param="messages", tool_use=use, form=_form(body)
    )
    return Call(
        endpoint="messages",
        id=new_id("msg", "_"),
        model=body.model or served.config.model_id,
        requests=(request,),
        opens_reasoning=prompt.opens_reasoning,
        stop_strings=checked_stops("stop_sequences", body.stop_sequences or []),
        stream=bool(body.stream),
        tool_use=use,
        retries_calls=not body.stream,
    )


def count_tokens(data: bytes, served: Served) -> tuple[str | None, int]:
    """Read a body, and return the model it names and the tokens of its prompt. Raises RequestError naming the field at fault."""
    body = _decode(data)
    return body.model, len(_render(body, served, tool_use(body.tools or [], body.tool_choice)).ids)


def _decode(data: bytes) -> MessagesBody:
    body = strict_json.decode(data, MessagesBody)
    reject_unsupported(body, honoured=("tools", "tool_choice"))
    for name, value in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if value:
            raise RequestError(f"{name}: not supported; leave it out, and run tools on the client's side", name)
    read_grammar(body, _form(body))  # whoever only counts tokens is told of mistakes too
    return body


def _form(body: MessagesBody) -> tuple[str, dict[str, Any] | None]:
    """What the answer must look like, and the field that says so; `output_format` is its older place."""
    if body.output_config is not None and body.output_config.format is not None:
        return "output_config.format", body.output_config.format
    return "output_format", body.output_format


def _render(body: MessagesBody, served: Served, use: ToolUse | None) -> Prompt:
    effort = Effort("output_config.effort", body.output_config.effort if body.output_config else None)
    thinks = resolve(body, body.model, effort)
    turns = read_turns(body.system, body.messages)
    return conversation.render(turns, served, thinks=thinks, param="messages", tool_use=use)

"""What the APIs that send a conversation have in common once it is read: one call with one choice. No API's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ds4jax.config import ServerConfig
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http import thinking
from ds4jax.serving.http.params import CommonBody, Number, completion_limit
from ds4jax.serving.http.prompts import encode_chat, shared_beginnings
from ds4jax.serving.http.structured import Format, constrain, read_grammar
from ds4jax.serving.http.tool_use import ToolUse
from ds4jax.text import chat
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.effort import Thinking
from ds4jax.text.grammar import GrammarCompiler
from ds4jax.text.template import ChatTemplate
from ds4jax.text.tokenizer import Tokenizer


class ConversationBody(CommonBody, kw_only=True):
    """Fields of every API that sends a conversation: the spellings of the thinking switch."""

    thinking: thinking.Switch = msgspec.UNSET
    think: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Served:
    """What a reader of bodies has to know of the server.

    n_ctx: the longest prompt it may make, in tokens; slot_ctx: tokens that a slot holds; grammars: compiles what answers must look like;
    memory: what the model wrote when it called tools; template: makes prompts in our stead.
    """

    tokenizer: Tokenizer
    n_ctx: int
    slot_ctx: int
    config: ServerConfig
    grammars: GrammarCompiler
    memory: ReplayMemory = field(default_factory=ReplayMemory)
    template: ChatTemplate | None = None


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. opens_reasoning: the model's first tokens are reasoning."""

    ids: tuple[int, ...]
    thinks: bool
    opens_reasoning: bool


def render(messages: Sequence[chat.Message], served: Served, *, thinks: Thinking, param: str, tool_use: ToolUse | None = None) -> Prompt:
    """Render and encode a conversation. Raises RequestError, or ContextLengthError naming `param`.

    A reply that has to begin with a call does not think before it: its prompt ends with the beginning of the call.
    """
    thinks = Thinking.OFF if tool_use and tool_use.is_forced else thinks.within(served.slot_ctx)
    tools = tool_use.tools if tool_use else ()
    if served.template is not None:
        segments = served.template.render(messages, thinking=thinks, tools=tools)
    else:
        style = cast(chat.PromptStyle, served.config.prompt_style)
        segments = chat.render(
            messages, thinking=thinks, style=style, tools=tools, tool_text=served.config.tool_prompt, recall=served.memory.recall
        )
    if tool_use:
        segments += tool_use.opening
    return Prompt(encode_chat(segments, served.tokenizer, served.n_ctx, param), bool(thinks), chat.opens_reasoning(segments))


def request_of(
    prompt: Prompt,
    body: CommonBody,
    served: Served,
    *,
    limit: tuple[str, Number | None],
    param: str,
    tool_use: ToolUse | None = None,
    form: tuple[str, Format | None] = ("", None),
) -> GenerateRequest:
    """Ask for the answer to a prompt.

    limit: the field that bounds the answer, and its value. form: the field in which this very API has what an answer must look like,
    and its value. Raises RequestError naming a field at fault, ContextLengthError.
    """
    tokenizer = served.tokenizer
    grammar = read_grammar(body, form)
    after = tokenizer.end_think_id if prompt.opens_reasoning else None
    # Without thinking the think tags end a reply too: it must not contain them.
    tags = () if prompt.thinks else (tokenizer.think_id, tokenizer.end_think_id)
    name, asked = limit
    max_tokens = completion_limit(
        name, asked, n_prompt=len(prompt.ids), n_ctx=served.n_ctx, default=served.config.default_max_tokens, param=param
    )
    sampling = body.sampling()
    return GenerateRequest(
        prompt=prompt.ids,
        marks=shared_beginnings(prompt.ids, tokenizer),
        conversation=body.prompt_cache_key,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=body.stop_tokens(tokenizer, tokenizer.eos_id, *tags),
        adjustments=body.adjustments(tokenizer, max_tokens),
        constraint=constrain(grammar, served.grammars, after=after, tool_use=tool_use),
        zones=tool_use.zones(sampling, tokenizer) if tool_use else None,
    )

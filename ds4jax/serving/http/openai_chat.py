"""`/v1/chat/completions`: the body, the reply, and the chunks of a stream. No I/O."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ds4jax.config import ServerConfig
from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http import openai_common as common
from ds4jax.serving.http import strict_json
from ds4jax.serving.http import thinking as thinking_fields
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.params import CommonBody, Number, completion_limit
from ds4jax.serving.http.prompts import encode_chat
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text import chat
from ds4jax.text.tokenizer import Tokenizer


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str = "text"
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a request. `reasoning` is what some clients call `reasoning_content`."""

    role: str = "user"
    content: str | list[str | ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatBody(CommonBody, kw_only=True):
    """The body of a chat completion request."""

    messages: list[ChatMessage]
    max_completion_tokens: Number | None = None
    thinking: thinking_fields.Switch = msgspec.UNSET
    think: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read(data: bytes, tokenizer: Tokenizer, n_ctx: int, config: ServerConfig) -> Call:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = strict_json.decode(data, ChatBody)
    reject_unsupported(body)
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    thinks = thinking_fields.resolve(body, body.model)
    style = cast(chat.PromptStyle, config.prompt_style)
    segments = chat.render(messages, thinking=thinks, style=style)
    prompt = encode_chat(segments, tokenizer, n_ctx, "messages")
    # Without thinking the think tags end a reply too: it must not contain them.
    tags = () if thinks else (tokenizer.think_id, tokenizer.end_think_id)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = GenerateRequest(
        prompt=prompt,
        max_tokens=completion_limit(
            limit_name, getattr(body, limit_name), n_prompt=len(prompt), n_ctx=n_ctx, default=config.default_max_tokens, param="messages"
        ),
        sampling=body.sampling(),
        stop_token_ids=body.stop_tokens(tokenizer.eos_id, *tags),
    )
    return Call(
        endpoint="chat",
        id=new_id("chatcmpl"),
        model=body.model or config.model_id,
        requests=(request,),
        opens_reasoning=chat.opens_reasoning(segments),
        stop_strings=body.stop_strings,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


async def reply(generation: Generation, check_s: float) -> dict[str, Any]:
    """Wait for the reply of a call that does not stream."""
    ((text, ending),) = await common.collect(generation, check_s)
    # Thoughts that were cut are no answer: content is null, not the empty answer that "" would be.
    message = {"role": "assistant", "content": text["content"] or (None if text["reasoning"] else "")}
    if text["reasoning"]:
        message["reasoning_content"] = text["reasoning"]
    choice = {"index": 0, "message": message, "finish_reason": ending.reason}
    if ending.reason == "error":
        choice |= common.ending_error(ending)
    return {**common.head(generation, "chat.completion"), "choices": [choice], "usage": common.usage(generation)}


class ChatChunks:
    """The chunks of a chat stream.

    The one with the role comes with the first token and not before: clients that measure the time to the first token take
    any chunk for it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = common.head(generation, "chat.completion.chunk")
        self._opened = False

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Word what a piece adds."""
        chunks = []
        if not self._opened:
            self._opened = True
            chunks.append(self._chunk({"role": "assistant"}))
        for delta in piece.deltas:
            chunks.append(self._chunk({"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}))
        if piece.ending is not None and piece.ending.reason != "error":
            chunks.append(self._chunk({}, piece.ending.reason))
        return chunks

    def usage(self) -> dict[str, Any]:
        """Word the chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": common.usage(self._generation)}

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def _message(index: int, message: ChatMessage) -> chat.Message:
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            place = f"messages[{index}].{name}"
            raise RequestError(f"{place}: not supported yet; send the conversation without tool calls and results", place)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return chat.Message(message.role, _text(index, message.content), reasoning)


def _text(index: int, content: str | list[str | ContentPart] | None) -> str:
    """Join the parts of a content, with nothing between them. Raises RequestError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in ("text", "input_text", "output_text") and part.text is not None:
            texts.append(part.text)
        else:
            place = f"messages[{index}].content[{i}]"
            raise RequestError(
                f"{place}: a part of type {part.type!r} without text is not supported; this model reads text parts only", place
            )
    return "".join(texts)

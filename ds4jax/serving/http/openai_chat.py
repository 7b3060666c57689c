"""`/v1/chat/completions`: the body, the reply, and the chunks of a stream. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http import conversation, strict_json
from ds4jax.serving.http import openai_common as common
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.conversation import ConversationBody, Served
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.logprobs import chat_logprobs
from ds4jax.serving.http.openai_tools import HistoryCall, ToolEntry, call_chunk, call_objects, read_calls, tool_use
from ds4jax.serving.http.params import Number, choice_count, choice_requests, top_logprobs
from ds4jax.serving.http.thinking import resolve
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text.chat import Message
from ds4jax.text.dsml import ToolCall


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
    tool_calls: list[HistoryCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatBody(ConversationBody, kw_only=True):
    """The body of a chat completion request."""

    messages: list[ChatMessage]
    max_completion_tokens: Number | None = None
    n: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def read(data: bytes, served: Served) -> Call:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = strict_json.decode(data, ChatBody)
    reject_unsupported(body, honoured=("tools", "tool_choice", "n", "logprobs", "top_logprobs"))
    if body.top_logprobs and not body.logprobs:
        raise RequestError('top_logprobs: only beside log probabilities of the tokens themselves; send "logprobs": true', "top_logprobs")
    n_logprobs = top_logprobs("top_logprobs", body.top_logprobs) if body.logprobs else None
    use = tool_use(body.tools or [], body.tool_choice, parallel=body.parallel_tool_calls is not False)
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    prompt = conversation.render(messages, served, thinks=resolve(body, body.model), param="messages", tool_use=use)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = conversation.request_of(prompt, body, served, limit=(limit_name, getattr(body, limit_name)), param="messages", tool_use=use)
    n = choice_count(body.n)
    return Call(
        endpoint="chat",
        id=new_id("chatcmpl"),
        model=body.model or served.config.model_id,
        requests=choice_requests(request, n, n_logprobs),
        n=n,
        opens_reasoning=prompt.opens_reasoning,
        stop_strings=body.stop_strings,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        tool_use=use,
        retries_calls=not body.stream,
    )


async def reply(generation: Generation, check_s: float) -> dict[str, Any]:
    """Wait for the reply of a call that does not stream."""
    choices = []
    for index, answer in enumerate(await common.collect(generation, check_s)):
        choice: dict[str, Any] = {"index": index, "message": _reply_message(answer, generation.choices[index].calls), **answer.finish}
        if generation.call.wants_logprobs:
            choice["logprobs"] = chat_logprobs(answer.scored)
        choices.append(choice)
    return {**common.head(generation, "chat.completion"), "choices": choices, "usage": common.usage(generation)}


def _reply_message(answer: common.Answer, calls: Sequence[ToolCall]) -> dict[str, Any]:
    calls = calls if answer.finish["finish_reason"] != "error" else ()
    # Thoughts that were cut are no answer, nor are calls: content is null, not the empty answer that "" would be.
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.reasoning or calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = call_objects(calls)
    return message


class ChatChunks:
    """The chunks of a chat stream.

    The one with the role comes with the first token and not before: clients that measure the time to the first token take
    any chunk for it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = common.head(generation, "chat.completion.chunk")
        self._logprobs = common.ChunkLogprobs(generation)
        self._opened: set[int] = set()

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Word what a piece adds."""
        index, chunks = piece.index, []
        if index not in self._opened:
            self._opened.add(index)
            chunks.append(self._chunk(index, {"role": "assistant"}))
        self._logprobs.add(piece)
        for delta in piece.deltas:
            chunks.append(self._chunk(index, {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}))
        for event in piece.calls:
            if (told := call_chunk(event)) is not None:
                chunks.append(self._chunk(index, {"tool_calls": [told]}))
        if piece.ending is not None and piece.ending.reason != "error":
            chunks.append(self._chunk(index, {}, piece.ending.reason))
        return chunks

    def usage(self) -> dict[str, Any]:
        """Word the chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": common.usage(self._generation)}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if self._generation.call.wants_logprobs:
            scored = self._logprobs.take(index)
            choice["logprobs"] = chat_logprobs(scored) if scored else None
        return {**self._head, "choices": [choice]}


def _message(index: int, message: ChatMessage) -> Message:
    place = f"messages[{index}]"
    if message.function_call:
        raise RequestError(f"{place}.function_call: not supported; send the call in `tool_calls`", f"{place}.function_call")
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    calls = read_calls(f"{place}.tool_calls", message.tool_calls or [])
    return Message(message.role, _text(index, message.content), reasoning, calls, message.tool_call_id)


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

"""JSON schemas of what the server answers. Bodies of requests have theirs from the types that read them; see `openapi`."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """Point to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(description: str, required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "description": description, "required": list(required), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT, _WHOLE, _NUMBER, _SWITCH, _ANY = ({"type": kind} for kind in ("string", "integer", "number", "boolean", "object"))
_COUNT = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}

_FINISH = _enum("stop", "length", "tool_calls", "error")
_HEAD: dict[str, Schema] = {"id": _TEXT, "created": _WHOLE, "model": _TEXT}

_CALL = _object(
    "A call of a tool. In a stream it comes in pieces with the same index.",
    {"type": _const("function"), "id": _TEXT, "function": _object("arguments is JSON.", {"name": _TEXT, "arguments": _TEXT})},
)
_ASSISTANT = _object(
    "What the model answered.",
    {"role": _const("assistant"), "content": _TEXT_OR_NULL},
    {"reasoning_content": _TEXT, "tool_calls": _list(_CALL)},
)

SCHEMAS: dict[str, Schema] = {
    "OpenAIError": _object(
        "An error in OpenAI's shape.",
        {
            "error": _object(
                "message names the field or the byte at fault.",
                {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
                {"n_prompt_tokens": _COUNT, "n_ctx": _COUNT},
            )
        },
    ),
    "AnthropicError": _object(
        "An error in Anthropic's shape.",
        {"type": _const("error"), "error": _object("message names the field or the byte at fault.", {"type": _TEXT, "message": _TEXT})},
    ),
    "Usage": _object(
        "Tokens of a reply. Those found in a slot are cached; those of the reasoning are completion tokens too.",
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object("", {"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
            "completion_tokens_details": _object("", {"reasoning_tokens": _COUNT}),
        },
    ),
    "ChatCompletion": _object(
        "The reply of a chat completion.",
        {
            **_HEAD,
            "object": _const("chat.completion"),
            "choices": _list(_object("", {"index": _COUNT, "message": _ASSISTANT, "finish_reason": _FINISH}, {"logprobs": _ANY})),
            "usage": ref("Usage"),
        },
    ),
    "ChatCompletionChunk": _object(
        "One `data:` of a streamed chat completion; the last one is `[DONE]`.",
        {
            **_HEAD,
            "object": _const("chat.completion.chunk"),
            "choices": _list(_object("", {"index": _COUNT, "delta": _ANY, "finish_reason": _or_null(_FINISH)})),
        },
        {"usage": ref("Usage")},
    ),
    "TextCompletion": _object(
        "The reply of a text completion, and each `data:` of a streamed one; the last one is `[DONE]`.",
        {
            **_HEAD,
            "object": _const("text_completion"),
            "choices": _list(_object("", {"index": _COUNT, "text": _TEXT, "finish_reason": _or_null(_FINISH)})),
        },
        {"usage": ref("Usage")},
    ),
    "Response": _object(
        "A response: its output is a list of reasoning, message and call items.",
        {
            "id": _TEXT,
            "object": _const("response"),
            "created_at": _WHOLE,
            "status": _enum("in_progress", "completed", "incomplete", "failed"),
            "error": _or_null(_object("", {"code": _TEXT, "message": _TEXT})),
            "incomplete_details": _or_null(_object("", {"reason": _TEXT})),
            "model": _TEXT,
            "output": _list(_object("An item.", {"id": _TEXT, "type": _TEXT, "status": _TEXT})),
            "usage": _or_null(
                _object("Tokens of the response.", {"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT})
            ),
        },
    ),
    "ResponseEvent": _object("One event of a streamed response.", {"type": _TEXT, "sequence_number": _COUNT}),
    "DeletedResponse": _object("", {"id": _TEXT, "object": _const("response"), "deleted": _SWITCH}),
    "Message": _object(
        "The reply of Anthropic's API: thinking, text and tool_use blocks.",
        {
            "id": _TEXT,
            "type": _const("message"),
            "role": _const("assistant"),
            "model": _TEXT,
            "content": _list(_object("A block.", {"type": _enum("thinking", "text", "tool_use")})),
            "stop_reason": _enum("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": _TEXT_OR_NULL,
            "usage": _object(
                "input_tokens are those that were computed.",
                {
                    "input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                },
            ),
        },
    ),
    "MessageEvent": _object("One event of a streamed message.", {"type": _TEXT}),
    "TokenCount": _object("", {"input_tokens": _COUNT}),
    "Model": _object(
        "The loaded model, under one of its names.",
        {"id": _TEXT, "object": _const("model"), "created": _WHOLE, "owned_by": _TEXT, "context_length": _COUNT, "max_model_len": _COUNT},
    ),
    "ModelList": _object("", {"object": _const("list"), "data": _list(ref("Model"))}),
    "Tokenized": _object(
        "tokens are ids or, with `with_pieces`, pairs of id and piece.",
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list({"anyOf": [_COUNT, _object("", {"id": _COUNT, "piece": {}})]})},
        {"token_strs": _list(_TEXT)},
    ),
    "Detokenized": _object("prompt and content are the same text.", {"prompt": _TEXT, "content": _TEXT}),
    "Status": _object("ok, or what is wrong.", {"status": _TEXT}),
    "Health": _object(
        "ok, or what is wrong, and how busy the server is.",
        {"status": _TEXT, "n_slots": _COUNT, "n_ctx": _COUNT, "n_running": _COUNT, "n_waiting": _COUNT},
    ),
    "Version": _object("", {"version": _TEXT}),
    "ServerInfo": _object(
        "How the server was started, and what its engine has done.", {"version": _TEXT, "models": _list(_TEXT), "engine": _ANY}
    ),
    "Load": _object(
        "load: requests that run or wait.",
        {"load": _COUNT, "num_waiting_reqs": _COUNT, "num_prefilling_reqs": _COUNT, "num_slots": _COUNT},
    ),
}

"""What each route does, takes and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ds4jax.serving.http.anthropic_messages import MessagesBody
from ds4jax.serving.http.openai_chat import ChatBody
from ds4jax.serving.http.openai_completions import CompletionBody
from ds4jax.serving.http.responses_body import ResponsesBody
from ds4jax.serving.http.tokens import DetokenizeBody, TokenizeBody


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    reply: the schema of what is answered, None for plain text; body: the type that reads requests; events: the schema of what a stream
    carries, where there can be one; refusals: statuses beside 200 that a client has to expect, and why; error: the schema of those.
    """

    tag: str
    summary: str
    reply: str | None
    body: type[msgspec.Struct] | None = None
    events: str | None = None
    refusals: Mapping[int, str] = field(default_factory=dict)
    error: str = "OpenAIError"


_BAD_BODY = {400: "The body, or a field of it, is wrong; the message names it.", 413: "The body is larger than the server takes."}
_OTHER_MODEL = {404: "The model has another name, and the server is strict about it."}
_UNKNOWN = {404: "There is none of that id."}
_WORK = {
    **_BAD_BODY,
    **_OTHER_MODEL,
    429: "All slots work and the queue is full; Retry-After says when to come back.",
    500: "The engine failed the request.",
    503: "The server shuts down, or its engine has stopped.",
}
_UNWELL = {503: "Send requests elsewhere; `status` says why."}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI", "Answer a conversation", "ChatCompletion", ChatBody, "ChatCompletionChunk", _WORK
    ),
    ("POST", "/v1/completions"): Operation("OpenAI", "Continue raw text", "TextCompletion", CompletionBody, "TextCompletion", _WORK),
    ("GET", "/v1/models"): Operation("OpenAI", "List the names of the loaded model", "ModelList"),
    ("GET", "/v1/models/{model_id}"): Operation("OpenAI", "Describe the loaded model", "Model", refusals=_UNKNOWN),
    ("POST", "/v1/responses"): Operation(
        "Responses", "Answer a conversation, and keep it", "Response", ResponsesBody, "ResponseEvent", _WORK
    ),
    ("GET", "/v1/responses/{response_id}"): Operation("Responses", "Read a response that was kept", "Response", refusals=_UNKNOWN),
    ("DELETE", "/v1/responses/{response_id}"): Operation("Responses", "Forget a response", "DeletedResponse", refusals=_UNKNOWN),
    ("POST", "/v1/messages"): Operation(
        "Anthropic", "Answer a conversation", "Message", MessagesBody, "MessageEvent", _WORK, "AnthropicError"
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic", "Count the tokens of a prompt", "TokenCount", MessagesBody, None, {**_BAD_BODY, **_OTHER_MODEL}, "AnthropicError"
    ),
    ("POST", "/tokenize"): Operation("Tokens", "Turn text or a conversation into token ids", "Tokenized", TokenizeBody, None, _BAD_BODY),
    ("POST", "/detokenize"): Operation("Tokens", "Turn token ids into text", "Detokenized", DetokenizeBody, None, _BAD_BODY),
    ("GET", "/"): Operation("Status", "Tell that a server is here, as /live does", "Status", refusals=_UNWELL, error="Status"),
    ("GET", "/live"): Operation("Status", "Tell whether only a restart helps", "Status", refusals=_UNWELL, error="Status"),
    ("GET", "/ready"): Operation("Status", "Tell whether requests are taken", "Status", refusals=_UNWELL, error="Status"),
    ("GET", "/health"): Operation("Status", "Tell how the server is", "Health", refusals=_UNWELL, error="Health"),
    ("GET", "/metrics"): Operation("Status", "Give the metrics, in Prometheus' text format", None),
    ("GET", "/version"): Operation("Status", "Tell the version", "Version"),
    ("GET", "/server_info"): Operation("Status", "Tell how the server was started, and what it has done", "ServerInfo"),
    ("GET", "/get_load"): Operation("Status", "Tell how busy the server is, as routers ask it", "Load"),
    ("GET", "/openapi.json"): Operation("Status", "Give this document", "Document"),
}

"""Errors as HTTP sees them: which status, which machine-readable code. The shape of the body belongs to each API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from werkzeug.exceptions import HTTPException

from ds4jax.errors import ContextLengthError, EngineStoppedError, QueueFullError, RequestError
from ds4jax.serving.http.access import UnauthorizedError
from ds4jax.serving.http.call import GenerationFailedError, ModelNotFoundError
from ds4jax.serving.http.responses_store import ResponseNotFoundError

INVALID = "invalid_request_error"
SERVER = "server_error"
INTERNAL = "internal_error"

LONGEST_MESSAGE = 2000  # characters; many messages repeat what the client sent, which may be megabytes


@dataclass(frozen=True)
class Problem:
    """One error, in no API's shape yet. `extra` holds further members of the error object; `overflow`: the prompt that did not fit."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    overflow: ContextLengthError | None = None


def describe(error: Exception, *, body_limit_bytes: int) -> Problem:
    """Choose status, type and code for an error. Unknown ones become a 500 that tells nothing about our inside."""
    problem = _describe(error, body_limit_bytes)
    return replace(problem, message=_shortened(problem.message))


def _shortened(message: str) -> str:
    """Leave out the middle of a long message: the field stands at its beginning, what to do at its end."""
    half = LONGEST_MESSAGE // 2
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:half]} … {message[-half:]}"


def _describe(error: Exception, body_limit_bytes: int) -> Problem:
    match error:
        case ContextLengthError():
            sizes = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
            return Problem(400, str(error), param=error.param, code="context_length_exceeded", extra=sizes, overflow=error)
        case ModelNotFoundError():
            return Problem(404, str(error), param=error.param, code="model_not_found")
        case UnauthorizedError():
            return Problem(401, str(error), code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        case ResponseNotFoundError():
            code = "previous_response_not_found" if error.param == "previous_response_id" else "response_not_found"
            return Problem(404, str(error), param=error.param, code=code)
        case RequestError():
            return Problem(400, str(error), param=error.param)
        case QueueFullError():
            retry = {"Retry-After": str(error.retry_after_s)}
            return Problem(429, str(error), "rate_limit_error", code="queue_full", headers=retry)
        case EngineStoppedError():
            return Problem(503, str(error), SERVER, code="engine_stopped")
        case GenerationFailedError():
            return Problem(500, str(error), SERVER, code="generation_failed")
        case HTTPException():
            return _describe_http(error, body_limit_bytes)
        case _:
            return Problem(500, "internal error; the server's log has the details", SERVER, code=INTERNAL)


def _describe_http(error: HTTPException, body_limit_bytes: int) -> Problem:
    """Reword what the framework raises."""
    status = error.code or 500
    messages = {
        404: "unknown endpoint; see /v1/models, /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages",
        405: "this endpoint does not take that method; the Allow header lists those it does",
        408: "the request body did not arrive in time; send the request again",
        413: f"the request body is larger than this server takes ({body_limit_bytes} bytes); send less",
    }
    headers = {name: value for name, value in error.get_headers() if name == "Allow"}
    return Problem(status, messages.get(status) or error.description or error.name, INVALID if status < 500 else SERVER, headers=headers)

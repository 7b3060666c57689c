"""`--trace FILE`: what each request asked, what the model read and wrote, and how long it took; one JSON object a line.

The one place where text of prompts and replies leaves the server for anyone but its client, and only if it was started so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson

from ds4jax.serving.engine.api import Event, GenerateRequest, Started, Token
from ds4jax.serving.http.call import Call
from ds4jax.serving.metrics import ChoiceReport
from ds4jax.text.dsml import ToolCall
from ds4jax.text.stream import Delta
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")

Record = dict[str, Any]


class TraceFile:
    """The file that requests are traced to. It is opened anew for each line, so it may be moved away at any time."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer

    def begin(self, call: Call, body: bytes) -> CallTrace:
        """Follow a call from its submission."""
        return CallTrace(self, call, body)

    def refused(self, path: str, body: bytes, error: Exception) -> None:
        """Write down a request that became no call."""
        at = time.time()
        self.write(lambda _: {"time": at, "path": path, "error": str(error), "body": body.decode(errors="replace")})

    def write(self, describe: Callable[[Tokenizer], Record]) -> None:
        """Append a line, on a worker thread: no reply waits for a disk, or for a long prompt to be decoded."""
        asyncio.get_running_loop().run_in_executor(None, self._append, describe)

    def _append(self, describe: Callable[[Tokenizer], Record]) -> None:
        line = orjson.dumps(describe(self._tokenizer)) + b"\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line)  # in one piece, so that lines of several threads do not mix
            finally:
                os.close(file)
        except OSError as error:  # requests are served all the same
            log.warning("--trace %s: a request was not written down (%s)", self._path, error)


@dataclass(slots=True)
class _Attempt:
    """One run of a choice: the engine's request, and what the model wrote."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    n_cached: int | None = None

    def describe(self, tokenizer: Tokenizer) -> Record:
        request = self.request
        return {
            "prompt": tokenizer.decode(request.prompt),
            "n_prompt": len(request.prompt),
            "n_cached": self.n_cached,
            "cache": "slot" if self.n_cached else "none",
            "max_tokens": request.max_tokens,
            "sampling": dataclasses.asdict(request.sampling),
            "raw": tokenizer.decode(self.tokens),
            "n_generated": len(self.tokens),
        }


class CallTrace:
    """What is written down of one call: its body, every attempt of each choice, and what the client was told."""

    def __init__(self, file: TraceFile, call: Call, body: bytes) -> None:
        self._file, self._call, self._body = file, call, body
        self._at = time.time()
        self._attempts = [[_Attempt(request)] for request in call.requests]
        self._deltas: list[list[Delta]] = [[] for _ in call.requests]

    def took(self, index: int, event: Event) -> None:
        """Take an event that a choice took: what the model writes past the end of a reply is not read."""
        attempt = self._attempts[index][-1]
        if isinstance(event, Started):
            attempt.n_cached = event.n_cached
        elif isinstance(event, Token):
            attempt.tokens.append(event.token)

    def told(self, index: int, deltas: Sequence[Delta]) -> None:
        """Take text that goes to the client."""
        self._deltas[index] += deltas

    def restarted(self, index: int, request: GenerateRequest) -> None:
        """Note that a choice begins anew, and that what was told of it is void."""
        self._attempts[index].append(_Attempt(request))
        self._deltas[index] = []

    def end(self, reports: Sequence[ChoiceReport], errors: Sequence[str | None], calls: Sequence[Sequence[ToolCall]]) -> None:
        """Write the call down, once everything of it has been told."""
        self._file.write(lambda tokenizer: self._describe(tokenizer, reports, errors, calls))

    def _describe(
        self,
        tokenizer: Tokenizer,
        reports: Sequence[ChoiceReport],
        errors: Sequence[str | None],
        calls: Sequence[Sequence[ToolCall]],
    ) -> Record:
        choices = []
        for i, report in enumerate(reports):
            told = {kind: "".join(d.text for d in self._deltas[i] if d.kind == kind) for kind in ("reasoning", "content")}
            attempts = [attempt.describe(tokenizer) for attempt in self._attempts[i]]
            made = [dataclasses.asdict(call) for call in calls[i]]
            choices.append({"attempts": attempts, **told, "calls": made, "error": errors[i], **dataclasses.asdict(report)})
        return {
            "time": self._at,
            "id": self._call.id,
            "endpoint": self._call.endpoint,
            "model": self._call.model,
            "stream": self._call.stream,
            "stop": list(self._call.stop_strings),
            "body": orjson.Fragment(msgspec.json.format(self._body, indent=-1)),  # whatever its layout, on one line
            "choices": choices,
        }

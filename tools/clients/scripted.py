"""A server whose model follows a script: one call of a tool, then an answer that only its result can have told it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ds4jax.config import ServerConfig
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http.app import create_app
from ds4jax.text.dsml import ToolCall, call_block
from ds4jax.text.segments import Special, Text, to_ids
from ds4jax.text.special import END_THINK
from tests.http.conftest import Server
from tests.http.fakes import EOS_ID, THINK_ID, USER_ID, EchoEngine, byte_tokenizer
from tools.clients.record import Recorder

SECRET = "quince"
"""What the file says that the model has to read. It stands nowhere else."""

FILE = "word.txt"
QUESTIONS = (f"Which word is in {FILE}?", "Which is it now?")
ANSWER = f"The word is {SECRET}."

THOUGHTS = "I cannot know this; I have to look."
PREAMBLE = "Let me look."
TITLE = "A word in a file"
COMMAND = f"cat {FILE}"
PURPOSE = "Read the file"
CALLS = {  # every agent has a shell, under a name of its own
    "Bash": {"command": COMMAND, "description": PURPOSE},
    "bash": {"command": COMMAND, "description": PURPOSE},
    "exec_command": {"cmd": COMMAND},
}

_N_CTX = 4_000_000  # a token is a byte here, and prompts of agents are long
_TOKENIZER = byte_tokenizer()


def script(request: GenerateRequest) -> list[int]:
    """Write the reply to a prompt: a call while the file has not been read, else a text. Prompts without a shell get a text."""
    prompt = request.prompt
    last_turn = _TOKENIZER.decode(prompt[max((i for i, token in enumerate(prompt) if token == USER_ID), default=0) :])
    thoughts = [Text(THOUGHTS), Special(END_THINK)] if prompt[-1] == THINK_ID else []
    if SECRET in last_turn:
        reply = [Text(ANSWER)]
    elif (call := _call(_TOKENIZER.decode(prompt))) is not None:
        reply = [Text(PREAMBLE), *call_block([call])]
    else:
        reply = [Text(TITLE)]  # that is what agents ask for without tools
    return [*to_ids([*thoughts, *reply], _TOKENIZER), EOS_ID]


def _call(prompt: str) -> ToolCall | None:
    for name, arguments in CALLS.items():
        if re.search(rf'"name"\s*:\s*"{name}"', prompt):
            return ToolCall("", name, json.dumps(arguments))
    return None


@contextmanager
def scripted_server() -> Iterator[tuple[str, Recorder]]:
    """Serve the script on a free port; yields the URL, and what will have been asked there."""
    engine = EchoEngine(script=script, n_ctx=_N_CTX)
    app = create_app(engine, _TOKENIZER, ServerConfig())
    recorder = Recorder(app.asgi_app)
    app.asgi_app = recorder  # type: ignore[method-assign]
    server = Server(app, grace_s=0.0)
    try:
        yield server.url, recorder
    finally:
        server.stop()
        engine.die()

"""What agents really sent, asked again: every turn is answered, tools are called, and each prompt goes on where a slot stands.

The requests were recorded and cleaned by `make clients ARGS="--fixtures tests/fixtures/clients"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quart import Quart

from tests.http.conftest import MakeApp, MakeEngine
from tests.http.test_whole_and_streamed import events_of, message_of, response_of
from tools.clients.scripted import ANSWER, CALLS, PREAMBLE, THOUGHTS, TITLE, script
from tools.clients.scrub import SHORT, scrub_body

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "clients").glob("*.json"))
CLIENTS = pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
N_CTX = 4_000_000  # room beside the prompt for the longest answer that agents ask for, in bytes


@dataclass(frozen=True)
class Reply:
    """What a client gets to know, whatever the API. calls: names and arguments."""

    thoughts: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    finish: str


def recorded(path: Path) -> list[dict[str, Any]]:
    exchanges: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return exchanges


def generating(path: Path) -> list[dict[str, Any]]:
    """The requests that want a reply of the model."""
    return [exchange for exchange in recorded(path) if exchange["body"] is not None]


def read_chat(whole: dict[str, Any]) -> Reply:
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return Reply(message.get("reasoning_content") or "", message["content"] or "", calls, choice["finish_reason"])


def chat_of(stream: str) -> dict[str, Any]:
    """Put a chat completion together as clients do."""
    assert stream.endswith("data: [DONE]\n\n")
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    *chunks, usage = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert finish is None, "nothing comes behind the finish"
        finish = choice["finish_reason"]
        for member in ("content", "reasoning_content"):
            message[member] += choice["delta"].get(member) or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": piece["id"], "function": {"name": piece["function"]["name"], "arguments": ""}})
            message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"choices": [{"message": message, "finish_reason": finish}]}


def read_message(whole: dict[str, Any]) -> Reply:
    told = {kind: "".join(block[kind] for block in whole["content"] if block["type"] == kind) for kind in ("thinking", "text")}
    calls = []
    for block in whole["content"]:
        if block["type"] == "tool_use":
            arguments = block["input"]
            calls.append((block["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
    return Reply(told["thinking"], told["text"], calls, whole["stop_reason"])


def read_response(whole: dict[str, Any]) -> Reply:
    items = whole["output"]
    thoughts = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"])
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    return Reply(thoughts, text, calls, whole["status"])


def read(path: str, reply: str) -> Reply:
    """Read a reply, streamed or whole, and check that it is a proper one of its API."""
    whole = json.loads(reply) if reply.startswith("{") else None
    match path.partition("?")[0]:
        case "/v1/chat/completions":
            return read_chat(whole or chat_of(reply))
        case "/v1/messages":
            return read_message(whole or message_of(list(events_of(reply))))
        case "/v1/responses":
            return read_response(whole or response_of(list(events_of(reply))))
        case other:
            raise AssertionError(other)


async def send(app: Quart, exchange: dict[str, Any], **changes: Any) -> str:
    body = exchange["body"]
    data = None if body is None else json.dumps({**body, **changes}).encode()
    client = app.test_client()
    response = await client.open(exchange["path"], method=exchange["method"], headers=exchange["headers"], data=data)
    text: str = await response.get_data(as_text=True)
    assert response.status_code == 200, text
    return text


def expected(exchange: dict[str, Any], number: int) -> Reply:
    """What the script has to come to: without tools a title; else a call first, and an answer once its result is there."""
    is_chat = "/chat/" in exchange["path"]
    done, called = (
        ("stop", "tool_calls") if is_chat else ("end_turn", "tool_use") if "/messages" in exchange["path"] else ("completed",) * 2
    )
    tools = exchange["body"].get("tools", ())
    if not tools:
        return Reply("", TITLE, [], done)
    name = next(name for name in CALLS if name in [tool.get("function", tool).get("name") for tool in tools])
    return Reply(THOUGHTS, PREAMBLE, [(name, dict(CALLS[name]))], called) if number % 2 == 0 else Reply(THOUGHTS, ANSWER, [], done)


def with_numbers(exchanges: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number the requests of each conversation: those with tools count by themselves."""
    counts = {True: 0, False: 0}
    for exchange in exchanges:
        has_tools = "tools" in exchange["body"]
        yield counts[has_tools], exchange
        counts[has_tools] += 1


def test_there_are_fixtures() -> None:
    assert [path.stem for path in FIXTURES] == ["claude-code", "codex", "opencode", "pi"]


@CLIENTS
@pytest.mark.parametrize("stream", [True, False])
async def test_every_turn_is_answered(make_app: MakeApp, make_engine: MakeEngine, path: Path, stream: bool) -> None:
    app = make_app(make_engine(script=script, n_ctx=N_CTX))
    for number, exchange in with_numbers(generating(path)):
        changes = {} if stream else {"stream": False, "stream_options": None}
        assert read(exchange["path"], await send(app, exchange, **changes)) == expected(exchange, number)


@CLIENTS
async def test_whatever_else_they_ask_is_there(make_app: MakeApp, path: Path) -> None:
    app = make_app(api_keys=("secret",))
    for exchange in recorded(path):
        if exchange["body"] is None:
            await send(app, exchange)


@CLIENTS
async def test_each_turn_goes_on_where_the_slot_stands(make_app: MakeApp, make_engine: MakeEngine, path: Path) -> None:
    """The prompt of a turn begins with the prompt of the last one and what the model wrote, thoughts and calls included: to the token."""
    engine = make_engine(script=script, n_ctx=N_CTX)
    app = make_app(engine)
    turns = [exchange for exchange in generating(path) if "tools" in exchange["body"]]
    assert len(turns) == 4  # two questions, with a call for each
    for exchange in turns:
        await send(app, exchange)
    first, *others = engine.requests.values()
    held = [*first.prompt, *script(first)]
    for request in others:
        assert list(request.prompt[: len(held)]) == held
        held = [*request.prompt, *script(request)]


@CLIENTS
def test_they_hold_nothing_of_the_machine_or_the_client(path: Path) -> None:
    for exchange in recorded(path):
        assert exchange["headers"].get("authorization", "Bearer none") == "Bearer none"
        body = exchange["body"]
        assert body is None or scrub_body(body) == body
        assert [text for text in strings(body) if text.startswith(("/", "~")) or len(text) > SHORT] == []


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from strings(member)


def test_prose_and_owners_are_left_out_and_form_is_kept() -> None:
    body = {
        "metadata": {"user_id": "someone"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": f"{ANSWER} It is said. " * 10},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "<reminder>\nof /a/path"}, {"type": "text", "text": ANSWER}]}],
        "tools": [
            {"name": "t", "description": "Long.", "input_schema": {"properties": {"metadata": {"description": "Too.", "enum": ["a"]}}}}
        ],
    }
    told = "Told by the client."
    assert scrub_body(body) == {
        "metadata": {"user_id": "opaque"},
        "system": [{"type": "text", "text": "x-anthropic-billing-header: opaque"}, {"type": "text", "text": told}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<reminder>\nof the client\n</reminder>"}, {"type": "text", "text": ANSWER}],
            }
        ],
        "tools": [
            {
                "name": "t",
                "description": "described",
                "input_schema": {"properties": {"metadata": {"description": "described", "enum": ["a"]}}},
            }
        ],
    }


async def test_codex_goes_on_where_a_reply_was_cut(make_app: MakeApp, make_engine: MakeEngine) -> None:
    """It sends what it got of a reply as it is: incomplete text, and a call without an end, with what it made of that."""
    engine = make_engine()
    call = {"type": "function_call", "status": "incomplete", "call_id": "call_1", "name": "exec_command", "arguments": '{"cmd":"ls'}
    items = [
        {"role": "user", "content": "Look."},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": None,
            "encrypted_content": None,
        },
        {"type": "message", "status": "incomplete", "role": "assistant", "content": [{"type": "output_text", "text": "I lo"}]},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "failed to parse function arguments"},
        {"role": "user", "content": "Go on."},
    ]
    response = await make_app(engine).test_client().post("/v1/responses", json={"input": items})
    assert response.status_code == 200, await response.get_data(as_text=True)
    prompt = bytes(token for token in engine.requests[1].prompt if token < 256).decode()
    assert "hmI lo" in prompt and '{"cmd":"ls' in prompt and prompt.endswith("Go on.")

"""For any text, limit and stop strings: what a stream of events tells, put together, is what the reply that does not stream says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import ServerConfig
from ds4jax.serving.http.app import create_app
from tests.http.conftest import MakeEngine
from tests.http.fakes import byte_tokenizer

TEXT = st.text(alphabet="ab<>/think é🙂", max_size=12)
Events = list[dict[str, Any]]
GROWS = {
    "thinking_delta": ("thinking", "thinking"),
    "text_delta": ("text", "text"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "input"),
}


def message_of(events: Events) -> Any:
    """Put a message together as clients do; every index, start and stop must be in order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    is_open = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                if event["content_block"]["type"] == "tool_use":
                    assert message["content"][-1]["input"] == {}
                    message["content"][-1]["input"] = ""  # the text of its arguments
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                member, field = GROWS[event["delta"]["type"]]
                assert event["delta"][member]
                message["content"][-1][field] += event["delta"][member]
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                raise AssertionError(other)
    assert not is_open
    return message


def response_of(events: Events) -> Any:
    """Check that deltas and closing events say what the last event says, and return that."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    texts: dict[int, str] = {}
    done = []
    for event in events:
        index = event.get("output_index", -1)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(texts) == len(done), "one item at a time"
                texts[index] = ""
            case "output_text.delta" | "reasoning_summary_text.delta" | "function_call_arguments.delta" | "custom_tool_call_input.delta":
                texts[index] += event["delta"]
            case "output_text.done" | "reasoning_summary_text.done" | "function_call_arguments.done" | "custom_tool_call_input.done":
                assert next(event[name] for name in ("text", "arguments", "input") if name in event) == texts[index]
            case "output_item.done":
                done.append(event["item"])
    assert response["output"] == done
    assert [text_of(item) for item in done] == list(texts.values())
    return response


def text_of(item: dict[str, Any]) -> Any:
    """Read what is told of an item in deltas; of searches, nothing is."""
    match item["type"]:
        case "message" | "reasoning":
            return (item.get("content") or item.get("summary"))[0]["text"]  # type: ignore[index]
        case "function_call":
            return item["arguments"]
        case "custom_tool_call":
            return item["input"]
        case _:
            return ""


def without_ids(value: Any) -> Any:
    """Drop what differs between any two replies."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "signature", "created_at", "completed_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def events_of(stream: str) -> Iterator[dict[str, Any]]:
    for line in stream.splitlines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


@pytest.mark.parametrize(
    ("path", "prompt", "stops", "put_together"),
    [
        ("/v1/messages", lambda text: {"messages": [{"content": text}]}, "stop_sequences", message_of),
        ("/v1/responses", lambda text: {"input": text, "reasoning": {"summary": "auto"}}, "stop", response_of),
    ],
)
def test_a_stream_says_what_the_whole_reply_says(
    make_engine: MakeEngine, path: str, prompt: Callable[[str], Any], stops: str, put_together: Callable[[Events], Any]
) -> None:
    app = create_app(make_engine(), byte_tokenizer(), ServerConfig())

    async def both(body: dict[str, Any]) -> tuple[Any, Any]:
        client = app.test_client()
        whole = await (await client.post(path, json=body)).get_json()
        stream = await (await client.post(path, json={**body, "stream": True})).get_data(as_text=True)
        return whole, put_together(list(events_of(stream)))

    @given(text=TEXT, stop=st.lists(TEXT, max_size=2), thinking=st.booleans(), limit=st.integers(1, 40))
    @settings(max_examples=50)
    def check(text: str, stop: list[str], thinking: bool, limit: int) -> None:
        body = {**prompt(text), stops: stop, "thinking": thinking, "max_tokens": limit}
        whole, streamed = asyncio.run(both(body))
        assert without_ids(whole) == without_ids(streamed)

    check()

"""Calls and results of tools in the history of a conversation: what each API's way of writing them means."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ds4jax.errors import RequestError
from ds4jax.serving.http.anthropic_turns import Turn, read_turns
from ds4jax.serving.http.responses_input import Item, read_input
from ds4jax.serving.http.tool_use import NO_IMAGE
from ds4jax.text.chat import Message, ToolCall

USER = Message("user", "weather?")


def turns(*given: dict[str, Any]) -> list[Message]:
    return read_turns(None, msgspec.json.decode(msgspec.json.encode(given), type=list[Turn]))


def items(*given: dict[str, Any], earlier: tuple[Message, ...] = ()) -> list[Message]:
    return read_input(msgspec.convert(given, list[Item]), earlier)


def test_tool_blocks_of_messages() -> None:
    blocks = [
        {"type": "thinking", "thinking": "r", "signature": "s"},
        {"type": "text", "text": "let me see"},
        {"type": "tool_use", "id": "t1", "name": "get", "input": {"b": 1, "a": "é"}},
        {"type": "tool_use", "id": "t2", "name": "now"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "on"}]},
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "text", "text": "go"},
        {"type": "text", "text": " on"},
    ]
    assert turns({"content": "weather?"}, {"role": "assistant", "content": blocks}, {"content": results}) == [
        USER,
        Message("assistant", "let me see", "r", (ToolCall("t1", "get", '{"b":1,"a":"é"}'), ToolCall("t2", "now", "{}"))),
        Message("tool", "noon", tool_call_id="t2"),
        Message("tool", "", tool_call_id="t1"),
        Message("user", "go on"),
    ]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ([{"type": "tool_result", "tool_use_id": "t9", "content": "x"}], "messages[0].content[0].tool_use_id"),
        ([{"type": "tool_result"}], "messages[0].content[0].tool_use_id"),
        ([{"type": "tool_use", "id": "t1", "name": "get"}], "messages[0].content[0]"),
    ],
)
def test_tool_blocks_that_make_no_sense(content: list[Any], place: str) -> None:
    with pytest.raises(RequestError) as error:
        turns({"role": "user", "content": content})
    assert error.value.param == place


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": None}]}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        (
            {"content": [{"type": "text", "text": "<tool_use_error>no</tool_use_error>"}], "is_error": True},
            "<tool_use_error>no</tool_use_error>",
        ),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": ["a", {"type": "image", "source": {}}]}, "a" + NO_IMAGE),
        ({"content": None}, ""),
    ],
)
def test_what_a_tool_gave(result: dict[str, Any], text: str) -> None:
    given = turns(CALLED, {"content": [{"type": "tool_result", "tool_use_id": "t", **result}]})
    assert given == [Message("assistant", "", tool_calls=(ToolCall("t", "get", "{}"),)), Message("tool", text, tool_call_id="t")]


def test_a_result_of_another_kind_names_its_place() -> None:
    with pytest.raises(RequestError) as error:
        turns(CALLED, {"content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}]})
    assert error.value.param == "messages[1].content[0].content[0]"


def test_the_input_of_a_call_keeps_its_numbers() -> None:
    block = (
        b'[{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {"n": 123456789012345678901234.50}}]}]'
    )
    (message,) = read_turns(None, msgspec.json.decode(block, type=list[Turn]))
    assert message.tool_calls[0].arguments == '{"n": 123456789012345678901234.50}'
    with pytest.raises(RequestError) as error:
        read_turns(None, msgspec.json.decode(block.replace(b'{"n": 123456789012345678901234.50}', b"[]"), type=list[Turn]))
    assert error.value.param == "messages[0].content[0].input"


def test_items_become_one_message_of_the_assistant() -> None:
    assert items(
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": [{"type": "reasoning_text", "text": "s"}]},
        {"role": "assistant", "content": "let me see"},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"b": 1}'},
        {"type": "function_call", "call_id": "c2", "namespace": "time__", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c3", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": {"ok": True}},
    ) == [
        USER,
        Message("assistant", "let me see", "r\ns", (ToolCall("c1", "get", '{"b": 1}'), ToolCall("c2", "time__now", "{}"))),
        Message("tool", "noon", tool_call_id="c2"),
        Message("tool", "sun", tool_call_id="c1"),
        Message("assistant", "", None, (ToolCall("c3", "get", "{}"),)),
        Message("tool", '{"ok":true}', tool_call_id="c3"),
    ]


@pytest.mark.parametrize(
    ("item", "call"),
    [
        ({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** "}, ToolCall("c", "patch", '{"input":"*** "}')),
        ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, ToolCall("c", "local_shell", '{"command":["ls"]}')),
        ({"type": "tool_search_call", "call_id": "c", "arguments": {"q": 1}}, ToolCall("c", "tool_search", '{"q":1}')),
        ({"type": "web_search_call", "id": "ws"}, ToolCall("ws", "web_search_call", "{}")),
    ],
)
def test_calls_of_every_type(item: dict[str, Any], call: ToolCall) -> None:
    assert items(item) == [Message("assistant", "", tool_calls=(call,))]


def test_thoughts_alone_and_messages_in_a_row_stay_apart() -> None:
    assert items(
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"role": "user", "content": "weather?"},
    ) == [Message("assistant", "a"), Message("assistant", "b"), Message("assistant", "", "r"), USER]


def test_a_result_may_answer_a_call_of_a_stored_response() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    earlier = (Message("assistant", "", tool_calls=(ToolCall("c1", "now", "{}"),)),)
    assert items(output, earlier=earlier) == [Message("tool", "noon", tool_call_id="c1")]
    with pytest.raises(RequestError) as error:
        items(output)
    assert error.value.param == "input[0].call_id"


@pytest.mark.parametrize("item", [{"type": "function_call", "call_id": "c"}, {"type": "function_call", "name": "f"}])
def test_a_call_needs_a_name_and_an_id(item: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="name and a call_id"):
        items(item)

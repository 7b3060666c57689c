"""Calls in the text of a reply: what is read from it, however it is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4jax.text import TextStream, to_text
from ds4jax.text.dsml import CallCollector, CallEnd, CallEvent, CallStart, DsmlParser, ReplayMemory, ToolCall, call_block, call_opening
from tests.text.test_stream import cut, cuts

FULL = "｜DSML｜"
Read = tuple[str, str, list[ToolCall], str | None, str | None]


def read(text: str, at: list[int] | None = None, *, thinking: bool = False, whole: bool = True, parallel: bool = True) -> Read:
    """Return reasoning, content, whole calls, the parser's error, and why calls were rejected."""
    parser = DsmlParser(map(str, itertools.count()).__next__, parallel=parallel)
    stream = TextStream(thinking=thinking, tools=parser)
    texts = {"reasoning": "", "content": ""}
    events: list[CallEvent] = []
    for piece in [*cut(text.encode(), at or []), None]:
        for delta in stream.finish(whole=whole) if piece is None else stream.feed(piece):
            assert not events, "text comes before calls"
            texts[delta.kind] += delta.text
        events += stream.take_calls()
    collector = CallCollector()
    collector.take(events)
    assert [event.index for event in events if isinstance(event, CallStart)] == list(range(collector.n_started))
    assert collector.n_started - sum(isinstance(event, CallEnd) for event in events) in (0, 1), "one call at a time"
    return texts["reasoning"], texts["content"], collector.calls, parser.error, stream.rejected


def block(*calls: str, mark: str = FULL) -> str:
    return f"<{mark}tool_calls>\n" + "".join(call.replace("@", mark) + "\n" for call in calls) + f"</{mark}tool_calls>"


WEATHER = '<@invoke name="weather">\n<@parameter name="city" string="true">Köln</@parameter>\n</@invoke>'
ADD = '<@invoke name="add">\n<@parameter name="n" string="false">[1, 2.0, {"a": null}]</@parameter>\n</@invoke>'
NOW = '<@invoke name="now">\n</@invoke>'


def calls_of(text: str, **options: bool) -> list[tuple[str, str]]:
    _, content, calls, error, rejected = read(text, **options)
    assert (content, error, rejected) == ("", None, None)
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.smoke
@pytest.mark.parametrize("mark", [FULL, "DSML｜", ""])
def test_calls_in_every_spelling(mark: str) -> None:
    reasoning, content, calls, error, _ = read(f"why</think>Let me see. \n\n{block(WEATHER, ADD, NOW, mark=mark)} more", thinking=True)
    assert (reasoning, content, error) == ("why", "Let me see.", None)
    assert calls == [
        ToolCall("0", "weather", '{"city":"Köln"}'),
        ToolCall("1", "add", '{"n":[1,2.0,{"a":null}]}'),
        ToolCall("2", "now", "{}"),
    ]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ('<@parameter name="s" string="true">\n "a"\\ \t\n</@parameter>', '{"s":"\\n \\"a\\"\\\\ \\t\\n"}'),
        ('<@parameter name="s" string="true"></@parameter>', '{"s":""}'),
        ('<@parameter name="s">as it is</@parameter>', '{"s":"as it is"}'),
        ('<@parameter name="s"> <b>x</b></@parameter>', '{"s":" <b>x</b>"}'),
        ('<@parameter string="true" name="a&quot;&lt;b">x</@parameter>', '{"a\\"<b":"x"}'),
        (
            '<@parameter name="s" string="true">a &lt; b &amp;&amp; c &amp;lt; &nbsp; &apos;</@parameter>',
            '{"s":"a < b && c &lt; &nbsp; \'"}',
        ),
        ('<@parameter name="s" string="true">&lt;/@parameter></@parameter>', '{"s":"</@parameter>"}'),
        (
            '<@parameter name="s" string="true"></@invoke> and <@invoke name="x"> quoted</@parameter>',
            '{"s":"</@invoke> and <@invoke name=\\"x\\"> quoted"}',
        ),
        ('<@parameter name="n" string="false"> 12345678901234567890.10 </@parameter>', '{"n":12345678901234567890.10}'),
        ('<@parameter name="n" string="false">{"a b" : "c  d\\u00e9", "e":[ ]}</@parameter>', '{"n":{"a b":"c  d\\u00e9","e":[]}}'),
        ('<@parameter name="n" string="false">"a &lt; b"</@parameter>', '{"n":"a &lt; b"}'),
        ('<@parameter name="n" string="false">not "json"</@parameter>', '{"n":"not \\"json\\""}'),
        ('<@parameter name="n" string="false">NaN</@parameter>', '{"n":"NaN"}'),
        (
            '<@parameter name="o"><@parameter name="a">x</@parameter>\n<@parameter name="p"> '
            '<@parameter name="b" string="false">1</@parameter></@parameter></@parameter>',
            '{"o":{"a":"x","p":{"b":1}}}',
        ),
        ('<@parameter name="o"><@parameter name="a">x</@parameter>', '{"o":{"a":"x"}}'),
        ('<@parameter name="a">1</@parameter><@parameter name="b">2</@parameter>', '{"a":"1","b":"2"}'),
    ],
)
@pytest.mark.parametrize("mark", [FULL, ""])
def test_arguments(parameters: str, arguments: str, mark: str) -> None:
    assert calls_of(block(f'<@invoke name="f">{parameters}</@invoke>', mark=mark)) == [("f", arguments.replace("@", mark))]
    json.loads(arguments)


@pytest.mark.parametrize(
    ("missing", "calls"),
    [
        ("</@tool_calls>", 2),
        ("</@invoke></@tool_calls>", 2),
        ("</@parameter></@invoke></@tool_calls>", 2),
        ("ter></@invoke></@tool_calls>", 2),
        ("oke></@tool_calls>", 2),
        ("calls>", 2),
    ],
)
@pytest.mark.parametrize("mark", [FULL, "DSML｜", ""])
def test_end_tags_left_out_at_the_end_are_put_in(missing: str, calls: int, mark: str) -> None:
    call = '<@invoke name="f"><@parameter name="s" string="true">a < b</@parameter></@invoke>'
    text = f"<@tool_calls>{call}{call}</@tool_calls>".removesuffix(missing).replace("@", mark)
    assert calls_of(text) == [("f", '{"s":"a < b"}')] * calls
    # A reply that was cut is not one that the model ended.
    assert read(text, whole=False)[2] == read(text)[2][: 2 if missing in ("</@tool_calls>", "calls>") else 1]


@pytest.mark.parametrize(
    "text",
    [
        '<@tool_calls><@invoke name="f"><@parameter name="s">a</@invoke><@invoke name="g"></@invoke></@tool_calls>',
        '<@tool_calls><@invoke name="f"><@parameter name="s">a</@parameter><@invoke name="g"></@tool_calls>',
    ],
)
def test_end_tags_left_out_inside_are_put_in(text: str) -> None:
    assert calls_of(text.replace("@", FULL)) == [("f", '{"s":"a"}'), ("g", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<@tool_calls></@tool_calls>",
        "<@tool_calls>",
        "<@tool_calls> \n<@invo",
        "<@tool_calls>\n{}",
        "<@tool_calls><@invoke></@invoke></@tool_calls>",
        '<@tool_calls><@invoke name=""></@invoke></@tool_calls>',
        '<@tool_calls><@invoke name="' + "x" * 5000 + '"></@invoke></@tool_calls>',
        "<@tool_calls><@tool_calls>",
        '<@invoke name="f"></@invoke>',
        "</@tool_calls> <tool_call>",
    ],
)
def test_what_holds_no_call_is_text(text: str) -> None:
    text = "Look:\n" + text.replace("@", FULL) + " \n"
    reasoning, content, calls, error, rejected = read(text)
    assert (reasoning, content, calls, error) == ("", text, [], None)
    assert bool(rejected) == (f"<{FULL}tool_calls>" in text)


def test_a_real_block_may_follow_one_that_was_none() -> None:
    reasoning, content, calls, error, rejected = read(f"I write <{FULL}tool_calls> and\n</think>Now.\n{block(NOW)}", thinking=True)
    assert (reasoning, content) == (f"I write <{FULL}tool_calls> and\n", "Now.")
    assert (calls, error, rejected) == ([ToolCall("0", "now", "{}")], None, None)


def test_a_block_ends_the_reasoning() -> None:
    assert read(f"so I call it\n\n{block(NOW)}", thinking=True)[:3] == ("so I call it", "", [ToolCall("0", "now", "{}")])


@pytest.mark.parametrize(
    ("text", "whole_calls"),
    [
        (f'<@tool_calls>{NOW}<@invoke name="f">oops', 1),
        (f"<@tool_calls>{NOW}oops", 1),
        ('<@tool_calls><@invoke name="f"><@parameter string="true">x</@parameter>', 0),
        ('<@tool_calls><@invoke name="f"></@parameter></@invoke></@tool_calls>', 0),
        ('<@tool_calls><@invoke name="f"><@parameter name="n" string="false">{"a":', 0),
        ('<@tool_calls><@invoke name="f"><@parameter name="n', 0),
        ('<@tool_calls><@invoke name="f">' + '<@parameter name="n">' * 17, 0),
    ],
)
def test_what_breaks_after_a_call_began_is_an_error(text: str, whole_calls: int) -> None:
    _, content, calls, error, rejected = read(text.replace("@", FULL))
    assert error and not rejected and content == "" and len(calls) == whole_calls


def test_half_a_block_of_a_cut_reply_is_dropped() -> None:
    text = f"Look:\n\n{block(WEATHER)}"
    for end in range(len("Look:\n\n<｜DSML｜"), len(text) - len("</｜DSML｜invoke>\n</｜DSML｜tool_calls>")):
        assert read(text[:end], whole=False)[:3] == ("", "Look:", [])


def test_one_call_at_a_time() -> None:
    assert calls_of(block(NOW, WEATHER), parallel=False) == [("now", "{}")]


def test_a_string_is_told_while_it_is_written() -> None:
    parser = DsmlParser(lambda: "id")
    parser.feed(f'<{FULL}tool_calls><{FULL}invoke name="f"><{FULL}parameter name="s" string="true">')
    seen = []
    for piece in ["one ", "<tw", "o> &l", "t; &co</", f"{FULL}par"]:
        stream = parser.feed(piece)
        seen.append("".join(event.text for event in stream if hasattr(event, "text")))
    assert seen == ["one ", "<tw", "o> ", "< &co", ""]


pieces = st.sampled_from(
    [f"<{FULL}tool_calls>", f"</{FULL}tool_calls>", f'<{FULL}invoke name="f">', f"</{FULL}invoke>", f"</{FULL}parameter>",
     f'<{FULL}parameter name="a" string="true">', f'<{FULL}parameter name="b" string="false">', f'<{FULL}parameter name="c">',
     "<tool_calls>", '<invoke name="g">', '<parameter name="x">', "</parameter>", "</invoke>", "</tool_calls>",
     "&lt;", "&l", "<", "</", "</think>", "<think>", " ", "\n", '"', "1", "{", "}", "é", "😀", "a"]
)  # fmt: skip
texts = st.lists(pieces, max_size=14).map("".join)


@given(text=texts, at=cuts, thinking=st.booleans(), whole=st.booleans(), parallel=st.booleans())
@example(text=f"<{FULL}tool_calls>", at=[3], thinking=True, whole=True, parallel=True)
def test_cuts_change_nothing(text: str, at: list[int], thinking: bool, whole: bool, parallel: bool) -> None:
    expected = read(text, thinking=thinking, whole=whole, parallel=parallel)
    everywhere = list(range(len(text.encode())))
    for places in (at, everywhere):
        assert read(text, places, thinking=thinking, whole=whole, parallel=parallel) == expected
    for call in expected[2]:
        assert isinstance(json.loads(call.arguments), dict)


@given(inside=texts, at=cuts, whole=st.booleans())
def test_cuts_inside_a_block_change_nothing(inside: str, at: list[int], whole: bool) -> None:
    text = f'<{FULL}tool_calls><{FULL}invoke name="f"><{FULL}parameter name="s">' + inside
    assert read(text, at, whole=whole) == read(text, list(range(len(text.encode()))), whole=whole) == read(text, whole=whole)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8) | pieces,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6) | pieces, values, max_size=4)
names = st.text(min_size=1, max_size=8)


@given(calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_what_is_rendered_is_read_back(calls: list[tuple[str, dict[str, object]]]) -> None:
    given = [ToolCall(str(i), name, json.dumps(members)) for i, (name, members) in enumerate(calls)]
    _, content, found, error, rejected = read(to_text(call_block(given)))
    assert (content, error, rejected) == ("", None, None)
    assert [(call.id, call.name) for call in found] == [(call.id, call.name) for call in given]
    for call, (_, members) in zip(found, calls, strict=True):
        assert json.loads(call.arguments) == members
        assert list(json.loads(call.arguments)) == list(members), "members keep their order"


@pytest.mark.parametrize("name", [None, 'we"ird<name>'])
def test_an_opening_is_the_beginning_of_a_block(name: str | None) -> None:
    rest = ' name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>' if name is None else "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    assert calls_of(to_text(call_opening(name)) + rest) == [(name or "now", "{}")]


# ---------------------------------------------------------------- ReplayMemory
def call(call_id: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(call_id, "f", arguments)


def test_a_block_is_recalled_by_its_calls() -> None:
    memory = ReplayMemory()
    memory.remember("text", [call("a", '{"x":1,"y":"é"}'), call("b")])
    assert memory.recall([call("a", '{ "y": "\\u00e9", "x": 1 }'), call("b", "")]) == "text"
    for changed in (
        [call("a")],
        [call("b"), call("a")],
        [call("a", '{"x":2,"y":"é"}'), call("b")],
        [call("c")],
        [],
        [call("a", "{"), call("b")],
    ):
        assert memory.recall(changed) is None
    memory.remember("other", [call("a")])
    assert memory.recall([call("a", '{"x":1,"y":"é"}'), call("b")]) == "text", "an id is given once"


def test_the_memory_forgets_what_was_not_asked_for_longest() -> None:
    memory = ReplayMemory(most_calls=3)
    memory.remember("one", [call("a")])
    memory.remember("two", [call("b"), call("c")])
    assert memory.recall([call("a")]) == "one"
    memory.remember("three", [call("d")])
    assert [memory.recall(c) for c in ([call("a")], [call("b"), call("c")], [call("d")])] == ["one", None, "three"]
    memory.remember("four", [call(i) for i in "wxyz"])
    assert memory.recall([call("a")]) is None
    few = ReplayMemory(most_characters=5)
    few.remember("12345", [call("a")])
    few.remember("1", [call("b")])
    assert (few.recall([call("a")]), few.recall([call("b")])) == (None, "1")
    assert ReplayMemory(most_calls=0).recall([call("a")]) is None


def test_a_memory_goes_on_where_another_one_has_dumped_what_a_text_needs() -> None:
    blocks = [f"\n\n<{FULL}tool_calls><{FULL}invoke name='{name}'></{FULL}invoke></{FULL}tool_calls>" for name in "xyz"]
    memory = ReplayMemory()
    for i, block in enumerate(blocks):
        memory.remember(block, [call(f"id{i}"), call(f"more{i}")])
    memory.remember(blocks[0].strip(), [call("again")])
    text = f"Before. {blocks[0]}<eos>between{blocks[2]} and <{FULL}tool_calls> that is cut"
    other = ReplayMemory()
    other.load(memory.dump(text))
    found = {i: other.recall([call(f"id{i}"), call(f"more{i}")]) for i in range(3)}
    assert found == {0: blocks[0], 1: None, 2: blocks[2]} and other.recall([call("again")]) == blocks[0].strip()
    assert memory.dump("no calls") == b"" == memory.dump(blocks[0].replace("x", "q"))
    for nonsense in (b"", b"\xc1", memory.dump(text)[:-3], b"\x91\x01"):
        other.load(nonsense)


def test_a_memory_that_forgets_dumps_no_more_of_it() -> None:
    block = f"<{FULL}tool_calls><{FULL}invoke name='x'></{FULL}invoke></{FULL}tool_calls>"
    memory = ReplayMemory(most_calls=2)
    for i in range(9):
        memory.remember(block, [call(f"id{i}")])
    other = ReplayMemory()
    other.load(memory.dump(block))
    assert [i for i in range(9) if other.recall([call(f"id{i}")])] == [7, 8]


def test_what_was_generated_is_replayed_byte_for_byte() -> None:
    text = f" \n<{FULL}tool_calls><{FULL}invoke  name='x' name=\"now\" ></{FULL}invoke>  </{FULL}tool_calls>"
    parser = DsmlParser(lambda: "id")
    for character in "Hm." + text + "more":
        parser.feed(character)
    assert parser.block_text == text

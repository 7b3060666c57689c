"""Which tokens of a reply are drawn greedily, and when the next one has to be read first."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4jax.text import to_text
from ds4jax.text.dsml import CallZones, ToolCall, call_block, call_opening
from ds4jax.text.dsml.markup import escape_string
from ds4jax.text.dsml.zones import LONG_PAYLOAD
from tests.http.fakes import byte_tokenizer
from tests.text.test_dsml import FULL, texts
from tests.text.test_stream import cut, cuts

TOKENIZER = byte_tokenizer()
LONG = "x" * LONG_PAYLOAD


def zones_of(pieces: Sequence[bytes]) -> list[tuple[bool, bool]]:
    """What is said before each of these tokens, and behind the last."""
    zones = CallZones(pieces.__getitem__)
    said = [(zones.is_greedy, zones.waits)]
    for token in range(len(pieces)):
        zones.take(token)
        said.append((zones.is_greedy, zones.waits))
    return said


def picture(text: str, opening: str = "") -> str:
    """A letter for each token, by the zone that it is drawn in: G structure, w payload or text that waits, a dot what does not."""
    zones, letters = CallZones(TOKENIZER.token_bytes, opening), ""
    for token in TOKENIZER.encode_rendered(text):
        letters += "G" if zones.is_greedy else "w" if zones.waits else "."
        zones.take(token)
    return letters


def string(value: str, string: str = "true") -> str:
    return f'<{FULL}tool_calls><{FULL}invoke name="f"><{FULL}parameter name="a" string="{string}">{value}</{FULL}parameter>'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", "ww"),
        ("a<b", "www"),
        ("</div>", "wwGwww"),
        (f"</{FULL}x", "wwGG"),
        (LONG + "ab", "w" * LONG_PAYLOAD + ".."),
        (LONG + "</div>", "w" * LONG_PAYLOAD + "..G..."),
    ],
)
def test_a_string_is_payload_up_to_two_characters_of_its_end(value: str, expected: str) -> None:
    begin, end = (TOKENIZER.encode_rendered(tag) for tag in string("@").split("@"))
    letters = picture(string(value))
    assert letters[: len(begin)] == ".." + "G" * (len(begin) - 2)
    assert letters[len(begin) :] == expected + ("ww" if len(value) < LONG_PAYLOAD else "..") + "G" * (len(end) - 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, true]", "GGGGGGGGG"),
        ('{"a": "b"}', "GGwwGGGwwG"),
        (r'["\"", "\\", ""]', "GGwwwGGGwwwGGGwG"),
        (f'["{LONG}", 1]', "GG" + "w" * LONG_PAYLOAD + ".GGGG"),
        (rf'["{LONG}\"a", 1]', "GG" + "w" * LONG_PAYLOAD + "....GGGG"),
        ('["</p"]', "GGwwGwG"),
    ],
)
def test_strings_in_json_are_payload_and_the_rest_of_it_is_structure(value: str, expected: str) -> None:
    (begin, _) = string("@", "false").split("@")
    n = len(TOKENIZER.encode_rendered(begin))
    assert picture(string(value, "false"))[n : n + len(expected)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <b> </b>", ".........."),
        ("<table>", "..w...."),  # the letter behind "<t" may be one of "<tool_calls>"
        (f"<{FULL}x y", "..G.."),
        (f"<{FULL}tool_calls>no block", "..GGGGGGGGGGGG......."),
        ('<tool_calls><invoke name="f">', "..wwwwwwwwww" + "G" * 17),
        (f"<{FULL}tool_calls><{FULL}invoke oops> and on", "..GGGGGGGGGGGGG" + "G" * 12 + "......."),
    ],
)
def test_what_is_no_block_is_drawn_as_asked(text: str, expected: str) -> None:
    assert picture(text) == expected


def test_behind_a_block_nothing_is_structure() -> None:
    block = to_text(call_block([ToolCall("id", "f", '{"a":"b"}')])).strip()
    more = f" and more <b>\n{block}"
    assert set(picture(block + more)[-len(TOKENIZER.encode_rendered(more)) :]) == {"."}


@pytest.mark.parametrize("name", [None, "f"])
def test_a_call_that_the_prompt_begins_is_structure_at_once(name: str | None) -> None:
    rest = (' name="f">\n' if name is None else "") + f"</{FULL}invoke>"
    assert set(picture(rest, to_text(call_opening(name)))) == {"G"}


@given(text=texts, at=cuts, inside=st.sampled_from(["", string("").partition("</")[0], string("", "false").partition("</")[0]]))
@example(text=LONG + '</\\"<', at=[3, LONG_PAYLOAD + 1], inside=string("").partition("</")[0])
@example(text='"' + LONG + '\\\\"1', at=[LONG_PAYLOAD + 2, LONG_PAYLOAD + 3], inside=string("", "false").partition("</")[0])
def test_cuts_change_nothing(text: str, at: list[int], inside: str) -> None:
    data = (inside + text).encode()
    pieces, by_bytes = cut(data, at), zones_of([data[i : i + 1] for i in range(len(data))])
    ends = [0, *(sum(map(len, pieces[: i + 1])) for i in range(len(pieces)))]
    assert zones_of(pieces) == [by_bytes[end] for end in ends]


strings = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
plain = st.none() | st.booleans() | st.integers() | strings
members = st.dictionaries(strings, plain | st.lists(plain, max_size=3) | st.dictionaries(strings, plain, max_size=2), max_size=4)


@settings(max_examples=40)
@given(members)
def test_payload_is_what_a_call_carries_as_strings(members: dict[str, object]) -> None:
    text = to_text(call_block([ToolCall("id", "f", json.dumps(members))]))
    drawn = zip(picture(text), TOKENIZER.encode_rendered(text), strict=True)
    payload = b"".join(TOKENIZER.token_bytes(token) for letter, token in drawn if letter != "G").decode()
    expected = f"\n\n<{FULL}"
    for value in members.values():
        if isinstance(value, str):
            expected += escape_string(value) + "</"
        else:  # a quote that ends a string was payload until it was drawn
            expected += "".join(re.findall(r'"((?:[^"\\]|\\.)*")', json.dumps(value)))
    assert payload == expected

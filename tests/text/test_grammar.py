"""Grammars against the texts that they allow, listed one by one; and grammars that mean harm."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.errors import GrammarError, RequestError
from ds4jax.serving.http.structured import MOST_CHOICES
from ds4jax.text.grammar import LARGEST_MULTIPLE, LONGEST_GRAMMAR, CompiledGrammar, Grammar, GrammarCompiler, Kind, Matcher
from ds4jax.text.tokenizer import Tokenizer
from tests.http.fakes import DSML_ID, EOS_ID, byte_tokenizer

pytestmark = pytest.mark.smoke
BYTES = byte_tokenizer()
COMPILER = GrammarCompiler(BYTES)


def grammar(kind: Kind, text: str) -> Grammar:
    return Grammar(kind, text, "field")


def compiled(kind: Kind, text: str) -> CompiledGrammar:
    return COMPILER.compile(grammar(kind, text))


def tokens_in(mask: bytes, n_vocab: int) -> set[int]:
    return {i for i in range(n_vocab) if mask[i // 8] >> i % 8 & 1}


def follow(matcher: Matcher, tokens: Iterable[int]) -> bytes | None:
    """Feed tokens; the mask behind the last of them, None once the text is complete."""
    mask: bytes | None = None
    for token in tokens:
        mask = matcher.advance(token)
        if mask is None:
            break
    return mask


def accepts(form: CompiledGrammar, text: bytes) -> bool:
    """Whether a grammar over bytes allows a text, from its first byte to its end."""
    mask: bytes | None = form.first_mask
    matcher = form.begin()
    for i, byte in enumerate(text):
        if mask is None or byte not in tokens_in(mask, BYTES.n_vocab):
            return False
        mask = matcher.advance(byte)
        if mask is None:
            return i == len(text) - 1
    return mask is not None and EOS_ID in tokens_in(mask, BYTES.n_vocab)


words = st.lists(st.text('abé\n"\\', min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@settings(max_examples=80)
@given(words, st.data())
def test_masks_are_those_of_the_texts_listed_one_by_one(allowed: list[str], data: st.DataObject) -> None:
    form = compiled("choice", json.dumps(allowed))
    text = data.draw(st.sampled_from(allowed)).encode()
    matcher, mask = form.begin(), form.first_mask

    def rests(n: int) -> list[bytes]:
        return [word.encode()[n:] for word in allowed if word.encode().startswith(text[:n])]

    for n, byte in enumerate(text):
        assert tokens_in(mask, BYTES.n_vocab) == {rest[0] if rest else EOS_ID for rest in rests(n)}
        following = matcher.advance(byte)
        assert (following is None) == (rests(n + 1) == [b""])
        mask = following or b""
    assert not mask or EOS_ID in tokens_in(mask, BYTES.n_vocab)


@settings(max_examples=40)
@given(words)
def test_no_token_of_several_letters_leads_astray(allowed: list[str]) -> None:
    """Where tokens overlap, only some spellings of a text may be left, but none that is no beginning of an allowed text."""
    pairs = [left + right for left in "ab" for right in "ab"]
    tokenizer = Tokenizer([*"ab", *pairs, *_other_bytes(), "<eos>"], [1] * 260 + [3], [f"{x[0]} {x[1]}" for x in pairs], 260, 260)
    form = GrammarCompiler(tokenizer).compile(grammar("choice", json.dumps(allowed)))
    texts = {b""}
    for _ in range(4):
        for text in list(texts):
            matcher = form.begin()
            mask = follow(matcher, tokenizer.encode(text.decode())) if text else form.first_mask
            for token in [] if mask is None else tokens_in(mask, tokenizer.n_vocab) - {260}:
                longer = text + tokenizer.token_bytes(token)
                assert any(word.encode().startswith(longer) for word in allowed)


def _other_bytes() -> list[str]:
    return [token for token in (BYTES._vocabulary.tokens[i] for i in range(256)) if token not in "ab"]


PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


GOOD_PEOPLE = ['{"name":"Ann","age":7}', '{ "name" : "é\\n" ,\n  "age":150}']
BAD_PEOPLE = ['{"name":"Ann"}', '{"name":1', '{"name":"","age":151}']


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", PERSON, GOOD_PEOPLE, BAD_PEOPLE),
        ("json_schema", '{"type":"object"}', ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", '{"a":}']),
        ("regex", "[a-c]{2,3}", ["ab", "abc"], ["a", "abcd", "xy"]),
        ("choice", '["yes","yes, please","no"]', ["yes", "yes, please", "no"], ["y", "maybe", "yes,"]),
        ("grammar", 'start: "a"+ tail?\ntail: "." /[0-9]/', ["a", "aa", "a.5"], ["", "a.", ".5"]),
        ("grammar", 'root ::= "a"+ tail?\ntail ::= "." [0-9]', ["a", "aa", "a.5"], ["", "a.", ".5"]),
    ],
)
def test_every_kind(kind: Kind, text: str, good: list[str], bad: list[str]) -> None:
    form = compiled(kind, text)
    assert [word for word in good if not accepts(form, word.encode())] == []
    assert [word for word in bad if accepts(form, word.encode())] == []


def test_white_space_comes_to_an_end() -> None:
    form = compiled("json_schema", '{"type":"object"}')
    assert follow(form.begin(), b"{" + b" " * 40) is not None
    matcher = form.begin()
    mask = follow(matcher, b"{" + b"\n" * 40)
    assert mask is not None and ord(" ") not in tokens_in(mask, BYTES.n_vocab)


def test_a_complete_text_ends_at_once_and_what_does_not_fit_is_an_error() -> None:
    form = compiled("json_schema", '{"type":"boolean"}')
    matcher = form.begin()
    assert [matcher.advance(byte) is None for byte in b"true"] == [False, False, False, True]
    with pytest.raises(GrammarError, match="too complex to be followed further"):
        form.begin().advance(ord("x"))
    assert form.begin().advance(ord("f")) is not None, "one text's error is not another's"


def test_calls_may_come_instead_of_an_answer() -> None:
    form = COMPILER.compile(grammar("json_schema", PERSON), or_calls=True)
    assert tokens_in(form.first_mask, BYTES.n_vocab) == {ord("{"), ord("\n")}
    opening = [*b"\n\n<", DSML_ID, *b"tool_calls>"]
    for n in range(1, len(opening)):
        mask = follow(form.begin(), opening[:n])
        assert mask is not None and tokens_in(mask, BYTES.n_vocab) == {opening[n]}
    mask = follow(form.begin(), [*opening, *b"\n<", DSML_ID, *b'invoke name="f">'])
    assert mask is not None and {DSML_ID, EOS_ID, ord("<"), ord("\n")} <= tokens_in(mask, BYTES.n_vocab)
    assert follow(form.begin(), b'{"name":"","age":1}') is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '"string"'),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"type":"strong"}'),
        ("json_schema", '{"not":{"type":"string"}}'),
        ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
        ("json_schema", '{"$ref":"http://127.0.0.1:9/schema.json"}'),
        ("json_schema", '{"type":"object","properties":{"a":false},"required":["a"]}'),
        ("json_schema", '{"type":"string","pattern":"(?=a)b"}'),
        ("regex", "(a"),
        ("regex", "a(?!b)"),
        ("grammar", "start: nobody"),
        ("grammar", "root ::= nobody"),
        ("grammar", "(((("),
        ("grammar", "root ::= " + '("a" ' * 3000 + ")" * 3000),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_the_name_of_its_field(kind: Kind, text: str) -> None:
    with pytest.raises(RequestError, match="^field: this .* cannot be enforced") as refused:
        compiled(kind, text)
    assert refused.value.param == "field"
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_what_no_text_can_follow_is_said_in_words() -> None:
    for kind, text in (("json_schema", '{"$ref":"#"}'), ("grammar", "start: start")):
        with pytest.raises(RequestError, match="no text that ends can follow it"):
            compiled(kind, text)


def test_as_many_choices_as_may_be_sent_are_followed_to_their_end() -> None:
    form = compiled("choice", json.dumps([f"x{i}" for i in range(MOST_CHOICES)]))
    assert accepts(form, b"x0") and accepts(form, b"x9999") and not accepts(form, b"x10000")


def test_an_empty_choice_may_be_chosen() -> None:
    form = compiled("choice", '["","a"]')
    assert tokens_in(form.first_mask, BYTES.n_vocab) == {EOS_ID, ord("a")}


def test_what_cannot_be_enforced_can_be_left_out() -> None:
    schema = '{"type":"string","format":"colour","not":{"const":"x"}}'
    form = COMPILER.compile(Grammar("json_schema", schema, "field", is_lenient=True))
    assert accepts(form, b'"y"') and not accepts(form, b"1")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"enum": ["x" * 20] * (LONGEST_GRAMMAR // 20)})),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": LARGEST_MULTIPLE + 1})),
        ("json_schema", json.dumps({"type": "number", "multipleOf": 1.23456789})),
        ("json_schema", '{"type":"integer","\\u006dultipleOf":999983}'),
        ("grammar", 'start: %json {"type":"integer","multipleOf": 999983}'),
        ("regex", "x" * LONGEST_GRAMMAR + "x"),
    ],
)
def test_what_would_take_too_long_is_refused_at_once(kind: Kind, text: str) -> None:
    with pytest.raises(RequestError):
        compiled(kind, text)


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


HOSTILE: list[tuple[Kind, str]] = [
    ("regex", "((((a{100}){100}){100}){100})"),
    ("regex", "(a*)*(a|aa|aaa)*(.*b.{50}){20}"),
    ("regex", "(.*a.{200}.*b.{200}|.*c.{100})"),
    ("regex", r"(\w{1,300}\s){1,300}"),
    ("json_schema", json.dumps(_nested(9))),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10**9})),
    ("json_schema", json.dumps({"type": "string", "maxLength": 10**9})),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})),
    ("json_schema", json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(8)]})),
    ("grammar", 'start: s\ns: s s s | s s | "a" | "b" | '),
    ("grammar", "start: " + " | ".join(f'"{i}"' for i in range(10_000))),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE)
def test_hostile_grammars_are_refused_or_followed(kind: Kind, text: str) -> None:
    """What takes for ever would show as a test that never ends; a text may break off with an error, but in bounded steps."""
    try:
        form = compiled(kind, text)
        matcher, mask = form.begin(), form.first_mask
        for _ in range(50):
            following = matcher.advance(min(tokens_in(mask, 256) or {EOS_ID}))
            if following is None:
                break
            mask = following
    except (RequestError, GrammarError):
        pass

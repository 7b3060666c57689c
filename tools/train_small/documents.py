"""Make the training conversations: the texts of the corpus as chats, and what is made by rule."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ds4jax.evals.dialogues import Dialogue, facts, recall, small_talk, story_plan, sum_of_two
from ds4jax.evals.tools import use_tools
from ds4jax.evals.words import ADJECTIVES, NOUNS, pool
from ds4jax.text.chat import Message
from tools.train_small.copying import common_words, ledger, many_keys, passage, word_list

HELD_OUT_PERCENT = 1
_STYLE = (" Answer in one or two short sentences with simple words.", " Use only simple words.", " Use simple words and short sentences.",
          " Use simple words.")  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A request and the text that answers it."""

    prompt: str
    text: str


def read_pairs(path: Path) -> tuple[list[Pair], list[Pair]]:
    """Read the corpus: (training pairs, held-out pairs). A prompt is on one side only, whatever its texts."""
    train, held_out = [], []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            pair = Pair(row["prompt"], row["text"])
            (held_out if zlib.crc32(pair.prompt.encode()) % 100 < HELD_OUT_PERCENT else train).append(pair)
    return train, held_out


def as_chat(rng: Random, pair: Pair, *, thinking: bool) -> Dialogue:
    """Make a chat of a pair; in half of them the words about style go, so that the model does without."""
    prompt = pair.prompt
    if rng.random() < 0.4:
        for style in _STYLE:
            prompt = prompt.removesuffix(style)
    thought = story_plan(rng, prompt) if thinking else None
    return Dialogue((Message("user", prompt), Message("assistant", pair.text, reasoning=thought)), thinking)


def several(rng: Random, pairs: Sequence[Pair]) -> Dialogue:
    """Join short chats to one of two to five turns."""
    messages: list[Message] = []
    for _ in range(rng.randint(2, 5)):
        turn = small_talk(rng) if rng.random() < 0.4 else as_chat(rng, rng.choice(pairs), thinking=False)
        messages += turn.messages[:2]
    return Dialogue(tuple(messages))


def filler_from(pairs: Sequence[Pair]) -> Callable[[Random, int], str]:
    """Return a maker of text of about so many characters, from whole sentences of the corpus."""

    def filler(rng: Random, n_chars: int) -> str:
        parts: list[str] = []
        left = n_chars
        while left > 20:
            text = rng.choice(pairs).text
            if len(text) > left:
                text = text[: left + 1].rpartition(".")[0] + "." if "." in text[: left + 1] else ""
                left = min(left, len(text))
            if text:
                parts.append(text)
            left -= len(text)
        return "\n\n".join(parts)

    return filler


def make_documents(pairs: Sequence[Pair], n_rule_made: int, seed: int) -> Iterator[Dialogue]:
    """Yield the training conversations: every pair once plain and once with thoughts, and n_rule_made others."""
    rng = Random(seed)
    short = [pair for pair in pairs if len(pair.text) < 400]
    filler = filler_from(pairs)
    words = common_words(pair.text for pair in pairs) or NOUNS
    for pair in pairs:
        yield as_chat(rng, pair, thinking=False)
    for pair in pairs:
        yield as_chat(rng, pair, thinking=True)

    def distance() -> int:
        """Characters between a key and its question, evenly spread over their logarithm: 40 to 8,000, some 10 to 1,900 tokens."""
        return int(40 * 200 ** rng.random())

    known = pool(NOUNS + ADJECTIVES, held_out=False)

    def some_words() -> Sequence[str]:
        """Where the words of one conversation come from; () stands for words that were made up."""
        return rng.choice((words, words, known, ()))

    makers: list[tuple[float, Callable[[], Dialogue]]] = [
        (0.10, lambda: recall(rng, filler, distance(), words=rng.choice([words, known]))),
        (0.08, lambda: many_keys(rng, some_words(), filler)),
        (0.04, lambda: facts(rng, filler, int(20 * 150 ** rng.random()))),
        (0.03, lambda: passage(rng, filler)),
        (0.14, lambda: word_list(rng, some_words(), filler)),
        (0.12, lambda: ledger(rng, some_words(), filler)),
        (0.06, lambda: small_talk(rng)),
        (0.07, lambda: sum_of_two(rng)),
        (0.05, lambda: several(rng, short)),
        (0.31, lambda: use_tools(rng, words=words)),
    ]
    shares, calls = zip(*makers, strict=True)
    for _ in range(n_rule_made):
        yield rng.choices(calls, shares)[0]()

"""Conversations whose answers are copied from far back: nothing else teaches a model so fast to look there.

A question at the end of a long text gives a handful of tokens to learn from; these ask for most of what was said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random

from ds4jax.evals.dialogues import KEY_ASKED, KEY_KINDS, KEY_SAID, KEY_TOLD, Dialogue, Filler
from ds4jax.evals.words import ADJECTIVES, CITIES, NAMES, NOUNS, VERBS, pool
from ds4jax.text.chat import Message

RARE = 4  # a word that stands in fewer texts may be a slip


def common_words(texts: Iterable[str]) -> list[str]:
    """Return the words of some texts, but for those that are kept for tests."""
    count = Counter(word for text in texts for word in set(re.findall(r"\b[a-z]{3,12}\b", text)))
    kept = {word for words in (ADJECTIVES, CITIES, NAMES, NOUNS, VERBS) for word in pool(words, held_out=True)}
    return sorted(word for word, n in count.items() if n >= RARE and word not in kept)


def made_up_word(rng: Random) -> str:
    """Make a word that nobody knows, of one to three syllables: who copies it has looked at it."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", *"lmnrst")) for _ in range(rng.randint(1, 3)))
    return "".join(syllables)


def some(rng: Random, words: Sequence[str], n: int) -> str:
    """Draw n words that have nothing to do with each other; words that were made up, where there are none to draw from."""
    return " ".join(rng.choice(words) if words else made_up_word(rng) for _ in range(n))


def _log_uniform(rng: Random, least: float, most: float) -> int:
    return int(least * (most / least) ** rng.random())


def passage(rng: Random, filler: Filler) -> Dialogue:
    """Say a text again, of some 20 to 700 tokens."""
    text = filler(rng, _log_uniform(rng, 80, 3000)) or "Nothing."
    asked = rng.choice(["Repeat this text.\n\n{t}", "Copy this text:\n\n{t}", "{t}\n\nSay this text again.", "{t}\n\nRepeat it."])
    return Dialogue((Message("user", asked.format(t=text)), Message("assistant", text)))


def word_list(rng: Random, words: Sequence[str], filler: Filler) -> Dialogue:
    """Say up to 300 words again, half of the time after some other text."""
    text = some(rng, words, _log_uniform(rng, 4, 300))
    if rng.random() < 0.5:
        told = rng.choice(["Remember this: {w}.", "Keep these words in mind: {w}.", "Here are some words: {w}."]).format(w=text)
        asked = rng.choice(["Say the words again.", "What were the words?", "Repeat the words."])
        question = "\n\n".join((told, filler(rng, _log_uniform(rng, 40, 4000)), asked))
    else:
        asked = rng.choice(["Repeat after me: {w}.", "Say this again: {w}.", "Copy these words: {w}.", "{w}\n\nRepeat these words."])
        question = asked.format(w=text)
    return Dialogue((Message("user", question), Message("assistant", f"{text}.")))


def many_keys(rng: Random, words: Sequence[str], filler: Filler) -> Dialogue:
    """Tell several keys with text between them, then ask for each: `recall` with more to learn from in as much text."""
    kinds = [*KEY_KINDS, *(f"{noun} words" for noun in rng.sample(pool(NOUNS, held_out=False), 12))]
    kinds = rng.sample(kinds, rng.randint(2, 12))
    keys = [some(rng, words, rng.randint(3, 5)) for _ in kinds]
    parts = []
    for kind, key in zip(kinds, keys, strict=True):
        parts += [rng.choice(KEY_TOLD).format(kind=kind, key=key), filler(rng, _log_uniform(rng, 10, 800))]
    messages: list[Message] = []
    for i in rng.sample(range(len(kinds)), len(kinds)):
        asked = rng.choice(KEY_ASKED).format(kind=kinds[i])
        question = asked if messages else "\n\n".join((*filter(None, parts), asked))
        messages += [Message("user", question), Message("assistant", KEY_SAID.format(kind=kinds[i], key=keys[i]))]
    return Dialogue(tuple(messages))


def ledger(rng: Random, words: Sequence[str], filler: Filler) -> Dialogue:
    """Say which words belong to whom, let some text pass, and ask about many of them."""
    people = rng.sample(pool(NAMES, held_out=False), rng.randint(2, 24))
    keys = [some(rng, words, rng.randint(1, 5)) for _ in people]
    said = rng.choice(["{p}: {k}.", "The words of {p} are: {k}.", "{p} has said: {k}."])
    told = rng.choice(["\n", " "]).join(said.format(p=p, k=k) for p, k in zip(people, keys, strict=True))
    between = filler(rng, _log_uniform(rng, 20, 4000)) if rng.random() < 0.7 else ""
    messages: list[Message] = []
    for i in rng.sample(range(len(people)), len(people)):
        asked = rng.choice(["What are the words of {p}?", "And {p}?", "What did {p} say?"]).format(p=people[i])
        before = "" if messages else "\n\n".join(part for part in (told, between) if part) + "\n\n"
        messages += [Message("user", before + asked), Message("assistant", f"The words of {people[i]} are: {keys[i]}.")]
    return Dialogue(tuple(messages))

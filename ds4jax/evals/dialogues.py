"""Conversations made by rule: small talk, sums, recall. Each maker draws all its choices from one generator, so a seed gives a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ds4jax.evals.words import ADJECTIVES, NAMES, NOUNS, SMALL_TALK, VERBS, pool
from ds4jax.text.chat import Message
from ds4jax.text.dsml import Tool

KEY_KINDS = ("secret words", "magic words", "four words", "key words")
KEY_TOLD = ("The {kind} are: {key}.", "Remember the {kind}: {key}.", "Please keep the {kind} in mind: {key}.")
KEY_ASKED = ("What are the {kind}?", "Tell me the {kind}.", "What were the {kind}?", "Please repeat the {kind}.")
KEY_SAID = "The {kind} are: {key}."

Filler = Callable[[Random, int], str]  # (generator, about so many characters) -> text


@dataclass(frozen=True)
class Dialogue:
    """A conversation whose last message is the answer that is wanted. thinking: the last answer has thoughts before it."""

    messages: tuple[Message, ...]
    thinking: bool = False
    tools: tuple[Tool, ...] = ()

    @property
    def question(self) -> tuple[Message, ...]:
        """All but the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        """The answer that is wanted."""
        return self.messages[-1]


def small_talk(rng: Random) -> Dialogue:
    """Greet, ask and thank, in one to four turns."""
    messages: list[Message] = []
    name = rng.choice(pool(NAMES, held_out=False))
    for turn in range(rng.randint(1, 4)):
        if turn == 0 and rng.random() < 0.2:
            asked, said = rng.choice([f"Hello, I am {name}.", f"Hi, my name is {name}."]), f"Hello {name}! Nice to meet you."
        elif turn and messages[0].content.endswith(f"{name}.") and rng.random() < 0.4:
            asked, said = rng.choice(["What is my name?", "Do you remember my name?"]), f"Your name is {name}."
        else:
            asked, said = rng.choice(SMALL_TALK)
            asked = rng.choice([asked, asked, asked.lower(), asked.rstrip("!.?")])
        messages += [Message("user", asked), Message("assistant", said)]
    return Dialogue(tuple(messages))


def sum_of_two(rng: Random, *, held_out: bool = False) -> Dialogue:
    """Add or take away small numbers, with a thought first half of the time."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if (a * 21 + b) % 10 == 0 and not held_out:
        b += 1
    a, b = max(a, b), min(a, b)
    word, result = rng.choice([("plus", a + b), ("minus", a - b)])
    asked = rng.choice(["What is {a} {w} {b}?", "How much is {a} {w} {b}?", "Please tell me: {a} {w} {b}?"]).format(a=a, w=word, b=b)
    thinking = held_out or rng.random() < 0.5
    thought = f"The user asks for {a} {word} {b}. {a} {word} {b} is {result}." if thinking else None
    said = rng.choice([f"{a} {word} {b} is {result}.", f"It is {result}."])
    return Dialogue((Message("user", asked), Message("assistant", said, reasoning=thought)), thinking)


def story_plan(rng: Random, prompt: str) -> str:
    """Think about a request for a text: what it is, and how to go about it."""
    wish = prompt.split(". ")[0].rstrip(".?!")
    wish = wish[0].lower() + wish[1:] if wish else "this"
    plan = rng.choice(
        [
            "I will keep it short and use simple words.",
            "First I think about who is in it. Then I write what happens.",
            "I need a beginning, a middle and an end.",
            "A short answer in simple words is best.",
        ]
    )
    return rng.choice([f"The user says: {wish}. {plan}", f'The request is "{wish}". {plan}', f"Let me think. {plan}"])


def story_request(rng: Random, *, held_out: bool) -> str:
    """Ask for a story, in the ways of the training texts."""
    noun, adjective, verb, name = (rng.choice(pool(words, held_out=held_out)) for words in (NOUNS, ADJECTIVES, VERBS, NAMES))
    other = rng.choice(pool(NOUNS, held_out=held_out))
    place = rng.choice(["in the forest", "at school", "on a train", "at the beach", "in a small village"])
    return rng.choice(
        [
            f"Write a short story {place} with a {noun}, a {other} and a child named {name}. Use simple words.",
            f"Write a very short story for a small child about a {adjective} {noun} who likes to {verb} {place}. Use only simple words.",
            f"Tell me a short bedtime story about {name} and a {adjective} {noun}. Use simple words and short sentences.",
            f"Write a short story where {name} learns to {verb}. Use simple words.",
        ]
    )


def recall(rng: Random, filler: Filler, n_chars: int, *, held_out: bool = False, words: Sequence[str] = ()) -> Dialogue:
    """State four words, let some text pass, ask for them. n_chars: of the text between; words: what to draw them from."""
    words = words or pool(NOUNS + ADJECTIVES, held_out=held_out)
    key = " ".join(rng.choice(words) for _ in range(4))
    kind = rng.choice(KEY_KINDS)
    told, asked = rng.choice(KEY_TOLD).format(kind=kind, key=key), rng.choice(KEY_ASKED).format(kind=kind)
    said = KEY_SAID.format(kind=kind, key=key)
    between = filler(rng, n_chars)
    if rng.random() < 0.5:
        return Dialogue((Message("user", f"{told}\n\n{between}\n\n{asked}"), Message("assistant", said)))
    before = filler(rng, rng.randint(0, 300)) if rng.random() < 0.3 else ""
    first = Message("user", f"{before}\n\n{told}".strip())
    turns = [first, Message("assistant", "I will remember them.")]
    if between:
        turns += [Message("user", f"Read this text.\n\n{between}"), Message("assistant", "I have read it.")]
    return Dialogue((*turns, Message("user", asked), Message("assistant", said)))


def facts(rng: Random, filler: Filler, n_chars: int) -> Dialogue:
    """Say who has what, let text pass, and ask about one or two of them."""
    people = rng.sample(pool(NAMES, held_out=False), rng.randint(2, 5))
    things = [f"{rng.choice(pool(ADJECTIVES, held_out=False))} {rng.choice(pool(NOUNS, held_out=False))}" for _ in people]
    told = " ".join(f"{person} has a {thing}." for person, thing in zip(people, things, strict=True))
    turns = [Message("user", f"{told}\n\n{filler(rng, n_chars)}\n\nWhat does {people[0]} have?")]
    turns.append(Message("assistant", f"{people[0]} has a {things[0]}."))
    if rng.random() < 0.5:
        turns += [Message("user", f"And {people[1]}?"), Message("assistant", f"{people[1]} has a {things[1]}.")]
    return Dialogue(tuple(turns))

"""What is measured: each function asks an engine and returns counts or a number."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np

from ds4jax.evals.dialogues import Dialogue, recall, story_request, sum_of_two
from ds4jax.evals.run import Question, Reply, ask
from ds4jax.evals.texts import held_out_chats, held_out_filler, held_out_pairs
from ds4jax.evals.tools import use_tools
from ds4jax.evals.words import ADJECTIVES, NAMES, NOUNS, VERBS
from ds4jax.model.model import Model
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.local import Engine
from ds4jax.text import Message, Tokenizer, render, to_ids

GREEDY = SamplingParams(temperature=0.0)
LOOP_WORDS, LOOP_TIMES = 5, 3  # a run of so many words that comes so often is a loop


@dataclass(frozen=True)
class Subject:
    """What is measured, and how many questions it answers at once."""

    engine: Engine
    at_once: int

    @property
    def model(self) -> Model:
        """The model."""
        return self.engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.model.tokenizer

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Ask all questions."""
        return ask(self.engine, self.tokenizer, questions, self.at_once)


def perplexity(subject: Subject, n: int) -> float:
    """Return the perplexity a token of n held-out answers, each after its prompt."""
    total, count = 0.0, 0
    for question, answer in held_out_chats(n):
        prompt = to_ids(render([question], thinking=False), subject.tokenizer)
        ids = to_ids(render([question, answer], thinking=False), subject.tokenizer)
        logits = subject.model.logits(ids).astype(np.float64)[len(prompt) - 1 : -1]
        target = np.array(ids[len(prompt) :])
        peak = logits.max(axis=-1)
        total += float(np.sum(peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1)) - logits[np.arange(len(target)), target]))
        count += len(target)
    return math.exp(total / count)


def stories_without_loops(subject: Subject, n: int, n_token: int = 150) -> int:
    """Count the stories, of n at temperature 0.8 and up to n_token tokens, that are text and do not repeat themselves."""
    rng = Random(1)
    questions = [
        Question((Message("user", story_request(rng, held_out=True)),), SamplingParams(temperature=0.8, min_p=0.0, seed=i), n_token)
        for i in range(n)
    ]
    return sum(is_text(reply.content) and not has_loop(reply.content) for reply in subject.ask(questions))


def is_text(text: str) -> bool:
    """Whether it has at least twenty words, most of which are known: words of the held-out texts or of the tasks."""
    words = re.findall(r"[a-z]+", text.lower())
    return len(words) >= 20 and sum(word in _known_words() for word in words) >= 0.7 * len(words)


@cache
def _known_words() -> frozenset[str]:
    texts = [" ".join(pair) for pair in held_out_pairs()] + [*NAMES, *NOUNS, *ADJECTIVES, *VERBS]
    return frozenset(re.findall(r"[a-z]+", " ".join(texts).lower()))


def has_loop(text: str) -> bool:
    """Whether some run of words comes again and again."""
    words = re.findall(r"\w+", text.lower())
    runs = Counter(tuple(words[i : i + LOOP_WORDS]) for i in range(len(words) - LOOP_WORDS + 1))
    return any(times >= LOOP_TIMES for times in runs.values())


def tool_calls(subject: Subject, n: int) -> tuple[int, int]:
    """Count replies to n held-out questions for a tool: (with a call that can be read, with the very call that is wanted)."""
    dialogues = [use_tools(Random(1000 + i), n_turn=1, held_out=True, thinking=False) for i in range(n)]
    replies = subject.ask([Question(d.question, GREEDY, 200, tools=d.tools) for d in dialogues])
    readable = sum(bool(reply.calls) for reply in replies)
    return readable, sum(_same_call(reply, dialogue) for reply, dialogue in zip(replies, dialogues, strict=True))


def _same_call(reply: Reply, dialogue: Dialogue) -> bool:
    wanted = dialogue.answer.tool_calls[0]
    if len(reply.calls) != 1 or reply.calls[0].name != wanted.name:
        return False
    return bool(json.loads(reply.calls[0].arguments) == json.loads(wanted.arguments))


def recalled(subject: Subject, n: int, distance: int) -> int:
    """Count the keys of four words, of n, that come back from about `distance` tokens ago."""
    dialogues = [recall_at(subject.tokenizer, Random(2000 + i), distance) for i in range(n)]
    replies = subject.ask([Question(d.question, GREEDY, 40) for d in dialogues])
    # The wanted answer is "The ... are: KEY."
    return sum(d.answer.content.split(": ")[1] in reply.content for d, reply in zip(dialogues, replies, strict=True))


def recall_at(tokenizer: Tokenizer, rng: Random, distance: int) -> Dialogue:
    """Make a recall task with about `distance` tokens of text between the key and the question."""
    sample = held_out_filler(Random(0), 4000)
    chars_a_token = len(sample) / len(tokenizer.encode(sample))
    return recall(rng, held_out_filler, int(distance * chars_a_token), held_out=True)


def thoughts_closed(subject: Subject, n: int) -> int:
    """Count the replies in thinking mode, of n, that think, close their thoughts, and then say something."""
    rng = Random(3)
    messages = [
        Message("user", story_request(rng, held_out=True)) if i % 2 else sum_of_two(rng, held_out=True).question[0] for i in range(n)
    ]
    sampling = [SamplingParams(temperature=0.8, min_p=0.0, seed=i) for i in range(n)]
    replies = subject.ask([Question((m,), s, 200, thinking=True) for m, s in zip(messages, sampling, strict=True)])
    return sum(bool(reply.reasoning.strip()) and reply.closed and bool(reply.content.strip()) for reply in replies)


def same_in_company(subject: Subject, n: int, n_token: int) -> int:
    """Count the prompts, of n, whose greedy reply is the same alone and in company."""
    rng = Random(4)
    questions = [Question((Message("user", story_request(rng, held_out=True)),), GREEDY, n_token) for _ in range(n)]
    together = subject.ask(questions)
    alone = [ask(subject.engine, subject.tokenizer, [question], 1)[0] for question in questions]
    return sum(a.tokens == b.tokens for a, b in zip(together, alone, strict=True))

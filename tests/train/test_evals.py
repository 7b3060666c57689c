"""`ds4jax eval`: tasks whose wanted answers the server's own parsers accept, and judges that can say no."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

import pytest

from ds4jax.cli.presets import TINY, vocabulary_of
from ds4jax.evals.dialogues import Dialogue, recall, small_talk, story_request, sum_of_two
from ds4jax.evals.measures import has_loop, is_text, recall_at
from ds4jax.evals.report import Row
from ds4jax.evals.run import Question, ask
from ds4jax.evals.texts import held_out_filler, held_out_pairs
from ds4jax.evals.tools import FAMILIES, use_tools
from ds4jax.evals.words import CITIES, NOUNS, pool
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, SamplingParams, Sink, Token
from ds4jax.text import Tokenizer, render, to_ids

VOCABULARY = vocabulary_of(TINY)
TOKENIZER = Tokenizer(VOCABULARY.tokens, VOCABULARY.types, VOCABULARY.merges, VOCABULARY.bos_id, VOCABULARY.eos_id)


@dataclass
class Parrot:
    """An engine that gives the wanted answer to every question, at most `limit` of them at once."""

    dialogues: list[Dialogue]
    limit: int
    waiting: list[tuple[int, GenerateRequest, Sink]] = field(default_factory=list)
    n_submitted: int = 0
    n_ctx: int = 4096

    def submit(self, request: GenerateRequest, sink: Sink, n_more: int = 0) -> int:
        self.n_submitted += 1
        self.waiting.append((self.n_submitted - 1, request, sink))
        assert len(self.waiting) <= self.limit
        if len(self.waiting) == self.limit or self.n_submitted == len(self.dialogues):
            for waiting in reversed(self.waiting):  # the last comes first: order must not matter
                self._answer(*waiting)
            self.waiting.clear()
        return self.n_submitted - 1

    def _answer(self, i: int, request: GenerateRequest, sink: Sink) -> None:
        d = self.dialogues[i]
        whole = to_ids(render(d.messages, thinking=d.thinking, tools=d.tools), TOKENIZER)
        assert tuple(whole[: len(request.prompt)]) == request.prompt
        answer = whole[len(request.prompt) :]
        assert answer[-1] in request.stop_token_ids
        for token in answer[:-1]:
            sink(Token(i, token))
        sink(Finish(i, FinishReason.STOP, len(request.prompt), 0, len(answer) - 1))


def questions(dialogues: list[Dialogue]) -> list[Question]:
    return [Question(d.question, SamplingParams(), 500, d.thinking, d.tools) for d in dialogues]


@pytest.mark.parametrize("thinking", [False, True])
def test_wanted_calls_are_read_as_they_were_meant(thinking: bool) -> None:
    dialogues = [use_tools(Random(i), n_turn=1 + i % 2, held_out=True, thinking=thinking) for i in range(40)]
    replies = ask(Parrot(dialogues, 4), TOKENIZER, questions(dialogues), 4)  # type: ignore[arg-type]
    for dialogue, reply in zip(dialogues, replies, strict=True):
        (call,) = reply.calls
        wanted = dialogue.answer.tool_calls[0]
        assert (call.name, json.loads(call.arguments)) == (wanted.name, json.loads(wanted.arguments))
        schema = next(json.loads(tool.schema) for tool in dialogue.tools if tool.name == call.name)
        assert set(json.loads(call.arguments)) <= set(schema["parameters"]["properties"])
        assert set(schema["parameters"]["required"]) <= set(json.loads(call.arguments))
        assert (reply.reasoning != "") == thinking
        assert reply.closed and reply.stopped


def test_other_answers_come_back_whole() -> None:
    filler = held_out_filler
    dialogues = [make(Random(i)) for i in range(10) for make in (small_talk, sum_of_two, lambda rng: recall(rng, filler, 200))]
    replies = ask(Parrot(dialogues, 3), TOKENIZER, questions(dialogues), 3)  # type: ignore[arg-type]
    for dialogue, reply in zip(dialogues, replies, strict=True):
        assert reply.content == dialogue.answer.content
        assert reply.reasoning == (dialogue.answer.reasoning or "")


def test_training_and_tests_share_no_word() -> None:
    for words in (CITIES, NOUNS):
        assert len(set(words)) == len(words)
        assert not set(pool(words, held_out=True)) & set(pool(words, held_out=False))
    held_out = [story_request(Random(i), held_out=True) for i in range(50)]
    assert not set(held_out) & {story_request(Random(i), held_out=False) for i in range(2000)}


def test_keys_stand_as_far_back_as_asked() -> None:
    for distance in (500, 1500):
        dialogue = recall_at(TOKENIZER, Random(7), distance)
        key = dialogue.answer.content.split(": ")[1]
        text = "\n".join(message.content for message in dialogue.question)
        behind = text[text.index(key.rstrip(".")) + len(key) :]
        assert 0.85 * distance < len(TOKENIZER.encode(behind)) < 1.15 * distance + 60


def test_loops_and_noise_are_told_from_text() -> None:
    text = held_out_pairs()[0][1] + " " + held_out_pairs()[1][1]
    assert is_text(text) and not has_loop(text)
    assert has_loop("The dog ran to the river and saw a fish. " * 3)
    assert not has_loop("the end. " * 2)
    assert not is_text("Too short.")
    assert not is_text(" ".join(f"xq{i}z gnu{i}rk" for i in range(40)))


def test_bars_are_shares() -> None:
    assert Row("a", 45, 50, 0.9).passed is True
    assert Row("a", 44, 50, 0.9).passed is False
    assert Row("a", 44, 50).passed is None


def test_every_family_of_tools_can_be_asked_for() -> None:
    seen = {dialogue.answer.tool_calls[0].name for dialogue in (use_tools(Random(i), n_turn=1, held_out=True) for i in range(400))}
    assert all(seen & set(family.names) for family in FAMILIES)

"""Answers in the terminal: one, and a conversation, over a scripted engine."""

import builtins
from collections.abc import Iterator

import pytest

from ds4jax.cli.answers import stream_answer
from ds4jax.cli.chat import Conversation
from ds4jax.cli.generate import write_answer
from ds4jax.cli.vocabulary import learn_vocabulary
from ds4jax.errors import DecodeFailedError, QueueFullError
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.text import Message, Tokenizer, render, to_ids
from tests.cli.fakes import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0, seed=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    v = learn_vocabulary(640)
    return Tokenizer(v.tokens, v.types, v.merges, v.bos_id, v.eos_id)


def answer(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_rendered(text)


class TestStreamAnswer:
    def test_reasoning_and_content_come_apart(self, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
        engine = ScriptedEngine(answer(tokenizer, "so\u2026 hm</think>Yes: \u6f22!"))
        deltas = stream_answer(engine, tokenizer, [0, 1], GREEDY, 9, thinking=True)
        assert write_answer(deltas) == ("so\u2026 hm", "Yes: \u6f22!")
        out, err = capsys.readouterr()
        assert out == "Yes: \u6f22!\n"
        assert err == "so\u2026 hm\n\n"
        request = engine.requests[0]
        assert (request.prompt, request.max_tokens, request.sampling) == ((0, 1), 9, GREEDY)
        assert tokenizer.eos_id in request.stop_token_ids

    def test_thoughts_without_an_answer_are_explained(self, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
        deltas = stream_answer(ScriptedEngine(answer(tokenizer, "let me see")), tokenizer, [0], GREEDY, 9, thinking=True)
        assert write_answer(deltas) == ("let me see", "")
        out, err = capsys.readouterr()
        assert out == "\n" and "--tokens" in err and "--nothink" in err

    def test_a_failed_step_is_an_error_after_what_was_written(self, tokenizer: Tokenizer) -> None:
        deltas = stream_answer(ScriptedEngine(answer(tokenizer, "Half"), "out of memory"), tokenizer, [0], GREEDY, None, thinking=False)
        written = ""
        with pytest.raises(DecodeFailedError, match="out of memory"):
            for delta in deltas:
                written += delta.text
        assert written == "Half"

    def test_closing_cancels(self, tokenizer: Tokenizer) -> None:
        engine = ScriptedEngine(answer(tokenizer, "one two"))
        deltas = stream_answer(engine, tokenizer, [0], GREEDY, None, thinking=False)
        next(deltas)
        deltas.close()
        assert engine.cancelled == [1]

    def test_a_refused_request_raises(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(QueueFullError):
            next(stream_answer(ScriptedEngine([], full=True), tokenizer, [0], GREEDY, None, thinking=False))


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | type[BaseException]]]:
    """Lines that the user types; an exception class is a key such as Ctrl+C. Ctrl+D comes after the last."""
    lines: list[str | type[BaseException]] = []

    def read(prompt: str) -> str:
        line = lines.pop(0) if lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    yield lines
    assert not lines, f"the conversation ended before {lines}"


class TestConversation:
    def test_it_goes_on_from_what_was_said(self, tokenizer: Tokenizer, type_lines: list) -> None:
        engine = ScriptedEngine(answer(tokenizer, "Good."))
        type_lines += ["How are you?", "", "  And now?  "]
        Conversation(engine, tokenizer, GREEDY, 5, thinking=False, system="Be brief.").run()
        first, second = (request.prompt for request in engine.requests)
        said = [Message("system", "Be brief."), Message("user", "How are you?"), Message("assistant", "Good."), Message("user", "And now?")]
        assert list(second) == to_ids(render(said, thinking=False), tokenizer)
        assert second[: len(first)] == first, "the slot's cache could not be used again"

    def test_commands(self, tokenizer: Tokenizer, type_lines: list, capsys: pytest.CaptureFixture[str]) -> None:
        engine = ScriptedEngine(answer(tokenizer, "x</think>y"))
        type_lines += ["/think", "q", "/clear", "/help", "/what", "/nothink", "q", "/quit"]
        Conversation(engine, tokenizer, GREEDY, 5, thinking=False, system="").run()
        assert [request.prompt[-1] for request in engine.requests] == [tokenizer.think_id, tokenizer.end_think_id]
        assert len(engine.requests[1].prompt) == len(engine.requests[0].prompt), "the conversation was not forgotten"
        err = capsys.readouterr().err
        assert "Ctrl+C stops an answer" in err and "unknown command /what" in err

    def test_ctrl_c_stops_the_answer_and_not_the_program(
        self, tokenizer: Tokenizer, type_lines: list, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine = ScriptedEngine(answer(tokenizer, "Well"))
        presses = iter([True, False])

        def press() -> None:
            if next(presses, False):
                raise KeyboardInterrupt

        engine.before_token = press
        type_lines += ["first", KeyboardInterrupt, "second"]
        conversation = Conversation(engine, tokenizer, GREEDY, 5, thinking=False, system="")
        conversation.run()
        assert [message.content for message in conversation.messages] == ["second", "Well"]
        assert "stopped" in capsys.readouterr().err

    def test_an_error_is_shown_and_the_question_forgotten(
        self, tokenizer: Tokenizer, type_lines: list, capsys: pytest.CaptureFixture[str]
    ) -> None:
        type_lines += ["q"]
        conversation = Conversation(ScriptedEngine([], "out of memory"), tokenizer, GREEDY, 5, thinking=False, system="")
        conversation.run()
        assert conversation.messages == []
        assert "batched decode failed: out of memory" in capsys.readouterr().err

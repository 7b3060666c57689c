"""`ds4jax chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from ds4jax.cli.console import fail, note
from ds4jax.cli.generate import (
    BackendOption,
    ContextOption,
    MinPOption,
    ModelOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    ThinkOption,
    TokensOption,
    TopPOption,
    write_answer,
)

if TYPE_CHECKING:
    from ds4jax.serving.engine.api import EngineClient, SamplingParams
    from ds4jax.text import Message, Tokenizer

HELP = """/think    reason before answering
/nothink  answer at once
/clear    forget the conversation
/help     this text
/quit     leave (so does Ctrl+D)
Ctrl+C stops an answer."""


def chat(
    model: ModelOption = None,
    tokens: TokensOption = None,
    ctx: ContextOption = 32768,
    temp: TemperatureOption = 1.0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.05,
    seed: SeedOption = None,
    think: ThinkOption = True,
    system: SystemOption = "",
    backend: BackendOption = "auto",
) -> None:
    """Talk with the model. /help lists the commands."""
    from ds4jax.cli.loading import open_engine
    from ds4jax.cli.options import choose_backend, choose_model
    from ds4jax.config import EngineConfig
    from ds4jax.serving.engine.api import SamplingParams

    path = choose_model(str(model) if model else None, None, ()).path
    with open_engine(path, EngineConfig(slots=1, ctx=ctx), *choose_backend(backend, False, False, None)) as (engine, tokenizer):
        note("/help lists the commands")
        Conversation(engine, tokenizer, SamplingParams(temp, 0, top_p, min_p, seed), tokens, thinking=think, system=system).run()


class Conversation:
    """Reads lines, keeps the messages, and lets nothing but /quit and the end of input leave the loop."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, sampling: SamplingParams, max_tokens: int | None, *, thinking: bool, system: str
    ) -> None:
        self._engine, self._tokenizer, self._sampling, self._max_tokens = engine, tokenizer, sampling, max_tokens
        self.thinking = thinking
        self._system = system
        self.messages: list[Message] = []
        self._prompt = "> " if sys.stdin.isatty() else ""  # piped questions leave answers alone on stdout

    def run(self) -> None:
        """Answer line after line until /quit or the end of input."""
        _enable_line_editing()
        while True:
            try:
                line = input(self._prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        match line:
            case "/think" | "/nothink":
                self.thinking = line == "/think"
            case "/clear":
                self.messages.clear()
            case "/help":
                note(HELP)
            case _:
                fail(f"unknown command {line}; /help lists the commands")

    def _answer(self, question: str) -> None:
        """Answer one question. An answer that was stopped or failed is forgotten together with its question."""
        from ds4jax.cli.answers import chat_prompt, stream_answer
        from ds4jax.errors import Ds4jaxError
        from ds4jax.text import Message

        head = [Message("system", self._system)] if self._system else []
        asked = [*self.messages, Message("user", question)]
        try:
            ids, thinking = chat_prompt([*head, *asked], self._tokenizer, thinking=self.thinking)
            deltas = stream_answer(self._engine, self._tokenizer, ids, self._sampling, self._max_tokens, thinking=thinking)
            with closing(deltas):
                reasoning, content = write_answer(deltas)
        except KeyboardInterrupt:
            note("\nstopped")
        except Ds4jaxError as error:
            fail(str(error))
        else:
            self.messages = [*asked, Message("assistant", content, reasoning or None)]


def _enable_line_editing() -> None:
    """Give input() history and editing where Python has readline."""
    try:
        import readline  # noqa: F401 - its import alone has the effect
    except ImportError:
        pass

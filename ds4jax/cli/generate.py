"""`ds4jax generate`: one answer to one prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds4jax.cli.console import note

if TYPE_CHECKING:
    from ds4jax.text import Delta

ModelOption = Annotated[Path | None, typer.Option("-m", "--model", help="GGUF file. Default: the small model of the package.")]
TokensOption = Annotated[
    int | None, typer.Option("-n", "--tokens", min=1, help="Most tokens to generate, thoughts included. Default: what the context allows.")
]
ContextOption = Annotated[int, typer.Option("-c", "--ctx", min=2, help="Context in tokens, prompt and answer together.")]
TemperatureOption = Annotated[float, typer.Option("--temp", min=0.0, max=100.0, help="0 always takes the likeliest token.")]
TopPOption = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)]
MinPOption = Annotated[float, typer.Option("--min-p", min=0.0, max=1.0)]
SeedOption = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer. Default: a new one each time.")]
ThinkOption = Annotated[bool, typer.Option("--think/--nothink", help="Whether the model reasons before it answers.")]
SystemOption = Annotated[str, typer.Option("-sys", "--system", help="System message.")]
BackendOption = Annotated[str, typer.Option("--backend", help="auto, cpu or cuda.")]


def generate(
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The question; - reads it from stdin.")],
    model: ModelOption = None,
    tokens: TokensOption = None,
    ctx: ContextOption = 4096,
    temp: TemperatureOption = 1.0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.05,
    seed: SeedOption = None,
    think: ThinkOption = True,
    system: SystemOption = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    backend: BackendOption = "auto",
) -> None:
    """Answer one prompt on stdout. Reasoning, if any, goes to stderr."""
    from ds4jax.cli.answers import chat_prompt, stream_answer
    from ds4jax.cli.loading import open_engine
    from ds4jax.cli.options import choose_backend, choose_model
    from ds4jax.config import EngineConfig
    from ds4jax.serving.engine.api import SamplingParams
    from ds4jax.text import Message

    path = choose_model(str(model) if model else None, None, ()).path
    question = sys.stdin.read() if prompt == "-" else prompt
    with open_engine(path, EngineConfig(slots=1, ctx=ctx), *choose_backend(backend, False, False, None)) as (engine, tokenizer):
        if raw:
            ids, thinking = [tokenizer.bos_id, *tokenizer.encode(question)], False
        else:
            messages = [*([Message("system", system)] if system else []), Message("user", question)]
            ids, thinking = chat_prompt(messages, tokenizer, thinking=think)
        sampling = SamplingParams(temp, 0, top_p, min_p, seed)
        write_answer(stream_answer(engine, tokenizer, ids, sampling, tokens, thinking=thinking))


def write_answer(deltas: Iterable[Delta]) -> tuple[str, str]:
    """Write an answer as it comes, content to stdout and reasoning to stderr; return (reasoning, content)."""
    written = {"reasoning": "", "content": ""}
    for delta in deltas:
        stream = sys.stdout if delta.kind == "content" else sys.stderr
        if delta.kind == "content" and written["reasoning"] and not written["content"]:
            print("\n", file=sys.stderr, flush=True)
        written[delta.kind] += delta.text
        print(delta.text, end="", file=stream, flush=True)
    print(flush=True)
    if written["reasoning"] and not written["content"]:  # an empty stdout wants a word
        note("\nthe reply ended within its thoughts; allow more with --tokens, or do without them: --nothink")
    return written["reasoning"], written["content"]

"""`echo` beside `logprobs`: every token of a prompt is scored by the model as if it had been drawn, and the text goes on from there.

That a real model gives the scores that its logits say is seen beside what else is asked of one by grammar (test_structured): an engine
takes long to open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http.prompt_logprobs import KnownText
from tests.http.conftest import MakeApp, MakeEngine
from tests.http.fakes import BOS_ID, EOS_ID
from tests.http.test_logprobs import TEXT, post, streamed

SCORED: dict[str, Any] = {"echo": True, "logprobs": 1}


def reads_and_says(*answer: int) -> Callable[[GenerateRequest], Sequence[int]]:
    """Script an engine that draws what it is held to, and then this."""

    def script(request: GenerateRequest) -> Sequence[int]:
        known = request.constraint.grammar if request.constraint else None
        return [*(known.ids if isinstance(known, KnownText) else ()), *answer, EOS_ID]

    return script


# ---------------------------------------------------------------- how it is told
@pytest.mark.parametrize(
    ("prompt", "shown", "tokens", "offsets"),
    [
        ("aé", "aé", ["<｜begin▁of▁sentence｜>", "a", "bytes:\\xc3", "bytes:\\xa9"], [0, 0, 1, 1]),
        ([97, 98], "ab", ["a", "b"], [0, 1]),
        ([BOS_ID, 97], "<｜begin▁of▁sentence｜>a", ["<｜begin▁of▁sentence｜>", "a"], [0, 21]),
        ([97], "a", ["a"], [0]),
        ("", "", ["<｜begin▁of▁sentence｜>"], [0]),
    ],
)
async def test_the_prompt_stands_before_the_text(
    make_app: MakeApp, make_engine: MakeEngine, prompt: Any, shown: str, tokens: list[str], offsets: list[int]
) -> None:
    app = make_app(make_engine(script=reads_and_says(120, 121)))
    _, reply = await post(app, TEXT, {"prompt": prompt, **SCORED})
    choice, n = reply["choices"][0], len(shown)
    logprobs = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (shown + "xy", "stop")
    assert (logprobs["tokens"], logprobs["text_offset"]) == ([*tokens, "x", "y"], [*offsets, n, n + 1])
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None, "it follows nothing"
    assert logprobs["token_logprobs"][-2:] == [-1.2, -1.21] and all(logprobs["top_logprobs"][1:])
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (len(tokens), 2)
    chunks = await streamed(app, TEXT, {"prompt": prompt, **SCORED})
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[0]["logprobs"]["tokens"] == tokens, "the prompt and its tokens come in one piece"
    for name in logprobs:
        assert sum((chunk["logprobs"][name] for chunk in chunks if chunk["logprobs"]), []) == logprobs[name]


async def test_a_score_alone(make_app: MakeApp, make_engine: MakeEngine) -> None:
    """`max_tokens` 0, or 1 where servers know no 0: then there is one entry behind the prompt, even if it is an end."""
    engine = make_engine(script=reads_and_says())
    app = make_app(engine)
    _, none = await post(app, TEXT, {"prompt": ["ab", "c"], "max_tokens": 0, **SCORED})
    assert [choice["text"] for choice in none["choices"]] == ["ab", "c"] and none["usage"]["completion_tokens"] == 0
    assert [choice["finish_reason"] for choice in none["choices"]] == ["length"] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in none["choices"]] == [3, 2]
    _, one = await post(app, TEXT, {"prompt": "ab", "max_tokens": 1, **SCORED})
    assert len(one["choices"][0]["logprobs"]["tokens"]) == 4


async def test_stop_strings_and_limits_count_from_the_end_of_the_prompt(make_app: MakeApp, make_engine: MakeEngine) -> None:
    engine = make_engine(script=reads_and_says(*b"hello"))
    body = {"prompt": "ll", "stop": ["l"], "max_tokens": 4, "min_tokens": 2, "seed": 3, **SCORED}
    _, reply = await post(make_app(engine), TEXT, body)
    assert (reply["choices"][0]["text"], reply["usage"]["completion_tokens"]) == ("llhe", 3)
    assert (engine.requests[1].max_tokens, engine.requests[1].adjustments.min_tokens) == (6, 4)


def test_masks_have_a_bit_for_each_token() -> None:
    known = KnownText((0, 37, 31), 40)
    reader = known.begin()
    masks = [known.first_mask, *(reader.advance(token) for token in known.ids)]
    bits = [np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little") for mask in masks]
    assert [np.flatnonzero(row).tolist() for row in bits[:3]] == [[0], [37], [31]] and bits[3].all() and len(bits[0]) == 64

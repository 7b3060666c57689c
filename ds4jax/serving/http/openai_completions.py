"""`/v1/completions`: raw text in, its continuation out, no chat template. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http import openai_common as common
from ds4jax.serving.http import strict_json
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.conversation import Served
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.logprobs import Scored, completion_logprobs
from ds4jax.serving.http.params import CommonBody, Number, choice_count, choice_requests, completion_limit, top_logprobs
from ds4jax.serving.http.prompt_logprobs import drawing_its_prompt
from ds4jax.serving.http.prompts import check_ids, encode_text
from ds4jax.serving.http.structured import constrain, read_grammar
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text.tokenizer import Tokenizer


class CompletionBody(CommonBody, kw_only=True):
    """The body of a text completion request. A list of strings, or of lists of ids, asks for one choice each."""

    prompt: str | list[str | int | list[int]]
    n: Number | None = None
    best_of: Number | None = None
    logprobs: Number | None = None
    echo: bool | None = None


@dataclass(frozen=True)
class CompletionCall(Call):
    """A checked call of this API. echoes: what each choice shows of its prompt, before what was generated."""

    echoes: tuple[str, ...] = ()


def read(data: bytes, served: Served) -> CompletionCall:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = strict_json.decode(data, CompletionBody)
    reject_unsupported(body, honoured=("n", "best_of", "logprobs", "echo"))
    n_logprobs = None if body.logprobs is None else top_logprobs("logprobs", body.logprobs)
    scores_prompt = bool(body.echo) and n_logprobs is not None
    n = choice_count(body.n)
    if body.best_of is not None and body.best_of != n:
        raise RequestError(f"best_of: got {body.best_of}, expected n ({n}), for all completions are sent; leave it out", "best_of")
    tokenizer, n_ctx, config = served.tokenizer, served.n_ctx, served.config
    sampling, stop_token_ids = body.sampling(), body.stop_tokens(tokenizer, tokenizer.eos_id)
    constraint = constrain(read_grammar(body), served.grammars)
    requests: list[GenerateRequest] = []
    echoes: list[str] = []
    for text, ids in _prompts(body.prompt, tokenizer, n_ctx):
        is_all = scores_prompt and body.max_tokens == 0 and len(ids) > 1  # nothing is to follow it
        max_tokens = completion_limit(
            "max_tokens",
            1 if is_all else body.max_tokens,
            n_prompt=len(ids),
            n_ctx=n_ctx,
            default=config.default_max_tokens,
            param="prompt",
        )
        adjustments = body.adjustments(tokenizer, max_tokens)
        request = GenerateRequest(ids, max_tokens, sampling, stop_token_ids, adjustments, constraint, conversation=body.prompt_cache_key)
        if scores_prompt:
            request = drawing_its_prompt(request, 0 if is_all else max_tokens, tokenizer.n_vocab)
        requests += choice_requests(request, n, n_logprobs)
        echoes += [text if body.echo else ""] * n
    return CompletionCall(
        endpoint="completions",
        id=new_id("cmpl"),
        model=body.model or config.model_id,
        requests=requests,
        n=n,
        echoes=tuple(echoes),
        scored_prompts=tuple(echoes) if scores_prompt else (),
        stop_strings=body.stop_strings,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


async def reply(generation: Generation, check_s: float) -> dict[str, Any]:
    """Wait for the reply of a call that does not stream."""
    choices = []
    echoes = echoes_of(generation)
    for index, answer in enumerate(await common.collect(generation, check_s)):
        choice: dict[str, Any] = {"text": echoes[index] + answer.content, "index": index, **answer.finish}
        if generation.call.wants_logprobs:
            choice["logprobs"] = completion_logprobs([*_prompt_scores(generation, index), *answer.scored])
        choices.append(choice)
    return {**common.head(generation, "text_completion"), "choices": choices, "usage": common.usage(generation)}


class CompletionChunks:
    """The chunks of a text stream; those of several choices mingle."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = common.head(generation, "text_completion")
        self._logprobs = common.ChunkLogprobs(generation)
        self._echoes = dict(enumerate(echoes_of(generation)))

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Word what a piece adds."""
        index, chunks = piece.index, []
        if index in self._echoes:
            scored, echo = _prompt_scores(self._generation, index), self._echoes.pop(index)
            if echo or scored:
                chunks.append(self._chunk(index, echo, scored))
        self._logprobs.add(piece)
        chunks += [self._chunk(index, delta.text, self._logprobs.take(index)) for delta in piece.deltas]
        if piece.ending is not None and piece.ending.reason != "error":
            chunks.append(self._chunk(index, "", self._logprobs.take(index), piece.ending.reason))
        return chunks

    def usage(self) -> dict[str, Any]:
        """Word the chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": common.usage(self._generation)}

    def _chunk(self, index: int, text: str, scored: Sequence[Scored], finish_reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": text, "index": index, "finish_reason": finish_reason}
        if self._generation.call.wants_logprobs:
            choice["logprobs"] = completion_logprobs(scored) if scored else None
        return {**self._head, "choices": [choice]}


def _prompt_scores(generation: Generation, index: int) -> Sequence[Scored]:
    scores = generation.choices[index].prompt_scores
    return () if scores is None else scores.tokens


def echoes_of(generation: Generation) -> tuple[str, ...]:
    """What each choice shows of its prompt."""
    assert isinstance(generation.call, CompletionCall)
    return generation.call.echoes


def _prompts(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer, n_ctx: int) -> list[tuple[str, tuple[int, ...]]]:
    """Read every form of prompt as its text and its token ids. Ids are taken as they are."""
    if isinstance(prompt, str):
        return [(prompt, encode_text(prompt, tokenizer, n_ctx, "prompt"))]
    if not prompt:
        raise RequestError("prompt: the list is empty; send text, token ids, or a list of either", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [_checked(prompt, "prompt", tokenizer)]
    prompts: list[tuple[str, tuple[int, ...]]] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append((item, encode_text(item, tokenizer, n_ctx, "prompt")))
        elif isinstance(item, list):
            prompts.append(_checked(item, f"prompt[{i}]", tokenizer))
        else:
            raise RequestError(f"prompt[{i}]: a token id among texts; send ids as a list of their own", f"prompt[{i}]")
    return prompts


def _checked(ids: list[Any], place: str, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    if not ids:
        raise RequestError(f"{place}: got no tokens, expected at least one", place)
    check_ids(ids, place, tokenizer)
    return tokenizer.decode(ids), tuple(ids)

"""Rows -> padded arrays. One constructor for real steps and for warm-up, so that the two cannot drift apart.

Everything a step takes from the host travels in one int32 array (floats and unsigned words by their bits): one upload
a step, whatever a request asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.model.adjust import IN_PROMPT, IS_END, SlotAdjustments
from ds4jax.model.mask import NEVER, RowMask
from ds4jax.model.sampling import RowSampling
from ds4jax.model.scores import TOP
from ds4jax.model.steps import DecodeBatch, PrefillBatch
from ds4jax.serving.engine.api import NO_ADJUSTMENTS, GenerateRequest, SamplingParams, TokenLogprobs
from ds4jax.serving.engine.buckets import PrefillShape
from ds4jax.serving.engine.device import Chunk, Row

N_CONTROL = 12  # rows of the control array: slot, n, four sampling words, three sampling numbers, token, two of the mask's rule
MOST_TOKENS = 1 << 30  # beyond any context; keeps positions within 32 bits


def decode_control(rows: Sequence[Row], bucket: int, n_slot: int) -> np.ndarray:
    """Pack a decode step: int32 [N_CONTROL, bucket]. Padding rows have slot n_slot, one past the last."""
    control = np.zeros((N_CONTROL, bucket), np.int32)
    control[0, len(rows) :], control[10:, len(rows) :] = n_slot, NEVER
    columns = [
        (row.slot, 1, *_words(row.sampling), -1 if row.token is None else row.token, row.mask.after, row.mask.barred) for row in rows
    ]
    control[:, : len(rows)] = np.array(columns, np.int32).reshape(-1, N_CONTROL).T
    return control


def prefill_control(chunks: Sequence[Chunk], shape: PrefillShape, n_slot: int) -> np.ndarray:
    """Pack a prefill launch: int32 [N_CONTROL + tokens, rows], a column for each chunk, its tokens last. Padding rows as above."""
    control = np.zeros((N_CONTROL + shape.n_tokens, shape.n_rows), np.int32)
    control[0, len(chunks) :], control[10:N_CONTROL, len(chunks) :] = n_slot, NEVER
    for row, chunk in enumerate(chunks):
        n = len(chunk.tokens)
        control[:N_CONTROL, row] = (chunk.slot, n, *_words(chunk.sampling), 0, chunk.mask.after, chunk.mask.barred)
        control[N_CONTROL : N_CONTROL + n, row] = chunk.tokens
    return control


def slot_adjustments(request: GenerateRequest | None, n_vocab: int) -> SlotAdjustments:
    """Pack what a request asks to be done to its logits, for the one slot that it gets; None adjusts nothing."""
    seen, bias = np.zeros((1, n_vocab), np.int32), np.zeros((1, n_vocab), np.float32)
    number, since = np.zeros((3, 1), np.float32), np.zeros((2, 1), np.int32)
    if request is not None and request.adjustments != NO_ADJUSTMENTS:
        asked, n_prompt = request.adjustments, len(request.prompt)
        number[:, 0] = asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty
        since[:, 0] = n_prompt, n_prompt + min(asked.min_tokens, MOST_TOKENS)
        if asked.repetition_penalty != 1.0:  # nothing else looks at the prompt, which may be long
            seen[0, list(request.prompt)] |= IN_PROMPT
        seen[0, list(request.stop_token_ids)] |= IS_END
        for token, value in asked.logit_bias:
            bias[0, token] = value
    return SlotAdjustments(seen, bias, number, since)  # type: ignore[arg-type]


def read_scores(row: np.ndarray, n_top: int) -> TokenLogprobs:
    """Take one row of `scores.score` apart, int32 [1 + 2 TOP], for the n_top best tokens."""
    number = row.view(np.float32).tolist()
    ids = row[1 : 1 + n_top].tolist()
    return TokenLogprobs(number[0], tuple((i, x) for i, x in zip(ids, number[1 + TOP :], strict=False) if i >= 0))


@lru_cache(maxsize=4096)
def _words(sampling: SamplingParams) -> tuple[int, ...]:
    """Pack sampling parameters as seven int32: four words, then three floats by their bits. Asked for at every step of a request."""
    seed = sampling.seed or 0
    top_p = sampling.top_p if 0.0 < sampling.top_p <= 1.0 else 1.0
    wants_scores = sampling.logprobs is not None
    code = np.array([max(sampling.top_k, 0), seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, wants_scores], np.uint32)
    number = np.array([sampling.temperature, top_p, max(sampling.min_p, 0.0)], np.float32)
    return (*code.view(np.int32).tolist(), *number.view(np.int32).tolist())


def unpack_decode(control: jax.Array) -> tuple[DecodeBatch, RowSampling]:
    """Take a decode control apart, inside a program."""
    return DecodeBatch(control[9], control[0]), _sampling(control)


def unpack_prefill(control: jax.Array) -> tuple[PrefillBatch, RowSampling]:
    """Take a prefill control apart, inside a program."""
    return PrefillBatch(control[N_CONTROL:].T, control[0], control[1]), _sampling(control)


def unpack_mask(control: jax.Array, table: jax.Array, fed: jax.Array) -> RowMask:
    """Take the rules of masks from a control of either kind, inside a program."""
    return RowMask(table, fed, control[10], control[11])


def _sampling(control: jax.Array) -> RowSampling:
    code = jax.lax.bitcast_convert_type(control[2:6], jnp.uint32)
    return RowSampling(jax.lax.bitcast_convert_type(control[6:9], jnp.float32), code)

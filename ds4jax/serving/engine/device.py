"""What the engine asks of the device, as plain types; `runner.Runner` answers with JAX, tests with a script.

The engine decides which rows run; the device owns the weights, the cache and the compiled programs, and knows
nothing of requests. Launches return at once: results are read later through a `StepHandle`, so the next step can be
enqueued before the tokens of the last one are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ds4jax.model.mask import ALWAYS, NEVER
from ds4jax.serving.engine.api import GenerateRequest, SamplingParams, TokenLogprobs
from ds4jax.serving.engine.buckets import PrefillShape
from ds4jax.serving.engine.kvstore import Part


@dataclass(frozen=True, slots=True)
class MaskRule:
    """When the mask of a slot holds for a row: in a step that feeds the token `after`, ALWAYS, or NEVER.

    barred: a token that may not be drawn as long as the mask waits for `after`.
    """

    after: int = NEVER
    barred: int = NEVER


UNMASKED, MASKED = MaskRule(), MaskRule(ALWAYS)


@dataclass(frozen=True, slots=True)
class Row:
    """One live row of a decode batch.

    token: the id to feed, or None for the one that the device itself sampled last for this slot (it never left the device).
    sampling: its seed must be set (an int).
    """

    slot: int
    token: int | None
    sampling: SamplingParams
    mask: MaskRule = UNMASKED


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of a prefill launch: the next tokens of a slot's prompt. sampling: as of a `Row`, for the token behind the last one."""

    slot: int
    tokens: Sequence[int]
    sampling: SamplingParams
    mask: MaskRule = UNMASKED


class DeviceStepError(Exception):
    """A step failed on the device, at its launch or when its result was read.

    Args:
        cause: what the device said, in one line.
        cache_lost: the cache went with it; every slot is empty now.
    """

    def __init__(self, cause: str, *, cache_lost: bool) -> None:
        super().__init__(cause)
        self.cause, self.cache_lost = cause, cache_lost


class StepHandle(Protocol):
    """The result of one enqueued step."""

    def tokens(self) -> list[int]:
        """Wait for the step; the sampled token of each live row, -1 where its logits were NaN or all equal. Raises DeviceStepError."""
        ...

    def logprobs(self, n_top: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """Wait for the step; for each live row the log probabilities of its token and of its n_top best ones, None where n_top is.

        Only rows whose sampling wants logprobs have any. Raises DeviceStepError.
        """
        ...

    def logits(self) -> Any:
        """Wait for the step; NumPy float32 [live rows, V]. Raises DeviceStepError."""
        ...


class Piece(Protocol):
    """A part of a slot on its way to the host, as it was behind all that was enqueued before."""

    def ready(self) -> bool:
        """Whether the device has made it, so that `arrays` waits for a copy at most."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Wait for it: arrays by name. Raises DeviceStepError."""
        ...


class Device(Protocol):
    """Slots, buckets and the two launches."""

    @property
    def n_slots(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Padded row counts with a compiled program, ascending; the last is n_slots."""
        ...

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Padded lengths (tokens) of a prefill launch of one row with a compiled program, ascending."""
        ...

    @property
    def pack_buckets(self) -> tuple[PrefillShape, ...]:
        """Padded shapes of prefill launches of several rows with a compiled program, ascending; none: one row goes at a time."""
        ...

    def decode(self, rows: Sequence[Row]) -> StepHandle:
        """Enqueue one decode step of 1 to n_slots rows with distinct slots. Raises DeviceStepError."""
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> StepHandle:
        """Enqueue one prefill launch: a chunk of up to the largest prefill bucket, or several, of distinct slots, that a pack bucket holds.

        The handle has a row for each chunk, which belongs to its last token. Raises DeviceStepError.
        """
        ...

    def clear(self, slot: int) -> None:
        """Make a slot empty (position 0). Enqueued in order with the steps. Raises DeviceStepError."""
        ...

    def adjust(self, slot: int, request: GenerateRequest | None) -> None:
        """Let a slot draw from now on as a request's adjustments say; None: as the logits say.

        Enqueued in order with the steps. Raises DeviceStepError.
        """
        ...

    def mask(self, slot: int, mask: bytes) -> None:
        """Say which tokens a slot may draw where its row's rule lets the mask hold, from the next launch on: a bit for each token."""
        ...

    @property
    def n_snapshots(self) -> int:
        """Places of the pool of snapshots; 0: none can be taken."""
        ...

    def save(self, slot: int, entry: int) -> None:
        """Keep in place `entry` of the pool what of a slot the next tokens overwrite, as it is behind all that was enqueued before.

        Raises DeviceStepError; the pool's contents are lost then.
        """
        ...

    def restore(self, entry: int, source: int, target: int) -> None:
        """Bring slot `target` to where a snapshot was taken. source: a slot that begins with the same tokens; target itself if it does.

        Enqueued in order with the steps. Raises DeviceStepError.
        """
        ...

    def session_parts(self, n_tokens: int) -> tuple[Part, ...]:
        """List the arrays of a session of n_tokens, as files have them."""
        ...

    def n_pieces(self, n_tokens: int) -> int:
        """Count the pieces of the rows of a session, each of a bounded size."""
        ...

    def export_state(self, slot: int) -> Piece:
        """Enqueue a copy of what the next token of a slot overwrites. Raises DeviceStepError."""
        ...

    def export_rows(self, slot: int, piece: int, n_tokens: int) -> Piece:
        """Enqueue a copy of one piece of the rows of a slot's first n_tokens. Raises DeviceStepError."""
        ...

    def import_rows(self, slot: int, piece: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Put one piece of a session's rows into a slot. arrays: of the whole session. Enqueued in order. Raises DeviceStepError."""
        ...

    def import_state(self, slot: int, n_tokens: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Bring a slot that has all rows of a session to its end. Enqueued in order. Raises DeviceStepError."""
        ...

    @property
    def compile_misses(self) -> int:
        """Programs compiled after warm-up; stays 0."""
        ...

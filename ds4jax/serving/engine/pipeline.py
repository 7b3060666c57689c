"""Steps that were enqueued on the device and not read yet, in launch order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4jax.serving.engine.api import TokenLogprobs
from ds4jax.serving.engine.device import Device, DeviceStepError, StepHandle
from ds4jax.serving.engine.scheduler import Decode, Prefill
from ds4jax.serving.engine.session import Session


@dataclass(frozen=True, slots=True)
class Launch:
    """One enqueued step; a launch that failed holds its failure where the handle would be.

    n_done: prompt tokens that the chunk of each row of a prefill launch completes, those before it included.
    """

    plan: Prefill | Decode
    handle: StepHandle | DeviceStepError
    launched_us: int
    n_done: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a launch: a token for each of its sessions (-1: unusable logits), or an error.

    logits: float32 [rows, V], read only where a notebook user waits for them: they are V times as large as the tokens.
    logprobs: for each session; None where they are not wanted.
    """

    launch: Launch
    elapsed_us: int
    tokens: list[int]
    logits: npt.NDArray[np.float32] | None
    logprobs: Sequence[TokenLogprobs | None] = ()
    error: DeviceStepError | None = None

    @property
    def sessions(self) -> tuple[Session, ...]:
        return self.launch.plan.rows


class Pipeline:
    """Launch plans and read what came of them, first in, first out.

    The failure of a launch comes out in its turn, like one that shows only when the result is read; so results and failures
    reach a session in one order, and there is one place that deals with failures.
    """

    def __init__(self, device: Device, clock_us: Callable[[], int]) -> None:
        self._device, self._clock_us = device, clock_us
        self._launches: deque[Launch] = deque()
        self.n_launched = 0

    @property
    def n_read(self) -> int:
        """Launches so far whose results were read."""
        return self.n_launched - len(self._launches)

    def __len__(self) -> int:
        return len(self._launches)

    def launch(self, plan: Prefill | Decode) -> bool:
        """Enqueue a step and note it in its sessions; says whether the device took it."""
        now_us = self._clock_us()
        handle = self._enqueue(plan)
        n_done: tuple[int, ...] = ()
        if isinstance(plan, Prefill):
            for session, n_tokens in zip(plan.rows, plan.n_tokens, strict=True):
                session.chunk_launched(n_tokens, now_us)
            n_done = tuple(session.n_fed for session in plan.rows)
        else:
            for session in plan.rows:
                session.row_launched(now_us)
        self._launches.append(Launch(plan, handle, now_us, n_done))
        self.n_launched += 1
        return not isinstance(handle, DeviceStepError)

    def _enqueue(self, plan: Prefill | Decode) -> StepHandle | DeviceStepError:
        try:
            if isinstance(plan, Decode):
                return self._device.decode([session.next_row() for session in plan.rows])
            return self._device.prefill([session.next_chunk(n) for session, n in zip(plan.rows, plan.n_tokens, strict=True)])
        except DeviceStepError as error:
            return error

    def read(self) -> Outcome:
        """Wait for the oldest launch."""
        launch = self._launches.popleft()
        for session in launch.plan.rows:
            session.n_unread -= 1
        try:
            if isinstance(launch.handle, DeviceStepError):
                raise launch.handle
            tokens = launch.handle.tokens()
            wanted = any(_wants_logits(session, launch, row) for row, session in enumerate(launch.plan.rows))
            logits = launch.handle.logits() if wanted else None
            n_top = [session.sampling.logprobs for session in launch.plan.rows]
            logprobs = launch.handle.logprobs(n_top) if any(n is not None for n in n_top) else [None] * len(n_top)
        except DeviceStepError as error:
            return Outcome(launch, self._clock_us() - launch.launched_us, [], None, error=error)
        return Outcome(launch, self._clock_us() - launch.launched_us, tokens, logits, logprobs)


def _wants_logits(session: Session, launch: Launch, row: int) -> bool:
    """Whether this launch ends the call of a manual session."""
    return session.is_manual and not session.finished and (isinstance(launch.plan, Decode) or launch.n_done[row] == session.prompt_end)

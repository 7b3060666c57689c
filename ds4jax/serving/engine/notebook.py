"""An engine by hand: sessions that are fed call by call, and generation as a plain iterator."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ds4jax.errors import Ds4jaxError, EngineStoppedError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest, Token
from ds4jax.serving.engine.core import EngineCore
from ds4jax.serving.engine.session import Session

Logits = npt.NDArray[np.float32]
Operation = Callable[[EngineCore], None]


class NotebookSession:
    """Feed one slot of an engine by hand.

    Every call blocks until the device has answered. Calls of several sessions from several threads share decode batches.
    The engine makes it (`Engine.open_session`) and lends it two ways into its thread: `run` an operation, and `ask`
    with one, which also waits for the logits.
    """

    def __init__(self, session: Session, run: Callable[[Operation], None], ask: Callable[[Session, Operation], Logits]) -> None:
        self._session, self._run, self._ask = session, run, ask

    @property
    def position(self) -> int:
        """Tokens in the slot."""
        return self._session.n_fed

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens in the slot, in order."""
        return tuple(self._session.tokens[: self._session.n_fed])

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append tokens (at least one); returns the logits after the last of them, float32 [V].

        Raises RequestError when they do not fit or the session is closed, DecodeFailedError when the device fails
        (which ends the session), EngineStoppedError when the engine was closed.
        """
        prompt = [int(token) for token in tokens]
        return self._ask(self._session, lambda core: core.prefill(self._session, prompt))

    def decode(self, token: int) -> Logits:
        """Append one token in a decode step; returns the logits after it, float32 [V].

        Raises what `prefill` raises, and DecodeInFlightError while another call of this session is running.
        """
        return self._ask(self._session, lambda core: core.decode(self._session, int(token)))

    def close(self) -> None:
        """Give the slot back. A call that another thread is waiting in raises; closing twice does nothing."""
        try:
            self._run(lambda core: core.close_session(self._session))
        except EngineStoppedError:
            pass  # the slot went with the engine

    def __enter__(self) -> NotebookSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def stream_tokens(engine: EngineClient, request: GenerateRequest) -> Generator[int, None, None]:
    """Generate from the first `next()` on; closing the iterator, or leaving its loop, cancels.

    Raises what `EngineClient.submit` raises, Ds4jaxError if a step fails, and EngineStoppedError if the engine is closed.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request_id = engine.submit(request, events.put)
    try:
        while not isinstance(event := events.get(), Finish):
            if isinstance(event, Token):
                yield event.token
    finally:
        engine.cancel(request_id)  # does nothing when it has finished
    if event.reason is FinishReason.ERROR:
        raise Ds4jaxError(event.error)
    if event.reason is FinishReason.CANCELLED:
        raise EngineStoppedError("the engine was closed while it generated; open a new one")

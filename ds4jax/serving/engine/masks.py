"""Follow the grammars of rows beside the engine's thread, while the device computes for the other rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ds4jax.serving.engine.session import Session

WAIT_S = 0.002  # as a rule a mask takes a twentieth of that, and the device is busy for longer
_WORKERS = 4  # a mask computes without the interpreter's lock


class MaskWorkers:
    """Compute the masks that sessions wait for. A grammar that takes long keeps its own session waiting, and nobody else."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None  # most engines never meet a grammar
        self._running: dict[Session, Future[bytes | None]] = {}

    def __len__(self) -> int:
        """Sessions that wait."""
        return len(self._running)

    def start(self, session: Session) -> None:
        """Begin to compute what may come behind the last token of a session."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mask")
        self._running[session] = self._pool.submit(session.follow_grammar)

    def take(self) -> Iterator[tuple[Session, Future[bytes | None]]]:
        """Yield what is done by now, or within WAIT_S: the mask, None where the text is complete, or an exception."""
        if self._running:
            done, _ = wait(self._running.values(), WAIT_S)
            for session, future in list(self._running.items()):
                if future in done:
                    del self._running[session]
                    yield session, future

    def close(self) -> None:
        """Begin no more masks."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

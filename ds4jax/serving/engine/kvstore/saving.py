"""One save in progress. The engine's thread hands over arrays as they come from the device; one other thread does all that is slow.

The disk's thread takes tasks in order, so a save needs no lock: making room, every piece and the end are tasks of one queue. Once the
save is over before its time, because it failed or the session is on disk already, the tasks that follow do nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np

from ds4jax.serving.engine.kvstore.files import EntryWriter
from ds4jax.serving.engine.kvstore.format import DTYPES, Part


class Saving:
    """Take the arrays of one session piece by piece. All methods are for one thread, and none waits for the disk.

    start: makes room and returns the writer, or None if the session is on disk already; called on the disk's thread. It, or a later
    write, may raise OSError: on_error is told.
    """

    def __init__(
        self, disk: Executor, parts: tuple[Part, ...], start: Callable[[], EntryWriter | None], on_error: Callable[[OSError], None]
    ) -> None:
        self._disk, self._on_error = disk, on_error
        self._dtypes = {part.name: DTYPES[part.dtype] for part in parts}
        self._missing_bytes = {part.name: part.nbytes for part in parts}
        self._queued: deque[tuple[Future[None], int]] = deque()
        self._writer: EntryWriter | None = None
        self._wanted = True
        self._given_up = False
        self.failed = False
        self._result: Future[bool] | None = None
        self._submit(lambda: self._begin(start), 0)

    @property
    def wanted(self) -> bool:
        """Whether more pieces are of use: False once the save failed or the session was found to be on disk already."""
        return self._wanted and not self._given_up

    @property
    def ended(self) -> bool:
        """Whether it was finished or cancelled; the disk may still be at work."""
        return self._result is not None

    @property
    def backlog_bytes(self) -> int:
        """Bytes handed over that are not on disk yet. They are held in memory: copy on when they have become few."""
        while self._queued and self._queued[0][0].done():
            self._queued.popleft()
        return sum(n_bytes for _, n_bytes in self._queued)

    def put(self, name: str, piece: np.ndarray) -> None:
        """Append to the array `name`, in row-major order; pieces of different arrays may alternate.

        The piece must not change afterwards. Raises ValueError for an array, a type or a size that was not announced.
        """
        if self._result is not None:
            raise ValueError("this save has ended; begin another")
        if name not in self._dtypes or piece.dtype != self._dtypes[name] or piece.nbytes > self._missing_bytes[name]:
            expected = f"{self._missing_bytes[name]} more bytes of {self._dtypes[name]}" if name in self._dtypes else sorted(self._dtypes)
            raise ValueError(f"a piece of {name}: got {piece.nbytes} bytes of {piece.dtype}, expected {expected}")
        self._missing_bytes[name] -= piece.nbytes
        if self.wanted:
            data = memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            self._submit(lambda: self._write(name, data), piece.nbytes)

    def finish(self) -> Future[bool]:
        """End the save: the future tells whether the entry is on disk, durable and visible. Raises ValueError if something is missing."""
        missing = {name: n for name, n in self._missing_bytes.items() if n}
        if missing:
            raise ValueError(f"bytes are missing: {missing}")
        if self._result is None:
            self._result = self._disk.submit(self._commit)
        return self._result

    def cancel(self) -> None:
        """Give the save up and leave nothing behind. Does nothing once it has ended."""
        if self._result is None:
            self._given_up = True
            self._result = self._disk.submit(self._abort)

    def abandon(self) -> None:
        """Give the save up even if it has ended, unless it is on disk by now. What was handed over is not written any more."""
        self.cancel()
        self._given_up = True

    def _submit(self, task: Callable[[], None], n_bytes: int) -> None:
        self._queued.append((self._disk.submit(self._guarded, task), n_bytes))

    # ---------------------------------------------------------------- on the disk's thread
    def _guarded(self, task: Callable[[], None]) -> None:
        if not self.wanted:
            return
        try:
            task()
        except OSError as error:
            self.failed = True
            self._abort()
            self._on_error(error)

    def _begin(self, start: Callable[[], EntryWriter | None]) -> None:
        self._writer = start()
        self._wanted = self._writer is not None

    def _write(self, name: str, data: memoryview) -> None:
        assert self._writer is not None  # the queue is in order
        self._writer.write(name, data)

    def _commit(self) -> bool:
        def commit() -> None:
            assert self._writer is not None
            self._writer.commit()

        self._guarded(commit)
        return self._abort() if self._given_up else self._wanted

    def _abort(self) -> bool:
        self._wanted = False
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        return False

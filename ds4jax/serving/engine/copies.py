"""Copies of arrays on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ds4jax.serving.engine.device import DeviceStepError

Arrays = dict[str, np.ndarray]


def begin_copy(array: jax.Array) -> None:
    """Start the copy to the host: by the time it is asked for it is usually here."""
    # A CPU's arrays are read where they lie; starting a copy of one takes a tenth of a millisecond or three.
    if jax.default_backend() != "cpu":
        array.copy_to_host_async()


class Exported:
    """The result of an export (`device.Piece`), whose copy to the host starts at once.

    cut: what is done to the arrays once they are here.
    """

    def __init__(self, arrays: Mapping[str, Any], cut: Callable[[Arrays], Arrays] = lambda arrays: arrays) -> None:
        self._arrays, self._cut = arrays, cut
        for array in arrays.values():
            begin_copy(array)

    def ready(self) -> bool:
        """Whether the device has made it."""
        return all(bool(array.is_ready()) for array in self._arrays.values())

    def arrays(self) -> Arrays:
        """Wait for it. A failure concerns the copy alone: what befell the slot shows in its own steps. Raises DeviceStepError."""
        try:
            return self._cut({name: np.asarray(array) for name, array in self._arrays.items()})
        except Exception as error:  # asynchronous failures of any kind surface here
            raise DeviceStepError(str(error).partition("\n")[0], cache_lost=False) from error

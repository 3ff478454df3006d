"""Keep memory for a copy of what a rank saves, so that training may go on while the copy is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.save_plan import KnownLayout
from mpizero.kernels.nontemporal import LINE, PAGE, copy_past_cache
from mpizero.types import Array


class SnapshotBuffer:
    """Hold the memory that asynchronous saves copy their values into, one after the other.

    Parameters
    ----------
    allocate : function, optional
        Returns so many new bytes as an array of uint8; a caller that counts memory gives its own.
    release : function, optional
        Called with an array of ``allocate`` that is no longer used.
    """

    def __init__(
        self, allocate: Callable[[int], Array] | None = None, release: Callable[[Array], object] | None = None
    ) -> None:
        self._allocate, self._release = allocate or _untouched, release or _forget
        self._memory: Array = np.empty(0, np.uint8)
        self._until_read: Callable[[], object] | None = None
        #: What the last save through this buffer has agreed on.
        self.layout = KnownLayout()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.size

    def reserve(self, arrays: Sequence[LocalArray]) -> None:
        """Allocate memory for the pieces of ``arrays``, so that the first copy costs no more than the others.

        Not collective.
        """
        needed = sum(_padded(values.nbytes) for array in arrays for _, values in array.pieces)
        if needed and needed + LINE > self._memory.size:
            self.close()  # given back before more is asked for
            self._memory = self._allocate(needed + LINE)
            self._memory[::PAGE] = 0  # the system hands out pages when they are touched

    def copy(self, arrays: Sequence[LocalArray]) -> list[LocalArray]:
        """Return ``arrays`` with pieces of the same values in this buffer; waits for the save that still uses it.

        Not collective.
        """
        self.wait()
        self.reserve(arrays)
        copied, place = [], -self._memory.ctypes.data % LINE
        for array in arrays:
            pieces = []
            for start, values in array.pieces:
                target = self._memory[place : place + values.nbytes]
                copy_past_cache(values.view(np.uint8), target)  # a thread will read it, once, when it comes to it
                pieces.append((start, target.view(values.dtype)))
                place += _padded(values.nbytes)
            copied.append(replace(array, pieces=tuple(pieces)))
        return copied

    def close(self) -> None:
        """Give the memory back, once nobody reads it; the next copy takes new memory. Not collective."""
        self.wait()
        if self._memory.size:
            self._release(self._memory)
        self._memory = np.empty(0, np.uint8)

    def keep(self, until: Callable[[], object]) -> None:
        """Keep the copy as it is until ``until()`` returns, which waits for its reader. Not collective."""
        self._until_read = until

    def wait(self) -> None:
        """Wait until nobody reads the copy. Not collective."""
        if self._until_read is not None:
            self._until_read()
            self._until_read = None


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _forget(memory: Array) -> None:
    """Do nothing: Python frees an array that is no longer used."""


def _untouched(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)

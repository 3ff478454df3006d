"""Room for a copy of what a rank saves, so that training may go on while the copy is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.save_plan import KnownLayout
from mpizero.kernels.pastcache import LINE, PAGE, copy_past_cache
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.checkpoint.pending import Writing


class SnapshotBuffer:
    """Memory that one asynchronous save after the other copies its values into.

    Parameters
    ----------
    allocate : function, optional
        Returns so many new bytes as an array of uint8; whoever counts memory gives its own.
    release : function, optional
        Told of an array of ``allocate`` that is given back.
    """

    def __init__(
        self, allocate: Callable[[int], Array] | None = None, release: Callable[[Array], object] | None = None
    ) -> None:
        self._allocate, self._release = allocate or _untouched, release or _forget
        self._room: Array = np.empty(0, np.uint8)
        self._user: Writing | None = None
        #: What the last save through this buffer has agreed on.
        self.layout = KnownLayout()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._room.size

    def reserve(self, arrays: Sequence[LocalArray]) -> None:
        """Make room for the pieces of ``arrays``, so that the first copy costs no more than the others.

        Not collective.
        """
        needed = sum(_padded(values.nbytes) for array in arrays for _, values in array.pieces)
        if needed and needed + LINE > self._room.size:
            self.close()  # given back before more is asked for
            self._room = self._allocate(needed + LINE)
            self._room[::PAGE] = 0  # the system hands out pages when they are touched

    def copy(self, arrays: Sequence[LocalArray]) -> list[LocalArray]:
        """Return ``arrays`` with pieces of the same values in this buffer; waits for the save that still uses it.

        Not collective.
        """
        self.wait()
        self.reserve(arrays)
        copied, place = [], -self._room.ctypes.data % LINE
        for array in arrays:
            pieces = []
            for start, values in array.pieces:
                room = self._room[place : place + values.nbytes]
                copy_past_cache(values.view(np.uint8), room)  # a thread will read it, once, when it comes to it
                pieces.append((start, room.view(values.dtype)))
                place += _padded(values.nbytes)
            copied.append(replace(array, pieces=tuple(pieces)))
        return copied

    def close(self) -> None:
        """Give the memory back, once nobody reads it; the next copy takes new memory. Not collective."""
        self.wait()
        if self._room.size:
            self._release(self._room)
        self._room = np.empty(0, np.uint8)

    def lend(self, user: Writing) -> None:
        """Remember who reads the copy. Not collective."""
        self._user = user

    def wait(self) -> None:
        """Wait until nobody reads the copy. Not collective."""
        if self._user is not None:
            self._user.join()
            self._user = None


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _forget(room: Array) -> None:
    """Leave it to Python to free an array."""


def _untouched(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)

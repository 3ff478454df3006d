"""Copy the values that a rank saves, so that training can continue while a thread writes the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.save_plan import KnownLayout
from mpizero.kernels.memory import LINE, PAGE, copy_past_cache
from mpizero.types import Array


class SnapshotBuffer:
    """Hold the memory into which asynchronous saves copy their values; every save reuses it.

    No method is collective.

    Parameters
    ----------
    allocate : function, optional
        Function that is called with a number of bytes and returns a new uint8 array of that size. A caller that counts
        its memory passes its own function. The default is ``numpy.empty``.
    release : function, optional
        Function that is called with an array from ``allocate`` when the array is no longer used.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> weight = np.arange(6.0).reshape(2, 3)
    >>> whole = checkpoint.LocalArray("parameters/weight", (2, 3), weight.dtype, ((0, weight.reshape(-1)),))
    >>> buffer = checkpoint.SnapshotBuffer()
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2):  # both saves copy into the same memory
    ...         checkpoint.begin(f"{run}/{step}", [whole], {}, comm="self", buffer=buffer).commit()
    >>> buffer.nbytes >= weight.nbytes
    True
    """

    def __init__(
        self, allocate: Callable[[int], Array] | None = None, release: Callable[[Array], object] | None = None
    ) -> None:
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._release = release or (lambda memory: None)  # Python frees an array that is no longer used
        self._memory: Array = np.empty(0, np.uint8)
        self._until_read: Callable[[], object] | None = None
        #: Layout of the last save through this buffer.
        self.layout = KnownLayout()

    @property
    def nbytes(self) -> int:
        """Number of bytes that the buffer has allocated."""
        return self._memory.size

    def reserve(self, arrays: Sequence[LocalArray]) -> None:
        """Allocate memory for all pieces of ``arrays`` now, so that the first save is as fast as later saves."""
        needed = sum(_padded(values.nbytes) for array in arrays for _, values in array.pieces)
        if needed and needed + LINE > self._memory.size:
            self.close()  # release the old memory before the new memory is allocated
            self._memory = self._allocate(needed + LINE)
            self._memory[::PAGE] = 0  # the system hands out pages when they are touched

    def copy(self, arrays: Sequence[LocalArray]) -> list[LocalArray]:
        """Copy the pieces of ``arrays`` into this buffer; return equal arrays whose pieces are views of the buffer.

        The call first waits until the last save no longer uses the buffer.
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
        """Wait until the last save no longer uses the memory, and release it; the next copy allocates memory again."""
        self.wait()
        if self._memory.size:
            self._release(self._memory)
        self._memory = np.empty(0, np.uint8)

    def keep(self, until: Callable[[], object]) -> None:
        """Register ``until``, a function that returns when the copy has been written, for the next :meth:`wait`."""
        self._until_read = until

    def wait(self) -> None:
        """Wait until the thread of the last save has ended and no longer reads the buffer."""
        if self._until_read is not None:
            self._until_read()
            self._until_read = None


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE

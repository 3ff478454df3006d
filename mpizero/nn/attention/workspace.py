"""Keep temporary arrays, so that repeated computations allocate them once."""

from __future__ import annotations

from math import prod

from mpizero.nn.arrays import namespace
from mpizero.types import Array


class Workspace:
    """Keep temporary arrays by name, to be reused by one computation after the other.

    Parameters
    ----------
    like : Array
        An array of the library (NumPy or CuPy) and dtype that the temporary arrays shall have.
    """

    def __init__(self, like: Array) -> None:
        self._like = like
        self._flat: dict[str, Array] = {}

    def room(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a contiguous array of undefined contents, in the memory that is kept under ``name``.

        The memory is that of the previous array of this name, which must no longer be used. If it is too small, new
        memory is allocated.
        """
        size = prod(shape)
        if name not in self._flat or self._flat[name].size < size:
            self._flat[name] = namespace(self._like).empty_like(self._like, shape=(size,))
        return self._flat[name][:size].reshape(shape)

    def copy(self, name: str, x: Array) -> Array:
        """Return a contiguous copy of ``x`` in the memory that is kept under ``name``."""
        room = self.room(name, x.shape)
        namespace(self._like).copyto(room, x)
        return room

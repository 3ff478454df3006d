"""Measure what a block allocates and keeps: memory that is traced, and the arrays inside of what a pass returns."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mpizero._util.pytree import leaves_of
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.planning.byte_counts import RecordingGroup
from mpizero.types import Array


class PeakMemory:
    """Measure by how many bytes, at most, the memory that was allocated grows from a moment on.

    ``allocations`` counts what another library allocates (:class:`mpizero.adapters.torch.passes.Allocations`);
    None if all is Python's and NumPy's. Sums of both peaks are an upper bound: they need not be reached together.
    """

    def __init__(self, allocations: Any) -> None:
        self._allocations = allocations
        self.begin()

    def begin(self) -> None:
        """Start a new measurement. Not collective."""
        tracemalloc.reset_peak()
        self._start = tracemalloc.get_traced_memory()[0]
        if self._allocations is not None:
            self._allocations.begin()
            self._start += self._allocations.now

    def peak(self) -> int:
        """Return the largest growth in bytes since the start of the measurement. Not collective."""
        most = 0 if self._allocations is None else self._allocations.most
        return tracemalloc.get_traced_memory()[1] + most - self._start

    def foreign(self, places: Iterable[int]) -> int:
        """Return the bytes in use of another library, without the arrays at these addresses. Not collective."""
        return 0 if self._allocations is None else self._allocations.now - sum(map(self.size_at, set(places)))

    def size_at(self, place: int) -> int:
        """Return the bytes in use of another library at an address; 0 if it has allocated none there."""
        return 0 if self._allocations is None else int(self._allocations.size_at(place))


@contextmanager
def watched(computing: Any) -> Iterator[PeakMemory]:
    """Trace the memory of a block or a loss, and what another library allocates for it, if it can count that."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    try:
        with getattr(computing, "allocations", nullcontext)() as counted:
            yield PeakMemory(counted)
    finally:
        if not already:
            tracemalloc.stop()


def _owner(array: Array) -> Array:
    """Return the array that owns the memory of ``array``, which may be a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def held(tree: Any, others: frozenset[int]) -> int:
    """Return the bytes of the arrays in ``tree``, without memory that has its address in ``others``."""
    return sum(owner.nbytes for owner in buffers(tree) if _place(owner) not in others)


def places(tree: Any) -> frozenset[int]:
    """Return the addresses of the memory of all arrays in ``tree``."""
    return frozenset(_place(array) for array in buffers(tree))


def _place(array: Array) -> int:
    """Return the address of the memory of ``array``, which may be a view. It must be in use as long as that matters."""
    return int(_owner(array).ctypes.data)


def buffers(value: object) -> list[Array]:
    """Return the arrays in nested containers and objects that own their memory, each once; for a view, its owner.

    A cache may refer to a group of ranks, which is not searched.
    """
    found: dict[int, Array] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, np.ndarray):
            owner = _owner(item)
            found[id(owner)] = owner
        elif id(item) not in seen:
            seen.add(id(item))
            left += _inside(item)
    return list(found.values())


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item)]
    if isinstance(item, RecordingGroup | CommunicatorGroup | type) or callable(item):
        return []
    return list(getattr(item, "__dict__", {}).values())


def leaf_places(tree: Any) -> list[int]:
    """Return, for each array of a tree, the address of its memory."""
    return [_place(array) for array in leaves_of(tree) if array is not None]

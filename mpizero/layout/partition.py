"""Divide elements into contiguous shards whose sizes differ by at most one, and whole things by their costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace

from mpizero.errors import LayoutError


@dataclass(frozen=True)
class Partition:
    """Cut ``length`` elements into ``parts`` contiguous shards; the first ``length % parts`` shards get one more.

    Parameters
    ----------
    length : int
        Number of elements, zero included.
    parts : int
        Number of shards. It may be greater than ``length``; then the last shards are empty.

    Raises
    ------
    LayoutError
        If ``length < 0`` or ``parts < 1``.

    Examples
    --------
    >>> import mpizero as mz
    >>> [(s.start, s.stop) for s in mz.layout.Partition(10, 3)]
    [(0, 4), (4, 7), (7, 10)]
    """

    length: int
    parts: int

    def __post_init__(self) -> None:
        """Raise :class:`LayoutError` if ``length < 0`` or ``parts < 1``."""
        if self.length < 0 or self.parts < 1:
            raise LayoutError(f"a partition needs length >= 0 and parts >= 1, got {self.length=} and {self.parts=}")

    def shard(self, part: int) -> slice:
        """Return the range of elements of shard number ``part``, counted from 0."""
        if not 0 <= part < self.parts:
            raise LayoutError(f"shard {part} does not exist: there are {self.parts} shards")
        base, extra = divmod(self.length, self.parts)
        start = part * base + min(part, extra)
        return slice(start, start + base + (part < extra))

    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each shard."""
        return _sizes(self)

    def __iter__(self) -> Iterator[slice]:
        """Iterate over the ranges of elements of all shards, in order."""
        return (self.shard(part) for part in range(self.parts))


@lru_cache(maxsize=1024)  # split layers ask again and again
def _sizes(partition: Partition) -> tuple[int, ...]:
    return tuple(shard.stop - shard.start for shard in partition)


def owners_by_cost(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    """Divide things over ``parts`` owners whose costs are then about equal; return the owner of each thing.

    The most expensive thing comes first; each goes to the owner with the least cost so far, of several such owners to
    the first (the rule of the longest processing time, Graham 1969). Of things with equal costs the first comes first.
    No owner gets more than 4/3 of the largest cost in the best division.
    """
    owners, loads = [0] * len(costs), [(0, owner) for owner in range(parts)]
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        load, owners[thing] = loads[0]
        heapreplace(loads, (load + costs[thing], owners[thing]))
    return tuple(owners)

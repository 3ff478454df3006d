"""Assign places of a sequence to the ranks of a context group, and pass arrays around the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mpizero.errors import DataError
from mpizero.layout import Partition
from mpizero.types import Array, Group, Run, ShiftRequest

#: Number of queries and of keys in one tile of scores. Tiles of this size stay in the cache; larger tiles would compute
#: more scores that the causal mask hides.
QUERIES, KEYS = 128, 512


class Tile(NamedTuple):
    """Describe a rectangle of attention scores that the causal mask does not hide completely.

    ``queries`` are places in this rank's part of the sequence, ``keys`` places in the part of the rank that the keys
    come from. ``row`` and ``column`` are the places of the first query and the first key in the whole sequence.
    """

    queries: slice
    keys: slice
    row: int
    column: int

    @property
    def offset(self) -> int:
        """Number of keys that the first query attends to, minus one."""
        return self.row - self.column


@dataclass(frozen=True)
class Zigzag:
    """Cut a sequence into 2 * ranks chunks by the shard rule; rank r holds chunks r and 2 * ranks - 1 - r.

    With this cut every rank has an equal share of the scores that a causal mask leaves, and also an equal share with
    the keys of each other rank. The parts differ in length by one place at most.

    Parameters
    ----------
    length : int
        Number of places of the whole sequence; in short sequences some chunks are empty.
    ranks : int
        Size of the context group.

    Examples
    --------
    >>> [Zigzag(10, 2).positions(rank).tolist() for rank in range(2)]
    [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    """

    length: int
    ranks: int

    @cached_property
    def _runs(self) -> tuple[tuple[slice, slice], ...]:
        chunks = tuple(Partition(self.length, 2 * self.ranks))
        return tuple((chunks[rank], chunks[-1 - rank]) for rank in range(self.ranks))

    def runs(self, rank: int) -> tuple[slice, slice]:
        """Return the two ranges of places in the whole sequence that a rank holds, in ascending order."""
        return self._runs[rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of places of each rank."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self._runs)

    @property
    def longest(self) -> int:
        """The largest of :attr:`sizes`; all ranks pad their messages to this number of places."""
        return -(-self.length // self.ranks)

    def pieces(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Yield, for each of a rank's two ranges, its places in the rank's part and in the whole sequence."""
        done = 0
        for run in self._runs[rank]:
            size = run.stop - run.start
            yield slice(done, done + size), run
            done += size

    def positions(self, rank: int) -> Array:
        """Return the place in the whole sequence of each place of a rank's part, int64."""
        return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in self._runs[rank]])

    def scores(self, rank: int) -> int:
        """Count the scores in all tiles of a rank's queries, with the keys of all ranks."""
        tiles = [
            (first, min(first + QUERIES, run.stop))
            for run in self._runs[rank]
            for first in range(run.start, run.stop, QUERIES)
        ]
        return sum((stop - first) * stop for first, stop in tiles)

    def tiles(self, rank: int, source: int) -> Iterator[Tile]:
        """Cut the scores of a rank's queries with the keys of rank ``source`` into tiles.

        Tiles that the causal mask hides completely are left out: those of a chunk of keys that comes after the queries,
        and those above the diagonal.
        """
        for here, run in self.pieces(rank):
            for first in range(run.start, run.stop, QUERIES):
                count = min(QUERIES, run.stop - first)
                queries = slice(here.start + first - run.start, here.start + first - run.start + count)
                for there, keys in self.pieces(source):
                    seen = min(keys.stop, first + count)
                    for column in range(keys.start, seen, KEYS):
                        begin = there.start + column - keys.start
                        visible = slice(begin, begin + min(KEYS, seen - column))
                        yield Tile(queries, visible, first, column)


def with_zigzag(run: Run, x: Array, group: Group) -> tuple[Run, Zigzag]:
    """Return ``run`` with the length of the whole sequences, and their :class:`Zigzag` cut.

    ``x`` (samples, places, ...) is this rank's part of the sequences. Collective over ``group``, unless ``run`` has the
    length already.

    Raises
    ------
    DataError
        The lengths on the ranks are not those of a zigzag cut, or the numbers of samples differ. If the call is
        collective, all ranks raise this error.
    """
    if run.length:
        here = Zigzag(run.length, group.size)
        if x.ndim < 2 or x.shape[1] != here.sizes[group.rank]:
            raise DataError(
                f"rank {group.rank} of {group.size} holds {here.sizes[group.rank]} places of a sequence of "
                f"{run.length}, but the input has shape {tuple(x.shape)}; cut batches with mpizero.nn.cut_batch"
            )
        return run, here
    here = Zigzag(sum(gather_lengths(x, group)), group.size)
    return replace(run, length=here.length), here


def gather_lengths(x: Array, group: Group) -> tuple[int, ...]:
    """Gather the lengths of all ranks' parts; ``x`` (samples, length, ...) is this rank's part.

    Collective over ``group``.

    Raises
    ------
    DataError
        The lengths are not those of a zigzag cut, or the numbers of samples differ. All ranks raise this error.
    """
    own = np.array([x.shape[:2] if x.ndim >= 2 else (-1, -1)], np.int64)
    shapes = group.all_gather(own, 0, (1,) * group.size, tag="context lengths") if group.size > 1 else own
    lengths = tuple(int(length) for length in shapes[:, 1])
    if min(lengths) < 0 or len(set(shapes[:, 0].tolist())) > 1 or lengths != Zigzag(sum(lengths), group.size).sizes:
        raise DataError(
            "the ranks of a context group hold inputs of (samples, length) = "
            f"{', '.join(str((int(s), int(n))) for s, n in shapes)}, which are not parts of the same sequences; "
            "cut the same batch on every rank with mpizero.nn.cut_batch"
        )
    return lengths


def ring_pass(group: Group, array: Array, tag: str) -> Iterator[tuple[int, Array, ShiftRequest | None]]:
    """Pass arrays around a ring of ranks; yield (rank, that rank's array, request for the next array).

    This rank's own ``array`` comes first. While the caller works with an array, it is also being sent to the next rank,
    so it must not be written to. All ranks' arrays have the same shape. Collective over ``group``: each rank sends
    size - 1 messages.
    """
    for hop in range(group.size):
        request = group.shift([array], 1, tag) if hop < group.size - 1 else None
        yield (group.rank - hop) % group.size, array, request
        if request is not None:
            (array,) = request.wait()


def poll_function(*requests: ShiftRequest | None) -> Callable[[], None]:
    """Return a function that lets the messages of the given requests make progress. Not collective.

    Most MPI implementations move large messages only while a rank is inside an MPI call.
    """
    coming = [request for request in requests if request is not None]

    def poll() -> None:
        for request in coming:
            request.test()

    return poll

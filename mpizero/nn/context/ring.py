"""Assign positions of a sequence to the ranks of a context group, and pass arrays around the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mpizero.errors import DataError
from mpizero.layout import Partition
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.types import Array, Group, Run, ShiftRequest

#: Number of queries and of keys in one tile of scores. Tiles of this size stay in the cache; larger tiles would compute
#: more scores that the causal mask hides.
QUERIES, KEYS = 128, 512


class Tile(NamedTuple):
    """Describe a rectangle of attention scores that the causal mask does not hide completely.

    ``queries`` are indices into this rank's part of the sequence. ``keys`` are indices into the part of the rank that
    the keys come from. ``row`` and ``column`` are the positions of the first query and the first key in the whole
    sequence.
    """

    queries: slice
    keys: slice
    row: int
    column: int

    @property
    def offset(self) -> int:
        """``row - column``: query i of the tile attends to key j of the tile if j <= i + offset."""
        return self.row - self.column


@dataclass(frozen=True)
class Zigzag:
    """Cut a sequence into 2 * ranks chunks by the shard rule; rank r holds chunks r and 2 * ranks - 1 - r.

    With this cut every rank computes about the same number of scores that the causal mask does not hide, in total and
    also with the keys of any one rank. The numbers of positions on two ranks differ by one at most.

    Parameters
    ----------
    length : int
        Number of positions of the whole sequence; if it is less than 2 * ranks, some chunks are empty.
    ranks : int
        Size of the context group.

    Examples
    --------
    >>> import mpizero as mz
    >>> [mz.nn.Zigzag(10, 2).positions(rank).tolist() for rank in range(2)]
    [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    """

    length: int
    ranks: int

    @cached_property
    def _runs(self) -> tuple[tuple[slice, slice], ...]:
        chunks = tuple(Partition(self.length, 2 * self.ranks))
        return tuple((chunks[rank], chunks[-1 - rank]) for rank in range(self.ranks))

    def runs(self, rank: int) -> tuple[slice, slice]:
        """Return the two ranges of positions in the whole sequence that rank ``rank`` holds, in ascending order."""
        return self._runs[rank]

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the two ranges as pairs (start, stop), as :attr:`mpizero.types.Run.ranges` has them."""
        return tuple((run.start, run.stop) for run in self._runs[rank])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self._runs)

    @property
    def longest(self) -> int:
        """The largest of :attr:`sizes`; all ranks pad their messages to this number of positions."""
        return -(-self.length // self.ranks)

    def pieces(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Yield two slices for each of the two ranges that rank ``rank`` holds.

        The first slice selects the range in the rank's part of the sequence, the second in the whole sequence.
        """
        done = 0
        for run in self._runs[rank]:
            size = run.stop - run.start
            yield slice(done, done + size), run
            done += size

    def positions(self, rank: int) -> Array:
        """Return, for each index into the part of rank ``rank``, the position in the whole sequence, as int64."""
        return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in self._runs[rank]])

    def scores(self, rank: int) -> int:
        """Count the scores in all tiles of the queries of rank ``rank``, with the keys of all ranks."""
        tiles = [
            (first, min(first + QUERIES, run.stop))
            for run in self._runs[rank]
            for first in range(run.start, run.stop, QUERIES)
        ]
        return sum((stop - first) * stop for first, stop in tiles)

    def tiles(self, rank: int, source: int) -> Iterator[Tile]:
        """Yield the tiles into which the scores of rank ``rank``'s queries with the keys of rank ``source`` are cut.

        Tiles that the causal mask hides completely are left out, because all their keys come after all their queries.
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


class ContextLayer(SequenceLayer):
    """Work on the positions of each sequence that this rank of a context group holds, by the :class:`Zigzag` cut."""

    #: The context group.
    group: Group

    def located(self, run: Run, shape: tuple[int, ...] | None) -> Run:
        """Return ``run`` with the length of the whole sequences, and the ranges of positions that this rank holds.

        As :func:`located`.
        """
        return located(run, shape, self.group)

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a sample whose whole shape is ``shape`` (length, ...)."""
        return (Zigzag(shape[0], self.group.size).sizes[self.group.rank], *shape[1:])


def located(run: Run, shape: tuple[int, ...] | None, group: Group) -> Run:
    """Return ``run`` with the length of the whole sequences, and the ranges of positions that this rank holds.

    ``shape`` (samples, positions, ...) is that of this rank's part of the sequences; None if ``run.length`` is known.
    Collective over ``group`` if ``run.length`` is 0.

    Raises
    ------
    DataError
        The numbers of positions on the ranks are not those of a zigzag cut, or the numbers of samples differ. If the
        call is collective, all ranks raise this error.
    """
    if not run.length and shape is not None:
        run = replace(run, length=sum(gather_lengths(shape, group)), ranges=())
    if not run.ranges:
        run = replace(run, ranges=Zigzag(run.length, group.size).ranges(group.rank))
    if shape is not None and (len(shape) < 2 or shape[1] != run.held):
        raise DataError(
            f"rank {group.rank} of {group.size} holds {run.held} places of a sequence of "
            f"{run.length}, but the input has shape {tuple(shape)}; cut batches with mpizero.nn.cut_batch"
        )
    return run


def gather_lengths(shape: tuple[int, ...], group: Group) -> tuple[int, ...]:
    """Return the number of positions on each rank.

    ``shape`` (samples, positions, ...) is that of this rank's part of the sequences. Collective over ``group``.

    Raises
    ------
    DataError
        The numbers are not those of a zigzag cut, or the numbers of samples differ. All ranks raise this error.
    """
    own = np.array([shape[:2] if len(shape) >= 2 else (-1, -1)], np.int64)
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

    The first array is this rank's own ``array``; then come those of the other ranks. While the caller works with an
    array, it is also being sent to the next rank, so it must not be written to. The last request is None. All ranks'
    arrays have the same shape. Collective over ``group``: each rank sends size - 1 messages, where size is the number
    of ranks.
    """
    for hop in range(group.size):
        request = group.shift([array], 1, tag) if hop < group.size - 1 else None
        yield (group.rank - hop) % group.size, array, request
        if request is not None:
            (array,) = request.wait()


def poll_function(*requests: ShiftRequest | None) -> Callable[[], None]:
    """Return a function that lets the messages of the given requests make progress; None among them is skipped.

    Most MPI implementations move large messages only while a rank is inside an MPI call. Not collective.
    """
    coming = [request for request in requests if request is not None]

    def poll() -> None:
        for request in coming:
            request.test()

    return poll

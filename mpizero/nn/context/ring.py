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

#: Queries and keys of one product. Tiles this small keep the scores in cache, and larger ones skip less of the masked
#: half.
QUERIES, KEYS = 128, 512


class Tile(NamedTuple):
    """Describe a rectangle of attention scores that is visible at least in part.

    ``queries`` are places of this rank's part of the sequence, ``keys`` of the part that another rank holds; ``row``
    and ``column`` are the places of the first query and the first key in the whole sequence.
    """

    queries: slice
    keys: slice
    row: int
    column: int

    @property
    def offset(self) -> int:
        """Number of keys that the first query sees, less one."""
        return self.row - self.column


@dataclass(frozen=True)
class Zigzag:
    """Cut a sequence into 2 * ranks chunks by the shard rule; rank r holds chunks r and 2 * ranks - 1 - r.

    Of a causal mask's lower triangle every rank then has an equal share, and with every other rank's keys an equal
    share again. The parts differ in length by one place at most.

    Parameters
    ----------
    length : int
        Places of the whole sequence; short ones leave chunks empty.
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
        """Return the two runs of places that a rank holds, one behind the other."""
        return self._runs[rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of places of each rank."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self._runs)

    @property
    def longest(self) -> int:
        """The largest of :attr:`sizes`: to that many places all ranks' messages are filled up."""
        return -(-self.length // self.ranks)

    def pieces(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """Pair the places in a rank's part with those of the whole sequence, for each run."""
        done = 0
        for run in self._runs[rank]:
            size = run.stop - run.start
            yield slice(done, done + size), run
            done += size

    def positions(self, rank: int) -> Array:
        """Return the place in the whole sequence of each place of a rank's part, int64."""
        return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in self._runs[rank]])

    def scores(self, rank: int) -> int:
        """Count the scores in all tiles of a rank, whosever keys they are."""
        tiles = [
            (first, min(first + QUERIES, run.stop))
            for run in self._runs[rank]
            for first in range(run.start, run.stop, QUERIES)
        ]
        return sum((stop - first) * stop for first, stop in tiles)

    def tiles(self, rank: int, source: int) -> Iterator[Tile]:
        """Cut the scores of a rank's queries and the keys of ``source`` into tiles.

        What the causal mask hides whole is left out: of two chunks with the keys after the queries there is no tile,
        and of a chunk with itself none above the diagonal.
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
    """Return ``run`` with the length of the sequences that ``x`` (samples, places, ...) is a part of, and their cut.

    Collective over ``group``, unless ``run`` knows the length.

    Raises
    ------
    DataError
        The lengths on the ranks are not those of a zigzag, or the numbers of samples differ: on all ranks alike.
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
    """Ask all ranks for the length of their part ``x`` (samples, length, ...).

    Collective over ``group``.

    Raises
    ------
    DataError
        The lengths are not those of a zigzag, or the numbers of samples differ: on all ranks alike.
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
    """Yield every rank's ``array`` with its rank, this rank's own first, and the request that fetches the next.

    Collective over ``group``: size - 1 messages for each rank. Each is in flight to the next rank while the caller
    works with it, so it must not be written to. All ranks' arrays have the same shape.
    """
    for hop in range(group.size):
        request = group.shift([array], 1, tag) if hop < group.size - 1 else None
        yield (group.rank - hop) % group.size, array, request
        if request is not None:
            (array,) = request.wait()


def poll_function(*requests: ShiftRequest | None) -> Callable[[], None]:
    """Return a function that lets the given requests move on. Not collective.

    Most MPIs move large messages only inside their own calls.
    """
    coming = [request for request in requests if request is not None]

    def poll() -> None:
        for request in coming:
            request.test()

    return poll

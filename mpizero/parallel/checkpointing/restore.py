"""Fill what ranks hold from an open checkpoint: all of it, or nothing.

[Note: slices are read by rows] A slice of columns stands in a file as one short range for each row; to read and verify
each by itself takes far longer than the bytes do. So a tensor group reads the rows that it needs as a whole, each rank
an equal part of them, and passes them around in pieces of bounded size, out of which every rank takes its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.equality import agree_arrays
from mpizero.comm.reduce.exact import EXCHANGE_ELEMENTS
from mpizero.errors import CollectiveError, PeerFailure
from mpizero.layout import Partition, Span
from mpizero.layout.parts import part_rows, take_rows
from mpizero.parallel.checkpointing.half_loaded import HalfLoaded
from mpizero.parallel.parameters.global_view import in_whole
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine

#: Elements of the arrays whose ranges are read, and verified, at once beside a model in use.
VERIFIED_AT_ONCE = 1 << 22
#: Slices whose ranges have fewer bytes than this on average are read by rows.
_SHORT_RANGE = 1 << 18


class ArrayReader(Protocol):
    """Read arrays of an open checkpoint: the part of a reader's interface that restoring needs."""

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[LocalArray]) -> None:
        """Fill the pieces of ``requests``."""


class HeldPiece(NamedTuple):
    """Hold a view of elements ``start ...`` of a parameter as this rank declares it, or of an array like it."""

    spec: ParameterSpec
    start: int
    values: Array


@dataclass(frozen=True)
class HeldArray:
    """Describe an array of a checkpoint and this rank's pieces of it; ``spec`` is the whole model's parameter."""

    path: str
    spec: ParameterSpec
    dtype: np.dtype[Any]
    pieces: list[HeldPiece] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return self.spec.shape

    def local(self) -> LocalArray:
        """Return the ranges of the whole array that this rank's pieces are."""
        ranges = (place for piece in self.pieces for place in in_whole(*piece))
        return LocalArray(self.path, self.shape, self.dtype, tuple(ranges))


@contextmanager
def opened_alike(comm: Communicator, what: str, data: bytes) -> Iterator[checkpoint.Reader]:
    """Open a serialized model, the same on every rank; the first message of an operation. Collective over ``comm``.

    Its arrays are compared by the checksums that stand beside them, by which reading verifies them.

    Raises
    ------
    CheckpointError
        Damaged, foreign or hostile bytes; on every rank.
    ConfigError
        As :func:`mpizero.comm.equality.agree_arrays`.
    """
    readers = []

    def given() -> dict[str, Any]:
        readers.append(reader := checkpoint.from_bytes(data))
        named = {f"array {path!r}": np.array(sums, np.uint32) for path, sums in sorted(reader.checksums().items())}
        return {**named, "the attributes": repr(sorted(reader.attributes.items()))}

    agree_arrays(comm, what, given)
    with readers[0] as reader:
        yield reader


def fill(engine: Engine, reader: ArrayReader, arrays: Sequence[HeldArray]) -> None:
    """Fill what this rank holds of ``arrays``, or change nothing and raise on every rank. Collective over the world.

    [Note: nothing half loaded] A model that still has its start values reads in place, and takes them again if
    something is wrong. Any other is too precious: its arrays are read aside, a bounded number of elements at once, and
    take their place when all ranks have theirs, verified. Where that number does not cover all of them, they are read
    once before, only to be verified, so that a rank never needs room for a second copy. What is left is a file that
    could be read a moment ago and cannot be read again, after the first part has taken its place: the engine is marked
    as :attr:`Engine.half_loaded` then, and its model refuses to be used until all of it has been loaded.

    Parameters
    ----------
    engine : Engine
        Whose parameters and optimizer state are filled.
    reader : ArrayReader
        The checkpoint.
    arrays : sequence of HeldArray
        The same arrays in the same order on every rank, whatever it holds of them.
    """
    engine.memory.barrier("restore")  # who still reads parameters reads the old ones
    untouched = np.array([engine.pristine], np.int8)  # empty optimizer state looks untouched: one rank must not decide
    engine.grid.world.allreduce(untouched, "min", "restore")
    rows, world = RowReading(engine.grid.tensor, arrays), engine.grid.world
    if untouched[0]:
        try:
            for group in _groups(arrays) if engine.grid.axes.tensor > 1 else [list(arrays)]:
                requests = [rows.request(array) for array in group]
                _read(world, reader, requests)
                rows.deliver(group, requests)
        except (CollectiveError, PeerFailure):
            raise
        except Exception:
            engine.start_over()
            raise
    else:
        _fill_in_use(engine, reader, rows, list(_groups(arrays)))
    if engine.half_loaded is not None:
        engine.half_loaded = engine.half_loaded.without(array.path for array in arrays)


def _fill_in_use(engine: Engine, reader: ArrayReader, rows: RowReading, groups: Sequence[Sequence[HeldArray]]) -> None:
    """Fill the arrays of a model that is in use, group by group."""
    world, changed = engine.grid.world, False
    for group in groups if len(groups) > 1 else ():
        _read_aside(world, reader, rows, group)
    try:
        for group in groups:
            requests, aside = _read_aside(world, reader, rows, group)
            changed = True
            for request, held in zip(requests, aside, strict=True):
                for (_, values), (_, found) in zip(request.pieces, held.pieces, strict=True):
                    values[:] = found
            rows.deliver(group, requests)
    except (CollectiveError, PeerFailure):
        raise
    except Exception as error:
        if changed:
            paths = {array.path for group in groups for array in group}
            earlier = engine.half_loaded.paths if engine.half_loaded is not None else ()
            engine.half_loaded = HalfLoaded(frozenset(paths.union(earlier)), f"{type(error).__name__}: {error}")
        raise


def _read_aside(
    world: Communicator, reader: ArrayReader, rows: RowReading, group: Sequence[HeldArray]
) -> tuple[list[LocalArray], list[LocalArray]]:
    """Return what is to be filled of some arrays, and the same ranges in new memory, read and verified."""
    with all_ranks(world, "restore"):
        requests = [rows.request(array) for array in group]
        aside = [_fresh(request) for request in requests]
    _read(world, reader, aside)
    return requests, aside


def _read(world: Communicator, reader: ArrayReader, requests: Sequence[LocalArray]) -> None:
    with all_ranks(world, "restore"):
        reader.read([request for request in requests if request.pieces])


def _groups(arrays: Sequence[HeldArray]) -> Iterator[list[HeldArray]]:
    """Cut arrays into groups of a bounded number of elements, or of one array; the same on every rank."""
    group: list[HeldArray] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += int(np.prod(array.shape, dtype=np.int64))
        if size >= VERIFIED_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _fresh(request: LocalArray) -> LocalArray:
    """Return a request for the same ranges into one new array."""
    room, place, pieces = np.empty(sum(v.size for _, v in request.pieces), request.dtype), 0, []
    for start, values in request.pieces:
        pieces.append((start, room[place : place + values.size]))
        place += values.size
    return LocalArray(request.path, request.shape, request.dtype, tuple(pieces))


class _Need(NamedTuple):
    """Describe the rows of a sliced array that a rank needs.

    ``cover`` is a range of elements of the whole array, made of rows of ``row`` elements; ``short`` tells whether the
    ranges of its slice are too short to be read one by one.
    """

    cover: Span
    row: int
    short: bool

    @classmethod
    def of(cls, array: HeldArray) -> _Need | None:
        """Return what this rank needs; None where it holds no slice."""
        sliced = [(part_rows(piece.spec.part), piece) for piece in array.pieces if piece.spec.part is not None]
        sliced = [(rows, piece) for rows, piece in sliced if piece.values.size]
        if not sliced:
            return None
        rows = sliced[0][0]
        first = min(piece.start // rows.local for _, piece in sliced)
        last = max(-(-(piece.start + piece.values.size) // rows.local) for _, piece in sliced)
        length = rows.local * array.dtype.itemsize // len(rows.runs)
        cover = Span(first * rows.whole, last * rows.whole)
        return cls(cover, rows.whole, rows.number > 1 and length < _SHORT_RANGE)


class RowReading:
    """Read rows of sliced arrays for a tensor group, each row once. Construction is collective over the group.

    Parameters
    ----------
    group : Communicator
        The tensor group.
    arrays : sequence of HeldArray
        What is to be read.
    """

    def __init__(self, group: Communicator, arrays: Sequence[HeldArray]) -> None:
        self.group = group
        self._needs: dict[str, _Need] = {}
        if group.size == 1:
            return
        mine = {array.path: need for array in arrays if (need := _Need.of(array)) is not None}
        everyone = group.allgather_object(mine, "rows of slices")
        for path in sorted({path for needs in everyone for path in needs}):
            needs = [needs[path] for needs in everyone if path in needs]
            if any(need.short for need in needs):
                cover = Span(min(need.cover.start for need in needs), max(need.cover.stop for need in needs))
                self._needs[path] = needs[0]._replace(cover=cover)

    def request(self, array: HeldArray) -> LocalArray:
        """Return what this rank reads of an array: in place, or its part of the group's rows in a new buffer."""
        if array.path not in self._needs:
            return array.local()
        part = self._parts(array.path)[self.group.rank]
        pieces = ((part.start, np.empty(part.size, array.dtype)),) if part.size else ()
        return LocalArray(array.path, array.shape, array.dtype, pieces)

    def deliver(self, arrays: Sequence[HeldArray], requests: Sequence[LocalArray]) -> None:
        """Give every rank its slices of what each :meth:`request` has read. Collective over the group."""
        for array, request in zip(arrays, requests, strict=True):
            if array.path in self._needs:
                self._deliver(array, request)

    def _deliver(self, array: HeldArray, request: LocalArray) -> None:
        cover, row, _ = self._needs[array.path]
        parts = self._parts(array.path)
        own = parts[self.group.rank]
        read = request.pieces[0][1] if request.pieces else np.empty(0, array.dtype)
        step = max(1, EXCHANGE_ELEMENTS // row) * row
        for start in range(cover.start, cover.stop, step):
            window = Span(start, min(start + step, cover.stop))
            mine = own.intersect(window).shift(-own.start)
            rows = np.empty(window.size, array.dtype)
            counts = [part.intersect(window).size for part in parts]
            self.group.allgatherv(read[mine.start : mine.stop] if mine.size else read[:0], rows, counts, "rows")
            for piece in array.pieces:
                _take(piece, rows, window)

    def _parts(self, path: str) -> list[Span]:
        """Return what each rank of the group reads of an array."""
        cover = self._needs[path].cover
        shards = Partition(cover.size, self.group.size)
        return [Span(shard.start, shard.stop).shift(cover.start) for shard in shards]


def _take(piece: HeldPiece, window: Array, where: Span) -> None:
    """Copy what a slice holds of a window of whole rows, which stands at ``where`` in the whole array."""
    assert piece.spec.part is not None
    rows = part_rows(piece.spec.part)
    first, last = where.start // rows.whole * rows.local, where.stop // rows.whole * rows.local
    held = Span(piece.start, piece.start + piece.values.size).intersect(Span(first, last))
    take_rows(rows, window, held.start - first, piece.values[held.start - piece.start : held.stop - piece.start])

"""Read an open checkpoint into the arrays that ranks hold: all of it, or nothing.

[Note: slices are read by rows] A rank of a tensor group may hold some columns of a matrix. In the file these columns
are one short range in each row, and reading and verifying many short ranges is slow. Therefore the ranks of the group
read whole rows, each rank an equal share. They exchange these rows, a limited number of elements at a time, and every
rank copies its columns out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpizero import checkpoint
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_arrays, all_ranks
from mpizero.comm.reduce import EXCHANGE_ELEMENTS
from mpizero.errors import CollectiveError, PeerFailure
from mpizero.layout import Partition, Span
from mpizero.layout.tensor_parts import part_rows, take_rows
from mpizero.parallel.checkpointing.half_loaded import HalfLoaded
from mpizero.parallel.parameters.global_view import in_whole
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.checkpoint import LocalArray
    from mpizero.parallel.engine import Engine

#: Elements of the arrays that are read and verified together, into extra memory, for a model that is in use.
VERIFIED_AT_ONCE = 1 << 22
#: Slices are read by rows if their ranges are shorter than this on average, in bytes.
_SHORT_RANGE = 1 << 18


class ArrayReader(Protocol):
    """Define the part of :class:`mpizero.checkpoint.Reader` that restoring needs.

    ``arrays`` holds the shape and type of each array by its name in the checkpoint; ``attributes`` are the checkpoint's
    attributes by name.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    attributes: dict[str, Any]

    def read(self, requests: list[LocalArray]) -> None:
        """Read values of the checkpoint into the pieces of ``requests``, and verify them. Collective."""


class HeldPiece(NamedTuple):
    """Hold a view of consecutive elements of a parameter, or of its optimizer state, in this rank's memory.

    ``start`` is the index of the first element in the flattened parameter, or in this rank's slice if a tensor group
    splits the parameter. ``spec`` describes the parameter as this rank holds it.
    """

    spec: ParameterSpec
    start: int
    values: Array


@dataclass(frozen=True)
class HeldArray:
    """Describe an array of a checkpoint and this rank's pieces of it.

    ``path`` is the array's name in the checkpoint. ``spec`` describes the parameter in the whole model. ``real`` is the
    type of the numbers in memory, of which a complex element has two.
    """

    path: str
    spec: ParameterSpec
    real: np.dtype[Any]
    pieces: list[HeldPiece] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the checkpoint."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the array in the checkpoint."""
        return self.spec.element_type(self.real)

    def local(self) -> LocalArray:
        """Return the array with its pieces as ranges of the whole array, the form that checkpoint readers take."""
        ranges = (place for piece in self.pieces for place in in_whole(*piece))
        return checkpoint.LocalArray(self.path, self.shape, self.dtype, tuple(ranges))


@contextmanager
def opened_alike(comm: Communicator, what: str, data: bytes) -> Iterator[checkpoint.Reader]:
    """Yield a reader of a serialized model, after checking that all ranks pass equal bytes. Collective over ``comm``.

    The check compares the attributes and the stored checksums of the arrays. It is the first message of the operation
    ``what``, a name for errors.

    Raises
    ------
    CheckpointError
        On every rank, if the bytes are damaged, crafted or not a serialized model.
    ConfigError
        If ranks pass different bytes.
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
    """Read this rank's pieces of ``arrays``, or change nothing and raise on every rank. Collective over the world.

    [Note: nothing half loaded] If the model still has its initial values, the arrays are read straight into its memory;
    after an error the model gets its initial values again. If it has been trained or loaded, its values must not be
    lost. Then the arrays are read into extra memory, a group of arrays of limited size at a time, and copied into the
    model when all ranks have verified what they read. If there are several groups, all of them are first read once only
    to be verified, and then read again and copied. So no rank needs memory for a second copy of the model. One case
    remains: the second reading may fail after a group was copied. Then :attr:`Engine.half_loaded` is set, and the model
    raises an error on every use until a checkpoint has been loaded completely.

    Parameters
    ----------
    engine : Engine
        Holds the parameters and the optimizer state that are filled.
    reader : ArrayReader
        The checkpoint.
    arrays : sequence of HeldArray
        The same arrays in the same order on every rank, also those of which a rank has no piece.
    """
    engine.memory.barrier("restore")  # other ranks may still read the old parameters in the shared window
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
    """Read arrays into a model that has been trained or loaded, group by group; see the note in :func:`fill`."""
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
    """Read a group of arrays into new memory and verify them.

    Returns
    -------
    (list of LocalArray, list of LocalArray)
        The ranges of the arrays with the memory that their values are to be copied to, and the same ranges with new
        memory that holds the values.
    """
    with all_ranks(world, "restore"):
        requests = [rows.request(array) for array in group]
        aside = [_fresh(request) for request in requests]
    _read(world, reader, aside)
    return requests, aside


def _read(world: Communicator, reader: ArrayReader, requests: Sequence[LocalArray]) -> None:
    with all_ranks(world, "restore"):
        reader.read([request for request in requests if request.pieces])


def _groups(arrays: Sequence[HeldArray]) -> Iterator[list[HeldArray]]:
    """Cut the list of arrays into groups of whole arrays, each group about :data:`VERIFIED_AT_ONCE` elements long.

    The groups are the same on every rank.
    """
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
    """Return a copy of ``request`` for the same ranges whose pieces are newly allocated memory."""
    from mpizero.checkpoint.format import number_of

    real = number_of(np.dtype(request.dtype))
    room, place, pieces = np.empty(sum(v.size for _, v in request.pieces), real), 0, []
    for start, values in request.pieces:
        pieces.append((start, room[place : place + values.size]))
        place += values.size
    return checkpoint.LocalArray(request.path, request.shape, request.dtype, tuple(pieces))


class _Need(NamedTuple):
    """Describe the rows that a rank needs of an array that a tensor group splits.

    ``cover`` is the range of elements of the whole array that these rows make up; ``row`` is the number of elements of
    a row of the whole array. ``short`` tells whether the ranges of this rank's slice are too short to be read one by
    one.
    """

    cover: Span
    row: int
    short: bool

    @classmethod
    def of(cls, array: HeldArray) -> _Need | None:
        """Return the rows of ``array`` that this rank needs; None if this rank holds no slice of the array."""
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
    """Read rows of the arrays that a tensor group splits, each row on one rank only, and give each rank its slices.

    Construction is collective over the group.

    Parameters
    ----------
    group : Communicator
        The tensor group.
    arrays : sequence of HeldArray
        The arrays to read.
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
        """Return the request by which this rank reads ``array``.

        If the ranges of all slices are long enough, the request is for this rank's pieces, in their own memory.
        Otherwise the request is for this rank's share of the rows that the group needs, in a new buffer.
        """
        if array.path not in self._needs:
            return array.local()
        part = self._parts(array.path)[self.group.rank]
        pieces = ((part.start, np.empty(part.size, array.dtype)),) if part.size else ()
        return checkpoint.LocalArray(array.path, array.shape, array.dtype, pieces)

    def deliver(self, arrays: Sequence[HeldArray], requests: Sequence[LocalArray]) -> None:
        """Exchange the rows that the ranks have read, and copy each rank's slices out of them.

        Collective over the group. ``requests`` are those that :meth:`request` returned for ``arrays``, after reading.
        """
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
        """Return, for each rank of the group, the range of elements of the array ``path`` that it reads."""
        cover = self._needs[path].cover
        shards = Partition(cover.size, self.group.size)
        return [Span(shard.start, shard.stop).shift(cover.start) for shard in shards]


def _take(piece: HeldPiece, window: Array, where: Span) -> None:
    """Copy the elements of ``window`` that belong to ``piece``, a piece of a slice, into the piece.

    ``window`` holds whole rows of the whole array; ``where`` is their range of elements in it.
    """
    assert piece.spec.part is not None
    rows = part_rows(piece.spec.part)
    first, last = where.start // rows.whole * rows.local, where.stop // rows.whole * rows.local
    held = Span(piece.start, piece.start + piece.values.size).intersect(Span(first, last))
    take_rows(rows, window, held.start - first, piece.values[held.start - piece.start : held.stop - piece.start])

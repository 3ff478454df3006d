"""Let each rank compute several tiles of a model, with the same bits as a group with one rank for each tile.

A tile is the part of layers, or of sequences, that one virtual rank computes (docs/concepts.md). Tiles are numbered,
and each rank of a group computes equally many consecutive ones. A layer that is split over a :class:`VirtualGroup`
computes what it would compute on a rank of a group with one rank for each tile. A process first adds the terms of its
own tiles, in the order of the binary summation tree, and the real group adds the results, which are the roots of
subtrees. So sums have the bits of the group with one rank for each tile.

:func:`run_in_turns` runs the code of each tile until it calls a collective, and :class:`VirtualRanks` computes the
collective for all tiles of the rank together. :class:`TileParameters` gives each tile its part of the rank's parameters
and gradients, :class:`TiledBlock` runs a split block for each tile, and :func:`tiled_model` splits a model over tensor
and context groups.

[Note: coroutines] A layer calls a collective in the middle of its code. To run the layer for several virtual ranks in
one process, each call has to be suspended there and resumed later. Python's generators would need ``yield`` in every
function in between; threads would need locks, and a thread switch takes longer than a small layer. So the functions run
as coroutines of the library greenlet, which switches between stacks in less than a microsecond. A coroutine starts
without the caller's context variables, such as NumPy's error state and the dtype of products on a GPU, unless it is
given a copy of the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

from mpizero import kernels
from mpizero._util.pytree import combine_leaves, map_leaves
from mpizero._util.text import Line, is_users
from mpizero.errors import CollectiveError, ConfigError, LayoutError
from mpizero.kernels.matmul_tile import fold, sums_of_parts
from mpizero.layout import Partition
from mpizero.layout.flat import nested
from mpizero.layout.tensor_parts import joined_ranges, local_ranges, shape_of_ranges
from mpizero.nn.arrays import namespace
from mpizero.nn.context_parallel import Zigzag, context_model
from mpizero.nn.layer import Layer, Operations, layer_integers
from mpizero.nn.models import run_on
from mpizero.nn.tensor_parallel import gather_scores, split_model, whole_prediction
from mpizero.types import (
    EVALUATE,
    Array,
    BlockModel,
    Group,
    IntegerSpec,
    Loss,
    ParameterSpec,
    Params,
    Run,
    ShiftRequest,
    as_reals,
)
from mpizero.types import Layer as AnyLayer


class Mismatch(Exception):
    """Signal that the values that coroutines pass to a :class:`Meeting` do not match; its ``answer`` raises this."""


class Meeting:
    """Synchronize ``size`` coroutines: each passes a value, and gets a result that is computed from all values.

    Parameters
    ----------
    size : int
        Number of coroutines, the members, which are numbered from 0.
    answer : callable
        Function that takes the values of all members, in the order of their numbers, and returns a result for each.
    """

    def __init__(self, size: int, answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.size, self.answer = size, answer

    def wait(self, member: int, brought: Any) -> Any:
        """Pass the caller's value ``brought``, wait until all members have passed one, and return the caller's result.

        The result is the one that ``answer`` returns for ``member``, the caller. Raises :class:`CollectiveError` if the
        caller does not run in :func:`run_in_turns`.
        """
        caller = getcurrent()
        if not isinstance(caller, _Coroutine):
            raise CollectiveError(
                f"{brought} was called for one of {self.size} tiles of this rank alone: a split layer of a rank with "
                "several tiles runs in the tiled model only"
            )
        return caller.parent.switch(_Arrival(self, member, brought))


class _Coroutine(greenlet):  # type: ignore[misc]  # no stubs
    """Run one of the functions of :func:`run_in_turns`."""


class _Arrival(NamedTuple):
    """Record that a coroutine waits at ``meeting``, as which of its members (a number) and with which value."""

    meeting: Meeting
    member: int
    brought: Any


R = TypeVar("R")


def run_in_turns(functions: Sequence[Callable[[], R]]) -> list[R]:
    """Run the functions as coroutines, which are suspended at each :class:`Meeting`; return their results in order.

    The functions run in an order that is always the same. An exception in one function ends all functions. Each
    function runs in a copy of the caller's context variables.

    Raises
    ------
    CollectiveError
        Functions wait at a meeting that others will not reach, or their values do not match. The error names the line
        at which each function waits.
    """
    coroutines = [_Coroutine(function) for function in functions]
    for coroutine in coroutines:
        coroutine.gr_context = copy_context()
    results: dict[int, Any] = {}
    came: dict[Meeting, dict[int, tuple[int, Any]]] = {}
    ready: deque[tuple[int, tuple[Any, ...]]] = deque((number, ()) for number in range(len(coroutines)))
    try:
        while ready:
            number, arguments = ready.popleft()
            arrival = coroutines[number].switch(*arguments)
            if coroutines[number].dead:
                results[number] = arrival
                continue
            there = came.setdefault(arrival.meeting, {})
            there[arrival.member] = number, arrival.brought
            if len(there) == arrival.meeting.size:
                members = [there[member] for member in sorted(there)]
                answers = arrival.meeting.answer([brought for _, brought in members])
                del came[arrival.meeting]
                ready.extend((waiting, (answer,)) for (waiting, _), answer in zip(members, answers, strict=True))
        if came:
            raise CollectiveError(f"{_different(came, coroutines)}; others have ended")
    except Mismatch:
        raise CollectiveError(_different(came, coroutines)) from None
    finally:
        for coroutine in coroutines:
            if coroutine and not coroutine.dead:
                with suppress(Exception):  # of a function's ``finally``, which would hide the error that ends all
                    coroutine.throw()
    return [results[number] for number in range(len(coroutines))]


def _different(came: Mapping[Meeting, Mapping[int, tuple[int, Any]]], coroutines: Sequence[greenlet]) -> str:
    """Return an error text that lists which collectives the waiting coroutines have called, and where."""
    calls = (
        f"tile {member} {brought}{_location(coroutines[number])}"
        for there in came.values()
        for member, (number, brought) in sorted(there.items())
    )
    return f"the tiles of this rank called different collectives: {'; '.join(calls)}"


def _location(coroutine: greenlet) -> str:
    """Return the user's line at which a coroutine waits, as " at file:line in function"; "" if there is none."""
    frame = coroutine.gr_frame
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f" at {Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)}"
        frame = frame.f_back
    return ""


class _Call(NamedTuple):
    """Describe one tile's call of a collective: name, settings (which must be the same for all tiles), and arrays."""

    kind: str
    settings: tuple[Any, ...]
    arrays: tuple[Array, ...]

    @property
    def comparable(self) -> tuple[Any, ...]:
        """Name, settings, dtypes and shapes, which must be equal in all calls; for gathers and shifts no shapes."""
        sums = self.kind not in ("all_gather", "shift")
        return self.kind, self.settings, [(x.dtype, x.shape if sums else x.ndim) for x in self.arrays]

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in self.arrays)
        return f"{self.kind}({shapes}{''.join(f', {setting!r}' for setting in self.settings)})"


class VirtualRanks:
    """Let each rank of a group compute as several consecutive virtual ranks, which are called its tiles.

    Parameters
    ----------
    group : Group
        The real ranks.
    size : int
        Number of tiles of all ranks together: the group's size times a power of two.

    Attributes
    ----------
    groups : tuple of VirtualGroup
        For each tile of this rank, in order, its view of the group of all tiles.

    Raises
    ------
    ConfigError
        ``size`` is not the group's size times a power of two.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.real, self.size = group, size
        self.hosted, rest = divmod(size, group.size)
        if rest or self.hosted & (self.hosted - 1) or not self.hosted:
            raise ConfigError(
                f"{size} tiles cannot be hosted by {group.size} ranks: each must have 1, 2, 4, 8, ... of them"
            )
        meeting = Meeting(self.hosted, self._answer)
        self.groups = tuple(
            VirtualGroup(group.rank * self.hosted + member, size, member, meeting) for member in range(self.hosted)
        )

    def _answer(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """Compute a collective that the tiles of this rank have called; collective over the group of ranks."""
        first = calls[0]
        if any(call.comparable != first.comparable for call in calls[1:]):
            raise Mismatch
        results: Sequence[Any] = getattr(self, f"_{first.kind}")([call.arrays for call in calls], *first.settings)
        return results

    def _all_reduce(self, arrays: Sequence[tuple[Array]], tag: str) -> Sequence[Array]:
        total = self._sum([x for (x,) in arrays])
        return self._copies(total if self.real.size == 1 else self.real.all_reduce(total, tag))

    def _all_max(self, arrays: Sequence[tuple[Array]], tag: str) -> Sequence[Array]:
        largest = namespace(arrays[0][0]).stack([x for (x,) in arrays]).max(axis=0)
        return self._copies(largest if self.real.size == 1 else self.real.all_max(largest, tag))

    def _all_gather(
        self, arrays: Sequence[tuple[Array]], axis: int, sizes: tuple[int, ...], tag: str
    ) -> Sequence[Array]:
        gathered = namespace(arrays[0][0]).concatenate([x for (x,) in arrays], axis=axis)
        if self.real.size > 1:
            gathered = self.real.all_gather(gathered, axis, self._of_ranks(sizes), tag)
        if isinstance(gathered, np.ndarray):
            gathered.flags.writeable = False  # all tiles read the same array
        return [gathered] * self.hosted

    def _reduce_scatter(
        self, arrays: Sequence[tuple[Array]], axis: int, sizes: tuple[int, ...], tag: str
    ) -> Sequence[Array]:
        terms = [x for (x,) in arrays]
        if self.real.size == 1:
            return sums_of_parts(terms, axis, sizes)
        scattered = self.real.reduce_scatter(self._sum(terms), axis, self._of_ranks(sizes), tag)
        first = self.real.rank * self.hosted
        xp = namespace(scattered)
        indices = _part_indices(sizes[first : first + self.hosted], axis, scattered.ndim)
        return [xp.ascontiguousarray(scattered[index]) for index in indices]

    def _shift(self, arrays: Sequence[tuple[Array, ...]], by: int, tag: str) -> Sequence[ShiftRequest]:
        """Pass the arrays of each tile to the tile whose number is larger by ``by`` (cyclic); return tiles' requests.

        Arrays for a tile of this rank are copied; arrays for a tile of another rank are sent by the real group.
        """
        ranks, over = divmod(by, self.hosted)
        received: list[tuple[Array, ...]] = [()] * self.hosted
        requests: list[tuple[int, ShiftRequest]] = []
        for member, brought in enumerate(arrays):
            target, moved = (member + over) % self.hosted, ranks + (member + over) // self.hosted
            if moved % self.real.size:
                requests.append((target, self.real.shift(brought, moved, tag)))
            else:
                received[target] = tuple(namespace(x).array(x) for x in brought)
        coming = dict(requests)
        return [coming.get(member) or Arrived(received[member]) for member in range(self.hosted)]

    def _sum(self, terms: Sequence[Array]) -> Array:
        """Return the sum of this rank's terms, in the order of the summation tree, as a new contiguous array."""
        (total,) = sums_of_parts([term.reshape(1, -1) for term in terms], 1, (terms[0].size,))
        return total.reshape(terms[0].shape)

    def _copies(self, x: Array) -> Sequence[Array]:
        return [x, *(namespace(x).array(x) for _ in range(self.hosted - 1))]

    def _of_ranks(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sum(sizes[first : first + self.hosted]) for first in range(0, self.size, self.hosted))


def _part_indices(sizes: Sequence[int], axis: int, axes: int) -> list[tuple[slice, ...]]:
    """Return the index of each part, if an array of ``axes`` axes is cut along ``axis`` into parts of ``sizes``."""
    indices, start = [], 0
    for size in sizes:
        indices.append((*(slice(None),) * axis, slice(start, start + size), *(slice(None),) * (axes - axis - 1)))
        start += size
    return indices


class Arrived(NamedTuple):
    """Hold the arrays that one tile (virtual rank) of this rank gets from another tile of this rank by a shift.

    They are copies, which are there from the start. Implements :class:`mpizero.types.ShiftRequest`.
    """

    arrays: tuple[Array, ...]

    def wait(self) -> tuple[Array, ...]:
        """Return the received arrays, without waiting: copies of those of another tile of this rank. Not collective."""
        return self.arrays

    def test(self) -> bool:
        """Return True, because the arrays have arrived already. Not collective."""
        return True


@dataclass(frozen=True, eq=False)
class VirtualGroup:
    """Represent, for one tile, the group whose ranks are all tiles; implements :class:`Group`.

    Its methods are collective over all tiles; the tiles of this process call them in one :func:`run_in_turns`.

    Parameters
    ----------
    rank, size : int
        Index of this tile, and how many tiles there are.
    member : int
        Index of this tile among the tiles of this process.
    meeting : Meeting
        The synchronization point of the tiles of this process.
    """

    rank: int
    size: int
    member: int
    meeting: Meeting

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum of the tiles' arrays as a new array. Collective."""
        self._require("all_reduce", x, tag)
        return self._wait("all_reduce", (x,), tag)

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum of the tiles' arrays as a new array. Collective."""
        self._require("all_max", x, tag)
        return self._wait("all_max", (x,), tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return the arrays of all tiles, concatenated along ``axis``, as a read-only array. Collective."""
        axis = self._along("all_gather", x, axis, sizes, tag)
        if x.shape[axis] != sizes[self.rank]:
            raise self._error("all_gather", x, tag, f"sizes[{self.rank}] is {sizes[self.rank]} along axis {axis}")
        return self._wait("all_gather", (x,), axis, tuple(sizes), tag)

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this tile's part, along ``axis``, of the sum of all tiles' arrays, as a new array. Collective."""
        self._require("reduce_scatter", x, tag)
        axis = self._along("reduce_scatter", x, axis, sizes, tag)
        if x.shape[axis] != sum(sizes):
            raise self._error("reduce_scatter", x, tag, f"sizes {sizes} do not add up to its length along axis {axis}")
        return self._wait("reduce_scatter", (x,), axis, tuple(sizes), tag)

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to tile ``rank + by``, and to receive as many from ``rank - by``. Collective."""
        request: ShiftRequest = self.meeting.wait(self.member, _Call("shift", (by, tag), tuple(arrays)))
        return request

    # The checks of a real group, made before the tiles are synchronized, so that the error names the caller's line.

    def _require(self, kind: str, x: Array, tag: str) -> None:
        if x.dtype.char not in "fd":
            raise self._error(kind, x, tag, "expected float32 or float64")

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int], tag: str) -> int:
        """Check ``axis`` and ``sizes``; return the axis counted from the front."""
        if not -x.ndim <= axis < x.ndim:
            raise self._error(kind, x, tag, f"axis {axis} does not exist")
        if len(sizes) != self.size or min(sizes) < 0:
            raise self._error(kind, x, tag, f"sizes {sizes} are not one length >= 0 for each of {self.size} tiles")
        return axis % x.ndim

    def _error(self, kind: str, x: Array, tag: str, reason: str) -> CollectiveError:
        return CollectiveError(f"tile {self.rank}: {_Call(kind, (tag,), (x,))}: {reason}")

    def _wait(self, kind: str, arrays: tuple[Array, ...], *settings: Any) -> Array:
        answer: Array = self.meeting.wait(self.member, _Call(kind, settings, arrays))
        return answer


class TileViews(dict[str, Any]):
    """Hold a tile's parameters by name, with the attributes ``poll`` and ``gathered`` of the rank's parameters."""

    __slots__ = ("gathered", "poll")

    def __init__(self, views: Mapping[str, Any], source: Any) -> None:
        super().__init__(views)
        self.poll, self.gathered = getattr(source, "poll", None), getattr(source, "gathered", False)


class _Cut(NamedTuple):
    """Describe which elements of a parameter's array on a rank belong to which of the rank's tiles (virtual ranks).

    The array is seen as a matrix, whose rows are the axes before the one that is split. Each tile has one or several
    ranges of the columns.

    Attributes
    ----------
    rows, columns : int
        Shape of the matrix.
    in_one : bool
        Whether each tile has only one range of columns.
    firsts : tuple
        For each tile, the index of its first range in the array.
    shapes : tuple of tuple of int
        Shape of each tile's part.
    offsets : tuple of int
        Start of each tile's part in one flat array that holds the parts of all tiles, and the size of that array.
    ranges : ndarray
        Four integers for each range of columns, as the kernels ``split_columns`` and ``join_columns`` take them.
    """

    rows: int
    columns: int
    in_one: bool
    firsts: tuple[tuple[slice, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    ranges: Any

    def arrays(self, array: Array) -> list[Array]:
        """Return the tiles' parts of ``array`` as contiguous arrays: views if possible, else copies."""
        return self.views(array) if self.in_one and self.rows == 1 else self.parts(self.copied(array))

    def views(self, array: Array) -> list[Array]:
        """Return, for each tile, a view of its first range of ``array``'s columns."""
        return [array[index] for index in self.firsts]

    def copied(self, array: Array) -> Array:
        """Return an array with copies of the tiles' parts of ``array``, one after the other."""
        xp = namespace(array)
        copies: Array = xp.empty(self.offsets[-1], array.dtype)
        if array.size:
            matrix, ranges, parts = self._as_reals(xp.ascontiguousarray(array), copies)
            kernels.backend(array).layers.split_columns(matrix, ranges, parts)
        return copies

    def parts(self, copied: Array) -> list[Array]:
        """Return the tiles' parts as views of an array that :meth:`copied` has returned."""
        offsets = zip(self.offsets[:-1], self.shapes, strict=True)
        return [copied[offset : offset + prod(shape)].reshape(shape) for offset, shape in offsets]

    def write_back(self, copied: Array, array: Array) -> None:
        """Copy the tiles' parts from an array that :meth:`copied` has returned to ``array``."""
        contiguous = namespace(array).ascontiguousarray(array)
        if array.size:
            matrix, ranges, parts = self._as_reals(contiguous, copied)
            kernels.backend(array).layers.join_columns(parts, ranges, matrix)
        if contiguous is not array:
            array[...] = contiguous

    def _as_reals(self, array: Array, copied: Array) -> tuple[Array, Any, Array]:
        """Return the kernels' arguments matrix, ranges and parts, with complex numbers as pairs of real ones."""
        size = 2 if array.dtype.kind == "c" else 1
        return as_reals(array).reshape(self.rows, size * self.columns), size * self.ranges, as_reals(copied)


class _Copied(NamedTuple):
    """Hold copies of the tiles' parts of a gradient (``parts``), how it is cut, and the gradient itself (``array``)."""

    cut: _Cut
    parts: Array
    array: Array


@dataclass(frozen=True)
class TileParameters:
    """Divide the parameters of a block that a rank holds among the rank's tiles (virtual ranks).

    Parameters
    ----------
    declared : tuple of tuple of ParameterSpec
        For each tile, the specs of the parameters of its split form.
    """

    declared: tuple[tuple[ParameterSpec, ...], ...]

    @cached_property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The specs of the parameters that the rank holds; of a split parameter, the union of the tiles' parts."""
        return tuple(_union(specs) for specs in zip(*self.declared, strict=True))

    @cached_property
    def _cuts(self) -> dict[str, Any]:
        """The cut of each parameter into tiles, or None if every tile has all of it; in dictionaries nested by name."""
        return nested({spec.name: None if spec.part is None else _cut(spec) for spec in self.specs})

    @cached_property
    def _split(self) -> bool:
        return any(spec.part is not None for spec in self.specs)

    def parameters(self, params: Params) -> list[Params]:
        """Return each tile's parameters, as contiguous arrays: views of ``params`` where possible, else copies."""
        count = len(self.declared)
        return [*_parameters(self._cuts, params, count)] if self._split else [params] * count

    def gradients(self, grads: Params) -> tuple[list[Params], list[_Copied]]:
        """Return arrays that each tile writes its gradients to, and what :meth:`collect` needs.

        The arrays are views of ``grads``, or copies that :meth:`collect` copies back. Of a parameter that every tile
        holds whole, all tiles compute the same gradient: the first tile writes it to ``grads``, the others write to new
        arrays. The same holds for integer arrays, except that their new arrays begin as copies of those in ``grads``.
        """
        count = len(self.declared)
        copies: list[_Copied] = []
        if count == 1 and not self._split:
            return [grads], copies
        return [_like(grads, views) for views in _gradients(self._cuts, grads, count, copies)], copies

    def collect(self, copies: Sequence[_Copied]) -> None:
        """Copy the gradients in ``copies``, which tiles have written, back to the rank's arrays."""
        for cut, parts, array in copies:
            cut.write_back(parts, array)


def _parameters(cuts: Mapping[str, Any], params: Any, count: int) -> list[TileViews]:
    views = [TileViews(params, params) for _ in range(count)]
    for name, cut in cuts.items():
        if cut is not None:
            array = params[name]
            parts: list[Any] = _parameters(cut, array, count) if type(cut) is dict else cut.arrays(array)
            for tile, part in enumerate(parts):
                views[tile][name] = part
    return views


def _gradients(cuts: Mapping[str, Any], grads: Any, count: int, copies: list[_Copied]) -> list[dict[str, Any]]:
    views = [dict(grads) for _ in range(count)]
    for name, array in grads.items():
        cut = cuts.get(name)
        if isinstance(array, dict):
            parts: list[Any] = _gradients(cut or {}, array, count, copies)
        elif cut is None:
            parts = [array, *(_new_gradient(array) for _ in range(count - 1))]
        elif cut.in_one:
            parts = cut.views(array)
        else:
            copies.append(_Copied(cut, cut.copied(array), array))
            parts = cut.parts(copies[-1].parts)
        for tile, part in enumerate(parts):
            views[tile][name] = part
    return views


def _new_gradient(array: Array) -> Array:
    """Return a new array for a tile's gradient, or a copy of an integer array, for its new value."""
    return array.copy() if array.dtype.kind in "iub" else namespace(array).empty_like(array)


def copied(grads: Any) -> Any:
    """Return new arrays like ``grads``; NumPy arrays of floats that do not begin with NaN are left uninitialized.

    Copying these would cost a pass over memory. All other arrays are copied: the layers need the values of integer
    arrays, and a caller may fill gradients with NaN, to find those that a layer does not write.
    """
    if isinstance(grads, Mapping):
        return _like(grads, {name: copied(value) for name, value in grads.items()})
    plain = isinstance(grads, np.ndarray) and grads.dtype.kind in "fc" and grads.size
    return np.empty_like(grads) if plain and not np.isnan(grads.flat[0]) else grads.copy()


def _like(grads: Any, views: dict[str, Any]) -> Params:
    return type(grads)(views) if isinstance(grads, dict) else views


def require_equal_integers(targets: Sequence[Any], path: str = "") -> None:
    """Raise :class:`LayoutError` if tiles have written different new values to an integer array.

    ``targets`` are the dictionaries that the tiles wrote their gradients to; ``path`` is the prefix of the names in
    messages.
    """
    for name, value in targets[0].items():
        if isinstance(value, Mapping):
            require_equal_integers([target[name] for target in targets], f"{path}{name}.")
        elif value.dtype.kind in "iub":
            for tile, target in enumerate(targets):
                if (target[name] != value).any():
                    raise LayoutError(
                        f"the new value of integer array {path + name!r} differs between tiles: {value.tolist()} on "
                        f"the first tile of this rank, {target[name].tolist()} on tile {tile} after it; it must follow "
                        "from the value that each is given, not from the tile"
                    )


def _cut(spec: ParameterSpec) -> _Cut:
    part = spec.part
    assert part is not None
    before, after = spec.shape[: part.axis], spec.shape[part.axis + 1 :]
    rows, inner = prod(before), prod(after)
    firsts, shapes, offsets, ranges = [], [], [0], []
    for ranges_of_tile in part.tiles:
        local = local_ranges(ranges_of_tile, part.ranges) or ((0, 0),)
        width = sum(stop - start for start, stop in local)
        starts = accumulate((stop - start for start, stop in local), initial=0)
        ranges += [
            (start * inner, (stop - start) * inner, offsets[-1] + first * inner, width * inner)
            for (start, stop), first in zip(local, starts, strict=False)
        ]
        firsts.append((*(slice(None),) * part.axis, slice(*local[0])))
        shapes.append((*before, width, *after))
        offsets.append(offsets[-1] + _aligned(rows * width * inner))
    in_one = all(len(ranges_of_tile) == 1 for ranges_of_tile in part.tiles)
    columns = spec.shape[part.axis] * inner
    return _Cut(rows, columns, in_one, tuple(firsts), tuple(shapes), tuple(offsets), np.array(sorted(ranges)))


def _aligned(size: int) -> int:
    """Round up to a multiple of 16, so that the parts of all tiles begin at the same offset from a cache line."""
    return -size // 16 * -16


def _union(specs: Sequence[ParameterSpec]) -> ParameterSpec:
    """Return the spec of the union of the tiles' parts of one parameter."""
    first = specs[0]
    parts = [spec.part for spec in specs if spec.part is not None]
    if not parts:
        return first
    if len(parts) < len(specs) or any((part.shape, part.axis) != (parts[0].shape, parts[0].axis) for part in parts):
        raise LayoutError(f"parameter {first.name!r} is split in another way on some of a rank's {len(specs)} tiles")
    merged = joined_ranges(span for part in parts for span in part.ranges)
    part = replace(parts[0], ranges=merged, tiles=tuple(part.ranges for part in parts))
    return replace(first, shape=shape_of_ranges(part), part=part)


class Hosted(NamedTuple):
    """Describe a rank's tiles of the tensor or context axis: their indices, and how many tiles all ranks have."""

    local: range
    size: int


@dataclass(frozen=True)
class TileGrid:
    """Order the tiles of a rank: context tiles (parts of sequences), and in each of these tensor tiles (of layers).

    With n tensor tiles on this rank, tile ``c * n + t`` is tensor tile t in context tile c. The activations between
    blocks that a rank holds are those of its context tiles, concatenated along the axis of positions. The activations
    of a context tile are those of its tensor tiles, concatenated along the axis that is cut over tensor tiles.

    Parameters
    ----------
    tensor, context : Hosted
        The tiles of each axis.
    """

    tensor: Hosted
    context: Hosted

    @property
    def across(self) -> int:
        """Number of tensor tiles of this rank."""
        return len(self.tensor.local)

    @property
    def along(self) -> int:
        """Number of context tiles of this rank."""
        return len(self.context.local)

    def cut(self, x: Any, length: int, axis: int | None) -> list[Any]:
        """Return a list with each tile's part of the rank's activations ``x``: an array, or a tree if ``axis`` is None.

        ``length`` is the number of positions of the whole sequences; it is not used if the rank has one context tile.
        ``axis`` is the axis that is cut over the virtual ranks of the tensor group, or None if each of these holds the
        whole array.
        """
        if self.along == 1:
            return [x] * self.across if axis is None else _parts(x, axis, Partition(x.shape[axis], self.across).sizes())
        lengths = Zigzag(length, self.context.size).sizes
        sizes_of_rows = [self._sizes(lengths[tile], axis) for tile in self.context.local]
        parts: list[Any] = []
        for row, sizes in zip(_rows(x, [sum(sizes) for sizes in sizes_of_rows]), sizes_of_rows, strict=True):
            if axis is None:
                parts += [row] * self.across
            else:
                parts += _parts(row, axis, sizes if axis == 1 else Partition(row.shape[axis], self.across).sizes())
        return parts

    def runs(self, run: Run) -> list[Run]:
        """Return a list with the Run that each of this rank's tiles (virtual ranks) gets.

        Each is a copy of ``run`` with the tile's positions if the rank has several context tiles, else ``run`` itself.
        """
        if self.along == 1:
            return [run] * self.across
        zigzag = Zigzag(run.length, self.context.size)
        rows = [replace(run, ranges=zigzag.ranges(tile)) for tile in self.context.local]
        return [row for row in rows for _ in range(self.across)]

    def _sizes(self, positions: int, axis: int | None) -> tuple[int, ...]:
        """Return how many of a context tile's positions each tensor tile of this rank has, if ``axis`` is 1.

        Otherwise every tensor tile has all of them: ``(positions,)``.
        """
        if axis != 1:
            return (positions,)
        sizes = Partition(positions, self.tensor.size).sizes()
        return tuple(sizes[tile] for tile in self.tensor.local)

    def join(self, parts: Sequence[Any], axis: int | None) -> Any:
        """Join the tiles' parts to the activations that the rank holds; the inverse of :meth:`cut`."""
        rows = [parts[start : start + self.across] for start in range(0, len(parts), self.across)]
        joined = [row[0] if axis is None else _joined(row, axis) for row in rows]
        return joined[0] if len(joined) == 1 else combine_leaves(partial(_joined, axis=1), joined)


def _rows(x: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut all arrays in ``x`` (nested) along axis 1 into parts of the given sizes, as contiguous arrays."""
    starts = list(accumulate(sizes, initial=0))
    return [map_leaves(partial(_slice, start=a, stop=b), x) for a, b in pairwise(starts)]


def _slice(x: Array, start: int, stop: int) -> Array:
    return namespace(x).ascontiguousarray(x[:, start:stop])


def _parts(x: Array, axis: int, sizes: Sequence[int]) -> list[Array]:
    """Cut ``x`` along ``axis`` into parts of the given sizes, as contiguous arrays."""
    xp = namespace(x)
    return [xp.ascontiguousarray(part) for part in xp.split(x, list(accumulate(sizes))[:-1], axis=axis)]


def _joined(parts: Sequence[Array], axis: int) -> Array:
    return namespace(parts[0]).concatenate(parts, axis=axis)


class _Cache(NamedTuple):
    """Hold what the backward pass of a tiled block needs: the length of the sequences, and the tiles' caches."""

    length: int
    caches: list[Any]


@dataclass(frozen=True)
class TiledBlock(Layer):
    """Run the split forms of a block for all tiles (virtual ranks) of a rank, by :func:`run_in_turns`.

    Parameters
    ----------
    forms : tuple of Layer
        The split form of the block for each tile of the rank, in the order of :class:`TileGrid`.
    grid : TileGrid
        The tiles of the rank.
    entry, exit : int or None
        The axis of the input and of the output that is cut over the tensor tiles; None if each tile has the whole
        array.
    takes_parts, gives_parts : bool
        Whether the input and the output are tuples of the tiles' parts instead of joined arrays. Inputs are tuples if
        the block before is tiled and on this rank, outputs if the block after is.
    """

    forms: tuple[Layer, ...]
    grid: TileGrid
    entry: int | None
    exit: int | None
    takes_parts: bool = False
    gives_parts: bool = False

    @cached_property
    def _parameters(self) -> TileParameters:
        return TileParameters(tuple(form.specs() for form in self.forms[: self.grid.across]))

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters that this rank holds; for a split parameter, the parts of all of its tiles."""
        return self._parameters.specs

    @property
    def stands_for(self) -> Layer:
        """The layer that error messages name: the split form of the first tile."""
        return self.forms[0]

    def integers(self) -> tuple[IntegerSpec, ...]:
        """Describe the block's integer arrays. Not collective."""
        return layer_integers(self.forms[0])

    @cached_property
    def _has_integers(self) -> bool:
        return bool(self.integers())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the block forward for all tiles. Collective over the groups that the block is split over."""
        inputs: Any = x if self.takes_parts else self.grid.cut(x, run.length, self.entry)
        arguments = zip(self.forms, self._views(params), inputs, self.grid.runs(run), strict=True)
        results = run_in_turns([partial(form.forward, p, part, r) for form, p, part, r in arguments])
        parts = [y for y, _ in results]
        output: Any = tuple(parts) if self.gives_parts else self.grid.join(parts, self.exit)
        return output, _Cache(run.length, [cache for _, cache in results])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of the input for all tiles. Collective over the groups that the block is split over."""
        return self._inputs(self._views(params), cache, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients, summed over context tiles in the order of the summation tree.

        Collective over the groups that the block is split over.
        """
        self._weights(self._views(params), cache, pending, grads)

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Overwrite the gradients, and return the gradient of the input. Collective over the groups."""
        views = self._views(params)
        if self._has_halves:
            dx, pending = self._inputs(views, cache, dy)
            self._weights(views, cache, pending, grads)
            return dx
        with self._gradients(grads) as targets:
            arguments = zip(self.forms, views, cache.caches, self._above(dy, cache), targets, strict=True)
            gradients = run_in_turns([partial(form.backward, p, c, d, g) for form, p, c, d, g in arguments])
        gradient: Array | None = self._input_gradient(gradients)
        return gradient

    @cached_property
    def _has_halves(self) -> bool:
        """Tell whether :meth:`backward` calls ``backward_input`` of all tiles, then ``backward_weights`` of all tiles.

        With several context tiles this order takes less memory: each tile has gradients of its own, which exist in the
        second half only.
        """
        return self.grid.along > 1 and all(hasattr(form, "backward_input") for form in self.forms)

    def _inputs(self, views: list[Params], cache: _Cache, dy: Array) -> tuple[Array | None, Any]:
        arguments = zip(self.forms, views, cache.caches, self._above(dy, cache), strict=True)
        results = run_in_turns([partial(form.backward_input, p, c, d) for form, p, c, d in arguments])
        return self._input_gradient([dx for dx, _ in results]), [pending for _, pending in results]

    def _weights(self, views: list[Params], cache: _Cache, pending: Any, grads: Params) -> None:
        with self._gradients(grads) as targets:
            arguments = zip(self.forms, views, cache.caches, pending, targets, strict=True)
            run_in_turns([partial(form.backward_weights, p, c, w, g) for form, p, c, w, g in arguments])

    @contextmanager
    def _gradients(self, grads: Params) -> Iterator[list[Params]]:
        """Yield arrays for the gradients of each tile; at the end, collect the gradients in ``grads``."""
        copies_of_grads = [grads, *(copied(grads) for _ in range(self.grid.along - 1))]
        divided = [self._parameters.gradients(one) for one in copies_of_grads]
        targets = [target for row, _ in divided for target in row]
        yield targets
        if self._has_integers:
            require_equal_integers(targets)
        for _, copies in divided:
            self._parameters.collect(copies)
        if len(copies_of_grads) > 1:
            _add_up(copies_of_grads)

    def _views(self, params: Params) -> list[Params]:
        return self._parameters.parameters(params) * self.grid.along

    def _above(self, dy: Any, cache: _Cache) -> Any:
        return dy if self.gives_parts else self.grid.cut(dy, cache.length, self.exit)

    def _input_gradient(self, parts: list[Any]) -> Any:
        if parts[0] is None:
            return None
        return tuple(parts) if self.takes_parts else self.grid.join(parts, self.entry)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit block's output shape for one sample of ``shape``. Not collective."""
        return self.forms[0].output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the operations of all tiles of this rank together, for one sample of ``shape``. Not collective."""
        return sum((form.operations(shape) for form in self.forms), Operations())


def _add_up(trees: Sequence[Any]) -> None:
    """Add the arrays of ``trees`` in the order of the summation tree; write the sums to the arrays of the first."""
    for name, value in trees[0].items():
        below = [tree[name] for tree in trees]
        if isinstance(value, dict):
            _add_up(below)
        elif value.size and value.dtype.kind in "fc":
            fold(np.add, [array.reshape(-1) for array in below], value.reshape(-1))


def tiled_model(
    model: BlockModel, tensor: Group, context: Group, virtual_ranks: tuple[int, int], ends: Container[str] = ()
) -> BlockModel:
    """Split a model over a tensor and a context group, with the bits of groups that have one rank for each tile.

    Not collective.

    Parameters
    ----------
    model : BlockModel
        The whole model.
    tensor, context : Group
        The ranks over which layers, and over which sequences are split.
    virtual_ranks : tuple of int
        How many tensor tiles and how many context tiles there are: the groups' sizes times powers of two.
    ends : container of str
        The blocks whose outputs are sent to other pipeline stages.

    Returns
    -------
    BlockModel
        ``model`` itself if both numbers are 1; the split model if every rank has one tile; otherwise a
        :class:`TiledModel`, whose blocks run the split blocks of all tiles of the rank.

    Raises
    ------
    ConfigError
        The model cannot be split into so many tiles.
    """
    tensor_size, context_size = virtual_ranks
    across, along = _groups(tensor, tensor_size), _groups(context, context_size)
    if len(across) * len(along) == 1:
        return context_model(split_model(model, tensor), context)
    rows = [_groups(tensor, tensor_size) for _ in along]
    columns = [_groups(context, context_size) for _ in across]
    forms = tuple(
        context_model(split_model(model, rows[c][t]), columns[t][c])
        for c in range(len(along))
        for t in range(len(across))
    )
    grid = TileGrid(_hosted(tensor, tensor_size), _hosted(context, context_size))
    return TiledModel(model, forms, grid, context, ends)


def _groups(group: Group, size: int) -> Sequence[Group]:
    return [group] if size == group.size else VirtualRanks(group, size).groups


def _hosted(group: Group, size: int) -> Hosted:
    each = size // group.size
    return Hosted(range(group.rank * each, (group.rank + 1) * each), size)


@dataclass(frozen=True)
class TiledLoss:
    """Compute the loss of the parts of predictions that a rank's tiles (virtual ranks) hold.

    Parameters
    ----------
    losses : tuple of Loss
        The loss of each tile.
    grid : TileGrid
        The tiles of the rank.
    axis : int or None
        The axis of predictions that is cut over the tensor tiles.
    context : Group
        The real ranks that sequences are split over.
    """

    losses: tuple[Loss, ...]
    grid: TileGrid
    axis: int | None
    context: Group

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Return the sum of the losses and of the weights of this rank's tiles, and the cache for :meth:`backward`.

        Collective over the groups that the model is split over.
        """
        length = _global_length(prediction, self.context) if self.grid.along > 1 else 0
        predictions, targets = self.grid.cut(prediction, length, self.axis), self.grid.cut(target, length, None)
        arguments = zip(self.losses, predictions, targets, strict=True)
        passes = run_in_turns([partial(loss.forward, p, y) for loss, p, y in arguments])
        rows = passes[:: self.grid.across]  # the tensor tiles of a context tile find the same numbers
        return _tree_sum([row[0] for row in rows]), _tree_sum([row[1] for row in rows]), [cache for *_, cache in passes]

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum with respect to this rank's part of the prediction.

        Not collective.
        """
        gradients = run_in_turns([partial(loss.backward, c, scale) for loss, c in zip(self.losses, cache, strict=True)])
        gradient: Array = self.grid.join(gradients, self.axis)
        return gradient


@dataclass(frozen=True, eq=False)
class TiledModel:
    """Hold the split forms of a model for all tiles (virtual ranks) of a rank, as one model of blocks.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model.
    forms : tuple of SplitModel or ContextModel
        The split model of each tile of the rank, in the order of :class:`TileGrid`.
    grid : TileGrid
        The tiles of the rank.
    context : Group
        The real ranks that sequences are split over.
    ends : container of str
        The blocks whose outputs are sent to other pipeline stages.
    """

    whole: BlockModel
    forms: tuple[Any, ...]
    grid: TileGrid
    context: Group
    ends: Container[str] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the unsplit model."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The seed of the unsplit model."""
        return self.whole.seed

    @cached_property
    def blocks(self) -> Mapping[str, AnyLayer]:
        """The blocks by name, in the order in which they run; each runs its split forms for all tiles of the rank.

        A block that neither group splits is the unsplit block, which runs once.
        """
        names = list(self.whole.blocks)
        cuts = [getattr(self.forms[0], "cuts", {}).get(name) for name in names]
        leaves = [cut if cut is None or cut < 0 else cut + 1 for cut in cuts]  # axes of whole outputs, with samples
        blocks: dict[str, Any] = {}
        for name, entry, leave in zip(names, [None, *leaves], leaves, strict=False):
            block, forms = self.whole.blocks[name], tuple(form.blocks[name] for form in self.forms)
            alone = self.grid.along == 1 and entry is leave is None and all(form is block for form in forms)
            blocks[name] = block if alone else TiledBlock(forms, self.grid, entry, leave)
        for (name, block), (after, following) in pairwise(list(blocks.items())):
            if isinstance(block, TiledBlock) and isinstance(following, TiledBlock) and name not in self.ends:
                blocks[name] = replace(blocks[name], gives_parts=True)
                blocks[after] = replace(following, takes_parts=True)
        return blocks

    @property
    def _prediction_axis(self) -> int | None:
        return None if getattr(self.forms[0], "outputs", None) is None else -1

    @property
    def loss(self) -> Loss:
        """The loss, which takes the last block's output on this rank."""
        return self._tiled([form.loss for form in self.forms])

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole predictions to the last block's output on this rank. Not collective."""
        return self._tiled([form.loss_on_parts(loss) for form in self.forms])

    def _tiled(self, losses: Sequence[Loss]) -> Loss:
        return TiledLoss(tuple(losses), self.grid, self._prediction_axis, self.context)

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the whole sequences, if the blocks need it.

        ``x`` is this rank's part of the input. Collective over the context group if ``run.length`` is 0 (unknown).
        """
        if self.grid.context.size > 1 and not run.length:
            run = replace(run, length=_global_length(x, self.context))
        inputs = self.grid.cut(x, run.length, None)
        runs: list[Run] = run_in_turns(
            [partial(run_on, form, part, run) for form, part in zip(self.forms, inputs, strict=True)]
        )
        return replace(runs[0], ranges=()) if self.grid.along > 1 else runs[0]  # each tile finds its own

    def whole_prediction(self, y: Array) -> Array:
        """Return the whole prediction; ``y`` is the last block's output on this rank.

        Collective over the groups.
        """
        return self._joined(whole_prediction, y)[0]

    def gather_scores(self, y: Array) -> Array:
        """Return the prediction for this rank's positions, with the scores of all classes; see :func:`gather_scores`.

        Collective over the tensor group.
        """
        scores: Array = self.grid.join(self._joined(gather_scores, y), None)
        return scores

    def _joined(self, join: Callable[[Any, Array], Array], y: Array) -> list[Array]:
        length = _global_length(y, self.context) if self.grid.along > 1 else 0
        parts = self.grid.cut(y, length, self._prediction_axis)
        return run_in_turns([partial(join, form, part) for form, part in zip(self.forms, parts, strict=True)])

    def local_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a block's output, for one sample. Not collective.

        ``shape`` is the shape of the whole output for one sample.
        """
        axis = getattr(self.forms[0], "cuts", {}).get(block)
        if axis is None:
            return shape
        axis %= len(shape)
        length = sum(form.local_shape(block, shape)[axis] for form in self.forms[: self.grid.across])
        return (*shape[:axis], length, *shape[axis + 1 :])


def _global_length(x: Array, context: Group) -> int:
    """Return the number of positions of whole sequences; ``x`` has this rank's positions along axis 1.

    Collective over ``context``.
    """
    if context.size == 1:
        return int(x.shape[1])
    length = namespace(x).full(1, x.shape[1], np.int64)
    return int(context.all_gather(length, 0, (1,) * context.size, "context lengths").sum())


def _tree_sum(terms: Sequence[float]) -> float:
    total = np.empty(1)
    fold(np.add, [np.full(1, term) for term in terms], total)
    return float(total[0])

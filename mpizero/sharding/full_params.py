"""Read and write all parameters of a model by name, although pipeline stages and tensor ranks hold parts of it.

[Note: who holds what] An engine's layout describes the parameters on one pipeline stage and tensor rank. A parameter
with a ``part`` is split: each tensor rank of its stage holds a slice. A parameter without a ``part`` is held whole by
all tensor ranks, with equal bits, and is read from tensor rank 0. A parameter with a ``guest`` is a copy of a parameter
that another stage declares; it is never read, only the original is. All ranks of a data group hold the same parameters,
whole or in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.errors import LayoutError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, ParameterUse, Unit
from mpizero.layout.mesh import GROUPS, Coordinates
from mpizero.layout.tensor_parts import part_rows, part_runs, part_shape, put_rows, take_rows
from mpizero.sharding.params import ParameterStore
from mpizero.types import Array, ParameterSpec, Part, Ranges

#: A function that takes the name of a parameter of this rank's layout, and returns all its values as a flat array.
ReadParameter = Callable[[str], Array]
#: The message about a parameter that is read from a rank: its number among the whole model's parameters,
#: and axis, ranges and tiles of the slice that the rank holds, or None if it holds the whole parameter. These are plain
#: numbers, because each rank reads those of all ranks of its replica.
ParameterMessage = tuple[int, tuple[int, Ranges, tuple[Ranges, ...]] | None]


class SentParameter(NamedTuple):
    """Hold a parameter of the whole model (``entry``), and the slice of it that is read from one rank.

    ``part`` is the slice, or None for the whole parameter. ``size`` is the number of elements that are read.
    """

    entry: ParameterUse
    part: Part | None
    size: int


def speaks_for(spec: ParameterSpec, where: Coordinates) -> bool:
    """Tell whether values of a parameter are read from the rank at ``where``; ``spec`` describes what that rank holds.

    Slices are read from every tensor rank. Of a parameter that all tensor ranks hold whole, only the values on tensor
    rank 0 are read. A copy of another stage's parameter is never read.
    """
    return spec.guest is None and (spec.part is not None or where.tensor == 0)


class GlobalView:
    """Give access to all parameters of a model under the names and shapes that they have in the whole model.

    Construction is collective over the model group (``grid.model``), the ranks of a replica. If the model is not split,
    the methods call the store's methods, without further copies or messages.

    Parameters
    ----------
    blocks : mapping of str to sequence of ParameterSpec
        The parameters of the whole model, before it is split, by block in order of use.
    store : ParameterStore
        The parameters that this rank holds.
    grid : ProcessGrid
        The ranks.

    Attributes
    ----------
    layout : FlatLayout
        The layout of the whole model, in which each block is a unit; the store's layout if the model is not split.
    nodes : int
        The number of nodes (of ranks if they share no memory) in the data group that has the most.

    Raises
    ------
    LayoutError
        On every rank, if the parts that the ranks hold do not make up the model. The error names the parameter.
    """

    def __init__(self, blocks: Mapping[str, Sequence[ParameterSpec]], store: ParameterStore, grid: ProcessGrid) -> None:
        self.store, self.grid = store, grid
        self._split = grid.axes.pipeline * grid.axes.tensor > 1
        self.layout = FlatLayout.build(blocks) if self._split else store.layout
        self.nodes = grid.inter_node.size
        if self._split:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange, among the ranks of the replica, which parameters each rank sends when they are read.

        Collective over the model group.
        """
        grid, declared = self.grid, tuple(entry.spec for entry in self.store.layout.parameters)
        message, problem = list[ParameterMessage](), ""
        try:
            message = sent_parameters(self.layout, grid.coordinates, declared)
        except LayoutError as error:
            problem = str(error)
        gathered = grid.model.allgather_object((message, self.nodes, problem), "what ranks hold")
        for _, _, wrong in gathered:
            if wrong:
                raise LayoutError(wrong)
        # The ranks of a data group, contexts too, gather together; one of each context sends.
        self._sends = [
            grid.axes.coordinates(rank).context == 0 for rank in grid.axes.group(grid.world.rank, GROUPS["model"])
        ]
        check_cover(self.layout, [message for (message, *_), sends in zip(gathered, self._sends, strict=True) if sends])
        self.nodes = max(nodes for _, nodes, _ in gathered)
        self._pieces = [self._sent_parameters(message) for message, _, _ in gathered]

    def _sent_parameters(self, message: Sequence[ParameterMessage]) -> list[list[SentParameter]]:
        """Return, by unit of the whole model, the parameters that one rank sends, as its ``message`` lists them."""
        units: list[list[SentParameter]] = [[] for _ in self.layout.units]
        for number, cut in message:
            entry = self.layout.parameters[number]
            part = None if cut is None else Part(entry.spec.shape, *cut)
            size = entry.spec.size if part is None else prod(part_shape(part))
            units[entry.unit].append(SentParameter(entry, part, size))
        return units

    # ------------------------------------------------------------------ reading

    @property
    def parameter_count(self) -> int:
        """The number of parameter elements of the whole model; copies are not counted."""
        return self.layout.size

    @property
    def gathers(self) -> bool:
        """Tell whether reading parameters sends messages; the same on every rank of the world."""
        return self._split or self.store.sharded

    def vector(self) -> Array:
        """Return a new 1-D array of all parameters of the whole model, in declared order. Collective over the world."""
        full = np.empty(self.layout.size, self.store.dtype)
        for unit, values in zip(self.layout.units, self.units(), strict=True):
            full[unit.span.start : unit.span.stop] = values
        return full

    def units(self) -> Iterator[Array]:
        """Yield the values of each unit of :attr:`layout`, one unit after the other, as a new 1-D array.

        Collective over the world: every rank must take the values of all units. At any time a rank holds one unit, a
        buffer for its messages and, with sharded parameters, one gathered unit of the parameters that it stores.
        """
        read = self._reader()
        for unit in self.layout.units:
            if self._split:
                values = np.empty(unit.span.size, self.store.dtype)
                self._assemble(unit, read, values)
            else:
                values = self.store.gathered(unit)
            yield values

    def named(self, values: Array) -> dict[str, Array]:
        """Return copies of all parameters by name from ``values``, a vector like :meth:`vector`. Not collective."""
        parts = ((e.spec, values[e.span.start : e.span.stop]) for e in self.layout.parameters)
        return {spec.name: spec.view(part).copy() for spec, part in parts}

    def assemble(self, local: Array) -> Array:
        """Assemble a vector with one value for each parameter element of the whole model, such as a momentum.

        Collective over the model group. ``local`` has a value for each element of the parameters on this rank's
        pipeline stage and tensor rank, in the order of the store's layout. Values for copies of another stage's
        parameters are not used.
        """
        if not self._split:
            return local.copy()
        full = np.empty(self.layout.size, local.dtype)
        for unit in self.layout.units:
            self._assemble(unit, self._views(local), full[unit.span.start : unit.span.stop])
        return full

    def _reader(self) -> ReadParameter:
        """Return a function that returns the values of a parameter of this rank's layout, by name.

        With sharded parameters the function gathers the parameter's unit, and keeps it until it needs another unit.
        """
        layout, store = self.store.layout, self.store
        if not store.sharded:
            return self._views(store.values)
        gathered: dict[int, Array] = {}

        def read(name: str) -> Array:
            entry = layout.by_name[name]
            if entry.unit not in gathered:
                gathered.clear()
                gathered[entry.unit] = store.gathered(layout.units[entry.unit])
            span = entry.span.shift(-layout.units[entry.unit].span.start)
            return gathered[entry.unit][span.start : span.stop]

        return read

    def _views(self, values: Array) -> ReadParameter:
        """Return a function that returns the values of a parameter by name: a view of ``values``.

        ``values`` is in the order of this rank's layout.
        """
        by_name = self.store.layout.by_name
        return lambda name: values[by_name[name].span.start : by_name[name].span.stop]

    def _assemble(self, unit: Unit, read: ReadParameter, out: Array) -> None:
        """Fill ``out`` with the values of a unit of the whole model; ``read`` reads parameters of this rank's layout.

        Collective over the model group, and over the world if ``read`` gathers units.
        """
        if not unit.span.size:
            return
        group = self.grid.model
        local = [read(piece.entry.spec.name) for piece in self._pieces[group.rank][unit.index]]
        local = local if self._sends[group.rank] else []
        sent = [pieces[unit.index] if sends else [] for pieces, sends in zip(self._pieces, self._sends, strict=True)]
        counts = [sum(piece.size for piece in pieces) for pieces in sent]
        message = np.empty(out.size, out.dtype)
        group.allgatherv(np.concatenate([out[:0], *local]), message, counts, "whole parameters")
        position = 0
        for piece in (piece for pieces in sent for piece in pieces):
            values = message[position : position + piece.size]
            position += piece.size
            start = piece.entry.offset - unit.span.start
            target = out[start : start + piece.entry.spec.size]
            if piece.part is None:
                target[:] = values
            else:
                put_rows(part_rows(piece.part), values, target)

    # ------------------------------------------------------------------ writing

    def fill(self, values: Array) -> None:
        """Set all parameters, and the copies of them on other stages, from a vector of the whole model's parameters.

        Collective over the world. ``values`` must be equal on every rank.
        """
        if not self._split:
            self.store.fill(values)
            return
        self.store.memory.barrier("fill")  # ranks that still read parameters read the old ones
        for entry, part, _ in self.store.shard.pieces():
            owned, start = self.store.owned(entry.unit), self.store.shard.spans[entry.unit].start
            self._take(entry, part, values, owned[part.start - start : part.stop - start])
        self.store.all_gather()

    def owned(self, values: Array) -> Array:
        """Return the elements of ``values`` that belong to this rank's shard, concatenated. Not collective.

        ``values`` has a value for each parameter element of the whole model.
        """
        shard = self.store.shard
        local = np.empty(shard.size, values.dtype)
        for entry, part, offset in shard.pieces():
            self._take(entry, part, values, local[offset : offset + part.size])
        return local

    def _take(self, entry: ParameterUse, part: Span, values: Array, out: Array) -> None:
        """Fill ``out``, the range ``part`` of a parameter, from a vector of the whole model's parameters."""
        home = self.home(entry.spec).span
        take(entry.spec, values[home.start : home.stop], part.start - entry.offset, out)

    # ------------------------------------------------------------------ questions (not collective)

    def home(self, spec: ParameterSpec) -> ParameterUse:
        """Return the whole model's parameter that ``spec`` describes on this rank: all of it, a slice, or a copy."""
        return self.layout.by_name[spec.guest or spec.name]

    def writes(self, spec: ParameterSpec) -> bool:
        """Tell whether the array that ``spec`` describes is read from this rank, which then saves it to checkpoints."""
        return speaks_for(spec, self.grid.coordinates)


def take(spec: ParameterSpec, full: Array, start: int, out: Array) -> None:
    """Fill ``out`` with successive elements of a parameter, or of a rank's slice of it, from ``full``.

    ``full`` is the whole parameter. ``spec`` describes what the rank holds: the whole parameter or a slice of it.
    ``start`` is the index of the first element to fill, counted in what the rank holds.
    """
    if spec.part is None:
        out[:] = full[start : start + out.size]
    else:
        take_rows(part_rows(spec.part), full, start, out)


def global_ranges(spec: ParameterSpec, start: int, values: Array) -> Iterator[tuple[int, Array]]:
    """Cut values of a parameter into runs that are contiguous in the whole parameter.

    ``spec`` describes what the rank holds: the whole parameter or a slice. ``values`` are successive elements of this,
    from index ``start`` on.

    Yields
    ------
    (int, Array)
        The index in the whole parameter of the first element of a run, and a view of the run's values.
    """
    if spec.part is None:
        yield start, values
        return
    for run in part_runs(spec.part, spec.shape, start, start + values.size):
        yield run.full, values[run.local - start : run.local - start + run.size]


def sent_parameters(layout: FlatLayout, where: Coordinates, specs: Sequence[ParameterSpec]) -> list[ParameterMessage]:
    """Return the parameters that are read from the rank at ``where``, as a message. Not collective.

    ``layout`` is that of the whole model, and ``specs`` are the parameters that the rank holds.

    Raises
    ------
    LayoutError
        If the rank declares a parameter differently from the whole model. The error names the parameter.
    """
    numbers = {entry.spec.name: number for number, entry in enumerate(layout.parameters)}
    message: list[ParameterMessage] = []
    for spec in specs:
        _check_declared(layout, spec, f"pipeline stage {where.pipeline}, tensor rank {where.tensor}")
        if speaks_for(spec, where):
            part = spec.part
            message.append((numbers[spec.name], None if part is None else (part.axis, part.ranges, part.tiles)))
    return message


def check_cover(layout: FlatLayout, messages: Sequence[Sequence[ParameterMessage]]) -> None:
    """Check that each element of the model is read from exactly one rank of a replica. Not collective.

    ``layout`` is that of the whole model. ``messages`` holds the results of :func:`sent_parameters` of the ranks of a
    replica with context rank 0: which parameters are read from each.

    Raises
    ------
    LayoutError
        If an element is held by no rank, or read from several. The error names the parameter and says what is wrong.
    """
    cuts: list[list[tuple[int, Ranges] | None]] = [[] for _ in layout.parameters]
    for message in messages:
        for number, cut in message:
            cuts[number].append(None if cut is None else cut[:2])
    for entry, parts in zip(layout.parameters, cuts, strict=True):
        if parts != [None]:
            _check_cuts(entry.spec, parts)


def _check_declared(layout: FlatLayout, spec: ParameterSpec, where: str) -> None:
    home = layout.by_name.get(spec.guest or spec.name)
    if home is None:
        raise LayoutError(f"{where} holds {spec.guest or spec.name!r}, which is no parameter of the whole model")
    shape = spec.shape if spec.part is None else spec.part.shape
    if spec.part is not None and part_shape(spec.part) != spec.shape:
        raise LayoutError(f"{where} declares {spec.name!r} with shape {spec.shape}, its {spec.part} has another")
    if shape != home.spec.shape:
        raise LayoutError(f"{where} holds {spec.name!r} of shape {shape}, the whole model's has {home.spec.shape}")
    for what in ("init", "decay", "trainable", "averaged", "complex"):
        local, expected = getattr(spec, what), getattr(home.spec, what)
        if local != expected:
            raise LayoutError(f"{where} declares {spec.name!r} with {what}={local}, {home.spec.name!r} has {expected}")


def _check_cuts(spec: ParameterSpec, parts: Sequence[tuple[int, Ranges] | None]) -> None:
    cuts = [cut for cut in parts if cut is not None]
    listed = "; ".join(", ".join(f"{start}:{stop}" for start, stop in ranges) for _, ranges in cuts)
    if not cuts or len(cuts) < len(parts) or len({axis for axis, _ in cuts}) > 1:
        raise LayoutError(
            f"{spec.name!r} must be held whole, or in slices along one axis, by one pipeline stage; it is held "
            f"{len(parts) - len(cuts)} times whole and in {len(cuts)} slices{f' ({listed})' if listed else ''}"
        )
    axis, end = cuts[0][0], 0
    for start, stop in sorted(span for _, ranges in cuts for span in ranges if span[0] < span[1]):
        if start != end:
            times = "twice" if start < end else "by nobody"
            raise LayoutError(
                f"{spec.name!r}: index {min(start, end)} of axis {axis} is held {times}, by slices {listed}"
            )
        end = stop
    if end != spec.shape[axis]:
        raise LayoutError(f"{spec.name!r}: index {end} of axis {axis} is held by nobody, by slices {listed}")

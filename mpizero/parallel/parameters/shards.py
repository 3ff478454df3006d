"""Compute which ranges of parameters and gradients a rank owns, and where they begin in the rank's arrays."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, ParameterUse
from mpizero.types import ParameterSpec


@dataclass(frozen=True)
class Share:
    """Describe the shard that data rank ``rank`` of ``parts`` owns: one range of each unit's parameters.

    It owns the gradients of these parameters, too. All offsets and sizes are in elements.
    """

    layout: FlatLayout
    rank: int
    parts: int

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """For each unit, the range of the flat vector of all parameters that the rank owns."""
        return self.layout.shards(self.rank, self.parts)

    @cached_property
    def size(self) -> int:
        """Number of parameter elements that the rank owns."""
        return sum(span.size for span in self.spans)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """For each unit, where the owned range begins in the concatenation of the owned ranges of all units."""
        return _running([span.size for span in self.spans])

    @cached_property
    def gradient_spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each unit, the owned ranges of the array of the unit's gradients; tied uses have ranges of their own."""
        return tuple(self.layout.gradient_spans(unit, self.spans) for unit in self.layout.units)

    @cached_property
    def gradient_offsets(self) -> tuple[int, ...]:
        """For each unit, where its owned gradients begin in the concatenation of the owned gradients of all units."""
        return _running([sum(span.size for span in spans) for spans in self.gradient_spans])

    @cached_property
    def gradient_size(self) -> int:
        """Number of gradient elements that the rank owns."""
        return sum(span.size for spans in self.gradient_spans for span in spans)

    def row_spans(self, unit: int) -> tuple[Span, ...]:
        """Return the owned ranges of the gradients of unit number ``unit``, as ranges of the whole gradient vector."""
        base = self.layout.gradient_bases[unit]
        return tuple(span.shift(base) for span in self.gradient_spans[unit])

    @cached_property
    def gradient_kinds(self) -> tuple[tuple[Span, bool], ...]:
        """The concatenated owned gradients cut into ranges; for each, whether its elements are averaged parameters."""
        found: list[tuple[Span, bool]] = []
        position = 0
        for unit in self.layout.units:
            for span in self.row_spans(unit.index):
                for part, averaged in span.split(self.layout.averages):
                    start = position + part.start - span.start
                    if found and found[-1][1] == averaged:
                        start = found.pop()[0].start
                    found.append((Span(start, position + part.stop - span.start), averaged))
                position += span.size
        return tuple(found)

    def shard_position(self, unit: int, gradient: int) -> int:
        """Return the index, in the concatenated owned gradients, of an element that the rank owns.

        It is element ``gradient`` of the gradients of unit number ``unit``.
        """
        position = self.gradient_offsets[unit]
        for span in self.gradient_spans[unit]:
            if span.start <= gradient < span.stop:
                return position + gradient - span.start
            position += span.size
        return position


class UpdatePiece(NamedTuple):
    """Describe a contiguous range of one parameter that this rank updates.

    ``span`` is the range in the flat vector of all parameters. ``store``, ``gradient`` and ``state`` are the indices of
    its first element in the parameter store, in the reduced gradient and in the arrays of the optimizer state. ``uses``
    holds the index in the reduced gradient for each tied use of the parameter. ``group`` is the number of the
    optimizer group. For an averaged parameter, which has no state and no group, ``state`` and ``group`` are -1.
    """

    entry: ParameterUse
    span: Span
    store: int
    gradient: int
    uses: tuple[int, ...]
    state: int
    group: int

    @property
    def size(self) -> int:
        """Number of elements in the range."""
        return self.span.size


class StatePiece(NamedTuple):
    """Describe consecutive elements of one array of optimizer state that a rank keeps.

    ``spec`` describes the whole array as a parameter of the same name. ``start`` is the index of the first element in
    the flattened array, ``state`` its index in this rank's state; ``size`` is the number of elements.
    """

    spec: ParameterSpec
    start: int
    state: int
    size: int


class UpdateRun(NamedTuple):
    """Describe neighbouring pieces that one kernel call updates together.

    ``store``, ``gradient`` and ``state`` are the indices of the first element in the parameter store, in the reduced
    gradient and in the arrays of the optimizer state; ``size`` is the number of elements, ``group`` the number of the
    optimizer group.
    """

    store: int
    gradient: int
    state: int
    size: int
    group: int


def update_pieces(
    shares: Sequence[Share], groups: dict[ParameterSpec, int], store_bases: Sequence[int] | None, in_rows: bool
) -> tuple[UpdatePiece, ...]:
    """Return the pieces of parameters that a rank updates, averaged ones included; a piece is a range of one of them.

    Parameters
    ----------
    shares : sequence of Share
        The shards that the rank updates: its own or, with replicated optimizer state, the shards of all its peers.
    groups : dict
        The number of the optimizer group of each parameter; averaged ones may be left out.
    store_bases : sequence of int or None
        For each shard, the index of its first element in a sharded store; None for a store that holds all parameters.
    in_rows : bool
        Whether the reduced gradient is a row, a copy of the whole gradient vector. Otherwise it is an array of only the
        gradients that the rank owns.
    """
    pieces: list[UpdatePiece] = []
    state = 0
    for number, share in enumerate(shares):
        layout = share.layout
        for unit, span in zip(layout.units, share.spans, strict=True):
            for entry, part in layout.pieces(span):
                if not entry.spec.trainable:
                    continue
                inside = part.start - entry.offset
                store = part.start
                if store_bases is not None:
                    store = store_bases[number] + share.offsets[unit.index] + part.start - span.start
                uses = tuple(_locate(share, use, inside, in_rows) for use in layout.uses.get(entry.spec.name, ()))
                gradient = _locate(share, entry, inside, in_rows)
                averaged = entry.spec.averaged
                place = (-1, -1) if averaged else (state, groups[entry.spec])
                pieces.append(UpdatePiece(entry, part, store, gradient, uses, *place))
                state += 0 if averaged else part.size
    return tuple(pieces)


def whole_last(pieces: Sequence[UpdatePiece], whole: Container[str]) -> tuple[UpdatePiece, ...]:
    """Return the pieces, in their order, with new places in the optimizer state: those of ``whole`` come last.

    ``whole`` are the names of parameters that are updated as whole tensors. So a state array that these parameters do
    not have ends where their places begin.
    """
    sizes = [piece.size for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda number: pieces[number].entry.spec.name in whole)
    places = dict(zip(order, _running([sizes[number] for number in order]), strict=True))
    return tuple(piece._replace(state=places[number]) for number, piece in enumerate(pieces))


def _locate(share: Share, entry: ParameterUse, inside: int, in_rows: bool) -> int:
    gradient = entry.gradient + inside
    if in_rows:
        return share.layout.gradient_bases[entry.unit] + gradient
    return share.shard_position(entry.unit, gradient)


def runs_of(pieces: Sequence[UpdatePiece]) -> tuple[UpdateRun, ...]:
    """Join successive pieces of the same optimizer group into runs.

    Two pieces are joined if the second begins where the first ends in the parameter store, in the reduced gradient and
    in the optimizer state.
    """
    runs: list[UpdateRun] = []
    for piece in pieces:
        run = UpdateRun(piece.store, piece.gradient, piece.state, piece.size, piece.group)
        if runs and _follows(runs[-1], run):
            runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
        else:
            runs.append(run)
    return tuple(runs)


def _follows(first: UpdateRun, second: UpdateRun) -> bool:
    ends = (first.store + first.size, first.gradient + first.size, first.state + first.size, first.group)
    return ends == (second.store, second.gradient, second.state, second.group)


def _running(sizes: Sequence[int]) -> tuple[int, ...]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return tuple(starts)

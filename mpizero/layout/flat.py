"""Lay out named parameters in one flat array, cut the array into units, and lay out the gradients of each unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mpizero.errors import LayoutError
from mpizero.layout.partition import Partition
from mpizero.layout.unit import ParameterUse, Span, Unit
from mpizero.types import Array, ParameterSpec


@dataclass(frozen=True)
class FlatLayout:
    """Describe the flat array of all parameters and the units that it is cut into.

    Build a layout with :meth:`build`. All ranks of a data group build the same one.

    Attributes
    ----------
    units : tuple of Unit
        The units, in the order in which they lie in the flat array.
    size : int
        Number of elements of the flat array.
    """

    units: tuple[Unit, ...]
    size: int

    @classmethod
    def build(
        cls,
        blocks: Mapping[str, Sequence[ParameterSpec]],
        *,
        one_unit: bool = False,
        minimum_unit: int = 0,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> FlatLayout:
        """Lay out the parameters of named blocks.

        Parameters
        ----------
        blocks : mapping of str to sequence of ParameterSpec
            The declarations of each block's parameters, by the block's name, in the order in which blocks are used.
            The name of a block and a dot are put before the names of its parameters (nothing before those of a block
            named "").
        one_unit : bool
            Make one unit of all blocks of a group, instead of one unit per block.
        minimum_unit : int
            Least number of elements of a unit. A smaller one is joined with the next units of its group until it has
            that many; at the end of the group it is joined with the unit before it.
        groups : sequence of sequences of str or None
            The names of the blocks of each group; no unit holds blocks of two groups. A pipeline stage passes its
            chunks as groups, for example. None puts all blocks into one group.

        Raises
        ------
        LayoutError
            If two parameters have the same name, or if the parameter that a tied use refers to is missing, declared
            later or of another shape.
        """
        bounded = [tuple(blocks)] if groups is None else groups
        united = [names for group in bounded for names in _united(group, blocks, one_unit, minimum_unit)]
        builder = _Builder()
        units = tuple(builder.unit(i, names, blocks) for i, names in enumerate(united))
        return cls(units, builder.offset)

    @cached_property
    def entries(self) -> tuple[ParameterUse, ...]:
        """All uses of parameters, tied ones included, in declared order."""
        return tuple(entry for unit in self.units for entry in unit.entries)

    @cached_property
    def parameters(self) -> tuple[ParameterUse, ...]:
        """The first use of every parameter, without tied uses, in declared order."""
        return tuple(entry for entry in self.entries if entry.spec.tied is None)

    @cached_property
    def by_name(self) -> dict[str, ParameterUse]:
        """The first use of every parameter, by the parameter's global name."""
        return {entry.spec.name: entry for entry in self.parameters}

    @cached_property
    def uses(self) -> dict[str, tuple[ParameterUse, ...]]:
        """For the name of each parameter that has tied uses, these uses in declared order, without frozen ones."""
        found: dict[str, tuple[ParameterUse, ...]] = {}
        for entry in self.entries:
            if entry.spec.tied is not None and entry.gradient >= 0:
                found[entry.spec.tied] = (*found.get(entry.spec.tied, ()), entry)
        return found

    @cached_property
    def gradient_bases(self) -> tuple[int, ...]:
        """For each unit, the number of gradient elements of all units before it."""
        bases, total = [], 0
        for unit in self.units:
            bases.append(total)
            total += unit.gradients
        return tuple(bases)

    @cached_property
    def averages(self) -> tuple[Span, ...]:
        """The ranges of averaged parameters (``spec.averaged``) in the vector of the gradients of all units."""
        return self.gradients_of(lambda entry: entry.spec.averaged)

    def gradients_of(self, chosen: Callable[[ParameterUse], bool]) -> tuple[Span, ...]:
        """Return the ranges of the uses that ``chosen`` chooses in the vector of the gradients of all units, ascending.

        Ranges that follow one another without a gap are joined; uses of frozen parameters have none. Not collective.
        """
        found: list[Span] = []
        starts = {self.gradient_bases[e.unit] + e.gradient: e for e in self.entries if e.gradient >= 0 and chosen(e)}
        for start, entry in sorted(starts.items(), key=lambda item: item[0]):
            first = found.pop().start if found and found[-1].stop == start else start
            found.append(Span(first, start + entry.spec.size))
        return tuple(found)

    @cached_property
    def largest_gradient(self) -> int:
        """Number of gradient elements of the unit that has the most of them."""
        return max((unit.gradients for unit in self.units), default=0)

    @cached_property
    def largest_frozen(self) -> int:
        """Number of elements of the largest frozen parameter; 0 if none is frozen."""
        return max((entry.spec.size for entry in self.entries if entry.gradient < 0), default=0)

    @cached_property
    def largest_gathered(self) -> int:
        """The largest number of elements that a gather of one unit returns."""
        return max((unit.gathered for unit in self.units), default=0)

    def units_of(self, blocks: Iterable[str]) -> tuple[Unit, ...]:
        """Return the units whose blocks are all among the block names ``blocks``."""
        names = frozenset(blocks)
        return tuple(unit for unit in self.units if names.issuperset(unit.blocks))

    @cached_property
    def gradient_size(self) -> int:
        """Number of gradient elements of all units together."""
        return sum(unit.gradients for unit in self.units)

    def shards(self, part: int, parts: int) -> tuple[Span, ...]:
        """Return, for each unit, the range of the flat array that owner ``part`` (from 0) of ``parts`` owners holds."""
        spans = []
        for unit in self.units:
            shard = Partition(unit.span.size, parts).shard(part)
            spans.append(Span(shard.start, shard.stop).shift(unit.span.start))
        return tuple(spans)

    def gradient_spans(self, unit: Unit, shards: Sequence[Span]) -> tuple[Span, ...]:
        """Return the ranges of a unit's gradient space whose parameters one owner holds.

        ``shards`` are the owner's ranges of the flat array, one per unit, as :meth:`shards` returns them. The first
        range returned is that of the unit's own parameters. Then follows one range for each tied use that is not
        frozen; it is empty if the owner holds no element of the parameter.
        """
        own = shards[unit.index]
        spans = [Span(unit.gradient_of(own.start), unit.gradient_of(own.stop))]
        for entry in unit.aliases:
            if entry.gradient < 0:
                continue
            target = self.by_name[str(entry.spec.tied)]
            part = target.span.intersect(shards[target.unit])
            spans.append(part.shift(entry.gradient - target.offset) if part.size else Span(0, 0))
        return tuple(spans)

    def regions(self, minimum: int) -> tuple[tuple[int, Span], ...]:
        """Cut the flat array into regions of consecutive blocks; return (index of its unit, range) for each region.

        A region lies inside one unit and ends where a block ends. It has at least ``minimum`` elements; only the last
        region of a unit can have fewer.
        """
        found: list[tuple[int, Span]] = []
        for unit in self.units:
            start = stop = unit.span.start
            for block in unit.blocks:
                stop += sum(e.spec.size for e in unit.entries if e.block == block and e.spec.tied is None)
                if stop - start >= max(1, minimum):
                    found.append((unit.index, Span(start, stop)))
                    start = stop
            if stop > start:
                found.append((unit.index, Span(start, stop)))
        return tuple(found)

    def pieces(self, span: Span) -> Iterator[tuple[ParameterUse, Span]]:
        """Yield (parameter, range of the overlap) for each parameter that overlaps a range of the flat array."""
        for entry in self.parameters[bisect_right(self._stops, span.start) :]:
            if entry.offset >= span.stop:
                break
            part = entry.span.intersect(span)
            if part.size:
                yield entry, part

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        """The index at which each of ``parameters`` ends in the flat array."""
        return tuple(entry.span.stop for entry in self.parameters)


def joined(block: str, name: str) -> str:
    """Return the global name ``block.name`` of a block's parameter, without the dot if one of the two is empty."""
    return f"{block}.{name}" if block and name else block or name


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested dictionaries: ``{"a.b": x}`` becomes ``{"a": {"b": x}}``."""
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *path, leaf = name.split(".")
        level = tree
        for part in path:
            level = level.setdefault(part, {})
        level[leaf] = value
    return tree


def united(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Put the entries of the nested dictionary ``second`` into ``first``, and return that."""
    for name, value in second.items():
        first[name] = united(first[name], value) if isinstance(first.get(name), dict) else value
    return first


def views(buffer: Array, placed: Sequence[tuple[str, int, ParameterSpec]]) -> dict[str, Any]:
    """Return views of a 1-D buffer in nested dictionaries, whose keys are the names in ``placed`` cut at their dots.

    Each (name, start, spec) in ``placed`` gives a view like the parameter ``spec`` that begins with element ``start``
    of the buffer.
    """
    return nested({name: spec.view(buffer[start : start + spec.size]) for name, start, spec in placed})


def _united(
    names: Sequence[str], blocks: Mapping[str, Sequence[ParameterSpec]], one_unit: bool, minimum_unit: int
) -> list[list[str]]:
    """Join the consecutive blocks ``names`` into units as ``build`` says; return the names of each unit's blocks."""
    if one_unit:
        return [list(names)] if names else []
    units: list[list[str]] = []
    pending: list[str] = []
    for name in names:
        pending.append(name)
        if sum(s.size for b in pending for s in blocks[b] if s.tied is None) >= minimum_unit:
            units.append(pending)
            pending = []
    if pending and units:
        units[-1] += pending
    elif pending:
        units.append(pending)
    return units


class _Builder:
    """Lay out units one after the other; ``offset`` counts elements, ``known`` maps names to (declaration, offset)."""

    def __init__(self) -> None:
        self.offset = 0
        self.known: dict[str, tuple[ParameterSpec, int]] = {}

    def unit(self, index: int, names: Sequence[str], blocks: Mapping[str, Sequence[ParameterSpec]]) -> Unit:
        start, own, entries = self.offset, 0, []
        for block in names:
            for spec in blocks[block]:
                entry = self.entry(replace(spec, name=joined(block, spec.name)), block, index)
                if spec.tied is None and spec.trainable:
                    entry = replace(entry, gradient=own)
                    own += spec.size
                entries.append(entry)
        total = own
        for position, entry in enumerate(entries):
            if entry.spec.tied is not None and entry.spec.trainable:
                entries[position] = replace(entry, gradient=total)
                total += entry.spec.size
        return Unit(index, tuple(names), Span(start, self.offset), tuple(entries), own, total)

    def entry(self, spec: ParameterSpec, block: str, unit: int) -> ParameterUse:
        if spec.tied is not None:
            return self.tied_entry(spec, block, unit)
        if spec.name in self.known:
            raise LayoutError(f"parameter name {spec.name!r} is used twice; names must be unique")
        if spec.complex and spec.part is not None:
            raise LayoutError(
                f"{spec.name!r} is complex: a tensor group cannot split it; hold it whole on every rank of the group"
            )
        self.known[spec.name] = (spec, self.offset)
        self.offset += spec.size
        return ParameterUse(spec, block, unit, self.offset - spec.size, -1)

    def tied_entry(self, spec: ParameterSpec, block: str, unit: int) -> ParameterUse:
        if spec.tied not in self.known:
            raise LayoutError(f"{spec.name!r} is tied to {spec.tied!r}, which is not an earlier parameter")
        target, offset = self.known[str(spec.tied)]
        if spec.averaged or target.averaged:
            raise LayoutError(
                f"{spec.name!r} is tied to {spec.tied!r}, and averaged parameters cannot be tied: give each block a "
                "statistic of its own"
            )
        if target.shape != spec.shape:
            raise LayoutError(f"{spec.name!r} has shape {spec.shape}, its target {spec.tied!r} has {target.shape}")
        if target.complex != spec.complex:
            kinds = [("real", "complex")[kind] for kind in (spec.complex, target.complex)]
            raise LayoutError(f"{spec.name!r} is {kinds[0]}, its target {spec.tied!r} is {kinds[1]}")
        trainable = target.trainable and spec.trainable  # a frozen layer writes no gradient of what it shares
        return ParameterUse(replace(spec, trainable=trainable), block, unit, offset, -1)

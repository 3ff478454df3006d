"""Lay out named parameters in one flat array, cut the array into units, and lay out the gradients of each unit.

[Note: gradient space] The gradients of a unit have offsets of their own, the unit's gradient space. First come its own
trainable parameters (frozen ones take no space), then one slot for every tied use of a parameter that belongs to
another block or unit. A range of the unit's parameters is therefore one contiguous range of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from mpizero.errors import LayoutError
from mpizero.layout.partition import Partition
from mpizero.types import Array, ParameterSpec


class Span(NamedTuple):
    """Represent a half-open range of elements of a flat array."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """Return the common part, of size 0 when there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        """Return the range moved by ``by``."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True)
class ParameterUse:
    """Describe one use of a parameter: the parameter itself, or a tied use of an earlier one.

    Attributes
    ----------
    spec : ParameterSpec
        The parameter, under its global name.
    block : str
        The block that uses it.
    unit : int
        The unit that this use belongs to.
    offset : int
        Index of its first element in the flat array of parameters (for a tied use, the index of the shared parameter).
    gradient : int
        Index of its gradient's first element in the unit's gradient space; -1 when it has no gradient.
    """

    spec: ParameterSpec
    block: str
    unit: int
    offset: int
    gradient: int

    @property
    def local_name(self) -> str:
        """The name inside its block."""
        return self.spec.name[len(self.block) + 1 :] if self.block else self.spec.name

    @property
    def span(self) -> Span:
        """The range of its elements in the flat array of parameters."""
        return Span(self.offset, self.offset + self.spec.size)


@dataclass(frozen=True)
class Unit:
    """Describe a group of parameters that are gathered, reduced and freed together."""

    index: int
    blocks: tuple[str, ...]
    span: Span
    entries: tuple[ParameterUse, ...]
    own_gradients: int
    gradients: int

    @property
    def aliases(self) -> tuple[ParameterUse, ...]:
        """The uses in this unit of earlier parameters (tied weights)."""
        return tuple(entry for entry in self.entries if entry.spec.tied is not None)

    @cached_property
    def gathered(self) -> int:
        """Number of elements that a gather of this unit returns: its own parameters and the tied ones it uses."""
        return self.span.size + sum(entry.spec.size for entry in self.aliases)

    @cached_property
    def gradient_ranges(self) -> dict[str, tuple[Span, ...]]:
        """The ranges of each block's gradients in the unit's gradient space: as few ranges as possible."""
        found: dict[str, list[Span]] = {block: [] for block in self.blocks}
        for entry in sorted(self.entries, key=lambda entry: entry.gradient):
            ranges, span = found[entry.block], Span(entry.gradient, entry.gradient + entry.spec.size)
            if entry.gradient < 0:
                continue
            if ranges and ranges[-1].stop == span.start:
                span = Span(ranges.pop().start, span.stop)
            ranges.append(span)
        return {block: tuple(ranges) for block, ranges in found.items()}

    def gradient_of(self, offset: int) -> int:
        """Map an offset in the flat array of parameters to this unit's gradient space.

        An offset inside a frozen parameter maps to the end of the gradients before it.
        """
        position = 0
        for entry in self.entries:
            if entry.spec.tied is not None or not entry.spec.trainable:
                continue
            if offset <= entry.offset:
                return entry.gradient
            position = entry.gradient + min(entry.spec.size, offset - entry.offset)
            if offset < entry.span.stop:
                return position
        return position


@dataclass(frozen=True)
class FlatLayout:
    """Describe the flat array of all parameters and the units that it is cut into.

    Build a layout with :meth:`build`. Every rank builds the same one.
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
            The parameters of each block. Blocks come in the order of use. Names in the specs are relative to the block
            (a block named "" leaves them as they are).
        one_unit : bool
            Put everything (every group) into a single unit.
        minimum_unit : int
            Units with fewer elements than this are joined with the next one.
        groups : sequence of sequences of str or None
            Groups of consecutive blocks; no unit holds blocks of two groups. For example, the chunks of a pipeline
            stage. None puts all blocks into one group.

        Raises
        ------
        LayoutError
            On a name used twice, or a tied use whose target is missing, later or of another shape.
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
        """The first use of every parameter, in declared order: these are stored, saved and hashed."""
        return tuple(entry for entry in self.entries if entry.spec.tied is None)

    @cached_property
    def by_name(self) -> dict[str, ParameterUse]:
        """The stored parameters by name."""
        return {entry.spec.name: entry for entry in self.parameters}

    @cached_property
    def uses(self) -> dict[str, tuple[ParameterUse, ...]]:
        """The later, tied uses of each parameter that has any, in declared order, without those in frozen layers."""
        found: dict[str, tuple[ParameterUse, ...]] = {}
        for entry in self.entries:
            if entry.spec.tied is not None and entry.gradient >= 0:
                found[entry.spec.tied] = (*found.get(entry.spec.tied, ()), entry)
        return found

    @cached_property
    def gradient_bases(self) -> tuple[int, ...]:
        """The index of each unit's first gradient when the units' gradient spaces are put one after the other."""
        bases, total = [], 0
        for unit in self.units:
            bases.append(total)
            total += unit.gradients
        return tuple(bases)

    @cached_property
    def largest_gradient(self) -> int:
        """Number of gradient elements of the largest unit."""
        return max((unit.gradients for unit in self.units), default=0)

    @cached_property
    def largest_frozen(self) -> int:
        """Number of elements of the largest parameter that has no gradient."""
        return max((entry.spec.size for entry in self.entries if entry.gradient < 0), default=0)

    @cached_property
    def largest_gathered(self) -> int:
        """Number of elements that a gather of the largest unit returns."""
        return max((unit.gathered for unit in self.units), default=0)

    def units_of(self, blocks: Iterable[str]) -> tuple[Unit, ...]:
        """Return the units whose blocks are all among ``blocks``."""
        names = frozenset(blocks)
        return tuple(unit for unit in self.units if names.issuperset(unit.blocks))

    @property
    def gradient_size(self) -> int:
        """Number of elements of the gradient spaces of all units together."""
        return sum(unit.gradients for unit in self.units)

    def shards(self, part: int, parts: int) -> tuple[Span, ...]:
        """Return the ranges of the flat array that owner ``part`` of ``parts`` owns: one range for each unit."""
        spans = []
        for unit in self.units:
            shard = Partition(unit.span.size, parts).shard(part)
            spans.append(Span(shard.start, shard.stop).shift(unit.span.start))
        return tuple(spans)

    def gradient_spans(self, unit: Unit, shards: Sequence[Span]) -> tuple[Span, ...]:
        """Return the ranges of a unit's gradient space that belong to the owner of ``shards`` (one range per unit).

        The first range is for the unit's own parameters; then follows one range for each tied use.
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
        """Cut the flat array into regions that end where a block ends; return each region's unit and range.

        A region lies inside one unit. It has at least ``minimum`` elements, except for the last one of a unit.
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
        """Yield the stored parameters that overlap a range of the flat array, each with the range of the overlap."""
        for entry in self.parameters:
            part = entry.span.intersect(span)
            if part.size:
                yield entry, part


def joined(block: str, name: str) -> str:
    """Return the global name of a block's parameter; an empty name on either side adds nothing."""
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


def views(buffer: Array, placed: Sequence[tuple[str, int, tuple[int, ...]]]) -> dict[str, Any]:
    """Return views of a 1-D buffer in nested dictionaries, one for each (name, start, shape) in ``placed``."""
    sizes = [ParameterSpec(name, shape).size for name, _, shape in placed]
    return nested({name: buffer[s : s + n].reshape(shape) for (name, s, shape), n in zip(placed, sizes, strict=True)})


def _united(
    names: Sequence[str], blocks: Mapping[str, Sequence[ParameterSpec]], one_unit: bool, minimum_unit: int
) -> list[list[str]]:
    """Join consecutive blocks of a group into units; return the names of each unit's blocks."""
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
    """Lay out one unit after the other, keeping the next free offset and the parameters seen so far."""

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
        self.known[spec.name] = (spec, self.offset)
        self.offset += spec.size
        return ParameterUse(spec, block, unit, self.offset - spec.size, -1)

    def tied_entry(self, spec: ParameterSpec, block: str, unit: int) -> ParameterUse:
        if spec.tied not in self.known:
            raise LayoutError(f"{spec.name!r} is tied to {spec.tied!r}, which is not an earlier parameter")
        target, offset = self.known[str(spec.tied)]
        if target.shape != spec.shape:
            raise LayoutError(f"{spec.name!r} has shape {spec.shape}, its target {spec.tied!r} has {target.shape}")
        trainable = target.trainable and spec.trainable  # a frozen layer writes no gradient of what it shares
        return ParameterUse(replace(spec, trainable=trainable), block, unit, offset, -1)

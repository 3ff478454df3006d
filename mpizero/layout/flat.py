"""Lay out named parameters in one flat array, and cut the array into units, shards, and boxes that files hold.

A :class:`Unit` is a group of parameters that are gathered, reduced and freed together. A :class:`Partition` divides
elements into contiguous shards whose sizes differ by at most one; :func:`owners_by_cost` assigns indivisible items to
owners. The :class:`FlatLayout` of a model has its units, computes their shards, and says where each gradient lies.
:func:`hyperslabs` cuts a range of C-order elements into rectangular blocks, as HDF5 selects them.

[Note: gradient space] The gradients of a unit are laid out in an array of their own, the unit's gradient space. First
come the gradients of the unit's own trainable parameters (frozen ones take no space), then the gradient of each tied
use of an earlier parameter. So the gradients of a contiguous range of the unit's own parameters are contiguous too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeVar

from mpizero.errors import LayoutError
from mpizero.types import Array, IntegerSpec, ParameterSpec

#: What a block declares: parameters or integer arrays.
_Spec = TypeVar("_Spec", ParameterSpec, IntegerSpec)


class Span(NamedTuple):
    """Represent the range of elements ``start`` to ``stop - 1`` of a flat array.

    Examples
    --------
    >>> import mpizero as mz
    >>> span = mz.layout.Span(4, 7)
    >>> span.start, span.stop, list(range(10))[slice(*span)]
    (4, 7, [4, 5, 6])
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements of the range."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """Return the elements that both ranges have in common: a range of size 0 if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        """Return this range moved by ``by`` elements."""
        return Span(self.start + by, self.stop + by)

    def split(self, chosen: Iterable[Span]) -> Iterator[tuple[Span, bool]]:
        """Cut this range where the ranges ``chosen`` begin and end; yield (part, whether it is inside one of them).

        ``chosen`` is in ascending order. Not collective.
        """
        start = self.start
        for part in (common for one in chosen if (common := one.intersect(self)).size):
            if start < part.start:
                yield Span(start, part.start), False
            yield part, True
            start = part.stop
        if start < self.stop:
            yield Span(start, self.stop), False


@dataclass(frozen=True)
class ParameterUse:
    """Describe one use of a parameter by a block: its first use, or a tied use of a parameter declared earlier.

    Attributes
    ----------
    spec : ParameterSpec
        Declaration of the parameter in this block. The parameter's name in ``spec`` is global: it starts with the name
        of the block.
    block : str
        Name of the block that uses the parameter.
    unit : int
        Index of the block's unit in :attr:`FlatLayout.units`.
    offset : int
        Index of the parameter's first element in the flat array of parameters. A tied use has the offset of the
        parameter that it is tied to.
    gradient : int
        Index of the first element of this use's gradient in the unit's gradient space (the array of all gradients of
        the unit); -1 for a frozen parameter, which has no gradient.
    """

    spec: ParameterSpec
    block: str
    unit: int
    offset: int
    gradient: int

    @property
    def local_name(self) -> str:
        """The parameter's name without the name of the block."""
        return self.spec.name[len(self.block) + 1 :] if self.block else self.spec.name

    @property
    def span(self) -> Span:
        """The range of the parameter's elements in the flat array of parameters."""
        return Span(self.offset, self.offset + self.spec.size)


@dataclass(frozen=True)
class Unit:
    """Describe a group of parameters that are gathered, reduced and freed together.

    Attributes
    ----------
    index : int
        Index of this unit in :attr:`FlatLayout.units`.
    blocks : tuple of str
        Names of the unit's blocks, in declared order.
    span : Span
        The range of the unit's own parameters (tied uses excluded) in the flat array of parameters.
    entries : tuple of ParameterUse
        All uses of parameters by the blocks, tied uses included, in declared order.
    untied_gradients : int
        Number of gradient elements of the unit's own parameters.
    gradients : int
        Number of gradient elements of the unit: ``untied_gradients`` and the gradients of its tied uses.
    """

    index: int
    blocks: tuple[str, ...]
    span: Span
    entries: tuple[ParameterUse, ...]
    untied_gradients: int
    gradients: int

    @property
    def aliases(self) -> tuple[ParameterUse, ...]:
        """Those of :attr:`entries` that use a parameter which was declared earlier (tied uses)."""
        return tuple(entry for entry in self.entries if entry.spec.tied is not None)

    @cached_property
    def gathered(self) -> int:
        """Number of elements that a gather of this unit returns: its own parameters, and a copy for each tied use."""
        return self.span.size + sum(entry.spec.size for entry in self.aliases)

    @cached_property
    def gradient_ranges(self) -> dict[str, tuple[Span, ...]]:
        """The ranges of each block's gradients in the array of the unit's gradients, by the block's name.

        Gradients that follow one another without a gap form one range.
        """
        by_block: dict[str, list[Span]] = {block: [] for block in self.blocks}
        for entry in sorted(self.entries, key=lambda entry: entry.gradient):
            ranges, span = by_block[entry.block], Span(entry.gradient, entry.gradient + entry.spec.size)
            if entry.gradient < 0:
                continue
            if ranges and ranges[-1].stop == span.start:
                span = Span(ranges.pop().start, span.stop)
            ranges.append(span)
        return {block: tuple(ranges) for block, ranges in by_block.items()}

    def gradient_of(self, offset: int) -> int:
        """Return the index, among this unit's gradients, of the gradient of element ``offset`` of the flat parameters.

        The gradients of a unit leave out frozen parameters. For an element of one of these, return the index at which
        the gradients of the elements before it end.
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
class Partition:
    """Cut ``length`` elements into ``parts`` contiguous shards; the first ``length % parts`` shards get one more.

    Parameters
    ----------
    length : int
        Number of elements, zero included.
    parts : int
        Number of shards. If ``parts`` is greater than ``length``, the last shards are empty.

    Raises
    ------
    LayoutError
        If ``length < 0`` or ``parts < 1``.

    Examples
    --------
    >>> import mpizero as mz
    >>> [(s.start, s.stop) for s in mz.layout.Partition(10, 3)]
    [(0, 4), (4, 7), (7, 10)]
    """

    length: int
    parts: int

    def __post_init__(self) -> None:
        """Raise :class:`LayoutError` if ``length < 0`` or ``parts < 1``."""
        if self.length < 0 or self.parts < 1:
            raise LayoutError(f"a partition needs length >= 0 and parts >= 1, got {self.length=} and {self.parts=}")

    def shard(self, part: int) -> slice:
        """Return the range of elements of shard number ``part``, counted from 0."""
        if not 0 <= part < self.parts:
            raise LayoutError(f"shard {part} does not exist: there are {self.parts} shards")
        base, extra = divmod(self.length, self.parts)
        start = part * base + min(part, extra)
        return slice(start, start + base + (part < extra))

    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each shard."""
        return _sizes(self)

    def __iter__(self) -> Iterator[slice]:
        """Iterate over the ranges of elements of all shards, in order."""
        return (self.shard(part) for part in range(self.parts))


@lru_cache(maxsize=1024)  # split layers ask again and again
def _sizes(partition: Partition) -> tuple[int, ...]:
    return tuple(shard.stop - shard.start for shard in partition)


def owners_by_cost(costs: Sequence[int], parts: int) -> tuple[int, ...]:
    """Assign items to ``parts`` owners so that the owners' total costs are about equal; return each item's owner.

    Items are assigned in descending order of cost, each to the owner with the least total cost so far (the rule of the
    longest processing time, Graham 1969); ties go to the first item and the first owner. No owner's total cost is more
    than 4/3 of the largest total cost in the best assignment.
    """
    owners, loads = [0] * len(costs), [(0, owner) for owner in range(parts)]
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        load, owners[thing] = loads[0]
        heapreplace(loads, (load + costs[thing], owners[thing]))
    return tuple(owners)


@dataclass(frozen=True)
class FlatLayout:
    """Describe the flat array of all parameters and the units that it is cut into.

    Build a layout with :meth:`build`. All ranks of a data group build the same layout.

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
            Least number of elements of a unit. A smaller unit is joined with the next units of its group until it has
            ``minimum_unit`` elements; at the end of the group it is joined with the unit before it.
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
        """All uses of parameters by blocks, in declared order; a tied parameter has several."""
        return tuple(entry for unit in self.units for entry in unit.entries)

    @cached_property
    def parameters(self) -> tuple[ParameterUse, ...]:
        """The first use of every parameter, in declared order; the further uses of tied parameters are left out."""
        return tuple(entry for entry in self.entries if entry.spec.tied is None)

    @cached_property
    def by_name(self) -> dict[str, ParameterUse]:
        """For every parameter, by global name, its first use; a tied parameter has more uses than this one."""
        return {entry.spec.name: entry for entry in self.parameters}

    @cached_property
    def uses(self) -> dict[str, tuple[ParameterUse, ...]]:
        """The tied uses of each parameter that is trained, by the parameter's name, in declared order."""
        by_name: dict[str, tuple[ParameterUse, ...]] = {}
        for entry in self.entries:
            if entry.spec.tied is not None and entry.gradient >= 0:
                by_name[entry.spec.tied] = (*by_name.get(entry.spec.tied, ()), entry)
        return by_name

    @cached_property
    def gradient_bases(self) -> tuple[int, ...]:
        """For each unit, the number of gradient elements of all units before it."""
        return tuple(accumulate((unit.gradients for unit in self.units), initial=0))[:-1]

    @cached_property
    def averages(self) -> tuple[Span, ...]:
        """The ranges of averaged parameters (``spec.averaged``) in the vector of all units' gradients."""
        return self.gradients_of(lambda entry: entry.spec.averaged)

    def gradients_of(self, chosen: Callable[[ParameterUse], bool]) -> tuple[Span, ...]:
        """Return the ascending ranges of gradients of those uses of parameters for which ``chosen`` is true.

        The ranges are in the vector of the gradients of all units. Ranges without a gap between them are joined; uses
        of frozen parameters have no range. Not collective.
        """
        ranges: list[Span] = []
        starts = {self.gradient_bases[e.unit] + e.gradient: e for e in self.entries if e.gradient >= 0 and chosen(e)}
        for start, entry in sorted(starts.items(), key=lambda item: item[0]):
            first = ranges.pop().start if ranges and ranges[-1].stop == start else start
            ranges.append(Span(first, start + entry.spec.size))
        return tuple(ranges)

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
        """Return, for each unit, the range of the flat array that rank ``part`` (from 0) of ``parts`` ranks owns."""
        spans = []
        for unit in self.units:
            shard = Partition(unit.span.size, parts).shard(part)
            spans.append(Span(shard.start, shard.stop).shift(unit.span.start))
        return tuple(spans)

    def gradient_spans(self, unit: Unit, shards: Sequence[Span]) -> tuple[Span, ...]:
        """Return the ranges of a unit's gradients whose parameters one owner (rank that updates them) holds.

        ``shards`` are the owner's ranges of the flat array, one per unit, as :meth:`shards` returns them. The first
        range returned is that of the unit's own parameters. One range for each tied use that is not frozen follows; a
        range is empty if the owner holds no element of the parameter.
        """
        shard = shards[unit.index]
        spans = [Span(unit.gradient_of(shard.start), unit.gradient_of(shard.stop))]
        for entry in unit.aliases:
            if entry.gradient < 0:
                continue
            target = self.by_name[str(entry.spec.tied)]
            part = target.span.intersect(shards[target.unit])
            spans.append(part.shift(entry.gradient - target.offset) if part.size else Span(0, 0))
        return tuple(spans)

    def regions(self, minimum: int) -> tuple[tuple[int, Span], ...]:
        """Cut the flat array into regions of consecutive blocks; return (index of the unit, range) for each region.

        A region lies inside one unit and ends where a block ends. A region has at least ``minimum`` elements; only the
        last region of a unit can have fewer.
        """
        regions: list[tuple[int, Span]] = []
        for unit in self.units:
            start = stop = unit.span.start
            for block in unit.blocks:
                stop += sum(e.spec.size for e in unit.entries if e.block == block and e.spec.tied is None)
                if stop - start >= max(1, minimum):
                    regions.append((unit.index, Span(start, stop)))
                    start = stop
            if stop > start:
                regions.append((unit.index, Span(start, stop)))
        return tuple(regions)

    def pieces(self, span: Span) -> Iterator[tuple[ParameterUse, Span]]:
        """Yield each parameter with elements in the range ``span`` of the flat array, and the range of these."""
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


def _united(
    names: Sequence[str], blocks: Mapping[str, Sequence[ParameterSpec]], one_unit: bool, minimum_unit: int
) -> list[list[str]]:
    """Join the consecutive blocks ``names`` into units as in :meth:`FlatLayout.build`; return each unit's blocks."""
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
    """Lay out units one after the other; keep what has been laid out.

    ``offset`` is the number of elements laid out so far; ``known`` maps the name of each parameter laid out so far to
    its declaration and the index of its first element.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.known: dict[str, tuple[ParameterSpec, int]] = {}

    def unit(self, index: int, names: Sequence[str], blocks: Mapping[str, Sequence[ParameterSpec]]) -> Unit:
        start, untied, entries = self.offset, 0, []
        for block in names:
            for spec in blocks[block]:
                entry = self.entry(replace(spec, name=joined(block, spec.name)), block, index)
                if spec.tied is None and spec.trainable:
                    entry = replace(entry, gradient=untied)
                    untied += spec.size
                entries.append(entry)
        total = untied
        for position, entry in enumerate(entries):
            if entry.spec.tied is not None and entry.spec.trainable:
                entries[position] = replace(entry, gradient=total)
                total += entry.spec.size
        return Unit(index, tuple(names), Span(start, self.offset), tuple(entries), untied, total)

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


def joined(block: str, name: str) -> str:
    """Return the global name ``block.name`` of a block's parameter, without the dot if one of the two is empty."""
    return f"{block}.{name}" if block and name else block or name


def by_global_name(blocks: Mapping[str, Sequence[_Spec]]) -> dict[str, _Spec]:
    """Return the parameters or integer arrays that blocks declare by their global names, in declared order."""
    return {joined(block, spec.name): spec for block, specs in blocks.items() for spec in specs}


def flat_names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the dotted name, beginning with ``prefix``, and the array of every entry of a nested dictionary.

    The function is the inverse of :func:`nested`. ``prefix``, such as the name of a block, is put before the names by
    :func:`joined`.
    """
    for name, value in tree.items():
        full_name = joined(prefix, name)
        if isinstance(value, Mapping):
            yield from flat_names(value, full_name)
        else:
            yield full_name, value


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


def value_at(tree: Any, name: str) -> Any:
    """Return the entry of nested dictionaries at a dotted name; raise KeyError if there is none. Not collective."""
    for part in name.split("."):
        tree = tree[part]
    return tree


def united(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Put the entries of the nested dictionary ``second`` into ``first``, and return ``first``.

    A dictionary that both have under the same key is united in the same way; another entry of ``first`` is replaced.
    """
    for name, value in second.items():
        first[name] = united(first[name], value) if isinstance(first.get(name), dict) else value
    return first


def views(buffer: Array, placed: Sequence[tuple[str, int, ParameterSpec]]) -> dict[str, Any]:
    """Return views of a 1-D buffer in nested dictionaries, whose keys are the names in ``placed`` cut at their dots.

    Each (name, start, spec) in ``placed`` gives one view, which has the shape of the parameter ``spec`` and begins at
    element ``start`` of the buffer.
    """
    return nested({name: spec.view(buffer[start : start + spec.size]) for name, start, spec in placed})


def hyperslabs(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut the elements ``start:stop`` of an array into at most ``2 * ndim - 1`` disjoint rectangular blocks, in order.

    Parameters
    ----------
    shape : sequence of int
        Shape of the array; ``()`` is a scalar.
    start, stop : int
        Range of elements, as indices into the array flattened in C order.

    Yields
    ------
    tuple of slice
        One block, as one slice for each axis of the array.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _inside_row(shape, first, head, tail)
        return
    if head:
        yield from _inside_row(shape, first, head, row)
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    if tail:
        yield from _inside_row(shape, last, 0, tail)


def _inside_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    for block in hyperslabs(shape[1:], start, stop):
        yield (slice(index, index + 1), *block)

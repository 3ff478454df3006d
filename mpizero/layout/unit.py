"""Describe units: groups of parameters that are gathered, reduced and freed together, and where their gradients lie.

[Note: gradient space] The gradients of a unit are laid out in an array of their own, the unit's gradient space. First
come the gradients of the unit's own trainable parameters (frozen ones take no space), then the gradient of each tied
use of an earlier parameter. A range of the unit's own parameters has therefore one contiguous range of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpizero.types import ParameterSpec


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
        """Return this range with ``by`` added to its start and to its stop."""
        return Span(self.start + by, self.stop + by)

    def split(self, chosen: Iterable[Span]) -> Iterator[tuple[Span, bool]]:
        """Cut this range where the ranges ``chosen``, in ascending order, begin and end; yield (part, whether inside).

        Not collective.
        """
        start = self.start
        for part in (found for one in chosen if (found := one.intersect(self)).size):
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
        Declaration of the parameter in this block. Its name is global: it starts with the name of the block.
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
    own_gradients : int
        Number of gradient elements of the unit's own parameters.
    gradients : int
        Number of gradient elements of the unit: ``own_gradients`` and the gradients of its tied uses.
    """

    index: int
    blocks: tuple[str, ...]
    span: Span
    entries: tuple[ParameterUse, ...]
    own_gradients: int
    gradients: int

    @property
    def aliases(self) -> tuple[ParameterUse, ...]:
        """The tied uses: the entries of this unit that use a parameter which was declared earlier."""
        return tuple(entry for entry in self.entries if entry.spec.tied is not None)

    @cached_property
    def gathered(self) -> int:
        """Number of elements that a gather of this unit returns: its own parameters, and a copy for each tied use."""
        return self.span.size + sum(entry.spec.size for entry in self.aliases)

    @cached_property
    def gradient_ranges(self) -> dict[str, tuple[Span, ...]]:
        """For the name of each block, the ranges of its gradients in the unit's gradient space.

        Gradients that follow one another without a gap form one range.
        """
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
        """Return the index, in this unit's gradient space, of the gradient of element ``offset`` of the flat array.

        An element of a frozen parameter has no gradient. For it, return the index at which the gradients of the
        elements before it end.
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

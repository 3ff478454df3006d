"""Compute the sizes of the shards of all ranks of a stage's data group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, Unit
from mpizero.layout.sum_tree import cover
from mpizero.layout.tensor_parts import elements_within, tile_rows
from mpizero.sharding.params import Share


@dataclass(frozen=True)
class ShardSizes:
    """Compute the sizes of the shards into which a data group of ``parts`` ranks divides a layout.

    Attributes
    ----------
    layout : FlatLayout
        The parameters that one pipeline stage and tensor rank holds.
    parts : int
        Number of ranks of the data group.
    """

    layout: FlatLayout
    parts: int

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The shards of each data rank."""
        return tuple(Share(self.layout, rank, self.parts) for rank in range(self.parts))

    @cached_property
    def gradients(self) -> tuple[tuple[int, ...], ...]:
        """The number of gradient elements that a data rank owns in a unit, as ``gradients[rank][unit]``."""
        return tuple(tuple(sum(s.size for s in spans) for spans in share.gradient_spans) for share in self.shares)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """For each data rank, the number of its elements that an optimizer trains; tied uses are not counted."""
        own = (sum(spans[0].size for spans in share.gradient_spans) for share in self.shares)
        averaged = (sum(span.size for span, average in share.gradient_kinds if average) for share in self.shares)
        return tuple(all_own - average for all_own, average in zip(own, averaged, strict=True))

    def parameters(self, rank: int, unit: int, region: Span) -> int:
        """Return how many elements data rank ``rank`` owns in the range ``region`` of unit ``unit``. Not collective."""
        return self.shares[rank].spans[unit].intersect(region).size

    def gathered(self, rank: int, unit: Unit) -> tuple[int, ...]:
        """Return how many elements data rank ``rank`` sends in each message when ``unit`` is gathered. Not collective.

        The first message carries the unit's own parameters. Each further message carries a parameter that the unit uses
        but another unit owns, such as a token table that is both embedding and head.
        """
        spans = self.shares[rank].spans
        homes = [(entry, self.layout.by_name[str(entry.spec.tied)].unit) for entry in unit.aliases]
        return (spans[unit.index].size, *(entry.span.intersect(spans[home]).size for entry, home in homes))

    def squares(self, rank: int) -> int:
        """Return how many partial sums of squares data rank ``rank`` sends when a norm is computed. Not collective."""
        found = 0
        for unit, span in zip(self.layout.units, self.shares[rank].spans, strict=True):
            for entry in unit.entries:
                part = entry.span.intersect(span)
                if part.size and entry.spec.optimized and entry.spec.tied is None:
                    start = part.start - entry.offset
                    for rows in tile_rows(entry.spec):
                        held = elements_within(rows, start, start + part.size)
                        found += len(cover(held.start, held.stop, rows.size))
        return found

"""Overlap the reduction of gradients between nodes with the backward pass that still computes them (DDP).

[Note: buckets of rows] The row space is cut into buckets from its end: blocks come to the end of their backward pass
from the last to the first. As soon as every block that reaches into a bucket has ended on this rank, and a barrier says
the same of its node, the bucket's partial sums are exchanged. The peers share each bucket evenly: were it summed by the
rank whose share of the flat order it is in, as at the end of a step, all others would send to that one at a time. Then
each brings its part to all peers, straight to its place in their first rows. One exchange is in flight at a time, and
any number of gathers, which take no buffers. Every element is summed by its tree, on whichever rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpizero.comm.reduce.exact import Gathering, begin_gather, exchange_step
from mpizero.comm.reduce.segments import Arriving, Segment, program_array, tree_sum
from mpizero.layout import Partition, RowsPlan, Span
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array


class Bucket(NamedTuple):
    """Describe the part of the row space that travels at once.

    Attributes
    ----------
    start : int
        Nothing before this place of the row space belongs to it.
    parts : tuple of tuple of Span
        What each peer sums of it; each has as many spans, of which some may be empty.
    """

    start: int
    parts: tuple[tuple[Span, ...], ...]


def cut_buckets(
    spans: Sequence[Sequence[Span]], size: int, counts: Sequence[int], elements: int | None
) -> list[Bucket]:
    """Cut a row space of ``size`` elements into buckets, the last places first. Not collective.

    Parameters
    ----------
    spans : sequence over peers of sequences of Span
        The ranges of the row space that belong to the peers together.
    size : int
        Elements of a row.
    counts : sequence of int
        Partial sums of each group.
    elements : int or None
        Elements in flight at once; None is the default of the exchange.
    """
    peers = len(counts)
    whole = peers * exchange_step(counts, elements)
    mine = sorted((span for group in spans for span in group if span.size), key=lambda span: span.start)
    found = []
    for stop in range(size, 0, -whole):
        start = max(0, stop - whole)
        held = [span.intersect(Span(start, stop)) for span in mine]
        found.append(Bucket(start, _shared_evenly([span for span in held if span.size], peers)))
    return found


def _shared_evenly(spans: Sequence[Span], peers: int) -> tuple[tuple[Span, ...], ...]:
    """Cut the concatenation of ``spans`` by the shard rule; each part has a place for each of them."""
    total, parts = sum(span.size for span in spans), []
    for shard in Partition(total, peers):
        own = Span(shard.start, shard.stop)
        place, part = 0, []
        for span in spans:
            inside = own.intersect(Span(place, place + span.size))
            part.append(inside.shift(span.start - place) if inside.size else Span(0, 0))
            place += span.size
        parts.append(tuple(part))
    return tuple(parts)


class OverlappedReduction:
    """Sum one step's rows over the groups of ranks, bucket by bucket as blocks end.

    Parameters
    ----------
    store : ParameterStore
        The parameters: where their gradients stand in a row, the memory of the node, and the timeline.
    exchange : GradientExchange
        Without compression.
    spans : sequence over peers of sequences of Span
        The ranges of the row space that belong to the peers together.
    plan : RowsPlan
        What each group adds up, and what is added of all groups.
    rows : (2-D array, 1-D array)
        The window of the group, and this rank's first row, which takes the sums over all of ``spans``.
    """

    def __init__(
        self,
        store: ParameterStore,
        exchange: GradientExchange,
        spans: Sequence[Sequence[Span]],
        plan: RowsPlan,
        rows: tuple[Array, Array],
    ) -> None:
        self._memory, self._timeline, layout = store.memory, store.timeline, store.layout
        self._exchange, (self._rows, self.total) = exchange, rows
        self._counts = [len(programs) for programs in plan.group_programs]
        self._sums = [program_array(program) for program in plan.group_programs[exchange.peers.rank]]
        self._root = program_array(plan.root)
        self._one = np.ones(1, self.total.dtype)
        self._buckets = cut_buckets(spans, layout.gradient_size, self._counts, exchange.elements)[::-1]
        self._ends = {block: 0 for unit in layout.units for block in unit.blocks}
        for entry in layout.entries:
            if entry.gradient >= 0:
                end = layout.gradient_bases[entry.unit] + entry.gradient + entry.spec.size
                self._ends[entry.block] = max(self._ends[entry.block], end)
        self._final = layout.gradient_size
        self._exchanging: tuple[Bucket, Arriving] | None = None
        self._gatherings: list[Gathering] = []

    @property
    def in_flight(self) -> int:
        """Exchanges and gathers that are not known to have ended. Not collective."""
        return (self._exchanging is not None) + len(self._gatherings)

    def ended(self, blocks: Sequence[str], fold: Callable[[int, int], None]) -> None:
        """Fold what is final of the row now that ``blocks`` have ended, and begin the buckets inside.

        Collective over the data group, when all ranks have come to the same place.

        Parameters
        ----------
        blocks : sequence of str
            Their gradients are written; they may have been named before.
        fold : callable
            Called with the first place of the row space that is final now, and the place after the last.
        """
        for block in blocks:
            self._ends.pop(block, None)
        start = max(self._ends.values(), default=0)
        if start < self._final:
            fold(start, self._final)
            self._final = start
        while self._buckets and self._buckets[-1].start >= self._final:
            self._begin(self._buckets.pop())

    def poll(self) -> None:
        """Let messages move on. Not collective."""
        if self._exchanging is not None:
            self._exchanging[1].test()
        self._gatherings[:] = [gathering for gathering in self._gatherings if not gathering.test()]

    def finish(self) -> None:
        """Begin the rest and wait for all: :attr:`total` then has the sums. Collective over the data group."""
        self._final = 0
        while self._buckets:
            self._begin(self._buckets.pop())
        self._arrive()
        for gathering in self._gatherings:
            gathering.wait()
        self._gatherings.clear()

    def _begin(self, bucket: Bucket) -> None:
        begun = self._timeline.begin()
        self._arrive()
        self._memory.barrier("rows")
        windows: list[list[tuple[int, Span]]] = [[] for _ in bucket.parts]
        for window, part in zip(windows, bucket.parts, strict=True):
            window += [(0, span) for span in part if span.size]
        if any(windows):
            segment = Segment(self._rows, windows, self._counts, self._sums, "gradients")
            self._exchanging = bucket, self._exchange.begin_segment(segment)
        self._timeline.end("reduction", "bucket", begun)

    def _arrive(self) -> None:
        """Wait for the exchange in flight, add up what has come, and begin to give it to all peers."""
        if self._exchanging is None:
            return
        (bucket, arriving), self._exchanging = self._exchanging, None
        for piece in arriving.pieces():
            out = self.total[piece.target : piece.target + piece.size]
            tree_sum(piece.rows, piece.first, self._root, self._one, out)
        peers = self._exchange.peers
        own = [self.total[span.start : span.stop] for span in bucket.parts[peers.rank]]
        self._gatherings.append(begin_gather(peers, own, self.total, bucket.parts))

"""Reduce gradients between nodes while the backward pass still computes other gradients (DDP).

[Note: buckets of rows] A row is one copy of the whole gradient vector. It is cut into buckets from its end, because the
backward pass goes from the last block to the first. A bucket's partial sums are exchanged as soon as every block in it
has finished its backward pass on all ranks of the node; a barrier of the node makes sure of that. Each peer sums an
equal part of the bucket. (A reduction at the end of a step lets each peer sum the elements of its shard instead. But
all elements of one bucket may be in one shard, and then all ranks would send to one peer.) Then each peer sends its
part of the sums to all peers, into their first rows. One exchange of partial sums is in flight at a time, and any
number of all-gathers of sums, because these need no buffers. Every element is added in the order of the tree, so it
does not matter which rank adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpizero.comm.reduce import Arriving, Gathering, Segment, begin_gather, exchange_step, program_array, tree_sum
from mpizero.layout import Partition, Span
from mpizero.layout.sum_tree import RowsPlan
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array


class Bucket(NamedTuple):
    """Describe a range of the gradient vector that is exchanged at once.

    Attributes
    ----------
    start : int
        First element of the bucket in the row.
    parts : tuple of tuple of Span
        For each peer, the ranges of the row that it sums. All peers have equally many ranges; some may be empty.
    """

    start: int
    parts: tuple[tuple[Span, ...], ...]


def cut_buckets(
    spans: Sequence[Sequence[Span]], size: int, counts: Sequence[int], elements: int | None
) -> list[Bucket]:
    """Cut a row of ``size`` elements into buckets, from its end to its start. Not collective.

    Parameters
    ----------
    spans : sequence over peers of sequences of Span
        The ranges of the row that each peer owns.
    size : int
        Number of elements of a row.
    counts : sequence of int
        For each peer, the number of partial sums that its node sends.
    elements : int or None
        Number of elements in flight at once; None is the default of the exchange.

    Returns
    -------
    list of Bucket
        The buckets, the last one of the row first.
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
    """Cut the concatenation of ``spans`` by the shard rule; return, for each peer, its part of every span."""
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
    """Sum the rows of one step over the peers, bucket by bucket, while blocks end their backward pass.

    Parameters
    ----------
    store : ParameterStore
        The parameters; says where their gradients are in a row, and has the node's memory and the timeline.
    exchange : GradientExchange
        Sends partial sums between peers; it must not compress them.
    spans : sequence over peers of sequences of Span
        The ranges of the row that each peer owns.
    plan : RowsPlan
        Which rows each node adds up, and how the sums of all nodes are added.
    rows : (2-D array, 1-D array)
        The shared window with all rows of the node, and this rank's first row, to which the sums are written.
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
        self._exchanging: tuple[Bucket, Arriving] | None = None
        self._gatherings: list[Gathering] = []

    @property
    def in_flight(self) -> int:
        """The number of exchanges and all-gathers that may still be in flight. Not collective."""
        return (self._exchanging is not None) + len(self._gatherings)

    def ended(self, blocks: Sequence[str]) -> None:
        """Record that this rank's sums of ``blocks`` are complete, and begin to exchange the buckets that are so now.

        Collective over the data group; every rank calls it for the same blocks in the same order. ``blocks`` are those
        whose gradients have been added to the gradients of earlier grains; a block may be named more than once.
        """
        for block in blocks:
            self._ends.pop(block, None)
        final = max(self._ends.values(), default=0)
        while self._buckets and self._buckets[-1].start >= final:
            self._begin(self._buckets.pop())

    def poll(self) -> None:
        """Let exchanges and all-gathers in flight progress. Not collective."""
        if self._exchanging is not None:
            self._exchanging[1].test()
        self._gatherings[:] = [gathering for gathering in self._gatherings if not gathering.test()]

    def finish(self) -> None:
        """Exchange the remaining buckets, and wait until :attr:`total`, this rank's first row, has all sums.

        Collective over the data group.
        """
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
        """Wait for the exchange in flight, add up its partial sums, and begin to send this rank's sums to all peers."""
        if self._exchanging is None:
            return
        (bucket, arriving), self._exchanging = self._exchanging, None
        for piece in arriving.pieces():
            out = self.total[piece.target : piece.target + piece.size]
            tree_sum(piece.rows, piece.first, self._root, self._one, out)
        peers = self._exchange.peers
        own = [self.total[span.start : span.stop] for span in bucket.parts[peers.rank]]
        self._gatherings.append(begin_gather(peers, own, self.total, bucket.parts))

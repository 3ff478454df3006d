"""Segments of partial sums that are exchanged one after the other, a few at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.comm.reduce import IN_FLIGHT, ExactExchange, RowsToSum, Segment, SegmentQueue
from mpizero.layout import Partition, Span
from mpizero.testing import run_in_threads

RANKS, SIZE = 3, 500


class Watched(ExactExchange):
    """An exchange that notes the segments that have begun."""

    begun = 0

    def begin_segment(self, segment: Segment, **settings: Any) -> Any:
        self.begun += 1
        return super().begin_segment(segment, **settings)


def rows_of(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((1, SIZE)).astype(np.float32)


def begin(comm: Any) -> tuple[Watched, SegmentQueue, np.ndarray, np.ndarray]:
    """Add many segments to a queue; return the exchange, the queue, this rank's rows, and what it has received."""
    exchange, rows = Watched(comm, elements=RANKS * RANKS * 4), rows_of(comm.rank)
    ranges = [[Span(shard.start, shard.stop)] for shard in Partition(SIZE, RANKS)]
    own, queue = ranges[comm.rank][0], SegmentQueue(exchange)
    received = np.full((RANKS, own.size), np.nan, np.float32)

    def take(pieces: Any) -> None:
        for piece in pieces:
            received[:, piece.position : piece.position + piece.size] = piece.rows[:, piece.first :][:, : piece.size]

    queue.add(exchange.segments(RowsToSum(rows, ranges, [[(0,)]] * RANKS)), take)
    return exchange, queue, rows, received


def expected(rank: int) -> np.ndarray:
    shard = list(Partition(SIZE, RANKS))[rank]
    return np.concatenate([rows_of(peer)[:, shard.start : shard.stop] for peer in range(RANKS)])


def test_a_queue_exchanges_every_segment_and_only_a_few_at_a_time():
    def run(comm: Any) -> bool:
        exchange, queue, _, received = begin(comm)
        few = exchange.begun == IN_FLIGHT
        queue.finish()
        return few and not queue and np.array_equal(received, expected(comm.rank))

    assert all(run_in_threads(RANKS, run))


def test_rows_may_be_overwritten_when_all_segments_have_begun():
    def run(comm: Any) -> bool:
        _, queue, rows, received = begin(comm)
        queue.begin()
        rows[:] = np.nan
        queue.finish()
        return np.array_equal(received, expected(comm.rank))

    assert all(run_in_threads(RANKS, run))


def test_polls_alone_exchange_every_segment():
    def run(comm: Any) -> bool:
        _, queue, _, received = begin(comm)
        while queue:
            queue.poll()
        return np.array_equal(received, expected(comm.rank))

    assert all(run_in_threads(RANKS, run))

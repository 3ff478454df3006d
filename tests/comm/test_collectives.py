"""Each operation brings what NumPy computes, on threads, over MPI, and over MPI with tiny messages."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpizero.errors import CollectiveError, MpizeroError
from mpizero.layout import Span
from mpizero.testing import adjoint_test
from tests.comm.specification import check_everything, on_ranks, uneven

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


@on_ranks
def test_every_operation_brings_what_numpy_computes(comm):
    for length, dtype in ((0, "f4"), (1, "f8"), (5, "f4"), (40, "i2")):
        check_everything(comm, length, dtype)


@on_ranks(limit=1 << 18)
def test_long_blocks_are_gathered_like_short_ones(comm):
    """From 256 KiB on they go directly to every rank (``mpi.GATHER_DIRECTLY``)."""
    for length in ((1 << 16) - 1, 1 << 16, 3 << 16):
        counts = [length if rank == comm.size - 1 else rank % 2 * 5 for rank in range(comm.size)]
        whole = np.arange(sum(counts), dtype=np.float32)
        start = sum(counts[: comm.rank])
        mine = whole[start : start + counts[comm.rank]].copy()
        comm.allgatherv(mine, out := np.empty_like(whole), counts)
        assert_array_equal(out, whole)


@on_ranks
def test_uneven_allgather_is_adjoint_to_uneven_reduce_scatter(comm):
    counts = uneven(comm.size, 3)

    def gather(x):
        comm.allgatherv(x, out := np.empty(sum(counts)), counts)
        return out

    def reduce(y):
        comm.reduce_scatter(y, out := np.empty(counts[comm.rank]), counts)
        return out

    rng = np.random.default_rng(comm.rank)
    adjoint_test(gather, reduce, rng.standard_normal(counts[comm.rank]), rng.standard_normal(sum(counts)), comm)


@on_ranks(limit=1 << 16)
def test_blocks_gathered_to_their_places_leave_the_rest_alone(comm):
    """Places in any order with room between; in place or not; the middle rank has nothing."""
    for length in (5, 1 << 16):
        sizes = [0 if rank == comm.size // 2 and comm.size > 1 else length + rank for rank in range(comm.size)]
        starts = [sum(sizes[rank + 1 :]) + 3 * (comm.size - rank) for rank in range(comm.size)]
        spans = [Span(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        expected = np.full(starts[0] + sizes[0] + 2, -1, np.float32)
        for rank, span in enumerate(spans):
            expected[span.start : span.stop] = np.arange(span.size) + 100 * rank
        own = spans[comm.rank]
        mine = expected[own.start : own.stop].copy()
        for in_place in (False, True):
            out = np.full_like(expected, -1)
            if in_place:
                out[own.start : own.stop] = mine
            request = comm.igather_spans(out[own.start : own.stop] if in_place else mine, out, spans)
            while not request.test():
                pass
            request.wait()
            assert_array_equal(out, expected)


@on_ranks
def test_every_dtype_travels_unchanged(comm):
    for dtype in DTYPES:
        # Random bits: a NaN's payload must arrive too.
        bits = np.random.default_rng(1).integers(0, 2 if dtype == "?" else 256, 16 * 4 * comm.size, np.uint8)
        whole = bits.view(dtype)[: 4 * comm.size].copy()
        own = whole[4 * comm.rank :][:4].copy()
        gathered, spread = np.zeros_like(whole), own.copy()
        comm.allgather(own, gathered)
        comm.broadcast(spread)
        assert gathered.tobytes() == whole.tobytes(), dtype
        assert spread.tobytes() == whole[:4].tobytes(), dtype


@on_ranks
def test_arrays_of_several_dimensions_travel_in_c_order(comm):
    block = np.arange(6.0).reshape(2, 3) + 10 * comm.rank
    comm.allgather(block, out := np.empty((comm.size, 2, 3)))
    assert_array_equal(out, np.arange(6.0).reshape(2, 3) + 10 * np.arange(comm.size)[:, None, None])


@on_ranks
def test_objects_of_any_size_reach_all_ranks(comm):
    values = ["", "x" * 503, "y" * 560, {"shape": (2, 3)}, None]
    mine = values[comm.rank % 5]
    assert comm.allgather_object(mine) == [values[rank % 5] for rank in range(comm.size)]
    for root in range(comm.size):
        assert comm.broadcast_object(mine, root) == values[root % 5]


@on_ranks
def test_messages_overtake_only_other_tags(comm):
    out = [np.empty(1) for _ in range(3)]
    arrivals = [comm.irecv(out[0], 0, tag=7), comm.irecv(out[1], 0, tag=7), comm.irecv(out[2], 0, tag=8)]
    if comm.rank == 0:
        for peer in range(comm.size):
            for value, tag in ((3.0, 8), (1.0, 7), (2.0, 7)):
                comm.isend(np.array([value]), peer, tag).wait()
    for arrival in reversed(arrivals):
        arrival.wait()
    assert_array_equal(np.concatenate(out), [1.0, 2.0, 3.0])


@on_ranks
def test_counters_count_what_goes_to_other_ranks(comm):
    n, rank = comm.size, comm.rank
    x = np.zeros(3, np.float32)

    def sent(call, *arguments):
        comm.counters.reset()
        result = call(*arguments)
        if result is not None:
            result.wait()
        return comm.counters.bytes_sent

    there = [peer + 1 for peer in range(n)]
    block, total = np.zeros(rank + 1, np.float32), np.zeros(sum(there), np.float32)
    assert sent(comm.allgather, x, np.empty(3 * n, np.float32)) == 12 * (n - 1)
    assert sent(comm.allgatherv, block, np.empty_like(total), there) == 4 * (rank + 1) * (n - 1)
    received = np.empty((rank + 1) * n, np.float32)
    assert sent(comm.alltoallv, total, there, received, [rank + 1] * n) == 4 * (sum(there) - rank - 1)
    assert sent(comm.broadcast, x, n - 1) == (12 * (n - 1) if rank == n - 1 else 0)
    assert sent(comm.reduce_scatter, total, block, there) == 4 * (sum(there) - rank - 1)
    assert sent(comm.allreduce, x) == 24 * (n - 1) // n
    assert sent(comm.barrier) == 0
    assert comm.counters.messages == 0


@on_ranks
def test_the_trace_numbers_collectives_and_is_outside_between_calls(comm):
    first = comm.trace.sequence
    request = comm.iallgather(np.zeros(1), np.zeros(comm.size), tag="early")
    comm.barrier(tag="late")
    assert (comm.trace.operation, comm.trace.tag, comm.trace.sequence) == ("barrier", "late", first + 2)
    request.wait()
    assert (comm.trace.operation, comm.trace.tag) in {("iallgather", "early"), ("barrier", "late")}
    assert comm.trace.entered == 0.0
    assert comm.trace.started == first + 2


#: Numbers in another byte order than this machine's.
FOREIGN = np.dtype("f8").newbyteorder()

BAD_CALLS = {
    "another dtype": (lambda c: c.allgather(np.zeros(2), np.zeros(2 * c.size, "f4"), "w"), "float64 but receives"),
    "too small a result": (lambda c: c.allgather(np.zeros(2), np.zeros(2 * c.size + 1), "w"), "do not fill it"),
    "wrong counts": (lambda c: c.allgatherv(np.zeros(2), np.zeros(2), [7] * c.size, "w"), "counts .* blocks of 2"),
    "too few counts": (lambda c: c.allgatherv(np.zeros(2), np.zeros(2), [], "w"), "counts"),
    "negative counts": (lambda c: c.alltoallv(np.zeros(0), [1, -1], np.zeros(0), [0] * c.size, "w"), "counts"),
    "another own block": (lambda c: c.reduce_scatter(np.zeros(4 * c.size), np.zeros(3), [4] * c.size, "w"), "is 4"),
    "a strided array": (lambda c: c.broadcast(np.zeros((4, 4))[:, 0], 0, "w"), "not C-contiguous"),
    "a list": (lambda c: c.allreduce([1.0], "sum", "w"), "got list"),
    "another byte order": (lambda c: c.allreduce(np.ones(2, FOREIGN), "sum", "w"), "another byte order than"),
    "a broadcast of it": (lambda c: c.broadcast(np.ones(2, FOREIGN), 0, "w"), "convert it: a.astype"),
    "a message of it": (lambda c: c.isend(np.ones(2, FOREIGN), 0), "another byte order"),
    "objects": (lambda c: c.broadcast(np.array([None]), 0, "w"), "no message type"),
    "an unknown operation": (lambda c: c.allreduce(np.zeros(2), "mean", "w"), "'mean'"),
    "a sum of float16": (lambda c: c.allreduce(np.zeros(2, "f2"), "sum", "w"), "convert it to float32"),
    "no such root": (lambda c: c.broadcast(np.zeros(2), c.size, "w"), "is not in 0"),
    "no such peer": (lambda c: c.isend(np.zeros(2), -1), "is not in 0"),
    "too large a tag": (lambda c: c.irecv(np.zeros(2), 0, 32000), "tag must be"),
    "a negative color": (lambda c: c.split(-1), "color must be"),
    "nodes of nobody": (lambda c: c.split_node(0), "ranks_per_node"),
}


@on_ranks
def test_misuse_is_refused_before_anything_is_sent(comm):
    for call, message in BAD_CALLS.values():
        with pytest.raises(CollectiveError, match=rf"\[rank {comm.rank}\].*{message}"):
            call(comm)
    comm.barrier()


@on_ranks
def test_a_read_only_array_is_sent_but_never_written(comm):
    frozen = np.arange(2.0)
    frozen.flags.writeable = False
    comm.allgather(frozen, np.empty(2 * comm.size))
    with pytest.raises(CollectiveError, match="read-only"):
        comm.allreduce(frozen)


@on_ranks
def test_a_message_of_another_length_is_an_error(comm):
    # Open MPI cuts a message to oneself silently.
    for length, polling in product((0, 1, 3) if comm.size > 1 else (0, 1), (False, True)):
        arrival = comm.irecv(np.empty(2), (comm.rank - 1) % comm.size, tag=5)
        sent = comm.isend(np.zeros(length), (comm.rank + 1) % comm.size, tag=5)
        with pytest.raises(CollectiveError, match=rf"\[rank {comm.rank}\] irecv '?5'? on .*float64\[2\]"):  # noqa: PT012
            while polling and not arrival.test():
                pass
            arrival.wait()
        sent.wait()


@on_ranks
def test_a_closed_communicator_refuses_calls_and_closes_twice(comm):
    half = comm.split(comm.rank % 2)
    half.close()
    half.close()
    with pytest.raises(MpizeroError):
        half.barrier()


@on_ranks
def test_split_groups_by_color_and_orders_by_key(comm):
    with comm.split(comm.rank % 2, key=-comm.rank, name="half") as half:
        members = half.allgather_object(comm.rank)
        assert members == sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
        assert (half.rank, half.size, half.name) == (members.index(comm.rank), len(members), "half")


@on_ranks
def test_split_node_simulates_smaller_nodes(comm):
    for per_node in (1, 2, 3, 8):
        with comm.split_node(per_node) as node:
            first = comm.rank // per_node * per_node
            assert node.allgather_object(comm.rank) == list(range(first, min(first + per_node, comm.size)))
            assert node.shares_memory


@on_ranks
def test_more_communicators_can_be_opened_and_closed_than_live_at_once(comm):
    for _ in range(2500 if comm.size == 1 else 20):
        comm.split(0).close()
    comm.barrier()

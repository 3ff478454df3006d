"""Sums, gathers and shifts of a group have the bits that NumPy computes, through messages and through a window."""

from __future__ import annotations

from functools import reduce
from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import CollectiveError, SharedMemoryError
from mpizero.layout import Partition
from mpizero.testing import run_in_threads
from tests.comm.specification import on_groups, on_ranks, uneven

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (4, 6, 5)]
AXES_AND_DTYPES = list(product((0, 1, 2, -1), (np.float32, np.float64)))


def values(rank, shape, dtype=np.float64, seed=0):
    """What a rank brings; every rank can compute everybody's."""
    return np.random.default_rng([seed, rank]).standard_normal(shape).astype(dtype)


def everyone(group, shape, dtype=np.float64, seed=0):
    return [values(rank, shape, dtype, seed) for rank in range(group.size)]


def in_tree_order(arrays):
    """Neighbours first, as pencil and paper do it; an array without a neighbour waits for the next level."""
    while len(arrays) > 1:
        arrays = [reduce(np.add, arrays[i : i + 2]) for i in range(0, len(arrays), 2)]
    return arrays[0]


def same_bits(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@on_groups
def test_all_reduce_adds_in_tree_order(group):
    for shape, dtype in product(SHAPES, (np.float32, np.float64)):
        x = values(group.rank, shape, dtype)
        kept = x.copy()
        total = group.all_reduce(x)
        assert same_bits(total, np.asarray(in_tree_order(everyone(group, shape, dtype)))), (shape, dtype)
        assert same_bits(x, kept)
        assert not np.shares_memory(total, x)
        assert total.flags.writeable


@on_groups
def test_all_max_is_the_elementwise_maximum_and_nan_wins_it_and_stays_in_every_sum(group):
    for shape in SHAPES:
        assert_array_equal(group.all_max(values(group.rank, shape)), reduce(np.maximum, everyone(group, shape)))
    x = np.zeros(2 * group.size)
    x[group.rank] = np.nan
    for result in (group.all_max(x), group.all_reduce(x)):
        assert_array_equal(np.isnan(result), np.arange(2 * group.size) < group.size)


@on_groups
def test_all_gather_joins_uneven_and_empty_shards_along_any_axis(group):
    sizes = uneven(group.size, 3)
    for axis, dtype in AXES_AND_DTYPES:
        whole = values(99, np.insert([4, 5], axis % 3, sum(sizes)), dtype)
        cuts = np.split(whole, np.cumsum(sizes)[:-1], axis)
        assert same_bits(group.all_gather(cuts[group.rank], axis, sizes), whole), (axis, dtype)


@on_groups
def test_reduce_scatter_keeps_this_ranks_block_of_the_sum_along_any_axis(group):
    sizes = uneven(group.size, 3)
    for axis, dtype in AXES_AND_DTYPES:
        shape = tuple(np.insert([4, 5], axis % 3, sum(sizes)))
        total = in_tree_order(everyone(group, shape, dtype))
        expected = np.split(total, np.cumsum(sizes)[:-1], axis)[group.rank]
        block = group.reduce_scatter(values(group.rank, shape, dtype), axis, sizes)
        assert same_bits(block, np.ascontiguousarray(expected)), (axis, dtype)
        assert block.flags.writeable


@on_groups(limit=20_000)
def test_each_rank_gets_what_every_rank_has_for_it(group):
    n, rank = group.size, group.rank
    for dtype, most in product((np.float32, np.float64), (1, 3, 20_000)):
        counts = np.random.default_rng(most).integers(0, most, (n, n), endpoint=True)
        of = [
            [values(s * n + r, (count,), dtype) for r, count in enumerate(row)] for s, row in enumerate(counts.tolist())
        ]
        for _ in range(2):
            found = group.all_to_all(of[rank], counts)
            assert all(same_bits(found[s], of[s][rank]) for s in range(n))


@on_groups
def test_a_shift_brings_the_arrays_of_the_rank_behind(group):
    for by in (0, 1, -1, group.size, 3):
        arrays = [values(group.rank, (2, 3), np.float32), values(group.rank, (0,)), values(group.rank, (5, 4)).T]
        source = (group.rank - by) % group.size
        expected = [values(source, (2, 3), np.float32), values(source, (0,)), values(source, (5, 4)).T]
        request = group.shift(arrays, by)
        arrived = request.wait()
        assert request.wait() is arrived
        assert request.test()
        for found, right in zip(arrived, expected, strict=True):
            assert_array_equal(found, right)
            assert found.dtype == right.dtype


@on_groups
def test_two_shifts_can_be_on_their_way_in_both_directions(group):
    there = group.shift([np.array([group.rank])], 1)
    back = group.shift([np.array([100 + group.rank])], -1)
    assert back.wait()[0] == 100 + (group.rank + 1) % group.size
    while not there.test():
        pass
    assert there.wait()[0] == (group.rank - 1) % group.size


def test_a_group_of_one_returns_copies_and_shifts_the_arrays_themselves():
    from mpizero.comm import InMemoryCommunicator

    group = CommunicatorGroup(InMemoryCommunicator.group(1)[0])
    x = values(0, (3, 4))
    results = [group.all_reduce(x), group.all_max(x), group.all_gather(x, 1, [4]), group.reduce_scatter(x, 0, [3])]
    for result in results:
        assert same_bits(result, x)
        assert not np.shares_memory(result, x)
    assert group.shift([x], 1).wait()[0] is x


@on_groups
def test_arrays_with_gaps_and_frozen_ones_are_taken_and_left_alone(group):
    wide = values(group.rank, (6, 8))
    wide.flags.writeable = False
    gapped, sizes = wide[::2, ::-2], Partition(4, group.size).sizes()
    total = in_tree_order([values(r, (6, 8))[::2, ::-2] for r in range(group.size)])
    assert same_bits(group.all_reduce(gapped), np.ascontiguousarray(total))
    block = group.reduce_scatter(gapped, 1, sizes)
    assert_array_equal(block, total[:, Partition(4, group.size).shard(group.rank)])
    assert_array_equal(group.all_gather(block[:, ::-1], 1, sizes).shape, (3, 4))
    group.all_reduce(wide)
    group.reduce_scatter(wide, 1, Partition(8, group.size).sizes())
    group.all_gather(wide, 0, [6] * group.size)
    group.shift([wide], 1).wait()
    assert same_bits(wide, values(group.rank, (6, 8)))


@on_groups
def test_results_stay_what_they_are_while_the_buffers_are_used_again(group):
    sizes = [2] * group.size
    kept = []
    for turn in range(12):
        length = 2 * group.size * (1 + turn % 3)
        x = values(group.rank, (2, length), seed=turn)
        parts = [length // group.size] * group.size
        kept.append((turn, group.all_reduce(x), group.reduce_scatter(x, 1, parts), group.all_gather(x, 0, sizes)))
    for turn, total, block, whole in kept:
        arrays = everyone(group, (2, total.shape[1]), seed=turn)
        expected, width = in_tree_order(arrays), block.shape[1]
        assert same_bits(total, expected)
        assert_array_equal(block, expected[:, group.rank * width :][:, :width])
        assert same_bits(whole, np.concatenate(arrays))


@on_groups(limit=70_001)
def test_long_sums_have_the_same_bits_at_every_repetition(group):
    for length in (1000, 70_001):
        x = everyone(group, length, np.float32)
        total, sizes = in_tree_order(x), Partition(length, group.size).sizes()
        for _ in range(2):
            assert same_bits(group.all_reduce(x[group.rank]), total)
            assert same_bits(group.all_gather(group.reduce_scatter(x[group.rank], 0, sizes), 0, sizes), total)


@on_groups
def test_calls_are_counted_by_kind(group):
    sizes = [1] * group.size
    x = np.ones((group.size, 1))
    group.all_reduce(x)
    group.all_reduce(x)
    group.all_max(x)
    group.all_gather(x[:1], 0, sizes)
    group.reduce_scatter(x, 0, sizes)
    group.shift([x, x], 1).wait()
    group.all_to_all([x[0]] * group.size, np.ones((group.size, group.size), int))
    expected = {"all_reduce": 2, "all_max": 1, "all_gather": 1, "reduce_scatter": 1, "shift": 1, "all_to_all": 1}
    assert dict(group.counts) == expected


@on_ranks
def test_messages_send_the_bytes_of_a_reduce_scatter_and_a_gather(comm):
    group, n = CommunicatorGroup(comm), comm.size
    sizes = Partition(7, n).sizes()
    own = 3 * sizes[comm.rank] * 8

    def sent(call):
        comm.counters.reset()
        call()
        return comm.counters.bytes_sent

    x = np.ones((3, 7))
    part = Partition(21, n).sizes()[comm.rank] * 8
    assert sent(lambda: group.all_reduce(x)) == (21 * 8 - part + part * (n - 1) if n > 1 else 0)
    assert sent(lambda: group.reduce_scatter(x, 1, sizes)) == 21 * 8 - own
    assert sent(lambda: group.all_gather(np.ones((3, sizes[comm.rank])), 1, sizes)) == own * (n - 1)
    assert sent(lambda: group.shift([x, x], 1).wait()) == (2 * 21 * 8 if n > 1 else 0)
    assert sent(lambda: group.all_to_all([x[0]] * n, np.full((n, n), 7))) == 7 * 8 * (n - 1)


@on_ranks
def test_a_window_sends_nothing_and_messages_need_no_window(comm):
    with comm.split_node() as node:
        group, other = CommunicatorGroup(comm, node), CommunicatorGroup(comm, None)
        before = (comm.counters.bytes_sent, node.counters.bytes_sent)
        for length in (10, 40_000):
            group.all_reduce(np.ones(length))
            group.all_max(np.ones(length))
            group.reduce_scatter(np.ones((comm.size, length)), 0, [1] * comm.size)
            group.all_gather(np.ones((1, length)), 0, [1] * comm.size)
            group.all_to_all([np.ones(length)] * comm.size, np.full((comm.size, comm.size), length))
        assert (comm.counters.bytes_sent, node.counters.bytes_sent) == before
        other.all_reduce(np.ones(10))
        assert other.shared_bytes == 0
        if comm.size > 1:
            assert group.shared_bytes >= 2 * comm.size * 40_000 * 8
            assert group.private_bytes == 0
            assert other.private_bytes > 0
        group.close()
        assert group.shared_bytes == 0


def test_a_node_of_fewer_ranks_means_messages():
    def work(comm):
        with comm.split_node(2) as node:
            group = CommunicatorGroup(comm, node)
            assert_array_equal(group.all_reduce(np.ones(3)), [4.0] * 3)
            assert group.shared_bytes == 0

    run_in_threads(4, work)


@on_ranks
def test_the_order_of_sums_is_that_of_the_group_and_not_of_its_node(comm):
    with comm.split_node() as node, node.split(0, key=-node.rank) as turned:
        group = CommunicatorGroup(comm, turned)
        x = values(comm.rank, 9)
        assert same_bits(group.all_reduce(x), in_tree_order(everyone(group, 9)))
        sizes = uneven(group.size, 3)
        whole = group.all_gather(np.full(sizes[comm.rank], float(comm.rank)), 0, sizes)
        assert_array_equal(whole, np.repeat(np.arange(comm.size), sizes))
        group.close()


MISMATCHES = {
    "another shape": lambda g: g.all_reduce(np.ones(3 + (g.rank == 1))),
    "another dtype": lambda g: g.all_reduce(np.ones(3, np.float32 if g.rank == 1 else np.float64)),
    "another method": lambda g: (g.all_max if g.rank == 1 else g.all_reduce)(np.ones(3)),
    "other sizes": lambda g: g.all_gather(np.ones(1 + (g.rank == 1)), 0, [1 + (g.rank == 1)] * g.size),
    "another axis": lambda g: g.reduce_scatter(np.ones((g.size, g.size)), int(g.rank == 1), [1] * g.size),
    "one that grows the window": lambda g: g.all_reduce(np.ones(300_000 if g.rank == 1 else 3)),
}


@on_ranks
def test_calls_that_do_not_match_are_the_same_error_on_every_rank_of_a_window(comm):
    """Each as the first call of a group, on some numbers of ranks, and after others; the group goes on."""
    line = r".* at test_group.py:\d+ in .*"
    expected = rf"differs between ranks: ranks? 0.*: {line}; rank 1: {line}"
    if comm.size == 1:
        return
    with comm.split_node() as node:
        cases = tuple(MISMATCHES.values())
        for first, calls in (*((True, [call]) for call in cases[comm.size % 3 :: 3]), (False, cases)):
            group = CommunicatorGroup(comm, node)
            if not first:
                group.all_reduce(np.ones(2))
            for call in calls:
                with pytest.raises(CollectiveError, match=expected):
                    call(group)
                x = values(comm.rank, 9)  # and the group goes on
                assert same_bits(group.all_reduce(x), in_tree_order(everyone(group, 9)))
            x = values(comm.rank, 40_000)
            assert same_bits(group.all_reduce(x), in_tree_order(everyone(group, 40_000)))
            group.close()


class Crowded:
    """A node whose shared memory has room for a first window only."""

    def __init__(self, node, limit):
        self._node = node
        self._limit = limit

    def __getattr__(self, name):
        return getattr(self._node, name)

    def allocate_shared(self, nbytes, tag=""):
        if nbytes > self._limit:
            raise SharedMemoryError(f"a window of {nbytes} bytes does not fit")
        return self._node.allocate_shared(nbytes, tag)


@pytest.mark.parametrize("limit", [0, 200_000])
def test_without_room_for_a_window_the_group_goes_on_with_messages_and_says_so_once(limit, capfd):
    def work(comm):
        node = comm.split_node()
        group = CommunicatorGroup(comm, Crowded(node, limit))
        for length in (10, 100_000, 10, 100_000):
            x = values(comm.rank, length)
            assert same_bits(group.all_reduce(x), in_tree_order(everyone(group, length)))
            assert_array_equal(group.all_gather(x, 0, [length] * 3), np.concatenate(everyone(group, length)))
            assert_array_equal(group.reduce_scatter(x, 0, [length, 0, 0]).size, length * (comm.rank == 0))
            found = group.all_to_all([x] * 3, np.full((3, 3), length))
            assert_array_equal(found, everyone(group, length))
        assert group.shared_bytes == 0

    run_in_threads(3, work)
    assert capfd.readouterr().err.count("does not fit; group 'world/node' goes on with messages") == 1


def test_more_kinds_of_calls_than_are_remembered():
    def specification(comm):
        group = CommunicatorGroup(comm, comm.split_node())
        for length in (*range(700), *range(0, 700, 50)):
            total = group.all_reduce(np.full(length, 1.0 + group.rank))
            assert_array_equal(total, np.full(length, 3.0))

    run_in_threads(2, specification)


BAD = {
    "a list": (lambda g: g.all_reduce([1.0], "w"), "expected a NumPy array, got list"),
    "integers to add": (lambda g: g.all_reduce(np.ones(2, int), "w"), r"expected float32 or float64 \(shape \(2,\)\)"),
    "integers to scatter": (lambda g: g.reduce_scatter(np.ones(g.size, int), 0, [1] * g.size), "float32 or float64"),
    "objects to shift": (lambda g: g.shift([np.array([None])], 1), "no message type"),
    "no such axis": (lambda g: g.all_gather(np.ones(2), 1, [2] * g.size), "axis 1 does not exist in shape"),
    "too few sizes": (lambda g: g.all_gather(np.ones(2), 0, [2] * (g.size + 1)), "not one length >= 0 for each"),
    "a negative size": (lambda g: g.reduce_scatter(np.ones(2), 0, [-1] * g.size), "not one length >= 0 for each"),
    "another own block": (lambda g: g.all_gather(np.ones(2), 0, [3] * g.size), r"is 3 along axis 0 \(shape \(2,\)\)"),
    "parts of other sizes": (
        lambda g: g.all_to_all([np.ones(2)] * g.size, np.ones((g.size, g.size), int)),
        "the parts have",
    ),
    "another sum": (lambda g: g.reduce_scatter(np.ones((1, 2)), 1, [3] * g.size), "do not add up to its length along"),
}


@on_groups
def test_misuse_is_refused_on_every_rank_before_anything_is_sent(group):
    for call, message in BAD.values():
        with pytest.raises(CollectiveError, match=rf"\[rank {group.rank}\].*{message}"):
            call(group)
    assert not group.counts
    group.comm.barrier()

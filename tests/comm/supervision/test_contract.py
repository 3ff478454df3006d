"""What ranks must call alike: the numbers that stand for it, their sum over all communicators, and the report."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpizero.comm.startup import agree_to_start, versions
from mpizero.errors import CollectiveMismatch, ConfigError, ExitStatus
from mpizero.guard import guard
from mpizero.guard.call_trace import (
    MODULUS,
    REMEMBERED,
    CallTrace,
    CommunicatorRegistry,
    describe_call,
    mismatch,
    number_of,
)
from mpizero.testing import run_in_threads

CALLS = [
    ("barrier", ""),
    ("barrier", "step"),
    ("ibarrier", ""),
    ("allreduce", "a", "d", 3, "sum"),
    ("allreduce", "b", "d", 3, "sum"),
    ("allreduce", "a", "f", 3, "sum"),
    ("allreduce", "a", "d", 4, "sum"),
    ("allreduce", "a", "d", 3, "max"),
    ("allgatherv", "a", "d", (1, 2)),
    ("allgatherv", "a", "d", (2, 1)),
    ("broadcast", "a", "d", 3, 0),
    ("broadcast", "a", "d", 3, 1),
    ("alltoallv", "a", "d"),
]


def begin(trace, call):
    """Record a call from as far away as a communicator's caller."""
    return (lambda: (lambda: trace.begin(call))())()


def called(*calls):
    """Make a trace of calls, None among them for one that is counted only."""
    trace = CallTrace("world")
    for call in calls:
        trace.count() if call is None else begin(trace, call)
    return trace


def test_every_part_of_a_call_counts():
    assert len({number_of(call) for call in CALLS}) == len(CALLS)
    assert all(0 <= number_of(call) < MODULUS for call in CALLS)


def test_a_call_has_the_same_number_in_every_process_whatever_the_type_of_its_integers():
    assert number_of(("allreduce", "a", "d", 3, "sum")) == 67_285_477_162_176
    assert number_of(("barrier", "", "l", 3)) == number_of(("barrier", "", "q", np.int64(3)))


def test_calls_are_described():
    assert describe_call(("allreduce", "losses", "f", 3, "sum")) == "allreduce 'losses' float32[3] sum"
    assert describe_call(("broadcast", "", "d", 3, 2)) == "broadcast float64[3] root 2"
    assert describe_call(("allgatherv", "a", "d", (1, np.int64(2)))) == "allgatherv 'a' float64[1, 2]"
    assert describe_call(("alltoallv", "", "d")) == "alltoallv float64"
    assert len(describe_call(("allgatherv", "a", "d", tuple(range(1000))))) < 200


def test_the_last_calls_are_remembered_in_order():
    trace = called(*[("barrier", str(i)) for i in range(100)])
    records = trace.records()
    assert [r.sequence for r in records] == list(range(101 - REMEMBERED, 101))
    assert records[-1].what == "barrier '99'"
    assert trace.last() == (100, trace.number)
    assert trace.number_at(100) == trace.number
    assert trace.number_at(100 - REMEMBERED) is None


def test_the_line_of_a_call_is_the_first_outside_the_communicators():
    def work(comm):
        comm.allreduce(np.zeros(2))
        return comm.trace.records()[-1].where

    where = run_in_threads(1, work)[0]
    assert where == f"test_contract.py:{work.__code__.co_firstlineno + 1} in work"


@pytest.mark.parametrize("place", range(6))
def test_one_sum_sees_any_difference_in_any_communicator(place):
    """Four ranks in a world, two halves and two pairs across; one rank calls otherwise in one of them."""
    groups = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]

    def total(odd):
        numbers = []
        for rank in range(4):
            register, world = CommunicatorRegistry(), None
            for index, members in enumerate(groups):
                if rank in members:
                    calls = CALLS[: 3 + index]
                    if (rank, index) == odd:
                        calls = [calls[1], calls[0], *calls[2:]]
                    trace = called(*calls)
                    world = world or trace
                    register.add(trace, members, members.index(rank))
            numbers.append(register.mismatch_term(world))
        return sum(numbers) % MODULUS

    assert total(None) == 0
    assert all(total((rank, place)) for rank in groups[place])


def test_the_sum_leaves_out_whom_it_does_not_ask():
    register = CommunicatorRegistry()
    half, world = called(*CALLS), called(*CALLS)
    register.add(world, (0, 1, 2), 0)
    register.add(half, (0, 1), 0)
    assert [entry.trace for entry in register.inside(half)] == [half]
    register.remove(half)
    assert [entry.trace for entry in register.inside(world)] == [world]


def test_the_report_names_the_first_difference_and_shows_what_is_around():
    alike = [("barrier", str(i)) for i in range(80)]
    traces = [called(*alike, CALLS[3], CALLS[4]) for _ in range(3)] + [called(*alike, CALLS[4], CALLS[3])]
    error = mismatch("world", {rank: trace.records() for rank, trace in enumerate(traces)})
    assert error is not None
    first = "#81 of 'world' differs between ranks: ranks 0-2: allreduce 'a' float64[3] sum at test_contract.py:"
    assert first in str(error)
    assert "; rank 3: allreduce 'b' float64[3] sum at test_contract.py:" in str(error)
    assert [line.split(":")[0].split() for line in error.details] == [
        ["before", "#79"],
        ["before", "#80"],
        ["differs", "#81"],
        ["after", "#82"],
    ]
    assert error.status is ExitStatus.HANG


def test_a_difference_long_ago_is_said_to_be_that():
    alike = [("barrier", str(i)) for i in range(80)]
    traces = [called(first, *alike) for first in CALLS[:2]]
    assert "more than 64 calls ago" in str(mismatch("world", {r: t.records() for r, t in enumerate(traces)}))


def test_ranks_that_are_not_equally_far_do_not_differ():
    traces = [called(*CALLS[:n]) for n in (3, 5, 8)]
    assert mismatch("world", {rank: trace.records() for rank, trace in enumerate(traces)}) is None


def differ(comm):
    names = ["b", "a"] if comm.rank == 1 else ["a", "b"]
    for name in names:
        comm.allreduce(np.zeros(3), tag=name)


@pytest.mark.mpi
def test_calls_that_may_differ_by_rank_are_alike(world):
    """Counts of an alltoallv, the sender's side of a broadcast, colours and names of a split, and the lines."""
    n, rank = world.size, world.rank
    counts = [(rank + r) % 3 for r in range(n)]
    total = sum(counts)
    world.alltoallv(np.ones(total), counts, np.empty(total), counts)
    if rank == 0:
        world.broadcast(np.ones(3))
    else:
        world.broadcast(np.empty(3))
    with world.split(rank % 2, name=f"half {rank % 2}") as half:
        half.barrier()
    numbers = world.allgather_object(world.mismatch_term())
    assert sum(numbers) % MODULUS == 0


@pytest.mark.mpi(min_size=2)
def test_the_sum_over_the_ranks_sees_equal_sizes_in_another_order(world):
    """MPI does not: the error is the same on every rank, and comes before the sums are used."""
    watch = guard.current().mismatch_watch
    assert watch is not None
    watch.ignore(world.trace)  # its thread sees the difference too, sooner or later, and would end the tests
    world.barrier()
    differ(world)
    assert sum(world.allgather_object(world.mismatch_term())) % MODULUS != 0
    error = world.mismatch()
    assert isinstance(error, CollectiveMismatch)
    assert "rank 1: allreduce 'b' float64[3] sum at test_contract.py:" in str(error)
    assert len(set(world.allgather_object((str(error), error.details)))) == 1


def test_ranks_that_are_to_do_different_things_are_told_apart_by_one_message_of_32_bytes_at_the_start():
    def work(comm):
        agree_to_start(comm, lambda: {"the plan": {"lr": 0.1}, "more": list(range(1000))})
        assert (comm.trace.started, comm.counters.bytes_sent) == (1, 32)
        agree_to_start(comm, lambda: {"the table": [1, 2], "the plan": {"lr": 0.1 * (1 + comm.rank)}})

    with pytest.raises(ConfigError, match="learning rate 0.1 on rank 0, 0.2 on rank 1"):
        run_in_threads(2, work)


def test_the_versions_of_all_that_decides_bits_are_known():
    assert {"python", "mpizero", "numpy", "numba", "mpi4py", "h5py"} <= versions().keys()


def test_a_thread_that_watches_never_sees_a_number_that_was_not_there():
    calls = [("allreduce", f"bucket {i % 5}", "f", 1 + i % 7, "sum") for i in range(8_000)]
    reference, numbers = CallTrace("reference"), [0]
    for call in calls:
        begin(reference, call)
        numbers.append(reference.number)
    trace, seen, done = CallTrace("watched"), [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(trace.last())
            seen.extend((record.sequence, record.number) for record in trace.records()[-3:])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for call in calls:
        begin(trace, call)
    done.set()
    watcher.join()
    assert seen
    assert all(numbers[sequence] == number for sequence, number in seen)
    assert trace.number == numbers[-1]


A, B = CALLS[3], CALLS[4]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(((A, None, None, B), other) for other in ((A, None, B), (A, None, B, None), (A, B, None, None))),
        *(((A, None), other) for other in ((A, B), (A,))),
        ((None,), ()),
    ],
)
def test_the_number_of_counted_calls_and_their_places_count(one, other):
    assert called(*one).number == called(*one).number != called(*other).number


def test_numbers_of_counted_calls_are_remembered():
    calls = [call for i in range(2 * REMEMBERED) for call in [(A, B)[i % 2], *[None] * (i % 4)]]
    trace, numbers = CallTrace("counting"), [0]
    for call in calls:
        trace.count() if call is None else begin(trace, call)
        assert trace.last() == (len(numbers), trace.number)
        numbers.append(trace.number)
    for sequence in range(trace.started + 1 - REMEMBERED // 2, trace.started + 1):
        assert trace.number_at(sequence) == numbers[sequence]
    assert trace.number_at(trace.started + 1) is None
    old = trace.started - 2 * REMEMBERED
    assert trace.number_at(old) in (None, numbers[old])
    assert trace.number_at(1) is None
    assert [r.number for r in trace.records()][-9:] == numbers[-9:]
    silent = called(A, *[None] * (3 * REMEMBERED))
    assert silent.number_at(silent.started) is None, "nothing that it remembers is recorded"


def test_the_report_shows_calls_that_were_only_counted():
    traces = [called(A, None, None, B), called(A, None, B, None)]
    error = mismatch("node", {rank: trace.records() for rank, trace in enumerate(traces)})
    assert "collective #3 of 'node' differs between ranks: rank 0: node_barrier at a place that is not recorded" in str(
        error
    )
    assert "rank 1: allreduce 'b' float64[3] sum at test_contract.py:" in str(error)

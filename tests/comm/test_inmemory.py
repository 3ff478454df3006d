"""Threads as ranks: the same results as MPI, and no thread waits for one that cannot come."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpizero.comm import InMemoryCommunicator
from mpizero.errors import CollectiveError, CollectiveMismatch, PeerFailure
from mpizero.testing import run_in_threads
from mpizero.testing.checks import first_difference
from tests.comm.specification import counted, everything

WAITS = {
    "barrier": lambda c: c.barrier(),
    "broadcast": lambda c: c.broadcast(np.zeros(2), 1),
    "allgather": lambda c: c.allgather(np.zeros(2), np.zeros(2 * c.size)),
    "allreduce": lambda c: c.iallreduce(np.zeros(2)).wait(),
    "objects": lambda c: c.allgather_object(1),
    "recv": lambda c: c.recv(np.zeros(2), 1),
    "split": lambda c: c.split(0),
    "polling": lambda c: poll(c.ibarrier()),
}


def poll(request):
    while not request.test():
        pass


def traffic(comm):
    """Exercise every call that promises MPI's bits, and tell what was counted and traced."""
    found = everything(comm, 6)
    half = comm.split(comm.rank % 2, key=-comm.rank)
    place = half.allgather_object(comm.rank)
    node = comm.split_node(2)
    shared = node.allocate_shared(16)
    shared.buffer[node.rank] = comm.rank + 1
    node.node_barrier(shared)
    window = shared.buffer.copy()
    node.node_barrier(shared)
    shared.close()
    return [*found.values(), place, window, counted(comm)]


@pytest.mark.mpi
def test_threads_give_the_bits_and_counts_of_mpi(world):
    assert first_difference(traffic(world), run_in_threads(world.size, traffic)[world.rank]) == ""


@pytest.mark.parametrize("wait", WAITS)
def test_a_failing_thread_ends_all_the_others_with_its_cause(wait):
    seen = {}

    def work(comm):
        if comm.rank == 1:
            raise KeyError("broken data")
        try:
            WAITS[wait](comm)
        except PeerFailure as error:
            seen[comm.rank] = error
            raise

    with pytest.raises(KeyError, match="broken data"):
        run_in_threads(4, work)
    assert sorted(seen) == [0, 2, 3]
    assert all("rank 1 failed: KeyError: 'broken data'" in str(e) for e in seen.values())
    assert all(isinstance(e.__cause__, KeyError) for e in seen.values())


@pytest.mark.parametrize("wait", [w for w in WAITS if w != "polling"])
def test_a_thread_that_ends_is_not_waited_for(wait):
    with pytest.raises(PeerFailure, match=r"waits in .* for ranks \[1\], whose threads have ended"):
        run_in_threads(3, lambda comm: comm.rank == 1 or WAITS[wait](comm))


def test_a_failure_in_a_split_group_ends_the_whole_job():
    def work(comm):
        half = comm.split(comm.rank % 2)
        if comm.rank == 3:
            raise ValueError("odd one out")
        (half if comm.rank == 1 else comm).barrier()

    with pytest.raises(ValueError, match="odd one out"):
        run_in_threads(4, work)


def test_threads_that_all_wait_for_messages_are_freed_also_when_the_last_other_thread_ends():
    with pytest.raises(CollectiveError, match="all threads wait, none can go on"):
        run_in_threads(3, lambda comm: comm.recv(np.zeros(1), (comm.rank + 1) % 3))

    def work(comm):
        if comm.rank == 2:
            while len(comm._group.job._waiting) < 2:
                time.sleep(1e-3)
        else:
            comm.recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(CollectiveError, match="all threads wait, none can go on"):
        run_in_threads(3, work)


def test_a_thread_sleeps_until_what_it_waits_for_has_come():
    looks = {}

    def work(comm):
        others = comm.split(int(comm.rank > 0))
        if comm.rank == 0:
            comm._check_ranks = lambda arrival=None: looks.setdefault(0, []).append(arrival)
            comm.recv(np.zeros(1), comm.size - 1)
            return
        while not comm._group.job._waiting:  # rank 0 sleeps
            time.sleep(1e-3)
        for _ in range(50):
            others.barrier()
        if comm.rank == comm.size - 1:
            comm.send(np.zeros(1), 0)

    run_in_threads(6, work)
    assert len(looks[0]) == 2, "once when it called recv, and once before it slept"


def test_different_collectives_meet_in_an_error_that_names_them():
    def work(comm):
        if comm.rank == 0:
            comm.broadcast(np.zeros(2))
        else:
            comm.allreduce(np.zeros(2))

    calls = (
        r"collective #1 of 'world' differs between ranks: "
        r"rank 0: broadcast float64\[2\] root 0 at test_inmemory.py:\d+ in work; "
        r"rank 1: allreduce float64\[2\] sum at test_inmemory.py:\d+ in work"
    )
    with pytest.raises(CollectiveMismatch, match=calls):
        run_in_threads(2, work)


def test_different_counts_meet_in_an_error_that_names_them():
    def work(comm):
        comm.alltoallv(np.zeros(2), [1, 1], np.zeros(3), [1, 2] if comm.rank == 0 else [2, 1])

    with pytest.raises(CollectiveError, match=r"expects blocks of \[(1, 2|2, 1)\] elements, is sent \[1, 1\]"):
        run_in_threads(2, work)


def test_the_context_manager_carries_an_error_to_the_other_threads():
    first, second = InMemoryCommunicator.group(2)

    def work():
        with first:
            raise RuntimeError("in the block")

    thread = threading.Thread(target=lambda: pytest.raises(RuntimeError, work))
    thread.start()
    with pytest.raises(PeerFailure, match="in the block"):
        second.barrier()
    thread.join()


def test_buffers_can_be_reused_as_soon_as_a_call_has_returned_and_the_exchange_is_forgotten():
    def work(comm):
        x, out = np.array([comm.rank]), np.empty(comm.size, np.int64)
        for turn in range(200):
            x[0] = turn + comm.rank
            comm.allgather(x, out)
            assert (out == turn + np.arange(comm.size)).all()
        comm.barrier()
        return comm

    assert all(not comm._group.exchanges for comm in run_in_threads(4, work))


def test_a_group_of_nobody_is_refused():
    with pytest.raises(ValueError, match="expected a whole number of ranks >= 1"):
        InMemoryCommunicator.group(0)

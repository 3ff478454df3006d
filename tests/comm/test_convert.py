from __future__ import annotations

import numpy as np
import pytest

from mpizero.comm import InMemoryCommunicator, as_communicator


def test_nothing_becomes_a_communicator_of_one_that_does_everything():
    comm = as_communicator(None)
    assert (comm.rank, comm.size, comm.shares_memory) == (0, 1, True)
    comm.allgather(np.arange(3), out := np.empty(3, np.int64))
    assert out.tolist() == [0, 1, 2]
    assert comm.counters.bytes_sent == 0


def test_one_of_ours_is_passed_through():
    comm = InMemoryCommunicator.group(1)[0]
    assert as_communicator(comm) is comm


@pytest.mark.parametrize("wrong", [3, "world", object(), [None]])
def test_anything_else_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=f"got {type(wrong).__name__}"):
        as_communicator(wrong)


@pytest.mark.mpi
def test_an_mpi_communicator_is_split_never_used_itself():
    from mpi4py import MPI

    comm = as_communicator(MPI.COMM_WORLD)
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert MPI.Comm.Compare(comm.mpi, MPI.COMM_WORLD) == MPI.CONGRUENT
    comm.close()


@pytest.mark.mpi
def test_a_freed_mpi_communicator_is_refused():
    from mpi4py import MPI

    with pytest.raises(TypeError, match="live mpi4py intracommunicator"):
        as_communicator(MPI.COMM_NULL)

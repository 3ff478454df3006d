from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpizero.errors import CollectiveError, SharedMemoryError
from tests.comm.specification import on_ranks


@on_ranks
def test_what_one_rank_writes_every_rank_of_the_node_reads(comm):
    with comm.split_node() as node:
        shared = node.allocate_shared(8 * node.size)
        values = shared.buffer.view(np.int64)
        for turn in range(20):
            values[node.rank] = 100 * turn + node.rank
            node.node_barrier(shared)
            assert_array_equal(values, 100 * turn + np.arange(node.size))
            node.node_barrier(shared)
        shared.close()


@on_ranks
def test_a_window_is_whole_on_every_rank_aligned_and_zero(comm):
    """No window shows what one before it held, of the same size or another."""
    with comm.split_node() as node:
        for nbytes in (0, 1, 63, 64, 64, 4096, 100_001, 100_001):
            shared = node.allocate_shared(nbytes)
            assert (shared.buffer.dtype, shared.buffer.shape) == (np.uint8, (nbytes,))
            assert nbytes == 0 or shared.buffer.ctypes.data % 64 == 0
            assert not shared.buffer.any()
            node.node_barrier(shared)
            shared.buffer[node.rank :: node.size] = 255
            node.node_barrier(shared)
            shared.close()
            shared.close()
            assert shared.buffer.size == 0


@on_ranks
def test_simulated_nodes_have_windows_of_their_own(comm):
    with comm.split_node(2) as node:
        shared = node.allocate_shared(1)
        if node.rank == 0:
            shared.buffer[0] = comm.rank
        node.node_barrier(shared)
        assert shared.buffer[0] == comm.rank - node.rank
        shared.close()


@on_ranks
def test_only_ranks_that_share_memory_get_a_window_and_none_of_a_negative_size(comm):
    with comm.split_node() as node, pytest.raises(CollectiveError, match="nbytes must be >= 0, got -1"):
        node.allocate_shared(-1)
    if comm.size > 1:
        with pytest.raises(SharedMemoryError, match=r"may span nodes: allocate on split_node"):
            comm.allocate_shared(8)
    comm.barrier()


@on_ranks
def test_a_window_that_does_not_fit_is_refused_on_every_rank_alike(comm):
    with comm.split_node() as node:
        text = ""
        try:
            node.allocate_shared(2**60)
        except SharedMemoryError as error:
            text = str(error)
        assert node.allgather_object(text) == [text] * node.size
        assert str(2**60) in text


@pytest.mark.mpi
def test_the_error_of_a_full_node_says_what_to_do(world):
    with world.split_node() as node, pytest.raises(SharedMemoryError, match=r"/dev/shm has .*share_node_memory=False"):
        node.allocate_shared(2**60)


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["no file can be opened", "it is another file"])
def test_where_one_rank_cannot_take_its_pages_all_are_told_which_and_why(world, monkeypatch, what):
    def opened(path, *options, **more):
        if path == "/dev/zero" and what == "no file can be opened":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return original("/dev/null" if path == "/dev/zero" else path, *options, **more)

    original = os.open
    with world.split_node() as node:
        last = node.size - 1
        if node.rank == last:
            monkeypatch.setattr(os, "open", opened)
        with pytest.raises(SharedMemoryError, match=rf"a window of 800000 bytes .*rank {last}.*/dev/zero"):
            node.allocate_shared(800_000)
        monkeypatch.undo()
        node.allocate_shared(800_000).close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_windows_are_told_so(world):
    with world.split_node() as node, pytest.raises(SharedMemoryError, match="64 to 128 bytes; they must agree"):
        node.allocate_shared(128 if node.rank else 64)


@pytest.mark.mpi
def test_windows_leave_nothing_behind(world):
    """MPI runs out of windows at about 2000; closed ones do not count."""
    with world.split_node() as node:
        for _ in range(2500 if node.size == 1 else 20):
            node.allocate_shared(64).close()

"""The same promises on real ranks, through both back ends."""

from __future__ import annotations

import errno
import os
import resource

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointIOError, LocalArray
from mpizero.guard import guard
from tests.checkpoint.conftest import BACKENDS
from tests.checkpoint.sealed import digest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_ranks_save_any_number_of_them_loads_and_all_load_what_fewer_saved(world, folder, state, backend):
    state.save(folder / "c", world, backend=backend)
    for ranks in {1, (world.size + 1) // 2, world.size}:
        with world.split(int(world.rank >= ranks)) as group:
            if world.rank < ranks:
                assert state.loads(folder / "c", group)
                state.save(folder / str(ranks), group)
        world.barrier()
        assert state.loads(folder / str(ranks), world), ranks


def test_files_do_not_depend_on_ranks_nor_back_end_nor_on_whether_the_save_waits(world, folder, state):
    alignment = (64, 4096)[world.size % 3 % 2]
    arrays = state.pieces(world.rank, world.size)
    begun = checkpoint.begin(folder / "begun", arrays, state.attributes, world, alignment=alignment)
    for backend in BACKENDS:
        checkpoint.write(folder / backend, arrays, state.attributes, world, backend, alignment=alignment)
    begun.commit()
    assert begun.finished
    if world.rank == 0:
        checkpoint.write(folder / "alone", state.whole(), state.attributes, "self", alignment=alignment)
        assert all(digest(folder / how) == digest(folder / "alone") for how in ["begun", *BACKENDS])
    world.barrier()


@pytest.mark.parametrize("waits", [True, False])
def test_a_disk_that_is_full_for_one_rank_fails_on_all_and_leaves_nothing(world, folder, waits):
    def save(step):
        if waits:
            checkpoint.write(folder / f"step_0000000{step}", arrays, {}, world)
        else:
            checkpoint.begin(folder / f"step_0000000{step}", arrays, {}, world).commit()

    whole = np.ones(1_000_003, np.float32)
    cuts = [whole.size * k // world.size for k in range(world.size + 1)]
    values = whole[cuts[world.rank] : cuts[world.rank + 1]]
    arrays = [LocalArray("parameters/w", whole.shape, whole.dtype, ((cuts[world.rank], values),))]
    save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointIOError, match="File too large") as caught:
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(set(world.allgather_object(str(caught.value)))) == 1
    assert str(caught.value).startswith(f"checkpoint {folder}/step_00000002 was not written: ")
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(folder) == ["step_00000001"]
    assert checkpoint.latest(folder, world) == str(folder / "step_00000001")
    world.barrier()


def test_an_mpi4py_communicator_is_taken_as_it_is_and_training_s_own_messages_pass_beside_a_save(world, folder, small):
    from mpi4py import MPI

    comm, arrays = MPI.COMM_WORLD, small.pieces(world.rank, world.size)
    for step in range(1, 4):
        pending = checkpoint.begin(checkpoint.step_folder(folder, step), arrays, small.attributes, comm)
        assert comm.allreduce(1) == world.size
        pending.commit()
        assert small.loads(pending.target, comm)
    assert checkpoint.prune(folder, 2, comm) == [str(folder / "step_00000001")]
    assert checkpoint.latest(folder, comm) == str(folder / "step_00000003")
    image = checkpoint.to_bytes(arrays, small.attributes, comm)
    assert all(comm.allgather(image == checkpoint.to_bytes(small.whole(), small.attributes, "self")))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint.open_checkpoint(folder / "missing", comm)


@pytest.mark.skipif("mpio" not in BACKENDS, reason="needs an h5py with MPI")
def test_the_watchdog_sees_ranks_that_wait_for_one_another_inside_of_hdf5(world, folder, small, monkeypatch):
    """Where the disk refuses the last bytes of a file, its close does not return on any rank."""
    seen, close = [], h5py.File.close

    def look(file):
        seen.extend(entry.trace.operation for entry in guard.current().register.live if entry.trace.entered)
        close(file)

    monkeypatch.setattr(h5py.File, "close", look)
    small.save(folder / "c", world, backend="mpio")
    assert "hdf5 close" in seen

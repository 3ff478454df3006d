"""The same promises on real ranks, through both back ends."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointIOError, LocalArray
from mpizero.guard import guard
from tests.checkpoint.sealed import digest

pytestmark = pytest.mark.mpi

#: Without MPI in h5py there is one back end; that the other is refused is tested with the arguments.
BACKENDS = ["direct", "mpio"] if h5py.get_config().mpi else ["direct"]


@pytest.fixture
def folder(world, tmp_path) -> Path:
    """One folder for all ranks."""
    return Path(world.broadcast_object(str(tmp_path)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_ranks_save_any_number_of_them_loads(world, folder, state, backend):
    state.save(folder / "c", world, backend)
    for readers in {1, (world.size + 1) // 2, world.size}:
        with world.split(int(world.rank >= readers)) as group:
            if world.rank < readers:
                assert state.loads(folder / "c", group)
        world.barrier()


def test_what_fewer_ranks_saved_all_ranks_load(world, folder, state):
    for writers in {1, 1 + world.size // 4} if world.size > 1 else ():
        with world.split(int(world.rank >= writers)) as group:
            if world.rank < writers:
                state.save(folder / str(writers), group)
        world.barrier()
        assert state.loads(folder / str(writers), world), writers


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
    assert os.listdir(folder) == ["step_00000001"]
    assert checkpoint.newest(folder, world) == str(folder / "step_00000001")
    world.barrier()


def test_bytes_are_the_same_on_every_rank(world, small):
    image = checkpoint.to_bytes(small.pieces(world.rank, world.size), small.attributes, world)
    alone = checkpoint.to_bytes(small.whole(), small.attributes, "self")
    assert all(world.allgather_object(image == alone))


def test_an_mpi4py_communicator_is_taken_as_it_is_and_training_s_own_messages_pass_beside_a_save(world, folder, small):
    from mpi4py import MPI

    arrays = small.pieces(world.rank, world.size)
    for _ in range(3):
        pending = checkpoint.begin(folder / "c", arrays, small.attributes, MPI.COMM_WORLD, replace=True)
        assert MPI.COMM_WORLD.allreduce(1) == world.size
        pending.commit()
        checkpoint.write(folder / "c", arrays, small.attributes, MPI.COMM_WORLD, replace=True)
        with checkpoint.open_checkpoint(folder / "c", MPI.COMM_WORLD) as reader:
            wanted = small.pieces(world.rank, world.size, fill=False)
            reader.read(wanted)
        assert small.agrees(wanted)
    assert checkpoint.newest(folder, MPI.COMM_WORLD) is None
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint.open_checkpoint(folder / "missing", MPI.COMM_WORLD)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_that_cannot_be_written_is_the_same_error_on_every_rank(world, folder, small, backend):
    if world.rank == 0:
        (folder / "file").write_text("x")
    world.barrier()
    with pytest.raises(CheckpointIOError, match="Not a directory|File exists") as caught:
        small.save(folder / "file" / "c", world, backend)
    assert len(set(world.allgather_object(str(caught.value)))) == 1


def test_old_steps_are_pruned_together(world, folder, small):
    for step in (1, 2, 3):
        small.save(checkpoint.step_folder(folder, step), world)
    removed = checkpoint.prune(folder, 2, world)
    assert [os.path.basename(path) for path in removed] == ["step_00000001"]
    assert checkpoint.newest(folder, world) == str(folder / "step_00000003")


@pytest.mark.skipif("mpio" not in BACKENDS, reason="needs an h5py with MPI")
def test_the_watchdog_sees_ranks_that_wait_for_one_another_inside_of_hdf5(world, folder, small, monkeypatch):
    """Where the disk refuses the last bytes of a file, its close does not return on any rank."""
    seen, close = [], h5py.File.close

    def look(file):
        seen.extend(entry.trace.operation for entry in guard.current().register.live if entry.trace.entered)
        close(file)

    monkeypatch.setattr(h5py.File, "close", look)
    small.save(folder / "c", world, "mpio")
    assert "hdf5 close" in seen

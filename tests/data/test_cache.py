"""A node's copy has the samples of its source, reads each block once, and is refused or left out where it cannot be."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from mpizero import data
from mpizero.data import cache, files
from mpizero.data import source as mapped
from mpizero.errors import ConfigError, DataError, RemoteError, StateError
from mpizero.testing import run_in_threads

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def blocks_of_chunks(monkeypatch):
    """Let a rank read a file in its own chunks."""
    monkeypatch.setattr(cache, "BLOCK_BYTES", 100)


@pytest.mark.parametrize("size", [1, 3])
def test_each_block_of_a_node_is_read_once_and_samples_are_those_of_the_file(compressed, ranks, size):
    path, values = compressed

    def run(comm):
        with data.cached(data.Hdf5Source(path, ["x"], "y"), ranks(comm)) as source:
            for seed in range(2):
                order = np.random.default_rng(seed + comm.rank).permutation(100)
                x, y = source.samples(order)
                np.testing.assert_array_equal(x["x"], values[order], strict=True)
                np.testing.assert_array_equal(y, order)
            return source.blocks_read

    assert sum(run_in_threads(size, run)) == 13


def test_a_copy_is_the_same_data_as_its_source(compressed, ranks):
    source = data.Hdf5Source(compressed[0], "x", "y")
    with data.cached(source, ranks()) as copy:
        assert copy.fingerprint == source.fingerprint
        for part, same in zip(copy.split(0.2), source.split(0.2), strict=True):
            np.testing.assert_array_equal(part.samples([3, 1])[0], same.samples([3, 1])[0], strict=True)
            assert part.origin(np.arange(4)).tolist() == same.origin(np.arange(4)).tolist()


@pytest.mark.parametrize("limit", [None, 1000], ids=["memory of the job", "given"])
def test_a_copy_that_does_not_fit_is_left_out_and_told(compressed, ranks, capsys, monkeypatch, limit):
    if limit is None:
        monkeypatch.setattr(mapped, "available_memory", lambda: 2000)
    with data.cached(data.Hdf5Source(compressed[0], "x", "y"), ranks(), limit=limit) as source:
        assert source.nbytes == 0
        np.testing.assert_array_equal(source.samples([7])[0], compressed[1][[7]])
    assert "a node has room for 1000: every rank reads the files itself" in capsys.readouterr().err


@pytest.mark.parametrize("own_disk", [True, False])
def test_mapped_files_on_a_disk_of_the_node_are_not_copied(tmp_path, ranks, monkeypatch, capsys, own_disk):
    monkeypatch.setattr(files, "on_local_disk", lambda path: own_disk)
    values = RNG.normal(size=(100, 5))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"], file["y"] = values, np.arange(100)

    def run(comm):
        with data.cached(data.Hdf5Source(tmp_path / "d.h5", "x", "y").split(0.5)[0], ranks(comm)) as source:
            x, y = source.samples([40, 2])
            np.testing.assert_array_equal(x, values[y], strict=True)
            return source.nbytes > 0

    assert run_in_threads(2, run) == [not own_disk] * 2
    assert capsys.readouterr().err == ""


def test_the_page_cache_is_no_copy_of_what_does_not_fit_into_memory(compressed, monkeypatch):
    monkeypatch.setattr(files, "on_local_disk", lambda path: True)
    source = data.Hdf5Source(compressed[0], "y", "y")
    assert source.in_page_cache
    assert not data.Hdf5Source(compressed[0], "x", "y").in_page_cache  # chunks are not mapped
    monkeypatch.setattr(files, "room_in_memory", lambda: 100)
    assert not source.in_page_cache


def test_an_error_in_a_block_is_told_and_the_block_can_be_read_by_another_rank(compressed, ranks):
    class Failing(data.Hdf5Source):
        broken = False

        def read(self, indices):
            if self.broken and len(indices) > 1:
                raise DataError("d.h5: gone")
            return super().read(indices)

    def run(comm):
        source = Failing(compressed[0], "x", "y")
        source.broken = comm.rank == 0
        with data.cached(source, ranks(comm)) as copy:
            if comm.rank == 0:
                with pytest.raises(DataError, match="gone"):
                    copy.samples([50])
            comm.barrier()
            if comm.rank == 1:
                np.testing.assert_array_equal(copy.samples([50])[0], compressed[1][[50]])
            comm.barrier()
            if comm.rank == 0:
                np.testing.assert_array_equal(copy.samples([50])[0], compressed[1][[50]])

    run_in_threads(2, run)


def test_what_cannot_be_cached_is_an_error_of_all_ranks(compressed, ranks):
    class Random(data.Hdf5Source):
        def read(self, indices, *, run):
            return super().read(indices)

    def run(comm):
        kind = Random if comm.rank == 1 else data.Hdf5Source
        with pytest.raises(ConfigError if comm.rank == 1 else RemoteError, match="cache the source below"):
            data.cached(kind(compressed[0], "x", "y"), ranks(comm))
        with pytest.raises(ConfigError, match="ranks differ"):
            data.cached(data.ArraySource(np.zeros(5 + comm.rank), np.zeros(5 + comm.rank)), ranks(comm))

    run_in_threads(2, run)
    with pytest.raises(DataError, match="expected a source"):
        data.cached([1], ranks())
    copy = data.cached(data.Hdf5Source(compressed[0], "x", "y"), ranks())
    copy.close()
    copy.close()
    with pytest.raises(StateError, match="closed"):
        copy.samples([0])


@pytest.mark.mpi
def test_processes_of_a_node_share_one_copy(world, ranks, compressed):
    path, values = world.broadcast_object(compressed)
    order = np.random.default_rng(world.rank).permutation(100)
    with data.cached(data.Hdf5Source(path, "x", "y"), ranks(world)) as source:
        np.testing.assert_array_equal(source.samples(order)[0], values[order], strict=True)
        assert sum(world.allgather_object(source.blocks_read)) == 13

from __future__ import annotations

import io
import sys
import time

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.format import block_count
from mpizero.checkpoint.reader import FileByteSource, MemoryByteSource
from mpizero.errors import CheckpointError
from mpizero.guard.call_trace import Transfer
from mpizero.testing import run_in_threads
from tests.checkpoint.sealed import digest

SIZES = (1, 3, 8)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """The same state, saved on every number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for size in SIZES:
        run_in_threads(size, lambda comm: state.save(folder / f"on{comm.size}", comm))
    return folder


def test_files_do_not_depend_on_the_ranks_that_wrote_them_nor_on_the_time(state, saved, tmp_path):
    first = digest(saved / "on1")
    assert set(first) == {"manifest.json", "state.h5"}
    assert all(digest(saved / f"on{size}") == first for size in SIZES)
    while int(time.time()) == int((saved / "on1").stat().st_mtime):  # HDF5 would write the second of a date
        time.sleep(0.05)
    state.save(tmp_path / "later")
    assert digest(tmp_path / "later") == first


@pytest.mark.parametrize("readers", SIZES)
def test_any_number_of_ranks_loads_and_none_reads_more_than_its_own_ranges(state, saved, readers, monkeypatch):
    read: list[int] = []
    original = FileByteSource.read_into

    def counting(self, offset, view):
        read.append(len(view))
        original(self, offset, view)

    monkeypatch.setattr(FileByteSource, "read_into", counting)
    assert all(run_in_threads(readers, lambda comm: state.loads(saved / "on3", comm)))
    total = sum(whole.nbytes for whole in state.arrays.values())
    structure = (saved / "on3" / "state.h5").stat().st_size - total
    assert sum(read) == total + structure


def test_plain_h5py_reads_whole_named_arrays_each_in_one_piece(state, saved):
    with h5py.File(saved / "on3" / "state.h5", "r") as file:
        for path, whole in state.arrays.items():
            found = file[path]
            assert (found.shape, found.dtype, found.chunks) == (whole.shape, whole.dtype, None)
            assert found[()].tobytes() == whole.tobytes()
            assert not whole.size or found.id.get_offset() % 64 == 0
        assert file.attrs["format"] == b"mpizero-checkpoint"
        assert file.attrs["version"] == 1
    assert checkpoint.verify(saved / "on3") == (saved / "on3" / "state.h5").stat().st_size


def test_a_range_that_no_other_rank_completes_is_verified_all_the_same(state, saved):
    path = "parameters/embedding.weight"
    whole = state.arrays[path].reshape(-1)

    def load(comm):
        values = np.zeros(100, np.float32)
        wanted = [LocalArray(path, (1031, 2049), whole.dtype, ((1_048_530 + comm.rank, values),))]
        with checkpoint.open_checkpoint(saved / "on8", comm) as reader:
            reader.read(wanted if comm.rank < 2 else [])
        return state.agrees(wanted) if comm.rank < 2 else True

    assert all(run_in_threads(3, load))


def test_every_rank_may_read_everything(state, saved):
    def load(comm):
        with checkpoint.open_checkpoint(saved / "on3", comm) as reader:
            return all(reader.read_whole(path).tobytes() == whole.tobytes() for path, whole in state.arrays.items())

    assert all(run_in_threads(3, load))


def test_bytes_are_those_of_the_file_on_every_rank_and_load_on_any_number(state, saved):
    def image_of(comm):
        return checkpoint.to_bytes(state.pieces(comm.rank, comm.size), state.attributes, comm)

    (image,) = {image for size in (1, 4) for image in run_in_threads(size, image_of)}
    assert image.startswith((saved / "on1" / "state.h5").read_bytes())
    with h5py.File(io.BytesIO(image), "r") as file:
        assert file["optimizer/steps"][...].tolist() == [0, 1, 2, 3, 4]

    def load(comm):
        wanted = state.pieces(comm.rank, comm.size, fill=False)
        with checkpoint.from_bytes(image) as reader:
            reader.read(wanted)
            return state.agrees(wanted) and reader.attributes == state.attributes

    assert all(run_in_threads(3, load))


@pytest.mark.parametrize("waits", [True, False])
def test_bytes_of_each_block_are_told_to_who_waits_for_a_slow_disk(state, tmp_path, monkeypatch, waits):
    """A watchdog lets those wait for as long as bytes come (``Watchdog._bytes_move``)."""
    told = {"writing": [], "reading": []}
    monkeypatch.setattr(Transfer, "advance", lambda transfer, nbytes: told[transfer.what.split()[0]].append(nbytes))
    state.save(tmp_path / "c", waits=waits)
    assert state.loads(tmp_path / "c")
    total = sum(whole.nbytes for whole in state.arrays.values())
    assert sum(told["reading"]) == total
    assert sum(told["writing"]) == 2 * total  # each once more when it is on the disk
    blocks = sum(block_count(whole.nbytes) for whole in state.arrays.values())
    assert min(map(len, told.values())) >= blocks > len(state.arrays)


def test_a_checkpoint_without_arrays_keeps_its_attributes(tmp_path):
    checkpoint.write(tmp_path / "bare", [], {"step": 1})
    with checkpoint.open_checkpoint(tmp_path / "bare") as reader:
        assert reader.attributes == {"step": 1}
        assert dict(reader.arrays) == {}
    assert checkpoint.from_bytes(checkpoint.to_bytes([], {})).attributes == {}


def test_a_reader_of_memory_lets_go_of_it(small):
    image = bytearray(checkpoint.to_bytes(small.whole(), {}))
    reader = checkpoint.from_bytes(image)
    reader.close()
    assert isinstance(reader._source, MemoryByteSource)
    assert len(reader._source._data) == 0


@pytest.mark.slow
def test_the_work_of_a_save_grows_in_proportion_to_the_number_of_arrays(tmp_path):
    def calls(count):
        """The number of calls of functions while so many arrays are saved."""
        seen, one = [0], np.ones(3, "f4")
        arrays = [LocalArray(f"parameters/p{k}", (3,), one.dtype, ((0, one),)) for k in range(count)]

        def watch(frame, event, argument):
            seen[0] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            checkpoint.write(tmp_path / f"{count}", arrays, {})
        finally:
            sys.setprofile(before)
        return seen[0]

    calls(10)  # imports
    assert calls(200) < 2.1 * calls(100)


def test_another_models_checkpoint_is_refused_with_every_difference(small, tmp_path):
    small.save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        expected = {"parameters/a": ((8, 5), np.float32), "parameters/c": ((1,), np.float32)}
        with pytest.raises(CheckpointError) as caught:
            reader.check(expected)
        for text in ("parameters/a is (5, 8) <f4, expected (8, 5) <f4", "missing: parameters/c", "parameters/b"):
            assert text in str(caught.value)
        reader.check({path: (a.shape, a.dtype) for path, a in small.arrays.items()})
        with pytest.raises(CheckpointError, match="belongs to another model"):
            reader.read([LocalArray("parameters/zzz", (1,), np.dtype("f4"), ((0, np.zeros(1, "f4")),))])
        with pytest.raises(CheckpointError, match="no array 'parameters/zzz'"):
            reader.read_whole("parameters/zzz")

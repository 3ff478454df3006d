from __future__ import annotations

import hashlib
import io
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import LocalArray
from mpizero.checkpoint.reader import FileByteSource, MemoryByteSource
from mpizero.errors import CheckpointError
from mpizero.testing import run_in_threads

SIZES = (1, 2, 3, 4, 8)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """The same state, saved on every number of ranks."""
    folder = tmp_path_factory.mktemp("saved")
    for size in SIZES:
        run_in_threads(size, lambda comm: state.save(folder / f"on{comm.size}", comm))
    return folder


@pytest.mark.parametrize("readers", SIZES)
@pytest.mark.parametrize("writers", SIZES)
def test_what_any_number_of_ranks_saves_any_number_loads(state, saved, writers, readers):
    assert all(run_in_threads(readers, lambda comm: state.loads(saved / f"on{writers}", comm)))


def test_files_do_not_depend_on_the_ranks_that_wrote_them_nor_on_the_time(state, saved, tmp_path):
    first = digest(saved / "on1")
    assert set(first) == {"manifest.json", "state.h5"}
    time.sleep(1.1)
    state.save(tmp_path / "later")
    assert all(digest(saved / f"on{size}") == first for size in SIZES)
    assert digest(tmp_path / "later") == first


def test_plain_h5py_reads_whole_named_arrays(state, saved):
    with h5py.File(saved / "on3" / "state.h5", "r") as file:
        for path, whole in state.arrays.items():
            assert file[path].shape == whole.shape
            assert file[path].dtype == whole.dtype
            assert file[path][()].tobytes() == whole.tobytes()
        assert file.attrs["format"] == b"mpizero-checkpoint"
        assert file.attrs["version"] == 1


def test_arrays_lie_in_one_piece_at_multiples_of_64_bytes(state, saved):
    with h5py.File(saved / "on4" / "state.h5", "r") as file:
        for path, whole in state.arrays.items():
            assert file[path].chunks is None
            if whole.size:
                assert file[path].id.get_offset() % 64 == 0


def test_the_full_check_passes_and_tells_the_bytes(saved):
    assert checkpoint.verify(saved / "on8") == (saved / "on8" / "state.h5").stat().st_size


@pytest.mark.parametrize("readers", [2, 3, 4, 8])
def test_a_rank_reads_no_more_than_its_own_ranges(state, saved, readers, monkeypatch):
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


def test_a_range_that_no_other_rank_completes_is_verified_all_the_same(state, saved):
    path = "parameters/embedding.weight"
    whole = state.arrays[path].reshape(-1)

    def load(comm):
        values = np.zeros(100, np.float32)
        wanted = [LocalArray(path, (1031, 2503), whole.dtype, ((1_048_530 + comm.rank, values),))]
        with checkpoint.open_checkpoint(saved / "on2", comm) as reader:
            reader.read(wanted if comm.rank < 2 else [])
        return state.agrees(wanted) if comm.rank < 2 else True

    assert all(run_in_threads(3, load))


def test_every_rank_may_read_everything(state, saved):
    def load(comm):
        with checkpoint.open_checkpoint(saved / "on3", comm) as reader:
            return all(reader.read_whole(path).tobytes() == whole.tobytes() for path, whole in state.arrays.items())

    assert all(run_in_threads(3, load))


def test_bytes_are_the_same_on_every_rank_and_number_of_ranks(state, saved):
    images = {image for n in SIZES for image in run_in_threads(n, lambda comm: image_of(state, comm))}
    assert len(images) == 1
    image = images.pop()
    assert image.startswith((saved / "on1" / "state.h5").read_bytes())
    with h5py.File(io.BytesIO(image), "r") as file:
        assert file["optimizer/steps"][...].tolist() == [0, 1, 2, 3, 4]


def image_of(state, comm):
    return checkpoint.to_bytes(state.pieces(comm.rank, comm.size), state.attributes, comm)


def test_bytes_load_on_any_number_of_ranks(state):
    image = checkpoint.to_bytes(state.whole(), state.attributes)

    def load(comm):
        wanted = state.pieces(comm.rank, comm.size, fill=False)
        with checkpoint.from_bytes(image) as reader:
            reader.read(wanted)
            return state.agrees(wanted) and reader.attributes == state.attributes

    assert all(run_in_threads(3, load))


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


def test_thousands_of_arrays_are_laid_out_in_a_moment(tmp_path):
    arrays = [LocalArray(f"parameters/p{k}", (3,), np.dtype("f4"), ((0, np.full(3, k, "f4")),)) for k in range(3000)]
    started = time.monotonic()
    checkpoint.write(tmp_path / "many", arrays, {})
    assert time.monotonic() - started < 10
    with checkpoint.open_checkpoint(tmp_path / "many") as reader:
        assert reader.read_whole("parameters/p2999").tolist() == [2999] * 3


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

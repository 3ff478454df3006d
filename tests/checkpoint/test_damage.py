from __future__ import annotations

import shutil

import pytest

from mpizero import checkpoint
from mpizero.checkpoint import CheckpointMissingError
from mpizero.errors import CheckpointError
from mpizero.testing import run_in_threads
from tests.checkpoint.sealed import first_byte, flip, seal


@pytest.fixture
def folder(small, tmp_path):
    small.save(tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_one_flipped_bit_in_any_byte_is_found(small, folder, name):
    path = folder / name
    places = {}
    for array, whole in small.arrays.items():
        offset = first_byte(folder, array)
        places.update(dict.fromkeys(range(offset, offset + whole.nbytes), array))
    # All bytes of an array have one checksum, all others of the file have one, and the manifest's first line has one.
    end = path.stat().st_size
    last = path.read_bytes().rindex(b"\n", 0, -1) if name == "manifest.json" else end - 1
    near = [k for k in range(end) if len({places.get(k + by) for by in (-1, 0, 1)}) > 1]
    positions = sorted({*near, *range(0, end, 31), *range(last, end)})
    for position in positions:
        flip(path, position, position % 8)
        with pytest.raises(CheckpointError) as caught:
            small.loads(folder)
        if name == "state.h5":
            expected = f"array '{places[position]}'" if position in places else "HDF5 structure"
            assert expected in str(caught.value)
            assert "checksum mismatch" in str(caught.value)
        else:
            assert "manifest.json" in str(caught.value)
        flip(path, position, position % 8)
    assert small.loads(folder)


def test_a_flipped_bit_is_found_by_any_reader_of_a_part_of_its_block(state, tmp_path):
    state.save(tmp_path / "c")
    path, victim = tmp_path / "c" / "state.h5", "optimizer/exp_avg/embedding.weight"
    offset = first_byte(tmp_path / "c", victim)
    for inside in (0, 4 * 1024 * 1024 - 1, 5_000_001, state.arrays[victim].nbytes - 1):
        flip(path, offset + inside)

        def load(comm):
            with pytest.raises(CheckpointError, match=f"array '{victim}': checksum mismatch") as caught:
                state.loads(tmp_path / "c", comm)
            return str(caught.value)

        assert len(set(run_in_threads(3, load))) == 1
        flip(path, offset + inside)
    assert all(run_in_threads(3, lambda comm: state.loads(tmp_path / "c", comm)))


@pytest.mark.parametrize("name", ["state.h5", "manifest.json"])
def test_truncation_at_any_length_is_found(small, folder, name):
    path = folder / name
    whole = path.read_bytes()
    lengths = range(0, len(whole), 7 if name == "manifest.json" else 97)
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            small.loads(folder)
    for more in (b"\0", whole):
        path.write_bytes(whole + more)
        with pytest.raises(CheckpointError, match=name):
            small.loads(folder)


def test_a_tail_of_zeros_and_bytes_of_another_step_are_found(small, folder, tmp_path):
    whole = (folder / "state.h5").read_bytes()
    small.plus_one().save(tmp_path / "other")
    for changed in (
        whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
        (tmp_path / "other" / "state.h5").read_bytes(),
    ):
        (folder / "state.h5").write_bytes(changed)
        with pytest.raises(CheckpointError, match="checksum mismatch"):
            small.loads(folder)


@pytest.mark.parametrize(("missing", "ranks"), [("c", 3), ("c/manifest.json", 1), ("c/state.h5", 3)])
def test_what_is_missing_is_a_file_not_found_error_on_every_rank(small, folder, missing, ranks):
    path = folder.parent / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def load(comm):
        with pytest.raises(FileNotFoundError, match=path.name) as caught:
            small.loads(folder, comm)
        assert isinstance(caught.value, CheckpointMissingError)
        return "\n" not in str(caught.value)

    assert all(run_in_threads(ranks, load))


def test_the_full_check_finds_damage_and_a_manifest_that_names_arrays_wrongly(folder):
    offset = first_byte(folder, "parameters/b")
    flip(folder / "state.h5", offset)
    with pytest.raises(CheckpointError, match="array 'parameters/b': checksum mismatch"):
        checkpoint.verify(folder)
    flip(folder / "state.h5", offset)
    seal(folder, lambda body: body["arrays"]["parameters/a"].update(shape=[8, 5]))
    with pytest.raises(CheckpointError, match=r"\(5, 8\) <f4 in the file, \(8, 5\)"):
        checkpoint.verify(folder)


def test_damaged_bytes_are_refused(small):
    image = checkpoint.to_bytes(small.whole(), {"x": 1})
    step = 23
    for position in range(0, len(image), step):
        damaged = bytearray(image)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            checkpoint.from_bytes(damaged).read(small.pieces(0, 1, fill=False))
    for length in range(0, len(image), step):
        with pytest.raises(CheckpointError):
            checkpoint.from_bytes(image[:length])
    with pytest.raises(CheckpointError, match="truncated or foreign"):
        checkpoint.from_bytes(b"")
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.from_bytes(b"\xff" * 8 + b"mpizero1")

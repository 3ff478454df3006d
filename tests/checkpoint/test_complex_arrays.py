"""Complex arrays in checkpoints: pieces that share a number, statistics, differences, other formats."""

import h5py
import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint import writer
from mpizero.checkpoint.convert import ImportRules, TensorFile, export, write_imported
from mpizero.checkpoint.inspect import compare, statistics
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads

VALUES = {
    "parameters/w": (np.arange(15) - 1j * np.arange(15) ** 2).reshape(3, 5),
    "parameters/s": np.array(2 - 3j, np.complex64),
    "parameters/r": np.arange(3.0),
}


def saved(folder, comm="self", values=VALUES):
    """Write each array in as many pieces as there are ranks, cut at odd real numbers."""
    size, rank = (1, 0) if comm == "self" else (comm.size, comm.rank)
    arrays = []
    for path, array in values.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
        cuts = [0, *(flat.size * r // size | 1 for r in range(1, size)), flat.size]
        start, stop = cuts[rank], max(cuts[rank], cuts[rank + 1])
        arrays.append(checkpoint.LocalArray(path, array.shape, array.dtype, ((start, flat[start:stop]),)))
    checkpoint.write(folder, arrays, {}, comm, replace=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_may_share_a_complex_number(tmp_path, ranks):
    run_in_threads(ranks, lambda comm: saved(tmp_path / "c", comm))
    checkpoint.verify(tmp_path / "c")
    with h5py.File(tmp_path / "c" / "state.h5") as file:
        for path, array in VALUES.items():
            assert file[path].dtype == array.dtype
            np.testing.assert_array_equal(file[path][()], array)
        assert file["parameters/w"].id.get_type().get_class() == h5py.h5t.COMPOUND
    with checkpoint.open_checkpoint(tmp_path / "c", "self") as reader:
        for path, array in VALUES.items():
            np.testing.assert_array_equal(reader.read_whole(path), array)
        part = np.empty(4)
        reader.read([checkpoint.LocalArray("parameters/w", (3, 5), np.dtype("c16"), ((7, part),))])
        assert part.tolist() == [-9.0, 4.0, -16.0, 5.0]


def test_a_number_that_nobody_or_everybody_writes_is_told(tmp_path):
    for start, stop, told in ((0, 29, "elements 29 to 29 are written by no rank"), (1, 31, "do not fit")):
        piece = (start, np.zeros(stop - start))
        array = checkpoint.LocalArray("parameters/w", (3, 5), np.dtype("c16"), (piece,))
        with pytest.raises(CheckpointError, match=told):
            checkpoint.write(tmp_path / "c", [array], {}, "self")
    wrong = checkpoint.LocalArray("parameters/w", (3,), np.dtype("c16"), ((0, np.zeros(3, "f4")),))
    with pytest.raises(CheckpointError, match="values are <f4, the array is <c16"):
        checkpoint.write(tmp_path / "c", [wrong], {}, "self")


def test_statistics_and_differences_count_parts(tmp_path):
    changed = {path: array.copy() for path, array in VALUES.items()}
    changed["parameters/w"][1, 2] += 5j
    saved(tmp_path / "a")
    saved(tmp_path / "b", values=changed)
    with (
        checkpoint.open_checkpoint(tmp_path / "a", "self") as a,
        checkpoint.open_checkpoint(tmp_path / "b", "self") as b,
    ):
        figures = statistics(a, "parameters/w")
        assert (figures.minimum, figures.maximum, figures.not_finite) == (-196.0, 14.0, 0)
        assert figures.norm == pytest.approx(np.linalg.norm(VALUES["parameters/w"]))
        (difference,) = compare(a, b).arrays
        assert (difference.first, difference.size, difference.differing) == ((1, 2, 1), 30, 1)
        assert difference.values == (-49.0, -44.0)
        assert compare(a, b, tolerance=0.2).equal


def test_other_formats(tmp_path):
    pytest.importorskip("safetensors")
    saved(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c", "self") as reader:
        export(reader, tmp_path / "a.npz", "npz")
        with np.load(tmp_path / "a.npz") as found:
            np.testing.assert_array_equal(found["w"], VALUES["parameters/w"])
        with pytest.raises(ConfigError, match="'parameters/w' is complex128, which safetensors files cannot hold"):
            export(reader, tmp_path / "a.safetensors", "safetensors")
        with pytest.raises(ConfigError, match="'float16': there are no complex numbers of it"):
            export(reader, tmp_path / "a.safetensors", "safetensors", dtype="float16")
        export(reader, tmp_path / "a.safetensors", "safetensors", dtype="float32")
    from safetensors.numpy import load_file, save_file

    found = load_file(tmp_path / "a.safetensors")
    assert found["w"].dtype == np.complex64
    np.testing.assert_array_equal(found["w"], VALUES["parameters/w"].astype(np.complex64))
    save_file(found, tmp_path / "theirs", metadata={"mpizero": "{}"})
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    with TensorFile(tmp_path / "theirs") as source:
        write_imported(source, tmp_path / "back", {}, ImportRules(dtype="float64"))
    with checkpoint.open_checkpoint(tmp_path / "back", "self") as reader:
        np.testing.assert_array_equal(reader.read_whole("parameters/w"), VALUES["parameters/w"])


def test_parallel_hdf5_writes_whole_numbers_and_system_calls_the_halves(tmp_path):
    """A rank must not read, change and write a number of which another rank writes the other half."""
    saved(tmp_path / "c")
    numbers, file = np.arange(20.0, 29.0), tmp_path / "c" / "state.h5"
    array = checkpoint.LocalArray("parameters/w", (3, 5), np.dtype("c16"), ((3, numbers),))
    ((first, values),) = writer._elements(array)
    assert (first, values.tolist()) == (2, [21 + 22j, 23 + 24j, 25 + 26j, 27 + 28j])
    with h5py.File(file) as opened:
        offset = opened["parameters/w"].id.get_offset()
    writer._write_halves(file, [array], {"parameters/w": offset})
    with h5py.File(file) as opened:
        found = opened["parameters/w"][()].reshape(-1).view(np.float64)
    expected = VALUES["parameters/w"].reshape(-1).view(np.float64).copy()
    expected[3] = 20.0  # the imaginary part at its start; the piece ends with a whole number
    np.testing.assert_array_equal(found, expected)

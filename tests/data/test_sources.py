from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero.data import files as deflated
from mpizero.data import source as text_module
from mpizero.data.source import MappedArray
from mpizero.errors import ConfigError, DataError

# ---------------------------------------------------------------------------------------------- text


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.txt").write_bytes(b"0123456789")
    (folder / "b" / "c.txt").write_bytes(b"abcde")
    (folder / "b" / "empty.txt").write_bytes(b"")
    (folder / "d.txt").write_bytes(bytes(range(200, 220)))
    (folder / ".git" / "index").write_bytes(b"hidden")
    (folder / ".hidden").write_bytes(b"hidden")
    return folder


WHOLE = b"0123456789abcde" + bytes(range(200, 220))


@pytest.mark.parametrize("sequence", [1, 4, 34])
def test_sample_i_is_its_bytes_and_the_next_one(corpus, sequence):
    source = data.TextSource(corpus, sequence)
    assert len(source) == (len(WHOLE) - 1) // sequence
    order = np.random.default_rng(0).permutation(len(source))
    x, y = source.samples(order)
    assert x.shape == y.shape == (len(source), sequence)
    assert x.dtype == y.dtype == np.int64
    for row, i in enumerate(order):
        assert x[row].tolist() == list(WHOLE[i * sequence : (i + 1) * sequence])
        assert y[row].tolist() == list(WHOLE[i * sequence + 1 : (i + 1) * sequence + 1])


def test_files_folders_and_patterns_name_the_same_text(corpus, monkeypatch):
    monkeypatch.chdir(corpus)
    files = ["a.txt", "b/c.txt", "d.txt"]
    expected = [corpus / name for name in files]
    for paths in (corpus, str(corpus), expected, f"{corpus}/**/*.txt", files, "."):
        source = data.TextSource(paths, 4)
        assert [Path(name).resolve() for name in source.files] == expected
        assert source.bytes == len(WHOLE)
    assert data.TextSource(["d.txt", "a.txt"], 4).files == (str(corpus / "d.txt"), str(corpus / "a.txt"))


def test_more_files_than_stay_open_are_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "OPEN_FILES", 2)
    for k in range(30):
        (tmp_path / f"{k:02}.txt").write_bytes(bytes([k] * 3))
    source = data.TextSource(tmp_path, 10)
    before = len(os.listdir("/proc/self/fd"))
    x, _ = source.samples(range(len(source)))
    assert x.reshape(-1).tolist() == [k for k in range(30) for _ in range(3)][: x.size]
    assert len(os.listdir("/proc/self/fd")) - before <= 4  # two a file: one of its own, one of the mapping


#: What is given, and what is said; folders and pipes are made where their names are asked for.
BAD_TEXT = {
    "missing": (lambda folder: folder / "nothing.txt", "nothing.txt: does not exist"),
    "empty file": (lambda folder: folder / "b" / "empty.txt", "empty.txt: the file is empty"),
    "empty folder": (lambda folder: (folder / "e").mkdir() or folder / "e", "a folder without files"),
    "no match": (lambda folder: f"{folder}/*.rst", "matches no file"),
    "all empty": (lambda folder: f"{folder}/b/em*", "all of them empty"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe") or folder / "pipe", "not a regular file"),
    "too short": (lambda folder: folder / "b" / "c.txt", "5 bytes of text; sequences of 8 need at least 9 bytes"),
    "no paths": (lambda folder: [], "list of paths is empty"),
}


@pytest.mark.parametrize(("paths", "told"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_text_that_cannot_be_used_is_a_clear_error(corpus, paths, told):
    with pytest.raises(DataError, match=told) as caught:
        data.TextSource(paths(corpus), 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sequence", [0, 2.5, True])
def test_sequence_is_a_whole_number_of_bytes(corpus, sequence):
    with pytest.raises(ConfigError, match="sequence="):
        data.TextSource(corpus, sequence)


def test_a_file_that_changes_under_training_is_named(corpus):
    source = data.TextSource(corpus, 4)
    (corpus / "a.txt").write_bytes(b"longer than before")
    with pytest.raises(DataError, match=r"a\.txt: 18 bytes now, 10 when training started"):
        source.samples([0])
    (corpus / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read any more"):
        source.samples([0])


def test_the_standard_library_is_a_corpus_without_tests():
    source = data.TextSource("stdlib", 128)
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {Path(file).relative_to(root).as_posix() for file in source.files}
    assert {"argparse.py", "json/decoder.py", "os.py"} <= names
    assert not any(part in text_module.LEFT_OUT for name in names for part in name.split("/")[:-1])
    assert source.bytes > 5_000_000
    x, y = source.samples([0, len(source) - 1])
    assert (x[:, 1:] == y[:, :-1]).all()


@pytest.mark.slow
def test_a_file_of_the_standard_library_that_is_a_link_to_another_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "real.py").write_text("x = 1\n" * 100)
    (tmp_path / "link.py").symlink_to("real.py")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert len(data.TextSource("stdlib", 8)) == (600 - 1) // 8


def test_the_standard_library_is_the_same_in_every_process():
    code = "from mpizero import data; print(data.TextSource('stdlib', 128).fingerprint)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # of this process it is another one
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == data.TextSource("stdlib", 128).fingerprint


# ---------------------------------------------------------------------------------------------- arrays


def test_complex_samples_come_from_arrays_and_files(tmp_path):
    values = np.arange(8) * 1j
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["x"], file["y"] = values.reshape(4, 2), np.arange(4).astype("c8")
    np.save(tmp_path / "x.npy", values.reshape(4, 2))
    np.save(tmp_path / "y.npy", np.arange(4).astype("c8"))
    for source in (
        data.ArraySource(values.reshape(4, 2), np.arange(4).astype("c8")),
        data.NpySource(tmp_path / "x.npy", tmp_path / "y.npy"),
        data.Hdf5Source(tmp_path / "c.h5", "x", "y"),
    ):
        x, y = source.samples([3, 1])
        assert x.tolist() == [[6j, 7j], [2j, 3j]]
        assert (y.dtype, y.tolist()) == (np.complex64, [3, 1])


BAD_ARRAYS = [
    ([[1, 2], [3]], [0, 1], "x: not an array"),
    (["a", "b"], [0, 1], r"x: elements of type <U1; needed are numbers"),
    ([1.0, 2], [None, "x"], "y: elements of type object"),
    ([1, 2, 3], [0, 1], "x has 3 samples and y has 2"),
    (np.zeros((0, 3)), [], r"x: shape \(0, 3\) has no samples"),
    (5, 5, "x: a single number"),
]


@pytest.mark.parametrize(("x", "y", "reason"), BAD_ARRAYS)
def test_arrays_that_cannot_be_samples_are_a_clear_error(x, y, reason):
    with pytest.raises(DataError, match=reason):
        data.ArraySource(x, y)


@pytest.mark.parametrize("bad", [[-1], [20], [0, 99], [1.5], [[1]], "x"])
def test_indices_outside_are_errors(bad):
    with pytest.raises(DataError, match="does not exist|whole numbers"):
        data.ArraySource(np.arange(20), np.arange(20)).samples(bad)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def npy_bytes(values, **settings):
    np.save(file := io.BytesIO(), values, **settings)
    return file.getvalue()


def npy_header(shape):
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


def npz_bytes():
    np.savez(file := io.BytesIO(), x=np.zeros(3))
    return file.getvalue()


BAD_NPY = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("1 2 3"),
    "truncated": lambda path: path.write_bytes(npy_bytes(np.zeros(1000))[:500]),
    "pickled": lambda path: path.write_bytes(npy_bytes(np.array([Bomb()], object), allow_pickle=True)),
    "cut header": lambda path: path.write_bytes(npy_bytes(np.zeros(10)).replace(b"}", b" ", 1)),
    "terabytes declared": lambda path: path.write_bytes(npy_header((1 << 40,))),
    "archive": lambda path: path.write_bytes(npz_bytes()),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", BAD_NPY.values(), ids=BAD_NPY)
def test_npy_files_that_cannot_be_used_are_a_clear_error(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "y.npy", np.zeros(3))
    make(tmp_path / "x.npy")
    with pytest.raises(DataError, match=r"x\.npy: "):
        data.NpySource(tmp_path / "x.npy", tmp_path / "y.npy")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(300,), (300, 2000), (5, 0)])
def test_npy_files_are_read_in_any_order_of_elements_and_bytes(tmp_path, shape, order):
    values = np.random.default_rng(0).normal(size=shape).astype(">f8", order=order)
    np.save(tmp_path / "x.npy", values)
    source = data.NpySource(tmp_path / "x.npy", tmp_path / "x.npy")
    assert isinstance(source.x, MappedArray)
    for indices in (range(len(values)), [3, 1, 4], [0]):
        found = source.samples(indices)[0]
        np.testing.assert_array_equal(found, values[np.asarray(indices)])
        assert found.dtype.isnative


def test_npy_files_of_different_length_are_named(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    np.save(tmp_path / "y.npy", np.zeros(4))
    with pytest.raises(DataError, match=r"x\.npy has 3 samples and .*y\.npy has 4"):
        data.NpySource(tmp_path / "x.npy", tmp_path / "y.npy")


def test_digits_are_those_of_scikit_learns_file_or_else_of_its_function(monkeypatch):
    """The file's first numbers and those of each class are in its manual; the import would take more than a second."""
    if find_spec("sklearn") is None:
        pytest.skip("needs scikit-learn")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    x, y = data.digits().samples(range(1797))
    assert (x.shape, x.dtype, y.dtype) == ((1797, 64), np.float32, np.int64)
    assert (16 * x[0, :8]).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert np.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    monkeypatch.setattr("mpizero.data.source.DIGITS", ("elsewhere",))
    with pytest.raises(DataError, match="pip install scikit-learn"):
        data.digits()
    function = SimpleNamespace(load_digits=lambda return_X_y: (8 * np.eye(3), np.arange(3)))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", function)
    x, y = data.digits().samples([2, 0])
    assert (x.tolist(), y.tolist()) == ([[0, 0, 0.5], [0.5, 0, 0]], [2, 0])


# ---------------------------------------------------------------------------------------------- HDF5

STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (7, 2)},
    "one chunk": {"chunks": (100, 3)},
    "parts of rows": {"chunks": (16, 2), "compression": "gzip"},
    "sums": {"chunks": (16, 3), "compression": "gzip", "fletcher32": True},
    "another filter": {"chunks": (16, 3), "compression": "lzf"},
}
#: Types of elements, in either order of bytes.
TYPES = (">f4", "<f4", "f8", "f2", "i2", ">u8", "u1", "?", "c8")


@pytest.mark.parametrize(("shuffled", "kept"), [(False, 0), (True, 1 << 20)])
@pytest.mark.parametrize("dtype", TYPES)
def test_gzip_chunks_have_the_elements_that_hdf5_reads(tmp_path, monkeypatch, dtype, shuffled, kept):
    monkeypatch.setattr(deflated, "CACHED_BYTES", kept)
    values = np.random.default_rng(0).integers(0, 100, (50, 3, 2)).astype(dtype)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 3, 2), compression="gzip", shuffle=shuffled)
        file["y"] = np.arange(50)
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "y")
    assert isinstance(source._values(source.paths[0], "x"), deflated.DeflatedArray) == (values.dtype.kind in "fiu")
    for order in (np.random.default_rng(1).permutation(50), range(50), range(10, 14), [49, 3, 3]):
        np.testing.assert_array_equal(source.samples(order)[0], values[np.asarray(order)])
    windows = data.Hdf5Source(tmp_path / "d.h5", "x", "x", window={0: 4, 1: 2}, stride={0: 3, 1: 1})
    x, _ = windows.samples([0, 5, 31])
    for found, (begin, row) in zip(x, [(0, 0), (6, 1), (45, 1)], strict=True):
        np.testing.assert_array_equal(found, values[begin : begin + 4, row : row + 2])
    source.close()


def test_chunks_that_gzip_has_not_compressed_are_read_by_hdf5(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        x = file.create_dataset("x", (30, 2), "f4", chunks=(10, 2), compression="gzip", fillvalue=7)
        x[:10] = 1
        x.id.write_direct_chunk((20, 0), np.full((10, 2), 3, "f4").tobytes(), filter_mask=1)  # and one is missing
        file["y"] = np.arange(30)
    x, _ = data.Hdf5Source(tmp_path / "d.h5", "x", "y").samples(range(30))
    np.testing.assert_array_equal(x, np.repeat(np.array([1, 7, 3], "f4"), 10)[:, None] + np.zeros((1, 2), "f4"))


@pytest.mark.parametrize("storage", STORAGE)
def test_hdf5_gives_its_rows_however_they_are_stored(tmp_path, storage):
    x, y = np.random.default_rng(0).normal(size=(100, 3)).astype(">f4"), np.arange(100) % 2 == 0
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("in/x", data=x, **STORAGE[storage])
        file["y"] = y
    source = data.Hdf5Source(tmp_path / "d.h5", "in/x", "y")
    assert len(source) == 100
    runs = (range(100), [*range(14, 34), 3, 3, *range(60, 70), 4, 5], range(99, 0, -1))
    for order in (np.random.default_rng(1).permutation(100), [99, 0, 0, 50], [], *runs):
        got_x, got_y = source.samples(order)
        np.testing.assert_array_equal(got_x, x[np.asarray(order, int)])
        np.testing.assert_array_equal(got_y, y[np.asarray(order, int)])
        assert got_x.dtype.isnative
    source.close()
    source.close()


def test_every_chunk_is_read_once(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100.0), chunks=(10,))
        file["y"] = np.arange(100)
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "y")
    spans = []

    class Watched:
        def __getitem__(self, where):
            spans.append((where[0].start, where[0].stop))
            return np.arange(100.0)[where]

    source._opened = lambda path: {"x": (Watched(), 10), "y": (np.arange(100), 0)}
    x, _ = source.samples([55, 3, 51, 9, 58, 3])
    assert x.tolist() == [55, 3, 51, 9, 58, 3]
    assert spans == [(3, 10), (51, 59)]


def hdf5(path, **datasets):
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values


BAD_HDF5 = {
    "missing": (lambda path: None, "does not exist"),
    "empty": (lambda path: path.touch(), "the file is empty"),
    "text": (lambda path: path.write_text("no HDF5 at all"), "not a readable HDF5 file"),
    "other names": (lambda path: hdf5(path, images=np.zeros(3)), "no dataset 'x'; it has images"),
    "group": (lambda path: hdf5(path, **{"x/deep": np.zeros(3)}), "'x' is a group"),
    "text as samples": (lambda path: hdf5(path, x=["a", "b"], y=[0, 1]), "dataset 'x': elements of type object"),
    "no rows": (lambda path: hdf5(path, x=np.zeros((0, 3)), y=np.zeros(0)), "has no samples"),
    "null": (lambda path: hdf5(path, x=h5py.Empty("f4")), "dataset 'x' is empty"),
    "lengths": (
        lambda path: hdf5(path, x=np.zeros(3), y=np.zeros(4)),
        r"dataset 'x' has 3 samples and .* dataset 'y' has 4",
    ),
}


@pytest.mark.parametrize(("make", "told"), BAD_HDF5.values(), ids=BAD_HDF5)
def test_hdf5_files_that_cannot_be_used_are_a_clear_error(tmp_path, make, told):
    make(tmp_path / "d.h5")
    with pytest.raises(DataError, match=told) as caught:
        data.Hdf5Source(tmp_path / "d.h5", "x", "y")
    assert "d.h5" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize(("length", "share"), [(2, 0.01), (2, 0.5), (10, 0.05), (10, 0.2), (1000, 0.01), (1000, 0.5)])
def test_a_split_is_disjoint_complete_and_of_the_asked_share(numbers, length, share):
    train, valid = numbers(length).split(share)
    assert len(valid) == max(1, round(share * length))
    ids = [part.samples(range(len(part)))[0].tolist() for part in (train, valid)]
    assert sorted(ids[0] + ids[1]) == list(range(length))
    again = numbers(length).split(share)[1]
    assert again.samples(range(len(again)))[0].tolist() == ids[1]


def test_arrays_hold_back_a_random_choice_and_text_its_end(numbers, corpus):
    _, valid = numbers(1000).split(0.1)
    ids = sorted(valid.samples(range(100))[0].tolist())
    assert ids[0] < 100
    assert ids[-1] > 900
    source = data.TextSource(corpus, 2, validation=0.25)
    train, valid = source.split()
    assert (len(train), len(valid)) == (13, 4)
    assert valid.samples([3])[0].tolist() == source.samples([16])[0].tolist()


def test_a_share_of_zero_holds_nothing_back(numbers):
    train, valid = numbers(5).split(0)
    assert (len(train), len(valid)) == (5, 0)
    assert valid.samples([])[0].shape == (0,)


@pytest.mark.parametrize("share", [-0.1, 1, float("nan"), "0.1", True])
def test_shares_outside_are_errors(numbers, share):
    with pytest.raises(ConfigError, match="validation="):
        numbers(5).split(share)


@pytest.mark.parametrize(("length", "share"), [(1, 0.5), (3, 0.99)])
def test_a_split_that_leaves_nothing_to_train_on_is_an_error(numbers, length, share):
    with pytest.raises(DataError, match="leaves none to train on"):
        numbers(length).split(share)


@pytest.mark.parametrize(
    ("source", "start", "stop", "message"),
    [
        ([1, 2], 0, 2, "Subset: expected a source of samples, got list"),
        (None, 0, 11, "Subset: stop=11: the source has 10 samples"),
        (None, 5, 2, "Subset: stop=2: expected a whole number >= 5"),
        (None, 0, 2.5, "Subset: stop=2.5: expected a whole number"),
    ],
)
def test_a_subset_outside_of_its_source_is_an_error(source, start, stop, message):
    whole = data.ArraySource(np.zeros((10, 2)), np.arange(10))
    with pytest.raises((DataError, ConfigError), match=re.escape(message)):
        data.Subset(whole if source is None else source, start, stop)


def test_fingerprints_tell_data_apart(numbers, corpus):
    whole = data.TextSource(corpus, 4)
    train, valid = whole.split(0.25)
    prints = [whole, train, valid, data.TextSource(corpus, 5), numbers(5), numbers(6), numbers(5).split(0.2)[0]]
    assert len({source.fingerprint for source in prints}) == len(prints)
    assert data.TextSource(f"{corpus}/**/*.txt", 4).fingerprint == whole.fingerprint


def test_a_source_may_give_its_pair_as_a_list():
    class Listed(data.Source):
        def __len__(self):
            return 10

        def read(self, indices, *, run):
            return [indices.astype(float), indices]

        def describe(self):
            return {}

    with mz.ShardingConfig() as config:
        batches = data.batches(Listed().split(0.2)[0], config, 6)
        for x, y in (next(batches), next(batches)):  # the second across the end of an epoch
            np.testing.assert_array_equal(x, y)
            assert x.shape == y.shape == (6,)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((np.ones((5, 2)), np.ones(8)), r"was asked for 8 samples and returned x of shape \(5, 2\)"),
        ((np.ones((8, 2)), np.ones(9)), r"was asked for 8 samples and returned y of shape \(9,\)"),
        (None, r"must return the pair \(x, y\), it returned NoneType"),
        ((np.ones((8, 2)),), r"must return the pair \(x, y\), it returned a tuple of 1"),
    ],
)
def test_a_source_that_gives_other_samples_than_asked_is_named(found, told):
    class Short(data.Source):
        def __len__(self):
            return 100

        def read(self, indices):
            return found

        def describe(self):
            return {}

    with mz.ShardingConfig() as config:
        for source in (Short(), Short().split(0.1)[0]):
            with pytest.raises(DataError, match=rf"Short.read .*{told}"):
                next(data.batches(source, config, 8))


# ---------------------------------------------------------------------------------------------- labels of samples


class Index(list):
    """Labels as those of pandas."""

    def equals(self, other):
        return self == other


class Frame:
    """An array with labels, as pandas has them."""

    iloc = None

    def __init__(self, values, index):
        self.values, self.index = np.asarray(values), Index(index)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Field(Frame):
    """An array with names of axes and labels, as xarray has them."""

    def __init__(self, values, dims, **coordinates):
        super().__init__(values, [])
        self.dims, self.indexes = dims, {name: Index(labels) for name, labels in coordinates.items()}


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (
            Frame(np.eye(3), "abc"),
            Frame(range(3), "acb"),
            "y labels its samples otherwise than x, and .* by their place",
        ),
        ({"a": Frame(np.eye(3), "abc")}, Frame(range(3), "acb"), r"y labels its samples otherwise than x\['a'\]"),
        (
            Field(np.eye(3), ("place", "day")),
            Field(range(3), ("day",)),
            "y has samples along 'day', which is axis 1 of x",
        ),
        (
            Field(range(3), ("day",)),
            Field(np.eye(3), ("place", "day")),
            "x has samples along 'day', which is axis 1 of y",
        ),
        (Field(range(3), ("day",), day="abc"), Field(range(3), ("day",), day="bcd"), "y labels its samples otherwise"),
    ],
)
def test_arrays_whose_labels_have_another_order_are_not_paired_by_place(x, y, told):
    with pytest.raises(DataError, match=told):
        data.ArraySource(x, y)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (Frame(np.eye(3), "abc"), Frame(range(3), "abc")),
        (Frame(np.eye(3), "abc"), np.arange(3)),
        (Field(np.eye(3), ("day", "place"), day="abc"), Field(range(3), ("day",), day="abc")),
        (Field(np.eye(3), ("day", "place"), day="abc"), Field(range(3), ("number",), number="bcd")),
        (Field(np.eye(3), ("day", "place"), day="abc"), Frame(range(3), "bcd")),
    ],
)
def test_arrays_with_the_same_or_no_comparable_labels_are_taken(x, y):
    assert data.ArraySource(x, y).samples([2, 0])[1].tolist() == [2, 0]

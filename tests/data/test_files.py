"""Samples of many files, named arrays, other axes and windows, each compared with NumPy's own slices."""

from __future__ import annotations

import importlib

import h5py
import numpy as np
import pytest

from mpizero import data
from mpizero.data import files
from mpizero.data import source as mapped
from mpizero.errors import ConfigError, DataError
from mpizero.train.config.build import build_source
from mpizero.train.config.toml import ConfigDocument, parse_config

RNG = np.random.default_rng(0)


@pytest.fixture
def series(tmp_path):
    """Three files of a field (time, row, column), chunked and not, and a label for each time."""
    whole = RNG.normal(size=(23, 6, 8)).astype("f4")
    for name, part, storage in (
        ("a", slice(0, 5), {}),
        ("b", slice(5, 16), {"chunks": (4, 6, 8), "compression": "gzip"}),
        ("c", slice(16, 23), {}),
    ):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("field", data=whole[part], **storage)
            file["other"] = -whole[part]
            file["label"] = np.arange(23)[part]
    return tmp_path, whole


def test_files_of_a_pattern_are_one_source(series, monkeypatch):
    monkeypatch.setattr(files, "OPEN_FILES", 2)
    folder, whole = series
    order = RNG.permutation(23)
    for path in (f"{folder}/*.h5", [folder / "a.h5", folder / "b.h5", f"{folder}/c*.h5"]):
        source = data.Hdf5Source(path, "field", "label")
        x, y = source.samples(order)
        np.testing.assert_array_equal(x, whole[order], strict=True)
        np.testing.assert_array_equal(y, order)
        assert len(source) == 23


def test_several_datasets_are_a_dictionary(series):
    folder, whole = series
    x, y = data.Hdf5Source(f"{folder}/*.h5", ["field", "other"], {"class": "label"}).samples([20, 4])
    np.testing.assert_array_equal(x["field"], whole[[20, 4]])
    np.testing.assert_array_equal(x["other"], -whole[[20, 4]])
    assert y["class"].tolist() == [20, 4]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_samples_lie_along_any_axis(tmp_path, axis):
    values = RNG.normal(size=(4, 5, 6))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(2, 2, 2))
        file["y"] = values
    x, y = data.Hdf5Source(tmp_path / "d.h5", "x", "y", axis=axis).samples([3, 0, 3])
    np.testing.assert_array_equal(x, np.moveaxis(values, axis, 0)[[3, 0, 3]], strict=True)
    np.testing.assert_array_equal(y, x)


def test_windows_in_time_cross_files_and_targets_follow_by_the_lead(series):
    folder, whole = series
    source = data.Hdf5Source(f"{folder}/*.h5", "field", "field", window={0: 4}, stride={0: 3}, lead=2)
    starts = [start for start in range(0, 23, 3) if start + 4 + 2 <= 23]
    assert len(source) == len(starts)
    x, y = source.samples(range(len(source))[::-1])
    np.testing.assert_array_equal(x, [whole[s : s + 4] for s in starts[::-1]], strict=True)
    np.testing.assert_array_equal(y, [whole[s + 2 : s + 6] for s in starts[::-1]], strict=True)


def test_windows_in_space_are_numbered_by_time_then_row_then_column(series):
    folder, whole = series
    source = data.Hdf5Source(f"{folder}/*.h5", "field", "label", window={1: 4, 2: 3}, stride={1: 2})
    places = [(t, i, j) for t in range(23) for i in (0, 2) for j in (0, 3)]
    assert len(source) == len(places)
    x, y = source.samples(range(len(source)))
    np.testing.assert_array_equal(x, [whole[t, i : i + 4, j : j + 3] for t, i, j in places], strict=True)
    assert y.tolist() == [t for t, _, _ in places]


def test_nan_is_told_by_file_index_and_sample_unless_allowed(tmp_path):
    for name in "ab":
        values = np.zeros((10, 2))
        if name == "b":
            values[3, 1] = np.nan
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"], file["y"] = values, np.arange(10)
    told = r"b\.h5: dataset 'x', index 3 along axis 0: NaN at \[1\] of sample 13"
    source = data.Hdf5Source(f"{tmp_path}/*.h5", "x", "y")
    source.samples([12, 14])
    with pytest.raises(DataError, match=told):
        source.samples([1, 13])
    with pytest.raises(DataError, match=r"b\.h5: dataset 'x', index 3 along axis 0: NaN at \[1, 1\] of sample 6"):
        data.Hdf5Source(f"{tmp_path}/*.h5", "x", "y", window={0: 2}).samples([6])
    x, _ = data.Hdf5Source(f"{tmp_path}/*.h5", "x", "y", allow_nan=True).samples([13])
    assert np.isnan(x).tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"path": "*.nc"}, DataError, "matches no file"),
        ({"path": []}, DataError, "list of files is empty"),
        ({"path": ["a.h5", "gone.h5"]}, DataError, "gone.h5: does not exist"),
        ({"path": ["a.h5", "wide.h5"]}, DataError, r"wide.h5: .* has float32 of shape \(2, 6, 9\), .*a.h5: "),
        ({"y": ["label", "lable"]}, DataError, "a.h5: no dataset 'lable'; it has field, label, other"),
        ({"axis": 3}, DataError, r"a.h5: dataset 'field' has shape \(5, 6, 8\): it has no axis 3"),
        ({"axis": -1}, ConfigError, "axis=-1"),
        ({"window": {0: 6}}, DataError, r"a.h5: .* \(5, 6, 8\): axis 0 is too short for a window of 6"),
        ({"window": {0: 4}, "lead": 2}, DataError, "too short for a window of 4 and lead=2"),
        ({"window": {3: 1}}, ConfigError, "window: axis=3"),
        ({"window": {0: 0}}, ConfigError, r"window\[0\]=0"),
        ({"window": [4]}, ConfigError, "a mapping from axes"),
        ({"stride": {1: 2}}, ConfigError, "axis 1 has no length"),
        ({"x": {}}, ConfigError, "expected a name, names, or a mapping"),
        ({"allow_nan": 1}, ConfigError, "allow_nan=1"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_it(series, monkeypatch, arguments, error, told):
    folder, _ = series
    monkeypatch.chdir(folder)
    with h5py.File("wide.h5", "w") as file:
        file["field"], file["label"] = np.zeros((2, 6, 9), "f4"), np.zeros(2)
    with pytest.raises(error, match=told) as caught:
        data.Hdf5Source(**({"path": "a.h5", "x": "field", "y": "label"} | arguments))
    assert "\n" not in str(caught.value)


def test_a_damaged_chunk_is_told_by_file_and_range(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.arange(1000.0), chunks=(100,), compression="gzip")
        file["y"] = np.arange(1000)
        offset = dataset.id.get_chunk_info(4).byte_offset
    raw = bytearray((tmp_path / "d.h5").read_bytes())
    raw[offset : offset + 40] = b"\xff" * 40
    (tmp_path / "d.h5").write_bytes(raw)
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "y")
    source.samples([399])
    with pytest.raises(DataError, match=r"d\.h5: dataset 'x', elements \[410:421\]"):
        source.samples([410, 420])
    with pytest.raises(DataError, match=r"d\.h5: dataset 'x', elements \[400:500\]"):
        source.samples(range(350, 550))


def test_the_configuration_file_has_every_argument(series):
    folder, _ = series
    lines = f"""
        [model]
        name = "mlp"
        [data]
        validation = 0
        hdf5 = {{path = ["{folder}/*.h5"], x = {{f = "field"}}, y = ["label"], axis = 0, window = {{1 = 2}}, lead = 1}}
    """
    source = build_source(parse_config(ConfigDocument("run.toml", lines, ())))[0].source
    assert len(source) == 22 * 3
    x, y = source.samples([4])
    assert (x["f"].shape, y["label"].tolist()) == ((1, 2, 8), [2])


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("{path = 'a.h5', x = 'x'}", "y is missing"),
        ("{path = 'a.h5', x = 'x', y = 'y', windw = {0 = 1}}", "windw is unknown.*window"),
        ("{path = 'a.h5', x = 'x', y = 'y', window = {a = 1}}", "window must be a table from axes to numbers"),
        ("{path = 'a.h5', x = 'x', y = 'y', axis = -1}", "axis must be a whole number"),
        ("{path = [], x = 'x', y = 'y'}", "path must be a list of at least 1 values"),
    ],
)
def test_a_wrong_table_of_the_configuration_file_is_told(table, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(ConfigDocument("run.toml", f"[model]\nname = 'mlp'\n[data]\nhdf5 = {table}\n", ()))


@pytest.mark.parametrize("region", [4096, 8192, 1 << 22])
def test_reading_ahead_asks_once_for_each_region_that_is_touched(tmp_path, monkeypatch, region):
    monkeypatch.setattr(mapped, "REGION", region)
    values = RNG.normal(size=(100, 300))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["before"] = np.arange(77)
        file["x"], file["y"] = values, np.arange(100)
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "y")
    array = source._opened(str(tmp_path / "d.h5"))["x"][0]
    monkeypatch.setattr(mapped, "READ_BYTES", 20 * 2400)  # from 20 rows on, neighbours are read by a call of the system
    for order in ([99, 0], [98, 1, 99], range(30, 60), range(81, 100), RNG.permutation(100)):
        np.testing.assert_array_equal(source.samples(order)[0], values[order])
    assert not array._unread.any()
    assert len(array._unread) == -(-(array._first + values.nbytes) // region)


# ---------------------------------------------------------------------------------------------- links and virtual parts


def virtual(path, parts, name="x", fill=0.0):
    """Write a dataset of ten numbers from each of the files ``parts``, as they are named in it."""
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((10 * len(parts),), "f8")
        for number, part in enumerate(parts):
            layout[10 * number : 10 * number + 10] = h5py.VirtualSource(part, name, (10,))
        file.create_virtual_dataset("x", layout, fillvalue=fill)


def part(path):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(1.0, 11.0)


@pytest.mark.parametrize("there", ["beside the file", "where the source is made"])
def test_parts_of_a_virtual_dataset_are_found_wherever_the_program_goes(tmp_path, monkeypatch, there):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("a.h5", "b.h5"):
        part(tmp_path / ("data" if there == "beside the file" else ".") / name)
    virtual("data/all.h5", ["a.h5", "b.h5"])
    source = data.Hdf5Source("data/all.h5", "x", "x")
    monkeypatch.chdir("/")
    assert source.samples([0, 19])[0].tolist() == [1, 10]


def test_a_missing_part_of_a_virtual_dataset_is_an_error_unless_it_is_told_by_nan(tmp_path):
    part(tmp_path / "a.h5")
    virtual(tmp_path / "all.h5", ["a.h5", "gone.h5"])
    with pytest.raises(DataError, match=r"all\.h5: dataset 'x' is virtual, and its part gone\.h5: 'x' is not there"):
        data.Hdf5Source(tmp_path / "all.h5", "x", "x")
    virtual(tmp_path / "all.h5", ["a.h5", "a.h5"], name="y")
    with pytest.raises(DataError, match=r"its part a\.h5: 'y' is not there"):
        data.Hdf5Source(tmp_path / "all.h5", "x", "x")
    virtual(tmp_path / "all.h5", ["a.h5", "gone.h5"], fill=np.nan)
    assert np.isnan(data.Hdf5Source(tmp_path / "all.h5", "x", "x", allow_nan=True).samples([15])[0]).all()


@pytest.mark.parametrize(
    ("link", "to"),
    [(h5py.SoftLink("/lost"), "'/lost'"), (h5py.ExternalLink("gone.h5", "/x"), "'/x' of gone.h5")],
    ids=["soft", "external"],
)
def test_a_link_to_nowhere_is_told_with_where_it_leads(tmp_path, link, to):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = link
    with pytest.raises(DataError, match=f"a.h5: 'x' is a link to {to}, which is not there"):
        data.Hdf5Source(tmp_path / "a.h5", "x", "x")


def test_a_file_that_is_named_twice_would_count_twice(tmp_path):
    part(tmp_path / "a.h5")
    (tmp_path / "link.h5").symlink_to("a.h5")
    for paths in (["a.h5", "a.h5"], ["a.h5", "link.h5"], ["a.h5", "*.h5"]):
        with pytest.raises(DataError, match=r"a\.h5.*: the same file is given twice"):
            data.Hdf5Source([tmp_path / path for path in paths], "x", "x")
        with pytest.raises(DataError, match=r"a\.h5.*: the same file is given twice"):
            data.TextSource([tmp_path / path for path in paths], 8)


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_compressed_text_is_not_taken_for_text(tmp_path, module):
    with importlib.import_module(module).open(tmp_path / "genome.fa", "wb") as file:
        file.write(b"ACGT" * 100)
    for path in (tmp_path / "genome.fa", tmp_path, f"{tmp_path}/*.fa"):
        with pytest.raises(DataError, match=r"genome\.fa: compressed by (gzip|bzip2|xz)"):
            data.TextSource(path, 8)

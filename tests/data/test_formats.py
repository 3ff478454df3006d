"""Zarr stores and NetCDF files give what NumPy has, and what is missing in them is told."""

from __future__ import annotations

import sys

import h5py
import numpy as np
import pytest

from mpizero import data
from mpizero.errors import DataError

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(20, 4, 6)).astype("f4")


def zarr_store(path, values):
    group = pytest.importorskip("zarr").open_group(path, mode="w")
    for name, array in values.items():
        group.create_array(name, data=array, chunks=tuple(max(1, size // 3) for size in array.shape))


def netcdf_file(path, values, **attributes):
    with pytest.importorskip("h5netcdf").File(path, "w") as file:
        file.dimensions = {"t": None, "i": 4, "j": 6}
        for name, array in values.items():
            variable = file.create_variable(name, ("t", "i", "j")[: array.ndim], array.dtype, **attributes)
            file.resize_dimension("t", len(array))
            variable[...] = array


@pytest.mark.parametrize(
    ("source", "write"), [(data.ZarrSource, zarr_store), (data.NetcdfSource, netcdf_file)], ids=["zarr", "netcdf"]
)
def test_rows_and_windows_of_several_files_are_numpys(tmp_path, source, write):
    for name, part in (("a", slice(0, 9)), ("b", slice(9, 20))):
        write(tmp_path / name, {"field": VALUES[part], "label": np.arange(20)[part]})
    paths = [tmp_path / "a", tmp_path / "b"]
    order = RNG.permutation(20)
    x, y = source(paths, "field", "label").samples(order)
    np.testing.assert_array_equal(x, VALUES[order], strict=True)
    assert y.tolist() == order.tolist()
    windows = source(paths, {"f": "field"}, "field", window={0: 3, 2: 2}, stride={0: 1}, lead=2)
    x, y = windows.samples([3 * 8 + 1])
    np.testing.assert_array_equal(x["f"][0], VALUES[8:11, :, 2:4])
    np.testing.assert_array_equal(y[0], VALUES[10:13, :, 2:4])
    with pytest.raises(DataError, match=r"a: no (array|variable) 'fields'.*; it has field, label"):
        source(paths, "fields", "label")
    with pytest.raises(DataError, match="gone: does not exist"):
        source(tmp_path / "gone", "field", "label")
    (tmp_path / "c").write_text("text")
    with pytest.raises(DataError, match="c: not a readable"):
        source(tmp_path / "c", "field", "label")


def packed(tmp_path, values, **attributes):
    netcdf_file(tmp_path / "p.nc", {"x": values, "y": np.arange(3)})
    with h5py.File(tmp_path / "p.nc", "r+") as file:
        file["x"].attrs.update(attributes)
    return data.NetcdfSource(tmp_path / "p.nc", "x", "y", allow_nan="scale_factor" in attributes)


def test_packed_variables_are_unpacked_and_missing_elements_are_nan(tmp_path):
    values = np.array([[0, 1, 2, 3], [4, 5, -99, 7], [8, 9, 10, 11]], "i2")
    source = packed(tmp_path, values, scale_factor=np.float64(0.5), add_offset=np.float64(10), _FillValue=np.int16(-99))
    expected = np.where(values == -99, np.nan, values * 0.5 + 10)
    np.testing.assert_array_equal(source.samples(range(3))[0], expected, strict=True)


def test_a_missing_whole_number_is_an_error(tmp_path):
    source = packed(tmp_path, np.array([[0, 1, 2, 3], [4, 5, -99, 7]] * 2, "i2")[:3], _FillValue=np.int16(-99))
    with pytest.raises(DataError, match=r"p\.nc: variable 'x', elements \[1:2\]: an element is missing"):
        source.samples([1])


@pytest.mark.parametrize(("source", "library"), [(data.ZarrSource, "zarr"), (data.NetcdfSource, "h5netcdf")])
def test_without_the_library_it_is_told_what_to_install(tmp_path, monkeypatch, source, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=f"pip install {library}"):
        source(tmp_path, "x", "y")

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


def write(kind, path, **arrays):
    """Write arrays in a format, each given by its values or as (names of its axes, values, attributes)."""
    given = {n: a if isinstance(a, tuple) else ("tij"[: np.ndim(a)], a, {}) for n, a in arrays.items()}
    chunks = {name: tuple(max(1, size // 3) for size in np.shape(values)) for name, (_, values, _) in given.items()}
    if kind == "netcdf":
        with pytest.importorskip("h5netcdf").File(path, "w") as file:
            for name, (axes, values, attributes) in given.items():
                for axis, size in zip(axes, np.shape(values), strict=True):
                    if axis not in file.dimensions:
                        file.dimensions[axis] = size
                variable = file.create_variable(name, tuple(axes), data=np.asarray(values), chunks=chunks[name])
                variable.attrs.update(attributes)
        return
    group = pytest.importorskip("zarr").open_group(path, mode="w", zarr_format=int(kind[-1]))
    for name, (axes, values, attributes) in given.items():
        named = {"dimension_names": tuple(axes)} if kind == "zarr3" else {}
        more = {"_ARRAY_DIMENSIONS": list(axes)} if kind == "zarr2" else {}
        own = {
            key: value if isinstance(value, str) else np.asarray(value).tolist() for key, value in attributes.items()
        }
        group.create_array(name, data=np.asarray(values), chunks=chunks[name], **named).attrs.update(own | more)


KINDS = {"netcdf": data.NetcdfSource, "zarr2": data.ZarrSource, "zarr3": data.ZarrSource}


@pytest.mark.parametrize("kind", ["netcdf", "zarr3"])
def test_rows_and_windows_of_several_files_are_numpys(tmp_path, kind):
    source = KINDS[kind]
    for name, part in (("a", slice(0, 9)), ("b", slice(9, 20))):
        write(kind, tmp_path / name, field=VALUES[part], label=np.arange(20)[part])
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
    write("netcdf", tmp_path / "p.nc", x=values, y=np.arange(3))
    with h5py.File(tmp_path / "p.nc", "r+") as file:
        file["x"].attrs.update(attributes)
    return data.NetcdfSource(tmp_path / "p.nc", "x", "y", allow_nan="scale_factor" in attributes)


def test_a_missing_whole_number_is_an_error(tmp_path):
    source = packed(tmp_path, np.array([[0, 1, 2, 3], [4, 5, -99, 7]] * 2, "i2")[:3], _FillValue=np.int16(-99))
    with pytest.raises(DataError, match=r"p\.nc: variable 'x', elements \[1:2\]: an element is missing"):
        source.samples([1])


def stored(tmp_path, kind, values, **attributes):
    """A source of one array of four numbers with these attributes."""
    write(kind, tmp_path / "d", x=("t", values, attributes), y=np.arange(4))
    return KINDS[kind](tmp_path / "d", "x", "y", allow_nan=True)


NAN = np.nan
BYTES = np.array([10, -56, -1, 0], "i1")
#: Stored elements, attributes, and what is meant.
MEANT = {
    "unsigned": (BYTES, {"_Unsigned": "true", "scale_factor": np.float32(0.5)}, [5, 100, 127.5, 0]),
    "unsigned whole": (BYTES, {"_Unsigned": "true"}, [10, 200, 255, 0]),
    "signed": (BYTES.view("u1"), {"_Unsigned": "false"}, [10, -56, -1, 0]),
    "a missing byte": (
        BYTES,
        {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": np.float32(0.5)},
        [5, 100, NAN, 0],
    ),
    "two values": (np.array([1, -9, -99, 2], "f4"), {"missing_value": np.array([-9, -99], "f4")}, [1, NAN, NAN, 2]),
    "as many as samples": (
        np.array([1, -9, -99, 2], "f4"),
        {"missing_value": np.array([1, -9, -99, 7], "f4")},
        [NAN, NAN, NAN, 2],
    ),
    "both": (
        np.array([1, -9, -99, 2], "f8"),
        {"missing_value": np.float64(-9), "_FillValue": np.float64(-99)},
        [1, NAN, NAN, 2],
    ),
    "packed": (
        np.array([0, 5, -99, 7], "i2"),
        {"scale_factor": np.float64(0.5), "add_offset": np.float64(10), "_FillValue": np.int16(-99)},
        [10, 12.5, NAN, 13.5],
    ),
    "a wider type": (np.array([1, 1e20, 3, 2], "f4"), {"missing_value": np.float64(1e20)}, [1, NAN, 3, 2]),
    "a float for whole numbers": (
        np.array([1, -999, 3, 2], "i2"),
        {"missing_value": np.float64(-999), "add_offset": 0.5},
        [1.5, NAN, 3.5, 2.5],
    ),
    "out of range": (np.array([1, 0, 3, 2], "u1"), {"missing_value": np.float64(256)}, [1, 0, 3, 2]),
    "booleans": (np.array([1, 0, 1, 1], "i1"), {"dtype": "bool"}, [True, False, True, True]),
    "big-endian": (np.array([1, -9, 3, 2], ">i2"), {"_Unsigned": "true"}, [1, 65527, 3, 2]),
}


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.parametrize("kind", ["netcdf", "zarr3"])
def test_elements_are_what_the_attributes_say(tmp_path, kind, name):
    values, attributes, meant = MEANT[name]
    source = stored(tmp_path, kind, values, **attributes)
    for order in ([0, 1, 2, 3], [3, 1]):
        found, _ = source.samples(order)
        np.testing.assert_array_equal(found, np.array(meant, found.dtype)[order])


WRONG = {
    "missing_value": "-9",
    "scale_factor": np.array([0.1, 0.2]),
    "add_offset": "0.1",
    "_Unsigned": "maybe",
    "_FillValue": "none",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", ["netcdf", "zarr3"])
def test_an_attribute_that_cannot_be_followed_is_named(tmp_path, kind, name):
    with pytest.raises(DataError, match=f"d: (variable|array) 'x': the attribute {name}=.* cannot be followed"):
        stored(tmp_path, kind, np.arange(4, dtype="i4"), **{name: WRONG[name]})


def test_what_was_never_written_is_missing(tmp_path):
    """The library of NetCDF sets HDF5's own fill value and writes no attribute."""
    write("netcdf", tmp_path / "d.nc", y=np.arange(3))
    with h5py.File(tmp_path / "d.nc", "a") as file:
        for name, kind, fill in (("f", "f4", 9.969209968386869e36), ("n", "i2", -32767), ("own", "f4", 7.0)):
            file.create_dataset(name, (3,), kind, fillvalue=fill, chunks=(1,))[:2] = [1, 2]
            file[name].dims[0].attach_scale(file["t"])
    x, y = data.NetcdfSource(tmp_path / "d.nc", "f", "own", allow_nan=True).samples(range(3))
    np.testing.assert_array_equal(x, np.array([1, 2, NAN], "f4"))
    assert y.tolist() == [1, 2, 7]
    with pytest.raises(DataError, match="'n', elements .*: an element is missing: it has the fill value -32767"):
        data.NetcdfSource(tmp_path / "d.nc", "n", "y").samples(range(3))


@pytest.mark.parametrize("kind", [2, 3])
def test_a_store_of_xarray_is_unpacked(tmp_path, kind):
    """As xarray writes stores of version 2, with fill values of the array, and 3, with fill values as text."""
    group = pytest.importorskip("zarr").open_group(tmp_path / "d", mode="w", zarr_format=kind)
    packing = {"scale_factor": 0.5, "add_offset": 1.0}
    own = {"_ARRAY_DIMENSIONS": ["t"]} if kind == 2 else {"_FillValue": -9}
    group.create_array(
        "x", data=np.array([1, 2, -9], "i2"), fill_value=-9 if kind == 2 else 0, attributes=packing | own
    )
    own = {"_ARRAY_DIMENSIONS": ["t"]} if kind == 2 else {"_FillValue": "AAAAAAAA+H8="}
    group.create_array("y", data=np.array([1, 2, NAN], "f4"), fill_value=NAN, attributes=own)
    x, y = data.ZarrSource(tmp_path / "d", "x", "y", allow_nan=True).samples([2, 0])
    np.testing.assert_array_equal(x, [NAN, 1.5])
    np.testing.assert_array_equal(y, np.array([NAN, 1], "f4"), strict=True)


@pytest.mark.parametrize("source", [data.Hdf5Source, data.NetcdfSource])
@pytest.mark.parametrize(("start", "told"), [(b"CDF\x01", "classic NetCDF; .*nccopy"), (b"\x0e\x03\x13\x01", "h4toh5")])
def test_older_formats_are_told_with_the_way_to_convert(tmp_path, source, start, told):
    (tmp_path / "d.nc").write_bytes(start + bytes(100))
    with pytest.raises(DataError, match=f"d.nc: a file of .*{told}"):
        source(tmp_path / "d.nc", "x", "x")


def test_hdf5_does_not_read_packed_netcdf_as_plain_numbers(tmp_path):
    packed(tmp_path, np.ones((3, 4), "i2"), scale_factor=0.5)
    with pytest.raises(DataError, match="p.nc: a NetCDF file whose 'x' has the attribute scale_factor.*NetcdfSource"):
        data.Hdf5Source(tmp_path / "p.nc", "x", "x")
    assert len(data.Hdf5Source(tmp_path / "p.nc", "y", "y")) == 3


@pytest.mark.parametrize(("source", "library"), [(data.ZarrSource, "zarr"), (data.NetcdfSource, "h5netcdf")])
def test_without_the_library_it_is_told_what_to_install(tmp_path, monkeypatch, source, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=f"pip install {library}"):
        source(tmp_path, "x", "y")


# ----------------------------------------------------------------------------------------- names of axes, and units


SQUARE = np.arange(9.0).reshape(3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_lie_along_axes_of_one_name(tmp_path, kind):
    write(kind, tmp_path / "a", wind=(("place", "day"), SQUARE, {}), rain=(("day",), SQUARE[0], {}))
    told = r"a: .*'rain' has samples along 'day', which is axis 1 of .*a: .*'wind', not axis 0"
    with pytest.raises(DataError, match=told):
        KINDS[kind](tmp_path / "a", "wind", "rain")
    write(kind, tmp_path / "b", wind=(("day", "place"), SQUARE, {}), rain=(("day",), SQUARE[0], {}))
    write(kind, tmp_path / "c", wind=(("day", "place"), SQUARE, {}), rain=(("number",), SQUARE[0], {}))
    for name in "bc":  # other names alone may mean the same
        assert KINDS[kind](tmp_path / name, "wind", "rain").samples([1])[0].tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_files_have_their_axes_in_one_order(tmp_path, kind):
    write(kind, tmp_path / "a", wind=(("day", "place"), SQUARE, {}))
    write(kind, tmp_path / "b", wind=(("place", "day"), SQUARE, {}))
    with pytest.raises(DataError, match=r"b: .*'wind' has axes place, day, .*a: .*'wind' day, place"):
        KINDS[kind]([tmp_path / "a", tmp_path / "b"], "wind", "wind")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attribute", ["units", "calendar"])
def test_joined_files_have_one_unit(tmp_path, kind, attribute):
    for name, value in (("a", "K"), ("b", "degC")):
        write(kind, tmp_path / name, wind=(("day", "place"), SQUARE, {attribute: value}))
    with pytest.raises(DataError, match=f"b: .*'wind' has the {attribute} 'degC', .*a: .*'wind' 'K': numbers of other"):
        KINDS[kind]([tmp_path / "a", tmp_path / "b"], "wind", "wind")
    more = {attribute: np.bytes_("K ") if kind == "netcdf" else "K "}  # as other libraries write it
    write(kind, tmp_path / "c", wind=(("day", "place"), SQUARE, more), other=(("day",), SQUARE[0], {}))
    assert len(KINDS[kind]([tmp_path / "a", tmp_path / "c"], "wind", "wind")) == 6


def test_a_broken_description_of_a_zarr_array_is_told_by_store_and_array(tmp_path):
    write("zarr3", tmp_path / "a.zarr", x=VALUES)
    (tmp_path / "a.zarr" / "x" / "zarr.json").write_text("{")
    with pytest.raises(DataError, match=r"a\.zarr: array 'x' cannot be opened: "):
        data.ZarrSource(tmp_path / "a.zarr", "x", "x")

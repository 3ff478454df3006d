"""A dataset is mapped only from the file that holds it and as exactly its type; all others are read by HDF5."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero.data.source import MappedArray
from mpizero.errors import DataError

VALUES = np.array([1.0, 2.0, 3.0, -1.5])


def of_type(base, *, fields=None, bias=None, precision=None, offset=None, size=None):
    """A type of HDF5 that differs from a standard one."""
    kind = base.copy()
    if size is not None:
        kind.set_size(size)
    if fields is not None:
        kind.set_fields(*fields)
    if bias is not None:
        kind.set_ebias(bias)
    if precision is not None:
        kind.set_precision(precision)
    if offset is not None:
        kind.set_offset(offset)
    return kind


FLOAT, SHORT, INT = h5py.h5t.IEEE_F32LE, h5py.h5t.STD_I16LE, h5py.h5t.STD_I32LE
#: Types in files, and whether NumPy has the very same one.
TYPES = {
    "float32": (FLOAT, True),
    "big-endian": (h5py.h5t.IEEE_F64BE, True),
    "float16": (h5py.h5t.IEEE_F16LE, True),
    "int32": (INT, True),
    "bfloat16": (of_type(h5py.h5t.IEEE_F16LE, fields=(15, 7, 8, 0, 7), bias=127), False),
    "exponent bias": (of_type(FLOAT, bias=100), False),
    "12 bits with an offset": (of_type(SHORT, precision=12, offset=2), False),
    "24 bits in 32": (of_type(INT, precision=24), False),
}


@pytest.mark.parametrize(("kind", "mapped"), TYPES.values(), ids=TYPES)
def test_a_type_that_numpy_has_not_is_converted_by_hdf5(tmp_path, kind, mapped):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["more"] = np.zeros(100)
        stored = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4,)))
        stored.write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES)
    with h5py.File(tmp_path / "d.h5") as file:
        expected = file["x"][:]
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "x")
    for order in ([0, 1, 2, 3], [3, 1, 1], [2]):
        np.testing.assert_array_equal(source.samples(order)[0], expected[order])
    assert isinstance(source._opened(str(tmp_path / "d.h5"))["x"][0], MappedArray) == mapped


@pytest.mark.parametrize("values", [np.array([True, False]), np.array([1j, 2.0]), np.array([0, 1, 1], "i1")])
def test_booleans_complex_and_named_numbers_are_mapped(tmp_path, values):
    kind = h5py.enum_dtype({"off": 0, "on": 1}, "i1") if values.dtype == "i1" else values.dtype
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=values, dtype=kind)
    source = data.Hdf5Source(tmp_path / "d.h5", "x", "x")
    assert source.samples([1, 0])[0].tolist() == values[[1, 0]].tolist()
    assert isinstance(source._opened(str(tmp_path / "d.h5"))["x"][0], MappedArray)


def test_a_type_that_numpy_cannot_hold_is_told(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", of_type(INT, size=3), h5py.h5s.create_simple((4,)))
    with pytest.raises(DataError, match="d.h5: dataset 'x' has elements of a type that NumPy has not"):
        data.Hdf5Source(tmp_path / "d.h5", "x", "x")


@pytest.fixture
def linked(tmp_path):
    """A file whose datasets lie in another one, at other places, and samples of its own."""
    (tmp_path / "runs").mkdir()
    with h5py.File(tmp_path / "runs" / "a.h5", "w") as file:
        file["labels"] = np.arange(3)
        file["group/labels"] = np.arange(3) + 10
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["own"] = np.full(3000, 7.5)
        file["labels"] = h5py.ExternalLink("runs/a.h5", "/labels")
        file["group"] = h5py.ExternalLink("runs/a.h5", "/group")
        file["soft"] = h5py.SoftLink("/group/labels")
    return tmp_path / "d.h5"


@pytest.mark.parametrize(("name", "first"), [("labels", 0), ("group/labels", 10), ("soft", 10)])
@pytest.mark.parametrize("copied", [False, True])
def test_a_linked_dataset_is_read_from_the_file_that_holds_it(linked, monkeypatch, name, first, copied):
    monkeypatch.chdir(linked.parent)
    source = data.Hdf5Source("d.h5", name, name)
    with mz.ShardingConfig(comm="self") as config:
        used = data.cached(source, config) if copied else source
        assert used.samples([2, 0, 1])[1].tolist() == [first + 2, first, first + 1]
        if copied:
            used.close()
    os.rename("runs/a.h5", "runs/b.h5")
    source.close()
    with pytest.raises(DataError, match="d.h5: .*'(group/)?(labels|soft)'"):
        source.samples([0])


@pytest.fixture
def chunked(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100.0), chunks=(10,), compression="gzip")
    return tmp_path / "d.h5"


@pytest.mark.parametrize("locking", [None, False, True])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_the_program_has_open_is_read(chunked, mode, locking):
    with h5py.File(chunked, mode, locking=locking):
        source = data.Hdf5Source(chunked, "x", "x")
        assert source.samples([50, 3])[0].tolist() == [50, 3]
        source.close()


@pytest.mark.slow
def test_a_source_and_a_process_that_writes_do_not_shut_each_other_out(chunked):
    source = data.Hdf5Source(chunked, "x", "x")
    source.samples([1])
    with h5py.File(chunked) as file:
        assert source.samples([4])[0] == file["x"][4]
    program = f"import h5py, sys; file = h5py.File({str(chunked)!r}, 'a'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"\n"
        source.close()
        assert data.Hdf5Source(chunked, "x", "x").samples([50])[0] == 50
        writer.stdin.close()


def test_sources_of_both_kinds_share_a_file(tmp_path):
    h5netcdf = pytest.importorskip("h5netcdf")
    with h5netcdf.File(tmp_path / "d.nc", "w") as file:
        file.dimensions = {"t": 3}
        file.create_variable("x", ("t",), data=np.arange(3.0), chunks=(1,))
    kinds = data.Hdf5Source, data.NetcdfSource
    for first, second in (kinds, kinds[::-1]):
        kept = first(tmp_path / "d.nc", "x", "x")
        assert second(tmp_path / "d.nc", "x", "x").samples([2])[0] == kept.samples([2])[0] == 2
        kept.close()


def test_hdf5_without_dimensions_is_no_netcdf(chunked):
    pytest.importorskip("h5netcdf")
    with pytest.raises(DataError, match="d.h5: 'x' is no variable of NetCDF: .*Use Hdf5Source"):
        data.NetcdfSource(chunked, "x", "x")


def of_npy(path, count):
    np.save(path.with_suffix(".npy"), np.arange(count * 100.0).reshape(count, 100))
    return path.with_suffix(".npy"), lambda path: data.NpySource(path, path)


def of_hdf5(path, count):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(count * 100.0).reshape(count, 100)
    return path, lambda path: data.Hdf5Source(path, "x", "x")


def of_text(path, count):
    path.write_bytes(bytes(count * 100))
    return path, lambda path: data.TextSource(path, 99)


@pytest.mark.parametrize("write", [of_npy, of_hdf5, of_text])
@pytest.mark.parametrize("order", [[1500, 3], range(2000)])  # the second one by calls of the system
def test_a_file_that_was_made_shorter_is_an_error_and_no_bus_error(tmp_path, write, order):
    path, make = write(tmp_path / "d", 2000)
    source = make(path)
    source.samples([0])
    os.truncate(path, 8192)
    with pytest.raises(DataError, match=f"{path.name}: it has become shorter while it was used: 8192 bytes, .* before"):
        source.samples(order)


@pytest.mark.slow
def test_a_file_that_is_cut_while_it_is_read_is_named_by_the_interpreters_report(tmp_path):
    path, _ = of_npy(tmp_path / "d", 200)
    program = f"""
import os
from mpizero import data
source = data.NpySource({str(path)!r}, {str(path)!r})
source.x.file.check = lambda: None  # as between the look at the file and the access
os.truncate({str(path)!r}, 4096)
source.samples([150])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGBUS
    assert f'File "<mapped {path}>"' in ended.stderr
    assert 'File "<string>", line 7' in ended.stderr


def test_a_file_that_changed_is_not_opened_again(tmp_path):
    path, make = of_hdf5(tmp_path / "d.h5", 20)
    source = make(path)
    source.close()
    assert source.samples([1])[0][0, 0] == 100
    source.close()
    of_hdf5(path, 20)
    os.utime(path, (1e9, 1e9))
    with pytest.raises(DataError, match="d.h5: it has changed since the source was made, from .* to .* of 2001-09-09"):
        source.samples([1])


def many(tmp_path, variables):
    for number in range(16):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            for variable in range(variables):
                file[f"v{variable}"] = np.full((2, 3), number)
    return data.Hdf5Source(f"{tmp_path}/*.h5", [f"v{number}" for number in range(variables)], "v0")


def test_a_file_is_mapped_once_for_all_of_its_arrays(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    source = many(tmp_path, 8)
    assert source.samples([0, 31])[1][:, 0].tolist() == [0, 15]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 16


@pytest.mark.slow
def test_the_limit_of_open_files_is_raised_or_told(tmp_path):
    """In a process of its own, because a hard limit cannot be raised again."""
    many(tmp_path, 1)
    program = f"""
import resource
from mpizero import data
data.Hdf5Source("{tmp_path}/00.h5", "v0", "v0").close()  # which imports h5py
for most in (400, 30):
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, most))
    source = data.Hdf5Source("{tmp_path}/*.h5", "v0", "v0")
    print(source.samples([31])[0].tolist(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    source.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[[15, 15, 15]] 400\n", ended.stderr
    assert re.search("too many open files, this process may have 30: raise .*ulimit -n", ended.stderr)


@pytest.mark.parametrize("count", [2, 300_000], ids=["by pages", "by calls"])
@pytest.mark.parametrize("kind", ["hdf5", "npy"])
def test_a_file_that_was_written_again_is_not_taken_for_the_old_one(tmp_path, kind, count):
    def write(values):
        if kind == "npy":
            np.save(tmp_path / "a", values)
        else:
            with h5py.File(tmp_path / "a", "w") as file:
                file["x"] = values

    path = tmp_path / ("a.npy" if kind == "npy" else "a")
    write(np.arange(300_000.0))
    source = data.NpySource(path, path) if kind == "npy" else data.Hdf5Source(path, "x", "x")
    assert source.samples(np.arange(count))[0][1] == 1
    os.utime(path, ns=(0, 0))  # as of a file of another time, where clocks are coarse
    write(-np.arange(300_000.0))
    with pytest.raises(DataError, match="it has changed since the source was made, from"):
        source.samples(np.arange(count))

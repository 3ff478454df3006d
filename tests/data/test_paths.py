"""A path means the file that it named when the object was made, wherever the program has gone since."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero.testing import run_in_threads

SIZE = 2000


def of_text(folder, value):
    for name in "abc":
        (folder / f"{name}.txt").write_bytes(bytes([value]) * 700)


def of_hdf5(folder, value):
    for name in "abc":
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["x"] = np.full((SIZE, 100), float(value))
            file.create_dataset("chunked", data=np.full(SIZE, value), chunks=(100,))


def of_raw_bytes(folder, value):
    with h5py.File(folder / "a.h5", "w") as file:
        raw = [(str(folder / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("x", data=np.full(SIZE, value), external=raw)
    if not value:
        return
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("x", (SIZE,), np.int64, external=[("raw.bin", 0, h5py.h5f.UNLIMITED)])


def of_npy(folder, value):
    np.save(folder / "x.npy", np.full(SIZE, float(value)))


def of_zarr(folder, value):
    zarr = pytest.importorskip("zarr")
    for name in "ab":
        zarr.open_group(folder / f"{name}.zarr", mode="w")["x"] = np.full(SIZE, float(value))


def of_netcdf(folder, value):
    h5netcdf = pytest.importorskip("h5netcdf")
    for name in "ab":
        with h5netcdf.File(folder / f"{name}.nc", "w") as file:
            file.dimensions = {"t": SIZE}
            file.create_variable("x", ("t",), data=np.full(SIZE, float(value)))


KINDS = {
    "text": (of_text, lambda: data.TextSource("*.txt", 3)),
    "hdf5": (of_hdf5, lambda: data.Hdf5Source(["a.h5", "c.h5"], "x", "chunked")),
    "raw bytes of hdf5": (of_raw_bytes, lambda: data.Hdf5Source("b.h5", "x", "x")),
    "npy": (of_npy, lambda: data.NpySource("x.npy", "x.npy")),
    "zarr": (of_zarr, lambda: data.ZarrSource("*.zarr", "x", "x")),
    "netcdf": (of_netcdf, lambda: data.NetcdfSource("*.nc", "x", "x")),
}


@pytest.mark.parametrize("reopens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_reads_its_files_from_any_folder(tmp_path, monkeypatch, kind, reopens):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    write, make = KINDS[kind]
    write(home, 7)
    write(other, 9)
    monkeypatch.chdir(home)
    source = make()
    if not reopens:
        source.samples([0])
    monkeypatch.chdir(other)
    if reopens and hasattr(source, "close"):
        source.close()
    for order in (range(len(source)), [5, 1, 300], [0]):  # a run of 1 MB is read by a call of the system
        x, y = source.samples(order)
        assert (x == 7).all()
        assert (y == 7).all()


def test_a_spool_stays_where_it_was(tmp_path, monkeypatch):
    like = np.zeros(2), np.zeros(1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    def train(comm):
        producer = data.SpoolProducer("spool", "a", like=like) if comm.rank == 0 else None
        options = {"like": like, "producers": 1, "journal": "journal.jsonl"}
        with data.spool_source(comm, "spool", **options) as source, mz.ShardingConfig(comm=comm) as config:
            os.chdir("other")
            if producer is not None:
                with producer:
                    assert all(producer.put(np.ones(2), np.ones(1)) for _ in range(3))
            return [len(x) for x, _ in data.batches(source, config, 2)]

    assert run_in_threads(1, train) == [[2, 1]]
    assert not os.listdir(".")
    assert sorted(os.listdir("..")) == ["journal.jsonl", "other", "spool"]

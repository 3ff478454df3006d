"""On a domain each rank is given its part of every field, and files are read no further than that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero.data.batches import full_batch
from mpizero.data.source import MappedFile, Slab
from mpizero.errors import DataError
from mpizero.layout.fields import Cut
from mpizero.testing import run_in_threads

SPACE = (13, 11)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, *SPACE, 2)).astype("f4")
Y = {"after": RNG.normal(size=(8, *SPACE)).astype("f4"), "season": RNG.normal(size=(8, 3)).astype("f4")[:, :1]}


def hdf5(folder: Path, **more: Any) -> mz.data.Source:
    with h5py.File(folder / "fields.h5", "w") as file:
        file.create_dataset("x", data=X, **more)
        file.create_dataset("after", data=Y["after"], **({} if not more else {"chunks": (2, *SPACE)}))
        file.create_dataset("season", data=Y["season"])
    return mz.data.Hdf5Source(folder / "fields.h5", x="x", y=("after", "season"))


def zarr(folder: Path) -> mz.data.Source:
    store = pytest.importorskip("zarr").open_group(folder / "fields.zarr", mode="w")
    for name, values in (("x", X), *Y.items()):
        store.create_array(name, data=values, chunks=tuple(min(n, 4) for n in values.shape))
    return mz.data.ZarrSource(folder / "fields.zarr", x="x", y=("after", "season"))


def netcdf(folder: Path) -> mz.data.Source:
    with pytest.importorskip("h5netcdf").File(folder / "fields.nc", "w") as file:
        file.dimensions = {"day": 8, "lat": 13, "lon": 11, "level": 2, "one": 1}
        file.create_variable("x", ("day", "lat", "lon", "level"), data=X, chunks=(2, 4, 4, 2))
        file.create_variable("after", ("day", "lat", "lon"), data=Y["after"])
        file.create_variable("season", ("day", "one"), data=Y["season"])
    return mz.data.NetcdfSource(folder / "fields.nc", x="x", y=("after", "season"))


def joined(folder: Path) -> mz.data.Source:
    for number in (0, 1):
        rows = slice(4 * number, 4 * number + 4)
        with h5py.File(folder / f"{number}.h5", "w") as file:
            for name, values in (("x", X), *Y.items()):
                file.create_dataset(name, data=values[rows], chunks=(1, *values.shape[1:]), compression="gzip")
    return mz.data.Hdf5Source(f"{folder}/*.h5", x="x", y=("after", "season"))


def on_second_axis(folder: Path) -> mz.data.Source:
    """Samples along axis 1, which a sample does not have: x is (13, samples, 11, 2)."""
    with h5py.File(folder / "fields.h5", "w") as file:
        file["x"] = np.moveaxis(X, 0, 1)
        file["after"] = np.moveaxis(Y["after"], 0, 1)
        file["season"] = np.moveaxis(Y["season"], 0, 1)
    return mz.data.Hdf5Source(folder / "fields.h5", x="x", y=("after", "season"), axis=1)


SOURCES = {
    "arrays": lambda folder: mz.data.ArraySource(X, Y),
    "mapped": hdf5,
    "chunks": lambda folder: hdf5(folder, chunks=(2, 4, 4, 2)),
    "chunks of rows": lambda folder: hdf5(folder, chunks=(2, *SPACE, 2), compression="gzip", shuffle=True),
    "zarr": zarr,
    "netcdf": netcdf,
    "joined": joined,
    "second axis": on_second_axis,
    "transformed": lambda folder: mz.data.TransformedSource(mz.data.ArraySource(X, Y), lambda x, y, random: (2 * x, y)),
    "by blocks": lambda folder: mz.data.BlockShuffledSource(mz.data.ArraySource(X, Y), 2, 2),
}


class Doubled(mz.data.ArraySource):
    """A source of the user's, which changes what one of the library's reads."""

    def read(self, indices: Any) -> Any:
        x, y = super().read(indices)
        return 2 * x, y


SOURCES["own read"] = lambda folder: Doubled(X, Y)


@pytest.mark.parametrize("made", SOURCES.values(), ids=SOURCES)
def test_the_part_of_a_sample_is_the_whole_one_cut(made, tmp_path):
    whole = made(tmp_path)
    part, _ = whole.split(0.25)
    cut = Cut((2, 2))
    for source, indices in ((whole, [0, 1, 2, 3]), (whole, [5, 1, 1, 4]), (part, [0, 1, 2, 3]), (part, [])):
        x, y = source.samples(indices)
        for rank in range(cut.size):
            box = (slice(None), *cut.box(SPACE, rank))
            part_x, part_y = source.samples(indices, slab=Slab(cut, rank))
            np.testing.assert_array_equal(part_x, x[box])
            np.testing.assert_array_equal(part_y["after"], y["after"][box])
            np.testing.assert_array_equal(part_y["season"], y["season"])


def test_windows_along_axes_of_space_are_cut_too(tmp_path):
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(1, 4, 4, 2))
    source = mz.data.Hdf5Source(tmp_path / "fields.h5", x="x", y="x", window={1: 6, 2: 5}, lead=1)
    x, y = source.samples([0, 1, 9])
    assert x.shape == (3, 6, 5, 2)
    cut = Cut((3, 2))
    for rank in range(cut.size):
        box = (slice(None), *cut.box((6, 5), rank))
        part = source.samples([0, 1, 9], slab=Slab(cut, rank))
        np.testing.assert_array_equal(part[0], x[box])
        np.testing.assert_array_equal(part[1], y[box])


def test_a_missing_value_is_named_by_its_place_in_the_whole_field(tmp_path):
    values = X.copy()
    values[3, 9, 8, 1] = np.nan
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        file["x"] = values
    source = mz.data.Hdf5Source(tmp_path / "fields.h5", x="x", y="x")
    source.samples([3], slab=Slab(Cut((2, 2)), 0))
    with pytest.raises(DataError, match=r"NaN at \[9, 8, 1\] of sample 3"):
        source.samples([3], slab=Slab(Cut((2, 2)), 3))


@pytest.mark.parametrize(
    "more", [{}, {"chunks": (1, 4, 4, 2)}, {"chunks": (1, 4, 4, 2), "compression": "gzip"}], ids=str
)
def test_only_the_part_is_read_from_a_file(more, tmp_path, monkeypatch):
    """Count the elements that are asked for: a quarter of the field's, not all."""
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        file.create_dataset("x", data=X, **more)
    source = mz.data.Hdf5Source(tmp_path / "fields.h5", x="x", y="x")
    asked = []

    def watch(owner: Any, method: str, shape_of: Any) -> None:
        plain = getattr(owner, method)

        def counted(self: Any, *arguments: Any) -> Any:
            asked.append(shape_of(self, *arguments))
            return plain(self, *arguments)

        monkeypatch.setattr(owner, method, counted)

    extent = lambda shape, where: tuple(len(range(n)[s]) for n, s in zip(shape, where, strict=False))  # noqa: E731
    if more:
        watch(h5py.Dataset, "__getitem__", lambda data, where: extent(data.shape, where))
        watch(h5py.Dataset, "read_direct", lambda data, out, where, into: extent(data.shape, where))
    else:
        watch(MappedFile, "read", lambda _, array, where: (where[0].size, *extent(array.shape[1:], where[1:])))
    x, _ = source.samples([5, 2], slab=Slab(Cut((2, 2)), 0))
    assert x.shape == (2, 7, 6, 2)
    assert {shape[1:] for shape in asked} == {(7, 6)}
    assert sum(int(np.prod(shape)) for shape in asked) == 2 * 2 * 7 * 6  # of x and of y


def test_batches_give_each_rank_its_part_of_the_same_samples():
    """With a model, with its mesh alone, and from the node's cache."""
    source = mz.data.TransformedSource(
        mz.data.ArraySource(X, Y["after"][..., None]),
        lambda x, y, random: (x if random is None else x + random.normal(0.1, x.shape, x.dtype), y),
    )
    net = mz.nn.UNet(2, 1, 2, width=4, levels=2, groups=2)

    def on_ranks(domain: tuple[int, ...]) -> Any:
        def work(comm: Any) -> Any:
            config = mz.Config(micro_batch=1)
            with mz.Mesh(comm, domain=domain) as mesh, mz.data.cached(source.source, mesh) as copy:
                with mz.distribute(net, mz.Adam(0.01), "zero2", mesh=mesh, config=config) as model:
                    losses = [model.train(*batch) for batch in mz.data.batches(source, model, 4, steps=2, prefetch=1)]
                    bits = model.parameters_sha256()
                return losses, bits, *(next(mz.data.batches(used, mesh, 4))[0] for used in (source, copy))

        return run_in_threads(2 * int(np.prod(domain)), work)

    whole, cut = on_ranks(()), on_ranks((2, 1))
    assert [one[:2] for one in cut] == [whole[0][:2]] * 4
    for place in (2, 3):
        rows = [np.concatenate([cut[rank][place] for rank in ranks]) for ranks in ((0, 2), (1, 3))]
        np.testing.assert_array_equal(np.concatenate(rows, axis=1), np.concatenate([one[place] for one in whole]))


def test_statistics_are_those_of_whole_fields():
    source = mz.data.ArraySource(X, Y["after"])

    def work(domain: tuple[int, ...]) -> Any:
        def on_rank(comm: Any) -> Any:
            with mz.Mesh(comm, domain=domain) as mesh:
                return mz.data.statistics(source, mesh).mean["x"].tobytes()

        return run_in_threads(2, on_rank)

    assert work((2, 1)) == work(())


def test_online_samples_and_full_batches_are_cut_too():
    like = X[0], Y["after"][0]

    def on_ranks(domain: tuple[int, ...], trainers: int) -> Any:
        def work(comm: Any) -> Any:
            with mz.data.OnlineJob(comm, trainers=trainers, like=like) as job:
                if not job.trains:
                    with job.producer() as producer:
                        return [producer.put(x, y) for x, y in zip(X, Y["after"], strict=True)]
                with job.source() as source, mz.Mesh(job.group, domain=domain) as mesh:
                    (x, y), *_ = mz.data.batches(source, mesh, global_batch=4)
                    return x, y, *full_batch(mz.data.ArraySource(X, Y["after"]), mesh)

        return run_in_threads(trainers + 1, work)[:trainers]

    (whole,) = on_ranks((), 1)
    for parts, expected in zip(zip(*on_ranks((2, 1), 2), strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)

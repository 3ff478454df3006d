"""Samples in another byte order, or masked, of any source: the numbers of this machine, or an error that says so."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero._util.checks import native
from mpizero._util.pytree import leaves_of
from mpizero.testing import run_in_threads


class Foreign(data.Source):
    """Samples as a file of another machine holds them."""

    x, y = np.arange(36.0).reshape(12, 3).astype(">f4"), np.arange(12).astype(">i8")

    def __len__(self):
        return 12

    def read(self, indices):
        return {"a": self.x[indices], "b": [self.x[indices] + 0.5]}, self.y[indices]

    def describe(self):
        return {"foreign": 12}


def passed_on(x, y, random):
    return {"a": x["a"].astype(">f8"), "b": x["b"]}, y.astype(">i2")


SOURCES = {
    "own": lambda config: Foreign(),
    "part": lambda config: Foreign().split(0.25)[0],
    "changed": lambda config: data.TransformedSource(Foreign(), passed_on),
    "shuffled by blocks": lambda config: data.BlockShuffledSource(Foreign(), blocks=2),
    "cached": lambda config: data.cached(Foreign(), config),
    "not cached": lambda config: data.cached(Foreign(), config, limit=0),
}


def test_a_dtype_that_names_this_machines_order_becomes_numpys_without_a_copy(tmp_path):
    """Compiled code compares the letter of the order, and h5py gives "<" to what NumPy calls "="."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = np.arange(64, dtype="f4").reshape(2, 32, 1)  # contiguous: mapped, with the dtype of h5py
        named = file["x"].dtype
    source = data.Hdf5Source(str(tmp_path / "d.h5"), "x", "x")
    net = mz.nn.UNet(1, 1, 1, width=2, levels=2, groups=1)
    for x, y in (source.samples([0, 1]), (np.ones((2, 32, 1), "f4").view(named),) * 2):
        with mz.distribute(net, mz.SGD(lr=0.1), "ddp", mesh=mz.Mesh("self")) as model:
            assert np.isfinite(model.train(x, y))
    mapped = np.ones(3, "f4").view(named)
    assert np.shares_memory(native(mapped), mapped)
    assert native(mapped).dtype.byteorder == "="


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_samples_of_any_source_are_in_this_machines_byte_order(make):
    def run(comm):
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
            source, found = make(config), []
            for batch in data.batches(source, config, 3, steps=3, prefetch=2):
                assert all(leaf.dtype.isnative for leaf in leaves_of(batch))
                x, y = batch
                assert (x["a"][:, 0] == 3 * y).all()
                assert (x["b"][0] == x["a"] + 0.5).all()
                found.append(y.tolist())
            if isinstance(source, data.CachedSource):
                source.close()
        return found

    alone = run_in_threads(1, run)[0]
    assert [sum(step, []) for step in zip(*run_in_threads(3, run), strict=True)] == alone


@pytest.mark.parametrize(("order", "trainers"), [("<", 1), (">", 2)])
def test_online_samples_have_any_byte_order(order, trainers, tmp_path):
    like = np.zeros(2, ">f4"), np.zeros(1, ">f8")
    given = np.array([1.5, -2.0], f"{order}f4"), np.array([3.25], f"{order}f8")

    def check(comm, source):
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config, source:
            for x, y in data.batches(source, config, 2):
                assert x.dtype.isnative
                assert y.dtype.isnative
                assert x.tolist() == [[1.5, -2.0]] * len(x)
                assert y.tolist() == [[3.25]] * len(y)

    def job(comm):
        with data.OnlineJob(comm, trainers=trainers, like=like) as job:
            if job.trains:
                return check(job.group, job.source())
            with job.producer() as producer:
                return [producer.put(*given) for _ in range(3)]

    run_in_threads(trainers + 1, job)
    with data.SpoolProducer(tmp_path, "a", like=like) as producer:
        assert all(producer.put(*given) for _ in range(3))
    run_in_threads(trainers, lambda comm: check(comm, data.spool_source(comm, tmp_path, like=like, producers=1)))


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63, reason="only extended floats of x86 have bytes without meaning"
)
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_bytes_without_meaning_are_the_same_in_all_samples(dtype):
    """Extended floats of equal values are equal data on all ranks, and in a run that goes on."""

    def padded(byte):
        values = np.full(6 * np.dtype(dtype).itemsize, byte, np.uint8).view(dtype)
        values[...] = np.arange(6.0)
        raw = values.view(np.uint8).reshape(-1, 16)
        raw[:, 10:] = byte
        return values

    class Padded(Foreign):
        def __init__(self, byte):
            self.x = self.y = padded(byte)

        def read(self, indices):
            return self.x[indices], {"y": self.y[indices]}

    one, other = (data.ArraySource(padded(byte), {"y": padded(byte)}) for byte in (1, 2))
    assert one.fingerprint == other.fingerprint
    for sources in [(one, other), (Padded(1), Padded(2))]:
        first, second = (leaves_of(source.samples([1, 4])) for source in sources)
        assert [leaf.tobytes() for leaf in first] == [leaf.tobytes() for leaf in second]
        assert first[0].tolist() == [1, 4]

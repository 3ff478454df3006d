"""A run goes on with the data that it began with: what was changed is refused, what may have been is told."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero.errors import ConfigError, RemoteError
from mpizero.testing import run_in_threads
from mpizero.train import data_identity
from mpizero.train.data_identity import FINGERPRINT_SAMPLES, contents, difference, touched
from tests.train.test_trainer import linear

COUNT = 1000


@pytest.fixture(autouse=True)
def _no_limit_of_time(monkeypatch):
    monkeypatch.setattr(data_identity, "COMPARED_SECONDS", np.inf)


X = np.random.default_rng(0).normal(size=(COUNT, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


def spoilt(values):
    """All but those samples that the older fingerprint compares are changed."""
    compared = np.arange(FINGERPRINT_SAMPLES) * COUNT // FINGERPRINT_SAMPLES
    found = values + 1.0
    found[compared] = values[compared]
    assert (found != values).sum() == COUNT - FINGERPRINT_SAMPLES
    return found


class Own(data.Source):
    """A source that says nothing of its contents."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return len(self.y)

    def read(self, indices):
        return X[indices % COUNT], self.y[indices]

    def describe(self):
        return {"own": len(self.y)}


def of_arrays(folder, y):
    return data.ArraySource(X, y)


def of_npy(folder, y):
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", y)
    return data.NpySource(folder / "x.npy", folder / "y.npy")


def of_hdf5(folder, y):
    with h5py.File(folder / "d.h5", "w") as file:
        file["x"], file["y"] = X, y
    return data.Hdf5Source(folder / "d.h5", "x", "y")


def of_text(folder, y):
    (folder / "a.txt").write_bytes(y.astype("u1").tobytes())
    return data.TextSource(folder / "a.txt", 9)


OPENED = {
    of_npy: lambda folder: data.NpySource(folder / "x.npy", folder / "y.npy"),
    of_hdf5: lambda folder: data.Hdf5Source(folder / "d.h5", "x", "y"),
    of_text: lambda folder: data.TextSource(folder / "a.txt", 9),
}


def trained(comm, source, run, steps, **how):
    with mz.ShardingConfig(comm=comm, micro_batch=2) as config:
        settings = {"optimizer": mz.SGD(lr=0.01), "global_batch": 8, "steps": steps, "every": 1, "progress": False}
        with mz.Trainer(linear(), source, config, run=run, **settings, **how) as trainer:
            return trainer.resume().parameters_sha256


SOURCES = {"arrays": of_arrays, "npy": of_npy, "hdf5": of_hdf5, "own": lambda folder, y: Own(y)}
WRAPPED = {
    "plain": lambda source: source,
    "part": lambda source: source.split(0.1)[0],
    "changed": lambda source: data.TransformedSource(source, lambda x, y, random: (x, y)),
    "shuffled": lambda source: data.BlockShuffledSource(source, blocks=2, block=10),
}


@pytest.mark.parametrize(
    ("kind", "wrapped"),
    [("arrays", "plain"), ("own", "plain"), ("hdf5", "part"), ("npy", "changed"), ("arrays", "shuffled")],
)
def test_a_resume_with_other_targets_is_refused_though_the_first_samples_are_the_same(tmp_path, kind, wrapped):
    make, wrap = SOURCES[kind], WRAPPED[wrapped]
    source = wrap(make(tmp_path, Y))
    first = run_in_threads(2, lambda comm: trained(comm, source, tmp_path / "run", 2))
    assert run_in_threads(1, lambda comm: trained(comm, wrap(make(tmp_path, Y)), tmp_path / "run", 2))[0] == first[0]
    other = wrap(make(tmp_path, spoilt(Y)))

    def resume(comm):
        with pytest.raises(ConfigError, match="data: the training samples are not those of the saved run: .*give the"):
            trained(comm, other, tmp_path / "run", 3)

    run_in_threads(2, resume)


def test_arrays_are_compared_whole():
    changed = np.zeros(100_000)
    before = contents(data.ArraySource(changed, changed))
    changed[77_777] = 1
    assert difference(before, contents(data.ArraySource(changed, changed))) == "the arrays have other checksums"


@pytest.mark.parametrize("make", [of_npy, of_hdf5, of_text])
def test_files_of_other_sizes_are_other_data_and_of_other_times_are_told(tmp_path, make):
    before = contents(make(tmp_path, Y))
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    again = contents(OPENED[make](tmp_path))
    assert not difference(before, again)
    assert "changed at other times than those of the saved run (the newest at 2001-09-09" in touched(before, again)
    assert not touched(before, before)
    resized = {**again, "sizes": "other", "bytes": 5}
    assert "the files have other names or sizes, 5 bytes together" in difference(before, resized)


def test_a_resume_tells_of_files_that_were_copied_and_goes_on(tmp_path, capsys):
    first = trained("self", of_npy(tmp_path, Y), tmp_path / "run", 2)
    os.utime(tmp_path / "y.npy", (1e9, 1e9))
    assert trained("self", OPENED[of_npy](tmp_path), tmp_path / "run", 2) == first
    assert capsys.readouterr().err.count("the training data: their files were changed at other times") == 1


def test_few_samples_are_all_compared_and_of_many_any_number_is_spread_over_all():
    places = []

    class Watched(Own):
        def read(self, indices):
            places.append(indices.tolist())
            return super().read(indices)

    found = contents(Watched(Y))
    assert list(found["samples"]) == ["64", "128", "256", "512", "1000"]
    assert places[-1] == list(range(COUNT))
    places.clear()
    many = Watched(np.zeros(10**6))
    assert list(contents(many)["samples"]) == ["64", "128", "256", "512", "1024"]
    for level in range(1, 6):
        ordered = np.sort(np.concatenate(places[:level]))
        assert np.diff([0, *ordered, 10**6]).max() < 2.7 * 10**6 / ordered.size


def test_a_slow_source_is_compared_at_as_many_samples_as_both_have_read(monkeypatch):
    quick, changed = contents(Own(Y)), contents(Own(spoilt(Y)))
    monkeypatch.setattr(data_identity, "COMPARED_SECONDS", 0.0)
    slow = contents(Own(Y))
    assert list(slow["samples"]) == ["64"]
    assert not difference(quick, slow)
    assert difference(changed, slow) == "64 of 1000 samples were compared, and some have other values"


def test_checkpoints_of_older_versions_are_compared_as_before():
    assert not difference({}, contents(Own(Y)))
    assert not touched({}, contents(Own(Y)))


def test_only_rank_0_looks_into_the_data_and_its_error_is_everybodys():
    class Gone(Own):
        def __len__(self):
            raise OSError("the file is gone")

    def found(comm, failing):
        return data_identity.shared_contents(comm, (Gone if comm.rank == failing else Own)(Y), None)

    (first, second) = run_in_threads(2, lambda comm: found(comm, 1))
    assert first == second
    assert list(first) == ["training"]

    def fails(comm):
        with pytest.raises(OSError if comm.rank == 0 else RemoteError, match="the file is gone"):
            found(comm, 0)

    run_in_threads(2, fails)

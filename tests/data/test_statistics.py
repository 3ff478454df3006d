"""Statistics are NumPy's within rounding, and have the same bits on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import data
from mpizero.data import moments as module
from mpizero.errors import ConfigError, DataError, RemoteError
from mpizero.testing import assert_same_as_serial, run_in_threads

FIGURES = ("mean", "std", "least", "most")


@pytest.fixture
def source():
    """1000 samples with a large mean, of which naive sums of squares would lose all digits."""
    rng = np.random.default_rng(0)
    field = (1e4 + rng.normal(size=(1000, 3, 5)) * [[[1e-1], [1], [10]]]).astype("f4")
    return data.ArraySource({"field": field, "flag": rng.integers(0, 2, 1000)}, rng.normal(size=(1000, 2)))


def taken(found):
    return [(name, path, values.tobytes()) for name in FIGURES for path, values in getattr(found, name).items()]


@pytest.mark.parametrize("channel", [None, 0, 1])
def test_they_are_numpys(source, ranks, channel):
    found = data.statistics(source, ranks(), channel)
    arrays = {"x['field']": source.x["field"], "x['flag']": source.x["flag"], "y": source.y}
    for path, values in arrays.items():
        kept = channel is not None and values.ndim > channel + 1
        axes = tuple(axis for axis in range(values.ndim) if not kept or axis != channel + 1)
        exact = values.astype(np.longdouble)
        np.testing.assert_allclose(found.mean[path], exact.mean(axes).astype(float), rtol=1e-13)
        np.testing.assert_allclose(found.std[path], exact.std(axes).astype(float), rtol=1e-9)
        np.testing.assert_array_equal(found.least[path], values.min(axes))
        np.testing.assert_array_equal(found.most[path], values.max(axes))
    assert found.samples == 1000


@pytest.mark.parametrize("leaf", [1, 16])
def test_the_bits_do_not_depend_on_ranks(source, ranks, monkeypatch, leaf):
    monkeypatch.setattr(module, "LEAF", leaf)
    part = source.split(0.9)[0]
    sets = [run_in_threads(n, lambda comm: taken(data.statistics(part, ranks(comm), 0))) for n in (1, 2, 3, 8)]
    assert all(found == sets[0][0] for ranks_of_one in sets for found in ranks_of_one)


@pytest.mark.mpi
def test_processes_have_the_bits_of_one(world, source, ranks):
    assert_same_as_serial(lambda comm: taken(data.statistics(source, ranks(comm), 0)), world)


def test_a_file_keeps_the_bits(source, ranks, tmp_path):
    found = data.statistics(source, ranks(), 0)
    found.save(tmp_path / "s.json")
    again = data.Statistics.load(tmp_path / "s.json")
    assert taken(again) == taken(found)
    assert again.samples == 1000
    for text in ("", "{}", '{"format": "other"}', "[1]"):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(DataError, match=r"s\.json: no file of statistics that Statistics.save"):
            data.Statistics.load(tmp_path / "s.json")


def test_a_sample_that_is_not_finite_is_named_on_all_ranks(source, ranks):
    source.y[700, 1] = np.inf

    def run(comm):
        with pytest.raises((DataError, RemoteError), match="y of sample 700 has elements that are NaN or infinite"):
            data.statistics(source, ranks(comm))

    run_in_threads(3, run)


def test_what_has_no_statistics_is_told(source, numbers, ranks):
    with pytest.raises(ConfigError, match="channel=-1"):
        data.statistics(source, ranks(), -1)
    with pytest.raises(DataError, match="complex"):
        data.statistics(data.ArraySource(np.ones(4) * 1j, np.ones(4)), ranks())
    with pytest.raises(ConfigError, match="give its source"):
        data.statistics(data.TransformedSource(source, lambda x, y, random: (x, y)), ranks())
    with pytest.raises(DataError, match="no samples"):
        data.statistics(numbers(5).split(0)[1], ranks())

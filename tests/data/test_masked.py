"""A masked array never loses its mask in silence: it is refused where it comes in, by name and with the way out."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero import data
from mpizero.errors import DataError, MpizeroError
from mpizero.testing import run_in_threads

MASKED = np.ma.masked_array(np.arange(6.0).reshape(3, 2), mask=[[0, 1], [0, 0], [0, 0]])
PLAIN = np.arange(3)
WAY = "give the values and the mask as two arrays"


class Own(data.Source):
    """Samples as netCDF4 returns them."""

    def __len__(self):
        return 3

    def read(self, indices):
        return {"wind": MASKED[indices]}, PLAIN[indices]

    def describe(self):
        return {"own": 3}


def masking(x, y, random):
    return np.ma.masked_array(x, mask=[0, 1]), y


PLACES = {
    "inputs": (lambda: data.ArraySource(MASKED, PLAIN), "x is a masked array"),
    "targets": (lambda: data.ArraySource(PLAIN, MASKED), "y is a masked array"),
    "a dictionary": (lambda: data.ArraySource({"wind": MASKED}, PLAIN), r"x\['wind'\] is a masked array"),
    "a tuple": (lambda: data.ArraySource((MASKED, MASKED), PLAIN), r"x\[0\] is a masked array"),
    "a list": (lambda: data.ArraySource([MASKED[0], MASKED[1], MASKED[2]], PLAIN), "x is a masked array"),
    "a source": (lambda: Own().samples([0]), r"Own.read returned x\['wind'\], which is a masked array"),
    "a transformation": (
        lambda: data.TransformedSource(data.ArraySource(np.ones((3, 2)), PLAIN), masking).samples([0]),
        "masking returned x, which is a masked array",
    ),
    "an example": (lambda: data.SpoolProducer("no", "a", like=(MASKED, PLAIN)), "like: x is a masked array"),
}


@pytest.mark.parametrize(("make", "told"), PLACES.values(), ids=PLACES)
def test_masked_samples_are_refused(make, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"{told}, whose mask would be lost: {WAY}"):
        make()


def test_batches_and_copies_of_a_source_refuse_them_on_all_ranks():
    def run(comm):
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config:
            with pytest.raises(DataError, match="Own.read returned"):
                next(data.batches(Own(), config, 2))
            with pytest.raises(MpizeroError, match="Own.read returned"):
                data.cached(Own(), config)

    for ranks in (1, 2):
        run_in_threads(ranks, run)


def test_a_producer_refuses_a_masked_sample(tmp_path):
    with data.SpoolProducer(tmp_path, "a", like=(np.zeros(2), np.zeros(()))) as producer:
        with pytest.raises(DataError, match="a sample of the producer 'a': x is a masked array"):
            producer.put(MASKED[0], np.zeros(()))
        assert producer.put(MASKED[1].filled(0.0), np.zeros(()))

"""Datasets as PyTorch has them: read by number, the same each time, refused where a rank would see other samples."""

from __future__ import annotations

import random

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, DataError


class Fields:
    """Ten samples: a field and a mask, and a number to be predicted."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"field": np.full((2, 3), i, np.float32), "mask": np.array([i % 2, 1])}, i + 0.5


def test_samples_are_those_of_the_dataset_in_the_order_of_their_numbers():
    source = mz.data.DatasetSource(Fields())
    x, y = source.samples([7, 2, 7])
    assert len(source) == 10
    assert x["field"].shape == (3, 2, 3)
    assert x["field"][:, 0, 0].tolist() == y.astype(int).tolist() == [7, 2, 7]
    assert x["mask"].tolist() == [[1, 1], [0, 1], [1, 1]]
    assert source.samples([])[0]["field"].shape == (0, 2, 3)


class Noisy(Fields):
    own = np.random.default_rng(0)

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, i):
        return self.draw(), i


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: random.random() < 2, r"Noisy\[0\] draws random numbers.*mz.data.TransformedSource"),  # the same value
        (lambda: np.random.rand(3), r"Noisy\[0\] draws random numbers"),  # noqa: NPY002
        (lambda: Noisy.own.normal(size=3), r"Noisy\[0\] is another sample each time it is read"),
    ],
)
def test_a_dataset_that_draws_random_numbers_is_refused(draw, message):
    with pytest.raises(ConfigError, match=message):
        mz.data.DatasetSource(Noisy(draw))


class Odd(Fields):
    def __init__(self, item, length=3):
        self.item, self.length = item, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return self.item(i)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Odd(lambda i: {"x": 1}), r"Odd\[0\] must be the pair \(x, y\), it returned a dict"),
        (Odd(lambda i: (1, 2, 3)), r"returned a tuple of 3; either may be a tree of arrays: x, \(y, mask\)"),
        (Odd(lambda i: (1, 2), 0), "Odd has no samples"),
        (iter([1]), r"expected an object with len\(dataset\) and dataset\[i\]"),
    ],
)
def test_what_is_no_dataset_of_pairs_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        mz.data.DatasetSource(dataset)


def test_a_dataset_in_the_place_of_a_source_is_told_which_source_takes_it():
    with mz.Mesh("self") as mesh, pytest.raises(DataError, match=r"got Fields; .*mz.data.DatasetSource"):
        mz.data.batches(Fields(), mesh, global_batch=2)

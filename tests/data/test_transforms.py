"""A sample's random numbers depend on seed, epoch and its number in the data, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import data
from mpizero.errors import ConfigError, DataError
from mpizero.testing import run_in_threads
from tests.support.reference import reduction


def noisy(x, y, random):
    """Mark a sample by its number, whether it trains, and what was drawn."""
    return np.array([x, 0.0 if random is None else random.uniform()]), y


def seen(stream, steps):
    return [x.tolist() for x, _ in (next(stream) for _ in range(steps))]


def test_augmented_batches_do_not_depend_on_ranks_copies_or_the_order_of_reading(numbers, ranks):
    def run(comm):
        plain = data.TransformedSource(numbers(30), noisy).split(0.2)[0]
        below = data.TransformedSource(numbers(30).split(0.2)[0], noisy)
        with data.cached(numbers(30), ranks(comm)) as copy:
            sources = [plain, below, data.TransformedSource(copy.split(0.2)[0], noisy)]
            return [seen(data.batches(source, ranks(comm, 2), 8, seed=5, prefetch=2), 7) for source in sources]

    one = run_in_threads(1, run)[0]
    assert one[0] == one[1] == one[2]
    three = run_in_threads(3, run)
    assert [sum(parts, []) for parts in zip(*(rank[0] for rank in three), strict=True)] == one[0]


def test_every_sample_seed_and_epoch_has_numbers_of_its_own():
    def drawn(seed, epoch, sample):
        return float(data.SampleRandom(seed, epoch, sample).uniform())

    keys = [(seed, epoch, sample) for seed in (0, 1, 2**63) for epoch in (0, 1, 2**33) for sample in range(20)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_are_those_of_the_reference_generator_and_never_overlap(dtype):
    random = data.SampleRandom(7, 3, 11)
    draws = [random.uniform(-1, 2, (3, 3), dtype), random.uniform(shape=(2,), dtype=dtype)]
    words = np.empty(4, np.uint32)
    reduction.philox(np.array([3, 0, 0x7A45, 0]), np.array([7, 0]), words)
    per, sequence = 16 // np.dtype(dtype).itemsize, np.empty(40, dtype)
    reduction.fill_uniform(int(words[0]), int(words[1]), 11, 0, sequence, *np.array([[0], [1]], dtype))
    second = -(-9 // per) * per
    np.testing.assert_allclose((draws[0] + 1) / 3, sequence[:9].reshape(3, 3), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(draws[1], sequence[second : second + 2])


def test_draws_have_the_distribution_that_they_name():
    many = [data.SampleRandom(0, 0, i) for i in range(4000)]
    normals = np.array([random.normal(2.0) for random in many])
    assert abs(normals.mean()) < 0.15
    assert abs(normals.std() - 2) < 0.1
    counts = np.bincount([random.integer(4) for random in many], minlength=4)
    assert counts.min() > 850
    assert counts.size == 4


def test_outside_of_training_nothing_is_random(numbers):
    source = data.TransformedSource(numbers(5), noisy)
    assert source.samples([3, 1])[0].tolist() == [[3, 0], [1, 0]]
    assert source.samples([])[0].shape == (0, 2)


def test_trees_and_functions_that_do_not_fit(numbers):
    tree = data.ArraySource({"a": np.arange(4.0), "b": np.ones((4, 2))}, np.arange(4))
    doubled = data.TransformedSource(tree, lambda x, y, random: ({"a": 2 * x["a"], "b": x["b"]}, y))
    x, _ = doubled.samples([3, 2])
    assert (x["a"].tolist(), x["b"].shape) == ([6, 4], (2, 2))
    with pytest.raises(DataError, match=r"returned different shapes for samples \[1, 2\]"):
        data.TransformedSource(numbers(5), lambda x, y, random: (np.zeros(int(x)), y)).samples([1, 2])
    with pytest.raises(DataError, match=r"must return the pair \(x, y\), it returned a ndarray"):
        data.TransformedSource(numbers(5), lambda x, y, random: np.zeros(2)).samples([1])
    with pytest.raises(ConfigError, match="expected a function"):
        data.TransformedSource(numbers(5), 3)
    with pytest.raises(ConfigError, match="dtype=float16"):
        data.SampleRandom(0, 0, 0).normal(dtype=np.float16)


def test_sources_changed_by_other_functions_are_other_data(numbers):
    def plus(amount):
        return lambda x, y, random: (x + amount, y)

    prints = {data.TransformedSource(numbers(5), plus(amount)).fingerprint for amount in (1, 1, 2)}
    assert len(prints) == 2

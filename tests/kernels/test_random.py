from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpizero.kernels.cpu import reduction
from tests.support.reference import reduction as reference

DTYPES = (np.float32, np.float64)
ONES = 0xFFFFFFFF
# Known answers of Philox 4x32-10 published with the Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("kernels", [reduction, reference])
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(kernels, counter, key, result):
    out = np.empty(4, np.uint32)
    kernels.philox(np.array(counter, np.uint32), np.array(key, np.uint32), out)
    assert tuple(out.tolist()) == result


def uniform(start, size, dtype, key=(1, 2), site=3, low=-1.0, high=1.0):
    out = np.empty(size, dtype)
    reduction.fill_uniform(*key, site, start, out, np.array([low], dtype), np.array([high], dtype))
    return out


def normal(start, size, dtype, key=(1, 2), site=3, scale=1.0):
    out = np.empty(size, dtype)
    reduction.fill_normal(*key, site, start, out, np.array([scale], dtype))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [uniform, normal])
def test_a_value_depends_only_on_its_index(fill, dtype):
    whole = fill(0, 3000, dtype)
    for start, stop in ((0, 0), (0, 1), (1, 2), (3, 9), (7, 1031), (1022, 3000), (255, 513)):
        assert fill(start, stop - start, dtype).tobytes() == whole[start:stop].tobytes()
    far = 2**40 + 5
    assert fill(far, 600, dtype)[77:].tobytes() == fill(far + 77, 523, dtype).tobytes()


def test_keys_sites_and_seeds_give_unrelated_values():
    streams = [normal(0, 4000, np.float32, key, site) for key in ((1, 2), (2, 1), (1, 3)) for site in (0, 1, 2**33)]
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_numbers_fill_the_half_open_range(dtype):
    u = uniform(0, 200_000, dtype, low=2.0, high=5.0)
    assert u.min() >= 2
    assert u.max() < 5
    counts = np.histogram(u, 30, (2, 5))[0]
    assert ((counts - 200_000 / 30) ** 2).sum() / (200_000 / 30) < 70  # chi square, 29 degrees of freedom
    assert (uniform(0, 10, dtype, low=4.0, high=4.0) == 4).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_have_the_moments_and_tails_of_a_normal_distribution(dtype):
    z = normal(0, 400_000, dtype).astype(np.float64)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        deviation = np.sqrt(np.mean(z ** (2 * power)) / z.size)
        assert abs(np.mean(z**power) - moment) < 4.5 * deviation
    assert np.mean(np.abs(z) > 3) == pytest.approx(0.0027, rel=0.1)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 5 / np.sqrt(z.size)
    np.testing.assert_array_equal(normal(0, 9, dtype, scale=0.0), 0)


def drop(x, rate, first=0, per=8, seed=1, site=2, step=3, window=None):
    y = np.empty_like(x)
    reduction.dropout(x, y, np.array([rate], x.dtype), seed, site, step, first, per, *(window or (0, per, 1, 0, 0)))
    return y


@pytest.mark.parametrize("per", [1, 255, 1001])
def test_dropout_knows_only_global_samples_also_in_place(per):
    x = np.random.default_rng(per).normal(size=6 * per).astype(np.float32)
    whole = drop(x, 0.3, 10, per)
    assert drop(x[2 * per : 5 * per], 0.3, 12, per).tobytes() == whole[2 * per : 5 * per].tobytes()
    reduction.dropout(x, x, np.array([0.3], np.float32), 1, 2, 3, 10, per, 0, per, 1, 0, 0)
    assert x.tobytes() == whole.tobytes()


@pytest.mark.parametrize("box", [(0, 3, 0, 5, 0, 7), (1, 3, 2, 5, 3, 6), (0, 2, 4, 5, 1, 7), (2, 3, 0, 4, 5, 6)])
def test_dropout_of_a_window_is_the_window_of_dropout(box):
    """A sample is 3 planes of 5 rows of 7: any box of it, masked alone, has the masks of the whole."""
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 7)).astype(np.float32)
    whole = drop(x.reshape(-1), 0.4, first=6, per=105).reshape(x.shape)
    p0, p1, r0, r1, j0, j1 = box
    part = x[:, p0:p1, r0:r1, j0:j1]
    window = (p0 * 35 + r0 * 7 + j0, j1 - j0, r1 - r0, 7, 35)
    found = drop(part.reshape(-1), 0.4, first=6, per=part[0].size, window=window)
    np.testing.assert_array_equal(found.reshape(part.shape), whole[:, p0:p1, r0:r1, j0:j1])


@pytest.mark.parametrize(("start", "stop"), [(1, 1001), (3, 258), (255, 257), (510, 511)])
def test_dropout_of_a_contiguous_part_is_the_part_of_dropout(start, stop):
    x = np.random.default_rng(0).normal(size=(2, 1001))
    whole = drop(x.reshape(-1), 0.4, per=1001).reshape(x.shape)
    part = np.ascontiguousarray(x[:, start:stop])
    found = drop(part.reshape(-1), 0.4, per=stop - start, window=(start, stop - start, 1, 0, 0))
    np.testing.assert_array_equal(found.reshape(part.shape), whole[:, start:stop])


def test_dropout_keeps_the_expectation():
    x = np.ones(100_000, np.float32)
    for rate in (0.1, 0.5, 0.9):
        y = drop(x, rate, per=10_000)
        assert np.unique(y).size == 2
        assert np.mean(y == 0) == pytest.approx(rate, abs=0.008)
        assert y.max() == pytest.approx(1 / (1 - rate), rel=1e-6)
    assert drop(x, 0.0).tobytes() == x.tobytes()
    assert not drop(x, 1.0).any()
    assert drop(x[:0], 0.5).size == 0


def test_dropout_masks_differ_by_seed_site_step_and_sample():
    x = np.ones(512, np.float32)
    masks = [
        drop(x, 0.5, per=512, first=f, seed=s, site=i, step=t) for f, s, i, t in itertools.product((0, 1), repeat=4)
    ]
    masks.append(drop(x, 0.5, per=512, seed=2**40))
    masks.append(drop(x, 0.5, per=512, seed=-1))
    for a, b in itertools.combinations(masks, 2):
        assert 180 < np.count_nonzero(a == b) < 332


def shuffled(length, seed=0, epoch=0):
    index = np.arange(length)
    reduction.permutation(index, length, seed, epoch)
    return index


@pytest.mark.parametrize("length", [0, 1, 3, 10, 4097])
def test_permutation_is_a_bijection(length):
    assert sorted(shuffled(length, 5, 7).tolist()) == list(range(length))


def test_permutation_of_a_part_is_the_part_of_the_permutation():
    whole, part = shuffled(1000), np.array([999, 3, 500])
    reduction.permutation(part, 1000, 0, 0)
    assert part.tolist() == whole[[999, 3, 500]].tolist()
    outside = np.array([-1, 1000, 2**62])
    reduction.permutation(outside, 1000, 0, 0)
    assert outside.tolist() == [-1, -1, -1]


def test_permutations_differ_by_seed_and_epoch():
    images = [shuffled(1000, seed, epoch) for seed, epoch in itertools.product((0, 1, -3, 2**35), (0, 1, 2))]
    for a, b in itertools.combinations(images, 2):
        assert np.count_nonzero(a == b) < 10


def test_every_permutation_of_three_comes_about_equally_often():
    counts = {order: 0 for order in itertools.permutations(range(3))}
    for seed in range(3000):
        counts[tuple(shuffled(3, seed).tolist())] += 1
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 25  # chi square, 5 degrees of freedom


def test_large_lengths_stay_in_range_without_repeats():
    index, length = np.arange(20_000) * 10**13, 2 * 10**17
    reduction.permutation(index, length, 1, 1)
    assert np.unique(index).size == 20_000
    assert index.min() >= 0
    assert index.max() < length
    assert abs(index.mean() / length - 0.5) < 0.02

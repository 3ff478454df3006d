"""Compressed messages lose nothing: what is sent and what is kept add up."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import update
from tests.support.reference import update as reference

SIZES = (0, 255, 257, 5000)


def values(size, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 3, size)).astype(np.float32)


def int8(kernels, x, residual):
    """Encode and decode; return scales, codes, what arrives and what is kept."""
    kept, out = residual.copy(), np.full(x.size, 9, np.float32)
    scales, codes = np.full(-(-x.size // update.COMPRESSION_BLOCK), 9, np.float32), np.full(x.size, 9, np.int8)
    kernels.int8_encode(x, kept, scales, codes)
    kernels.int8_decode(scales, codes, out)
    return scales, codes, out, kept


def top(kernels, x, residual, count):
    """Encode and decode; return indices, values, what arrives and what is kept."""
    kept, out = residual.copy(), np.full(x.size, 9, np.float32)
    indices, largest = np.full(count, 9, np.int32), np.full(count, 9, np.float32)
    kernels.top_encode(x, kept, np.zeros(update.COUNTERS, np.int64), indices, largest)
    kernels.top_decode(indices, largest, out)
    return indices, largest, out, kept


def same(first, second):
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_eight_bits_lose_nothing(size):
    x, residual = values(size), values(size, 1)
    scales, codes, out, kept = int8(update, x, residual)
    assert np.abs(codes.astype(int)).max(initial=0) <= 127
    assert (np.abs(kept) <= np.repeat(scales, update.COMPRESSION_BLOCK)[:size] * np.float32(0.5001)).all()
    total = x.astype(float) + residual
    np.testing.assert_allclose(out.astype(float) + kept, total, atol=1e-6 * np.abs(total).max(initial=0))


def test_blocks_too_small_or_not_finite_are_told_apart():
    x = values(4 * update.COMPRESSION_BLOCK)
    x[:256] = np.linspace(-1e-37, 1e-37, 256)  # a code would be subnormal: all is kept
    x[256:512] = 0
    x[600], x[700] = np.inf, np.nan
    found = int8(update, x, np.zeros_like(x))
    assert same(found, int8(reference, x, np.zeros_like(x)))
    scales, _, out, kept = found
    assert np.array_equal(kept[:512], x[:512])
    assert not out[:512].any()
    assert np.isnan(scales).tolist() == [False, False, True, False]
    assert np.isnan(out).sum() == update.COMPRESSION_BLOCK  # who looks at the sum sees it


def test_the_largest_float_survives_eight_bits():
    x = np.full(3, np.finfo(np.float32).max)
    _, _, out, kept = int8(update, x, np.zeros_like(x))
    assert np.isfinite(out).all()
    assert np.isfinite(kept).all()


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_values_are_sent_and_the_others_are_kept(size):
    x, residual = values(size), values(size, 1)
    for count in sorted({0, min(1, size), size // 100, size // 3, size}):
        indices, _, out, kept = top(update, x, residual, count)
        assert np.array_equal(out + kept, x + residual)
        assert not kept[indices].any()
        assert np.abs(kept).max(initial=0) <= np.abs(out[indices]).min(initial=np.inf)


def test_of_equal_magnitudes_the_first_are_taken_and_bad_numbers_before_all():
    x = np.array([1, -1, 2, 1, -2, 0, 1], np.float32)
    assert top(update, x, np.zeros_like(x), 4)[0].tolist() == [0, 1, 2, 4]
    x[5], x[6] = np.nan, -np.inf
    for count in (2, 3):
        found = top(update, x, np.zeros_like(x), count)
        assert same(found, top(reference, x, np.zeros_like(x), count))
        assert {5, 6} <= set(found[0].tolist())
    x[:] = np.inf, 1, np.nan, np.inf, -np.nan, 0, 2
    assert top(update, x, np.zeros_like(x), 3)[0].tolist() == [0, 2, 4]
    assert top(reference, x, np.zeros_like(x), 3)[0].tolist() == [0, 2, 4]
    many = np.tile(values(300), 40)
    found = top(update, many, np.zeros_like(many), 1234)
    assert same(found, top(reference, many, np.zeros_like(many), 1234))

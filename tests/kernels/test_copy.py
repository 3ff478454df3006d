from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import layers
from tests.support.reference import layers as reference

ALL_HALVES = np.arange(2**16, dtype=np.uint16)


def float32_patterns():
    """Random patterns, and every 16-bit value with its neighbours and the points halfway between."""
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):
        halves = ALL_HALVES.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    brains = ALL_HALVES.astype(np.int64) << 16
    near = [base[::3] + step for base in (halves, brains) for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000)]
    random = rng.integers(0, 2**32, 100_000)
    return np.concatenate([random, *near]).astype(np.uint32).view(np.float32)


def same(got, want):
    """Equal patterns, where one NaN is as good as another."""
    view = np.float16 if got.dtype == np.uint16 else np.float32
    nan = np.isnan(want.view(view))
    return np.array_equal(got[~nan], want[~nan]) and np.isnan(got.view(view)[nan]).all()


@pytest.mark.parametrize("name", ["from_bfloat16", "from_float16"])
def test_widening_all_65536_patterns_agrees_with_the_oracle(name):
    got, want = np.empty((2, 2**16), np.float32)
    getattr(layers, name)(ALL_HALVES, got)
    getattr(reference, name)(ALL_HALVES, want)
    assert same(got.view(np.uint32), want.view(np.uint32)) or same(got, want)


def test_rounding_to_float16_agrees_with_the_oracle():
    x = float32_patterns()
    got, want = np.empty((2, x.size), np.uint16)
    layers.to_float16(x, got)
    reference.to_float16(x, want)
    assert same(got, want)


def test_rounding_to_bfloat16_agrees_with_the_oracle():
    x = float32_patterns()
    got, want = np.empty((2, x.size), np.uint16)
    layers.to_bfloat16(x, got)
    reference.to_bfloat16(x, want)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want[~nan])
    back = np.empty_like(x)
    layers.from_bfloat16(got, back)
    assert np.isnan(back[nan]).all()
    assert not np.isnan(back[~nan]).any()

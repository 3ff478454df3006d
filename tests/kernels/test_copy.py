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


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_all_65536_patterns_become_the_float32_of_the_oracle(name):
    got, want = np.empty((2, 2**16), np.float32)
    getattr(layers, f"from_{name}")(ALL_HALVES, got)
    getattr(reference, f"from_{name}")(ALL_HALVES, want)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert got[~nan].tobytes() == want[~nan].tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_float32_is_rounded_as_by_the_oracle_and_nan_stays_nan(name):
    x = float32_patterns()
    nan, back = np.isnan(x), np.empty_like(x)
    got, want = np.empty((2, x.size), np.uint16)
    getattr(layers, f"to_{name}")(x, got)
    getattr(reference, f"to_{name}")(x, want)
    getattr(layers, f"from_{name}")(got, back)
    assert np.array_equal(got[~nan], want[~nan])
    assert np.array_equal(np.isnan(back), nan)

from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels.cpu import update
from tests.kernels.cases import UPDATES


def arrays(name, size, dtype):
    rng = np.random.default_rng(size)
    slots, scalars = UPDATES[name]
    state = [np.abs(rng.standard_normal(size)).astype(dtype) for _ in range(slots)]
    w, g = rng.standard_normal((2, size)).astype(dtype)
    return [w, g, *state], np.array(scalars, dtype)


@pytest.mark.parametrize("name", UPDATES)
def test_float32_arithmetic_stays_float32(name):
    single, hyper = arrays(name, 64, np.float32)
    double = [a.astype(np.float64) for a in single]
    getattr(update, name)(*single, hyper, 0, 64)
    getattr(update, name)(*double, hyper.astype(np.float64), 0, 64)
    assert any(np.any(a != b.astype(np.float32)) for a, b in zip(single, double, strict=True))


@pytest.mark.parametrize("name", UPDATES)
def test_a_cut_anywhere_changes_no_bit(name):
    whole, hyper = arrays(name, 1000, np.float32)
    parts, _ = arrays(name, 1000, np.float32)
    getattr(update, name)(*whole, hyper, 0, 1000)
    for start, stop in ((0, 1), (1, 38), (38, 517), (517, 1000)):
        getattr(update, name)(*(a[start:stop] for a in parts), hyper, 0, stop - start)
    for a, b in zip(whole, parts, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", sorted(set(UPDATES) - {"lamb_apply", "ema"}))
def test_a_nan_in_the_gradient_is_not_swallowed(name):
    values, hyper = arrays(name, 16, np.float32)
    values[1][5] = np.nan
    getattr(update, name)(*values, hyper, 0, 16)
    changed = values[1] if name == "lamb_direction" else values[0]
    assert np.isnan(changed[5])
    assert np.isfinite(np.delete(changed, 5)).all()

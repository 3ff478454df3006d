from __future__ import annotations

import os

import numpy as np
import pytest

# The simulator is chosen when numba is imported; without it these kernels need a GPU.
if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("CUDA kernels run under NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0, 1, 2, 2, 0), (1, 2, 3, 3, 0), (2, 1, 2, 4, 9), (1, 1, 3, 4, -2)])
def test_tiles_agree_with_the_oracle(shape, dtype):
    from mpizero.kernels.cuda import attention
    from tests.support.reference import attention as reference

    samples, heads, queries, keys, offset = shape
    rng = np.random.default_rng(keys)
    scores, dprobs = rng.normal(size=(2, samples, heads, queries, keys)).astype(dtype)
    maxima, sums = rng.normal(size=(2, samples, queries + 1, heads)).astype(dtype)
    scale, results = np.array([0.7], dtype), []
    for kernels in (attention, reference):
        p, m, s, known, dp = (a.copy() for a in (scores, maxima, sums, scores, dprobs))
        factors = np.zeros((samples, heads, queries), dtype)
        kernels.running_softmax(p, scale, offset, 1, m, s, factors)
        kernels.known_softmax(known, scale, offset, 1, maxima, sums)
        kernels.known_softmax_backward(p, dp, scale, offset, 1, sums)
        results.append((p, m, s, factors, known, dp))
    tight = {"rtol": 1e-11, "atol": 1e-12} if dtype is np.float64 else {"rtol": 1e-5, "atol": 1e-6}
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, **tight)

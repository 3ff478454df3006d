from __future__ import annotations

import os
from importlib import import_module

import numpy as np
import pytest

# The simulator is chosen when numba is imported; without it these kernels need a GPU.
if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("CUDA kernels run under NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

DTYPES = (np.float32, np.float64)
PACKAGES = ("mpizero.kernels.cuda", "tests.support.reference")


def both(topic, name, *arrays, scalars=(), rtol=1e-5):
    """Run a CUDA kernel and its oracle on equal arrays; every array must end up equal."""
    results = []
    for package in PACKAGES:
        copies = [array.copy() for array in arrays]
        getattr(import_module(f"{package}.{topic}"), name)(*copies, *scalars)
        results.append(copies)
    tight = not any(array.dtype == np.float32 for array in arrays)
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11 if tight else rtol, atol=1e-12 if tight else rtol)
    return results[0]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "tanh"])
def test_activations_agree_with_the_oracle(name, dtype, rng):
    x, dy, y = (3 * rng.normal(size=(3, 7))).astype(dtype)
    both("layers", name, x, y)
    both("layers", f"{name}_backward", x, dy, y)
    both("layers", name, x[:0], y[:0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5)])
def test_bias_kernels_agree_with_the_oracle(shape, dtype, rng):
    x, y, z = rng.normal(size=(3, *shape)).astype(dtype)
    bias = rng.normal(size=shape[1]).astype(dtype)
    both("layers", "add_bias", x, bias, y)
    both("layers", "add_bias_residual", x, bias, z, y)
    both("layers", "bias_gelu", x, bias, z, y)
    both("layers", "column_sums", x, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (2, 2), (3, 5)])
def test_element_losses_agree_with_the_oracle(shape, dtype, rng):
    prediction, target, both_ = (rng.normal(size=(shape[0], n * shape[1])).astype(dtype) for n in (1, 1, 2))
    ones, losses = (target > 0).astype(dtype), np.zeros(shape)
    scale, delta, lowest = (np.array([number], dtype) for number in (0.25, 0.5, -0.5))
    factors, flat = rng.uniform(0.5, 2, shape[1]).astype(dtype), (prediction.reshape(-1), target.reshape(-1))
    both("losses", "absolute_error", *flat, losses.reshape(-1))
    both("losses", "absolute_error_backward", *flat, scale, flat[0])
    both("losses", "huber", *flat, delta, losses.reshape(-1))
    both("losses", "huber_backward", *flat, delta, scale, flat[0])
    both("losses", "binary_cross_entropy", prediction, ones, factors, losses)
    both("losses", "binary_cross_entropy_backward", prediction, ones, factors, scale, prediction)
    both("losses", "gaussian_likelihood", both_, target, lowest, losses)
    both("losses", "gaussian_likelihood_backward", both_, target, lowest, scale, both_)
    both("losses", "row_square_sums", prediction, np.zeros(shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (2, 2), (3, 5)])
def test_norms_agree_with_the_oracle(shape, dtype, rng):
    x, dy, y = rng.normal(size=(3, *shape)).astype(dtype)
    gamma, beta, dgamma, dbeta = rng.normal(size=(4, shape[1])).astype(dtype)
    mean, rstd, eps = np.empty(shape[0], dtype), np.empty(shape[0], dtype), np.array([1e-2], dtype)
    mean[:], rstd[:] = 0, 0
    *_, mean, rstd = both("layers", "layernorm", x, gamma, beta, eps, y, mean, rstd)
    for residual in (x[:0], dy):
        both("layers", "layernorm_backward", dy, x, gamma, mean, rstd, residual, y, dgamma, dbeta)
    *_, rstd = both("layers", "rmsnorm", x, gamma, eps, y, rstd)
    both("layers", "rmsnorm_backward_input", dy, x, gamma, rstd, y)
    both("layers", "rmsnorm_backward_weights", dy, x, rstd, dgamma)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7)])
def test_cross_entropy_agrees_with_the_oracle(shape, dtype, rng):
    logits = (3 * rng.normal(size=shape)).astype(dtype)
    targets = rng.integers(0, shape[1], shape[0])
    if shape[0] > 1:
        targets[1], targets[2] = -1, shape[1]
    both("losses", "softmax_cross_entropy", logits, targets, np.zeros(shape[0]), rtol=1e-4)
    both("losses", "softmax_cross_entropy_backward", logits, targets, np.array([0.5], dtype), logits, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (5, 7)])
def test_cross_entropy_in_parts_agrees_with_the_oracle(shape, dtype, rng):
    logits = (3 * rng.normal(size=shape)).astype(dtype)
    targets, terms = np.arange(-1, shape[0] - 1) + 8, np.zeros((2, 3, shape[0]), dtype)
    if shape[0] > 1:
        targets[1] = -1
    *_, terms[0] = both("losses", "partial_cross_entropy", logits, targets, np.array(8), terms[0], rtol=1e-4)
    terms[1] = rng.normal(size=(3, shape[0])) ** 2
    _, _, merged, _ = both(
        "losses", "merged_cross_entropy", terms, targets, terms[0, :2].copy(), np.zeros(shape[0]), rtol=1e-4
    )
    first, scale = np.array(8), np.array([0.5], dtype)
    both("losses", "partial_cross_entropy_backward", logits, targets, first, merged, scale, logits, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 2), (2, 5, 5), (1, 2, 4), (1, 3, 2)])
def test_causal_softmax_agrees_with_the_oracle(shape, dtype, rng):
    scores, dprobs = rng.normal(size=(2, *shape)).astype(dtype)
    scale = np.array([0.7], dtype)
    probs, _ = both("attention", "causal_softmax", scores, scale)
    both("attention", "causal_softmax_backward", probs, dprobs, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_agrees_with_the_oracle(dtype, rng):
    table, dy, ids = rng.normal(size=(4, 3)).astype(dtype), rng.normal(size=(6, 3)).astype(dtype), np.arange(6) % 5 - 1
    ids[5] = 4
    both("layers", "gather", table, ids, np.zeros((6, 3), dtype))
    both("layers", "scatter_add", dy, ids, table)


def test_philox_agrees_with_the_oracle():
    both("reduction", "philox", np.arange(4, dtype=np.uint32), np.array([7, 8], np.uint32), np.zeros(4, np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 3, 2**34 + 1])
def test_random_fills_agree_with_the_oracle(start, dtype):
    for size in (0, 1, 10):
        out, one = np.zeros(size, dtype), np.ones(1, dtype)
        for topic, values in (("fill_uniform", (-one, one)), ("fill_normal", (one,))):
            results = []
            for package in PACKAGES:
                filled = out.copy()
                kernels = import_module(f"{package}.reduction")
                getattr(kernels, topic)(1, 2**31, 3, start, filled, *values)
                results.append(filled)
            np.testing.assert_allclose(*results, rtol=0, atol=2e-6 if dtype is np.float32 else 1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per", [1, 5])
def test_dropout_agrees_with_the_oracle(per, dtype, rng):
    x = rng.normal(size=3 * per).astype(dtype)
    both("reduction", "dropout", x, x, np.array([0.4], dtype), scalars=(-1, 2, 3, 10, per, 0, per, 1, 0, 0))
    both("reduction", "dropout", x, x, np.array([0.4], dtype), scalars=(1, 2, 3, 10, per, 0, per, 1, 0, 0))


@pytest.mark.parametrize("window", [(3, 12, 1, 0, 0), (5, 2, 3, 7, 0), (2, 3, 2, 4, 17), (1, 1, 4, 1, 9)])
def test_dropout_of_a_window_agrees_with_the_oracle(window, rng):
    x = rng.normal(size=2 * 12)
    both("reduction", "dropout", x, x, np.array([0.4]), scalars=(1, 2, 3, 10, 12, *window))


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_permutation_agrees_with_the_oracle(length):
    both("reduction", "permutation", np.arange(-1, length + 1), scalars=(length, 2**40, 6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_heads_are_those_of_the_oracle(dtype, rng):
    both("attention", "transposed_heads", rng.normal(size=(2, 3, 5, 4)).astype(dtype), np.zeros((2, 3, 4, 5), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
def test_split_heads_are_those_of_the_oracle(biased, dtype, rng):
    x = rng.normal(size=(2 * 3, 2 * 4 * 5)).astype(dtype)
    bias = rng.normal(size=x.shape[1] if biased else 0).astype(dtype)
    for package in PACKAGES:
        out = np.full((2, 4, 3, 3, 5), 7, dtype)
        import_module(f"{package}.attention").split_heads(x, bias, 1, 2, out)
        whole = (x + bias if biased else x).reshape(2, 3, 2, 4, 5).transpose(2, 0, 3, 1, 4)
        np.testing.assert_array_equal(out[:, 2:], whole[:, :, 1:])
        assert (out[:, :2] == 7).all()

"""Causal attention by one kernel: that of batched products, and of the same bits however heads are held and dealt."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.kernels import matmul
from mpizero.nn import CausalSelfAttention, transformer
from mpizero.types import Run

pytestmark = pytest.mark.skipif(not matmul.fuses(), reason="needs a compiler, and a CPU that fuses")
TRAINING = Run(training=True)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(matmul, "library", matmul.KernelProducts)


def data(samples, length, heads, size, dtype="f"):
    rng = np.random.default_rng(length)
    qkv, above = (
        rng.standard_normal((samples, length, 3 * heads * size)),
        rng.standard_normal((samples, length, heads * size)),
    )
    return qkv.astype(dtype), above.astype(dtype), CausalSelfAttention(heads * size, heads)


def passes(layer, qkv, above, bias=None):
    """Result and gradient of one pass forward and one backward."""
    mixed, seen = layer.attend(qkv.copy(), bias, TRAINING)
    return mixed, layer.attend_backward(seen, above)


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 5, 3, 4), (3, 37, 2, 20), (1, 64, 2, 64), (1, 300, 2, 33), (0, 4, 2, 8)]
)
def test_it_is_that_of_batched_products(monkeypatch, shape, dtype):
    qkv, above, layer = data(*shape, dtype)
    bias = np.linspace(-1, 1, qkv.shape[2]).astype(dtype)
    found = passes(layer, qkv, above, bias)
    monkeypatch.setattr(matmul, "library", lambda: None)
    for one, other in zip(found, passes(layer, qkv, above, bias), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=0, atol=shape[1] * 8 * np.finfo(dtype).eps)


def test_a_head_has_the_same_bits_alone():
    qkv, above, layer = data(3, 50, 4, 16)
    mixed, gradient = passes(layer, qkv, above)
    for sample in range(3):
        for head in range(4):
            own = np.ascontiguousarray(qkv.reshape(3, 50, 3, 4, 16)[sample : sample + 1, :, :, head]).reshape(1, 50, 48)
            part = np.ascontiguousarray(above[sample : sample + 1, :, 16 * head : 16 * head + 16])
            alone, dalone = passes(CausalSelfAttention(16, 1), own, part)
            assert alone.tobytes() == mixed[sample, :, 16 * head : 16 * head + 16].tobytes()
            assert dalone.tobytes() == gradient.reshape(3, 50, 3, 4, 16)[sample, :, :, head].tobytes()


def test_heads_that_lie_apart_have_the_bits_of_those_in_rows():
    qkv, above, layer = data(2, 33, 3, 20)
    apart = np.ascontiguousarray(qkv.reshape(2, 33, 3, 3, 20).transpose(2, 0, 3, 1, 4))
    mixed, seen = layer.attend_heads(apart, TRAINING)
    above.flags.writeable = False
    for one, other in zip((mixed, layer.attend_backward(seen, above)), passes(layer, qkv, above), strict=True):
        assert one.tobytes() == other.tobytes()


def test_probabilities_computed_again_give_the_same_bits(monkeypatch):
    qkv, above, layer = data(2, 70, 3, 20)
    kept = passes(layer, qkv, above)
    monkeypatch.setattr(CausalSelfAttention, "keeps_probabilities", lambda self, length: False)
    assert layer.attend(qkv.copy(), None, TRAINING)[1][1] is None
    assert [x.tobytes() for x in passes(layer, qkv, above)] == [x.tobytes() for x in kept]


@pytest.mark.parametrize("threads", [3, 20])
def test_threads_change_no_bit(monkeypatch, threads):
    qkv, above, layer = data(3, 40, 3, 8)
    alone = passes(layer, qkv, above)
    monkeypatch.setattr(transformer, "threads_for", lambda operations: threads)
    assert [x.tobytes() for x in passes(layer, qkv, above)] == [x.tobytes() for x in alone]

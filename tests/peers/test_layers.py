"""Layers and losses against PyTorch's: outputs, gradients of inputs, gradients of parameters."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.layout.flat import nested

torch = pytest.importorskip("torch")
nn = torch.nn

from tests.peers.twins import fill  # noqa: E402


class Attention(nn.MultiheadAttention):
    """PyTorch's attention with a causal mask."""

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]


class Block(nn.TransformerEncoderLayer):
    """PyTorch's transformer layer, normalizing first, with a causal mask."""

    def __init__(self, dim, heads):
        gelu = nn.GELU(approximate="tanh")
        super().__init__(dim, heads, 4 * dim, 0.0, gelu, norm_first=True, batch_first=True)

    def forward(self, x):
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


#: This layer, PyTorch's, the shape of an input, and the places of our parameters in PyTorch's order where it differs.
LAYERS = {
    "linear": (mz.nn.Linear(4, 3), lambda: nn.Linear(4, 3), (5, 4), None),
    "linear without bias": (mz.nn.Linear(4, 3, bias=False), lambda: nn.Linear(4, 3, bias=False), (2, 3, 4), None),
    "projection": (mz.nn.Projection(4, 3), lambda: nn.Linear(4, 3, bias=False), (2, 3, 4), None),
    "layernorm": (mz.nn.LayerNorm(5), lambda: nn.LayerNorm(5), (2, 3, 5), None),
    "rmsnorm": (mz.nn.RMSNorm(5), lambda: nn.RMSNorm(5, eps=1e-6), (2, 3, 5), None),
    "gelu": (mz.nn.GELU(), lambda: nn.GELU(approximate="tanh"), (40, 9), None),
    "silu": (mz.nn.SiLU(), nn.SiLU, (40, 9), None),
    "relu": (mz.nn.ReLU(), nn.ReLU, (40, 9), None),
    "tanh": (mz.nn.Tanh(), nn.Tanh, (40, 9), None),
    "long attention": (mz.nn.CausalSelfAttention(4, 2), lambda: Attention(4, 2, batch_first=True), (1, 130, 4), None),
    "block": (mz.nn.TransformerBlock(12, 3), lambda: Block(12, 3), (2, 9, 12), (2, 3, 4, 5, 8, 9, 10, 11, 0, 1, 6, 7)),
}


def assert_close(got, wanted, message=""):
    size = max(1.0, float(abs(wanted).max()))
    np.testing.assert_allclose(got / size, wanted / size, rtol=0, atol=1e-12, err_msg=message)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_all_gradients_are_pytorch_s(name, rng):
    layer, make, shape, order = LAYERS[name]
    flat = {spec.name: rng.normal(size=spec.shape) for spec in layer.specs()}
    gradients = {name: np.full_like(value, np.nan) for name, value in flat.items()}
    names = [list(flat)[place] for place in order or range(len(flat))]
    straight = isinstance(layer, mz.nn.Projection)  # the orientation of PyTorch's matrices; all others are transposed
    twin = fill(make().double(), [flat[name] if straight else flat[name].T for name in names])
    x = rng.normal(0, 2, shape)
    theirs = torch.from_numpy(x.copy()).requires_grad_()
    wanted = twin(theirs)
    y, cache = layer.forward(nested(dict(flat.items())), x)
    dy = rng.normal(size=y.shape)
    wanted.backward(torch.from_numpy(dy.copy()))
    dx = layer.backward(nested(dict(flat.items())), cache, dy, nested(dict(gradients.items())))
    assert_close(y, wanted.detach().numpy())
    assert_close(dx, theirs.grad.numpy())
    for name, parameter in zip(names, twin.parameters(), strict=True):
        assert_close(gradients[name] if straight else gradients[name].T, parameter.grad.numpy(), name)


def test_an_embedding_s_output_and_gradient_are_pytorch_s(rng):
    table, ids, dy = rng.normal(size=(6, 3)), np.array([[0, 5, 5, 1], [2, 0, 5, 1]]), rng.normal(size=(2, 4, 3))
    twin = fill(nn.Embedding(6, 3, dtype=torch.float64), [table])
    wanted, gradient = twin(torch.from_numpy(ids)), np.full_like(table, np.nan)
    wanted.backward(torch.from_numpy(dy))
    y, cache = mz.nn.Embedding(6, 3).forward({"weight": table}, ids)
    mz.nn.Embedding(6, 3).backward({"weight": table}, cache, dy, {"weight": gradient})
    np.testing.assert_array_equal(y, wanted.detach().numpy())
    np.testing.assert_allclose(gradient, twin.weight.grad.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_cross_entropy_and_its_gradient_are_pytorch_s(size, rng):
    """Large logits too, whose exponentials overflow, and targets that are ignored."""
    logits, targets = size * rng.normal(size=(4, 6, 11)), rng.integers(0, 11, (4, 6))
    targets[1, ::2] = -1
    theirs = torch.from_numpy(logits).requires_grad_()
    wanted = nn.functional.cross_entropy(
        theirs.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-1, reduction="sum"
    )
    wanted.backward()
    total, weight, cache = mz.nn.CrossEntropy().forward(logits, targets)
    assert weight == 21.0
    assert total == pytest.approx(wanted.item(), rel=1e-12)
    assert_close(mz.nn.CrossEntropy().backward(cache), theirs.grad.numpy())

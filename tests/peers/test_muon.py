"""Muon against PyTorch's: one step within the error of its bfloat16, many steps to rounding where it has float64."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from mpizero import optim

torch = pytest.importorskip("torch")

SHAPES = [(24, 16), (16, 24), (20, 20)]


def both(shape, scale, steps, dtype="f8"):
    """Update by both; return the values before, and after each of them. PyTorch's matrices have outputs first."""
    rng = np.random.default_rng(1)
    start, history = rng.standard_normal(shape).astype(dtype), rng.standard_normal((steps, *shape)).astype(dtype)
    ours = optim.Muon(lr=0.02, weight_decay=0.1, scale=scale, output_axis=0)
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    w, state = start.copy(), {"momentum_buffer": np.zeros(shape, dtype)}
    for number, g in enumerate(history, start=1):
        ours.update_tensor(w, g.copy(), state, optim.TensorStep(number, 0.02, 0.1))
        theirs.grad = torch.tensor(g)
        optimizer.step()
    return start, w, theirs.detach().numpy()


def in_float64():
    """PyTorch's products are in float64 inside this context."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double)


@pytest.mark.parametrize(("shape", "scale"), [(SHAPES[0], "original"), (SHAPES[1], "match_rms_adamw")], ids=str)
def test_one_step_in_float32_is_pytorchs_within_the_error_of_its_bfloat16(shape, scale):
    start, ours, theirs = both(shape, scale, 1, "f4")
    with in_float64():
        exact = both(shape, scale, 1)[2]
    error = np.linalg.norm(theirs - exact)
    assert 0 < error < 0.04 * np.linalg.norm(exact - start)
    assert np.linalg.norm(ours - theirs) < 1.01 * error


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_are_pytorchs_if_its_products_are_in_float64(shape, scale):
    with in_float64():
        _, ours, theirs = both(shape, scale, 50)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)

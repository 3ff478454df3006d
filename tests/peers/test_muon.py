"""Muon against PyTorch's, whose products are made in float64 here."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from mpizero import optim

torch = pytest.importorskip("torch")

SHAPES = [(24, 16), (16, 24), (20, 20)]


def both(shape, scale, steps):
    """Update by both; return the values of each. PyTorch's matrices have outputs first."""
    rng = np.random.default_rng(1)
    start, history = rng.standard_normal(shape), rng.standard_normal((steps, *shape))
    ours = optim.Muon(lr=0.02, weight_decay=0.1, scale=scale, output_axis=0)
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    w, state = start.copy(), {"momentum_buffer": np.zeros(shape)}
    for number, g in enumerate(history, start=1):
        ours.update_tensor(w, g.copy(), state, optim.TensorStep(number, 0.02, 0.1))
        theirs.grad = torch.tensor(g)
        optimizer.step()
    return w, theirs.detach().numpy()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_are_pytorchs_if_its_products_are_in_float64(shape, scale):
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
        ours, theirs = both(shape, scale, 50)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)

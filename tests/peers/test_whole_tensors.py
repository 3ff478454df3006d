"""Optimizers of matrices against other implementations: Muon against PyTorch's, SOAP against pytorch_optimizer's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from mpizero import optim

torch = pytest.importorskip("torch")

SHAPES = [(24, 16), (16, 24), (20, 20)]


def both(ours, other, shape, steps, first=lambda theirs, state: None):
    """Update by both with the same gradients; return the start, and the values after ``steps`` gradients.

    ``other`` makes an optimizer of a list of parameters; ``first(theirs, our state)`` is called after one gradient.
    """
    rng = np.random.default_rng(1)
    start, history = rng.standard_normal(shape), rng.standard_normal((steps, *shape))
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = other([theirs])
    w, state = start.copy(), {slot: np.zeros(side) for slot, side in ours.state_shapes(shape).items()}
    for number, g in enumerate(history, start=1):
        ours.update_tensor(w, g.copy(), state, optim.TensorStep(number, ours.lr, ours.weight_decay))
        theirs.grad = torch.tensor(g)
        optimizer.step()
        if number == 1:
            first(optimizer.state[theirs], state)
    return start, w, theirs.detach().numpy()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fifty_steps_of_muon_are_pytorchs_if_its_products_are_in_float64(shape, scale):
    ours = optim.Muon(lr=0.02, weight_decay=0.1, scale=scale, output_axis=0)  # PyTorch's matrices have outputs first
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
        _, found, theirs = both(
            ours, lambda values: torch.optim.Muon(values, lr=0.02, weight_decay=0.1, adjust_lr_fn=scale), shape, 50
        )
    np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("steps", "frequency", "tolerance"), [(2, 10, 1e-10), (50, 100, 1e-9)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_updates_of_soap_are_those_of_the_authors_as_long_as_the_bases_stay(shape, steps, frequency, tolerance):
    """The first gradient gives the bases and changes no matrix; the second one updates it.

    After one gradient the longer side's average has eigenvalues of zero, whose eigenvectors are any orthogonal to the
    others. So both go on with ours.
    """
    others = pytest.importorskip("pytorch_optimizer")

    def take_bases(theirs, state):
        for own, name in zip(theirs["Q"], ("left_basis", "right_basis"), strict=True):
            assert np.allclose(own.T @ own, np.eye(len(own)), atol=1e-5)
            own.copy_(torch.tensor(state[name]))

    settings = {"lr": 0.02, "eps": 1e-12, "weight_decay": 0.0}
    start, found, theirs = both(
        optim.SOAP(frequency=frequency, **settings),
        lambda values: others.SOAP(values, precondition_frequency=frequency, **settings),
        shape, steps, take_bases,
    )  # fmt: skip
    assert np.abs(theirs - start).max() > 1e-3
    np.testing.assert_allclose(found, theirs, rtol=0, atol=tolerance)

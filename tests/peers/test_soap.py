"""SOAP against the implementation in the package pytorch_optimizer, which follows the authors' code."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import optim

torch = pytest.importorskip("torch")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

SHAPES = [(24, 16), (16, 24), (20, 20)]


def both(shape, steps, **settings):
    """Update by both with the same gradients; return the start, and the values after ``steps`` gradients.

    After one gradient the longer side's average has eigenvalues of zero, whose eigenvectors are any orthogonal
    to the others. So both go on with ours.
    """
    rng = np.random.default_rng(1)
    start, history = rng.standard_normal(shape), rng.standard_normal((steps, *shape))
    ours = optim.SOAP(lr=0.02, eps=1e-12, weight_decay=0.0, **settings)
    theirs = torch.nn.Parameter(torch.tensor(start))
    frequency = settings.get("frequency", 10)
    optimizer = pytorch_optimizer.SOAP([theirs], lr=0.02, eps=1e-12, weight_decay=0.0, precondition_frequency=frequency)
    w = start.copy()
    state = {slot: np.zeros(side, w.dtype) for slot, side in ours.state_shapes(shape).items()}
    for number, g in enumerate(history, start=1):
        ours.update_tensor(w, g.copy(), state, optim.TensorStep(number, 0.02, 0.0))
        theirs.grad = torch.tensor(g)
        optimizer.step()
        if number == 1:
            found = optimizer.state[theirs]["Q"]
            for own, name in zip(found, ("left_basis", "right_basis"), strict=True):
                assert np.allclose(own.T @ own, np.eye(len(own)), atol=1e-5)
                own.copy_(torch.tensor(state[name]))
    return start, w, theirs.detach().numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_update_is_that_of_the_authors(shape):
    """The first gradient gives the bases and changes no matrix; the second one updates it."""
    start, ours, theirs = both(shape, 2)
    assert np.abs(theirs - start).max() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_updates_are_those_of_the_authors_as_long_as_the_bases_stay(shape):
    _, ours, theirs = both(shape, 50, frequency=100)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)

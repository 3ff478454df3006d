"""What tests of optimizers of whole tensors share: random gradients, and a parameter updated by them."""

from __future__ import annotations

import numpy as np

from mpizero import optim


def data(shape, dtype="f8", steps=50):
    """Start values, and a gradient for each step."""
    rng = np.random.default_rng(3)
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal((steps, *shape)).astype(dtype)


def updated(optimizer, start, history):
    w = start.copy()
    state = {slot: np.zeros(shape, w.dtype) for slot, shape in optimizer.state_shapes(w.shape).items()}
    for number, g in enumerate(history, start=1):
        step = optim.TensorStep(number, optimizer.lr, optimizer.weight_decay)
        assert optimizer.update_tensor(w, g.copy(), state, step) is None
    return w

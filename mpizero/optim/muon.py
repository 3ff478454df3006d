"""Implement Muon (Jordan et al. 2024): momentum whose matrices are made nearly orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mpizero import kernels
from mpizero._util.checks import flag, fraction, require, whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError
from mpizero.optim.tensor_optimizer import TensorOptimizer, TensorStep
from mpizero.types import Array, LearningRate

#: Factors of x, (x x^T) x and (x x^T)^2 x in a step of the iteration (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: A matrix with a smaller norm is divided by this number.
SMALLEST_NORM = 1e-7
SCALES = ("original", "match_rms_adamw")


@explains
@dataclass(frozen=True, kw_only=True)
class Muon(TensorOptimizer):
    """Implement Muon (Jordan et al. 2024), momentum with orthogonal steps, for matrices; AdamW for other parameters.

    The momentum m of a matrix is updated with the gradient g, ``m = momentum * m + (1 - momentum) * g``. The step u is
    made of it by :func:`newton_schulz`, and ``w = (1 - lr * weight_decay) * w - lr * scale * u``. Parameters with
    ``spec.decay`` False (biases, norms, embeddings), those that are no matrices and those that ``exclude`` names are
    updated by AdamW, with ``betas`` and ``eps``. The authors advise that for the output layer, too:
    ``exclude=["head.*"]`` in a :class:`~mpizero.nn.GPT`.

    Attributes
    ----------
    momentum : float
        Decay rate of the momentum, in [0, 1).
    nesterov : bool
        Whether the step is made of ``momentum * m + (1 - momentum) * g`` instead of ``m``.
    iterations : int
        Number of iterations of :func:`newton_schulz`.
    scale : str
        "original": the factor of a matrix is ``sqrt(max(1, outputs / inputs))``. "match_rms_adamw": it is ``0.2 *
        sqrt(max(outputs, inputs))``, so that steps are about as large as AdamW's, and one learning rate suits both (Liu
        et al. 2025, section 2.2).
    output_axis : int
        The axis of a matrix that counts outputs: 1 in the layers of :mod:`mpizero.nn`, which compute ``x @ w``, and 0
        in those of PyTorch.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> muon = mz.Muon(lr=0.02, exclude=["head.*"])
    >>> w, g, state = np.zeros((2, 2)), np.array([[3.0, 0.0], [0.0, 1.0]]), {"momentum_buffer": np.zeros((2, 2))}
    >>> muon.update_tensor(w, g, state, mz.TensorStep(number=1, lr=1.0, weight_decay=0.0))
    >>> w.round(1)  # nearly minus the orthogonal factor of the gradient
    array([[-0.8,  0. ],
           [ 0. , -1.1]])
    """

    lr: LearningRate = field(default=2e-2, kw_only=False)
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    scale: str = "original"
    output_axis: int = 1

    tensor_slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def _check(self, owner: str) -> None:
        super()._check(owner)
        require(f"{owner}: momentum", self.momentum, fraction)
        require(f"{owner}: nesterov", self.nesterov, flag)
        require(f"{owner}: iterations", self.iterations, whole(1))
        require(f"{owner}: output_axis", self.output_axis, whole(0, 1))
        if self.scale not in SCALES:
            raise ConfigError(f"{owner}: scale={self.scale!r}: expected one of {', '.join(map(repr, SCALES))}")

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the momentum, which is the matrix's own."""
        return {"momentum_buffer": shape}

    def cost(self, shape: tuple[int, ...]) -> int:
        """Return the number of operations of the products of :func:`newton_schulz`."""
        small, large = sorted(shape)
        return self.iterations * 2 * small * small * (2 * large + small)

    def update_tensor(self, w: Array, g: Array, state: Mapping[str, Array], step: TensorStep) -> None:
        """Update a matrix and its momentum in place; ``g`` is overwritten."""
        m = state["momentum_buffer"]
        g *= 1.0 - self.momentum
        m *= self.momentum
        m += g
        if self.nesterov:
            g += self.momentum * m
        else:
            g[...] = m
        u = newton_schulz(g, self.iterations)
        u *= step.lr * self.factor(w.shape)
        w *= 1.0 - step.lr * step.weight_decay
        w -= u

    def factor(self, shape: tuple[int, ...]) -> float:
        """Return the factor by which the step of a matrix is multiplied, besides the learning rate."""
        outputs, inputs = shape[self.output_axis], shape[1 - self.output_axis]
        if self.scale == "match_rms_adamw":
            return 0.2 * math.sqrt(max(outputs, inputs))
        return math.sqrt(max(1.0, outputs / inputs))


def newton_schulz(g: Array, iterations: int = 5) -> Array:
    """Return a matrix with the singular vectors of ``g`` and singular values near 1 (Jordan et al. 2024).

    ``g``, divided by its norm, is iterated ``x = a x + b (x x^T) x + c (x x^T)^2 x`` with :data:`COEFFICIENTS`. In five
    steps that brings singular values that are not tiny to between 0.7 and 1.2. The smaller side is that of ``x x^T``.
    All products have shapes that depend on the shape of ``g`` alone. ``g`` is overwritten, and may be the result.
    """
    a, b, c = COEFFICIENTS
    tall = g.shape[0] > g.shape[1]
    x = np.ascontiguousarray(g.T) if tall else g
    x /= max(norm(x), SMALLEST_NORM)
    gram, square = np.empty((2, x.shape[0], x.shape[0]), x.dtype)
    y = np.empty_like(x)
    for _ in range(iterations):
        np.matmul(x, x.T, out=gram)
        np.matmul(gram, gram, out=square)
        gram *= b
        square *= c
        gram += square
        np.matmul(gram, x, out=y)
        x *= a
        y += x
        x, y = y, x
    return x.T if tall else x


def norm(x: Array) -> float:
    """Return the norm of all elements of a C-contiguous array, computed in float64 in the order of a binary tree."""
    total = np.empty(1, np.float64)
    starts, stops = np.zeros(1, np.int64), np.array([x.size], np.int64)
    kernels.backend(x).reduction.tree_square_sums(x.reshape(-1), starts, stops, total)
    return math.sqrt(total[0])

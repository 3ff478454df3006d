"""Implement SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero.optim.tensor_optimizer import TensorOptimizer, TensorStep
from mpizero.types import Array, LearningRate


@explains
@dataclass(frozen=True, kw_only=True)
class SOAP(TensorOptimizer):
    """Implement SOAP (Vyas et al. 2024, algorithm 3) for matrices; AdamW for other parameters.

    Of the gradients g of a matrix, the averages L of ``g g^T`` and R of ``g^T g`` are kept with the decay rate
    ``betas[1]``. Their eigenvectors are a basis in which AdamW updates the matrix. The bases are found by an
    eigendecomposition in the first step, which changes no matrix, as in the authors' implementation. Every
    ``frequency`` updates they are corrected by one power iteration and a QR decomposition (algorithm 4). ``betas`` and
    ``eps`` are those of the updates in this basis and of the other parameters. Biases are corrected as in Adam.

    Attributes
    ----------
    frequency : int
        Number of updates from one correction of the bases to the next.
    max_dimension : int
        Largest side of a matrix that has a basis. A larger side is not rotated, and has no arrays.

    Examples
    --------
    >>> import mpizero as mz
    >>> soap = mz.SOAP(lr=3e-3, max_dimension=1000)
    >>> soap.state_shapes((4, 2000))  # the larger side is not rotated
    {'momentum': (4, 2000), 'second_moment': (4, 2000), 'left': (4, 4), 'left_basis': (4, 4)}
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), soap, comm="self") as model:
    ...     sorted(model.optimizer.state_dict()["state"])[:4]
    ['exp_avg', 'exp_avg_sq', 'left', 'left_basis']
    """

    lr: LearningRate = field(default=3e-3, kw_only=False)
    betas: tuple[float, float] = (0.95, 0.95)
    frequency: int = 10
    max_dimension: int = 10_000

    magnifies_rounding: ClassVar[str] = (
        "SOAP magnifies it: in float32 a difference in the last place becomes one of a whole step in a few steps"
    )
    tensor_slots: ClassVar[tuple[str, ...]] = (
        "momentum",
        "second_moment",
        "left",
        "right",
        "left_basis",
        "right_basis",
    )

    def _check(self, owner: str) -> None:
        super()._check(owner)
        require(f"{owner}: frequency", self.frequency, whole(1))
        require(f"{owner}: max_dimension", self.max_dimension, whole(1))

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the two moments, which are the matrix's, and of averages and bases of its sides."""
        sides = {name: (size, size) for name, size in zip(("left", "right"), shape, strict=True) if self._rotates(size)}
        bases = {f"{name}_basis": square for name, square in sides.items()}
        return {"momentum": shape, "second_moment": shape} | sides | bases

    def _rotates(self, size: int) -> bool:
        return size <= self.max_dimension

    def cost(self, shape: tuple[int, ...]) -> int:
        """Return the number of operations of an update's products, and its share of the QR decompositions."""
        rows, columns = shape
        sides = [size for size in shape if self._rotates(size)]
        return sum(8 * rows * columns * size + 5 * size**3 // self.frequency for size in sides)

    def update_tensor(self, w: Array, g: Array, state: Mapping[str, Array], step: TensorStep) -> None:
        """Update a matrix and its state in place from the gradient ``g``."""
        bases = state.get("left_basis"), state.get("right_basis")
        updates = step.number - 1
        if updates:
            u = rotated(self._direction(g, state, updates), *bases, back=True)
            u *= step.lr
            w *= 1.0 - step.lr * step.weight_decay
            w -= u
        for name, factors in (("left", (g, g.T)), ("right", (g.T, g))):
            if name in state:
                average, basis = state[name], state[f"{name}_basis"]
                average *= self.betas[1]
                average += (1.0 - self.betas[1]) * np.matmul(*factors)
                if not updates:
                    basis[...] = np.linalg.eigh(average)[1][:, ::-1]
                elif updates % self.frequency == 0:
                    basis[...] = np.linalg.qr(average @ basis)[0]

    def _direction(self, g: Array, state: Mapping[str, Array], updates: int) -> Array:
        """Return Adam's direction in the rotated basis; ``updates`` counts this update, too."""
        bases = state.get("left_basis"), state.get("right_basis")
        (beta1, beta2), m, v = self.betas, state["momentum"], state["second_moment"]
        m *= beta1
        m += (1.0 - beta1) * g
        square = rotated(g, *bases)
        square *= square
        square *= 1.0 - beta2
        v *= beta2
        v += square
        u = rotated(m, *bases)
        np.sqrt(v, out=square)
        square *= (1.0 - beta2**updates) ** -0.5
        square += self.eps
        u /= square
        u *= 1.0 / (1.0 - beta1**updates)
        return u


def rotated(x: Array, left: Array | None, right: Array | None, *, back: bool = False) -> Array:
    """Return a new array, ``left^T x right`` or with ``back`` ``left x right^T``; None stands for the identity."""
    found: Array = x.copy() if left is None else np.matmul(left if back else left.T, x)
    if right is not None:
        found = np.matmul(found, right.T if back else right)
    return found

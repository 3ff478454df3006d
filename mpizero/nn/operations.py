"""Count the floating-point work of layers by the matrix products that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Operations:
    """Hold the floating-point operations of the products of one sample: 2 m n k for (m, k) times (k, n).

    Elementwise work, norms and softmax are not counted: they are bound by memory, not by arithmetic.
    """

    forward: int = 0
    backward_input: int = 0
    backward_weights: int = 0

    def __add__(self, other: Operations) -> Operations:
        """Add two layers' work."""
        return Operations(*(a + b for a, b in zip(self, other, strict=True)))

    def __iter__(self) -> Iterator[int]:
        """Return the three numbers in order."""
        return iter((self.forward, self.backward_input, self.backward_weights))

    @property
    def total(self) -> int:
        """Forward and both halves of the backward pass."""
        return sum(self)


def linear_operations(rows: int, inputs: int, outputs: int, input_gradient: bool = True) -> Operations:
    """Count the three products of a linear map of ``rows`` rows."""
    product = 2 * rows * inputs * outputs
    return Operations(product, product if input_gradient else 0, product)

"""Count the floating-point work of layers by the matrix products that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Operations:
    """Hold the number of floating-point operations of a layer's matrix products for one sample, by pass.

    A product of (m, k) by (k, n) counts 2 m n k operations. Elementwise work, norms and softmax are not counted: they
    are bound by memory, not by arithmetic. A layer of yours returns it from :meth:`mpizero.nn.Layer.operations`.

    Parameters
    ----------
    forward, backward_input, backward_weights : int
        Operations of the forward pass, and of the two halves of the backward pass.

    Examples
    --------
    >>> import mpizero as mz
    >>> first, second = mz.nn.Linear(3, 4).operations((3,)), mz.nn.Linear(4, 2).operations((4,))
    >>> first + second
    Operations(forward=40, backward_input=40, backward_weights=40)
    >>> (first + second).total  # of one training step on one sample
    120
    """

    forward: int = 0
    backward_input: int = 0
    backward_weights: int = 0

    def __add__(self, other: Operations) -> Operations:
        """Add two layers' numbers, pass by pass."""
        return Operations(*(a + b for a, b in zip(self, other, strict=True)))

    def __iter__(self) -> Iterator[int]:
        """Iterate over the three numbers: forward, backward_input, backward_weights."""
        return iter((self.forward, self.backward_input, self.backward_weights))

    @property
    def total(self) -> int:
        """The sum of the three numbers: forward pass and both halves of the backward pass."""
        return sum(self)


def linear_operations(rows: int, inputs: int, outputs: int, input_gradient: bool = True) -> Operations:
    """Count the operations of a linear map on ``rows`` rows: its forward product and its two gradient products.

    ``inputs`` and ``outputs`` are the sizes of the weight. If ``input_gradient`` is False, the product for the input's
    gradient is not counted.
    """
    product = 2 * rows * inputs * outputs
    return Operations(product, product if input_gradient else 0, product)

"""Define the operations by which methods of whole vectors see the parameters, wherever their elements are."""

from __future__ import annotations

from typing import Protocol

#: The state array that holds the gradient of the last evaluation.
TRIAL = "trial_gradient"


class VectorSpace(Protocol):
    """Compute with vectors that are as long as all optimized parameters of a model together.

    Vectors are named; a rank holds its elements of each, and never needs those of others. Scalars have the same bits on
    all ranks and on every layout. So all ranks of a method make the same decisions.
    """

    #: The distance from 1 to the next number of the vectors' type.
    precision: float

    def dot(self, a: str, b: str) -> float:
        """Return the dot product of two vectors, summed in float64 in the order of a binary tree. Collective."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy one vector to another. Not collective."""
        ...

    def scale(self, factor: float, target: str) -> None:
        """Multiply a vector by a number. Not collective."""
        ...

    def add(self, factor: float, source: str, target: str) -> None:
        """Add ``factor`` times one vector to another. Not collective."""
        ...

    def precondition(self, target: str) -> None:
        """Multiply a vector by the preconditioner, if there is one. Not collective."""
        ...

    def fill(self, value: float, target: str) -> None:
        """Set all elements of a vector to a number. Not collective."""
        ...

    def multiply(self, factors: str, target: str) -> None:
        """Multiply one vector by another, element by element. Not collective."""
        ...

    def divide(self, divisors: str, target: str) -> None:
        """Divide one vector by another, element by element. Not collective."""
        ...

    def update_diagonal(self, target: str, y: str, curvature: float, bs: str, square: float) -> None:
        """Add ``y**2 / curvature - bs**2 / square``, by element, to ``target``, which stays positive. Not collective.

        That is the diagonal of the BFGS update of a diagonal matrix B by a pair s and y, if ``bs`` is B s,
        ``curvature`` is s^T y and ``square`` is s^T B s.
        """
        ...

    def parameters(self, target: str) -> None:
        """Copy the parameters to a vector. Not collective."""
        ...

    def move(self, origin: str, step: float, direction: str) -> None:
        """Set the parameters to ``origin + step * direction``, within their bounds. Not collective."""
        ...

    # ------------------------------------------------------------------ bounds

    #: Whether there are bounds. If there are none, the methods below do nothing.
    bounded: bool

    def enter_bounds(self) -> bool:
        """Move the parameters into their bounds; tell whether that changed any of them. Collective."""
        ...

    def largest_projected(self, gradient: str) -> float:
        """Return the largest magnitude of ``parameters - P(parameters - gradient)``; P moves into bounds. Collective.

        Without bounds it is that of the gradient.
        """
        ...

    def drop_fixed(self, gradient: str, reach: float, target: str) -> None:
        """Set to 0 the elements of a vector for which ``point - reach * gradient`` is at or beyond a bound.

        Not collective.
        """
        ...

    def go_to_bounds(self, gradient: str, reach: float, direction: str) -> None:
        """Set the elements that :meth:`drop_fixed` clears to the way from ``point`` to their bound. Not collective."""
        ...

    def clip(self, origin: str, step: float, direction: str) -> None:
        """Set ``direction`` to ``P(origin + step * direction) - origin``. Not collective."""
        ...

    def longest_step(self, origin: str, direction: str) -> float:
        """Return the longest step along ``direction`` that stays within bounds; infinite without any. Collective."""
        ...

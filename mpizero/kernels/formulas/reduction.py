"""Define the formulas of the reductions, for one element."""

from __future__ import annotations

from typing import Any

Scalar = Any


def is_finite(x: Scalar) -> bool:
    """Tell whether ``x`` is neither infinite nor NaN: only then is x - x a number."""
    difference = x - x
    return bool(difference == difference)

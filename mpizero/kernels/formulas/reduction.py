"""Define the test for finite numbers, for one element."""

from __future__ import annotations

from typing import Any

Scalar = Any


def is_finite(x: Scalar) -> bool:
    """Tell whether ``x`` is neither infinite nor NaN; only then is ``x - x`` equal to itself."""
    difference = x - x
    return bool(difference == difference)

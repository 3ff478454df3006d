"""Scalars of the reductions."""


def is_finite(x):
    """Tell whether ``x`` is neither infinite nor NaN: only then is x - x a number."""
    difference = x - x
    return difference == difference

"""Define the formulas of layer and root-mean-square normalization, for one element."""

from __future__ import annotations

import math
from typing import Any


def inverse_root(mean_square: Any, eps: Any, T: Any) -> Any:  # noqa: N803
    """Return ``1 / sqrt(mean_square + eps)`` as a number of type ``T``."""
    return T(1.0) / T(math.sqrt(mean_square + eps))


def standardized(x: Any, mean: Any, rstd: Any) -> Any:
    """Return ``(x - mean) * rstd``, where ``rstd`` is 1 / (standard deviation)."""
    return (x - mean) * rstd


def scaled(standard: Any, gamma: Any, beta: Any) -> Any:
    """Return ``standard * gamma + beta``, where ``standard`` comes from :func:`standardized`."""
    return standard * gamma + beta


def layernorm_gradient(g: Any, standard: Any, mean_g: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of one input x of layer normalization.

    ``standard`` is (x - mean) * rstd with rstd = 1 / (standard deviation), and ``g`` is dy * gamma. ``mean_g`` and
    ``mean_gs`` are the means of g and of g * standard over the row.
    """
    return rstd * ((g - mean_g) - standard * mean_gs)


def rmsnorm_gradient(g: Any, standard: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of one input x of root-mean-square normalization.

    ``standard`` is x * rstd with rstd = 1 / (root mean square), and ``g`` is dy * gamma. ``mean_gs`` is the mean of g *
    standard over the row.
    """
    return rstd * (g - standard * mean_gs)

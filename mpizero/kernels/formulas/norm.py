"""Define the formulas of layer and root-mean-square normalization, for one element."""

from __future__ import annotations

import math
from typing import Any


def inverse_root(mean_square: Any, eps: Any, T: Any) -> Any:  # noqa: N803
    """Return 1 / sqrt(mean_square + eps)."""
    return T(1.0) / T(math.sqrt(mean_square + eps))


def standardized(x: Any, mean: Any, rstd: Any) -> Any:
    """Return (x - mean) * rstd."""
    return (x - mean) * rstd


def scaled(standard: Any, gamma: Any, beta: Any) -> Any:
    """Return standard * gamma + beta."""
    return standard * gamma + beta


def layernorm_gradient(g: Any, standard: Any, mean_g: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of the input, from g = dy * gamma and the row's means of g and of g * standard."""
    return rstd * ((g - mean_g) - standard * mean_gs)


def rmsnorm_gradient(g: Any, standard: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of the input, from g = dy * gamma and the row's mean of g * standard."""
    return rstd * (g - standard * mean_gs)

"""Define the formulas of the softmax cross-entropy loss, for one row or one logit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def cross_entropy(total: Any, largest: Any, logit: Any) -> Any:
    """Return the loss of one row, -log softmax(x)[target], in float64.

    ``total`` is the sum of exp(x - largest) over the row's logits x, ``largest`` the largest logit, and ``logit`` the
    logit of the target.
    """
    return math.log(np.float64(total)) + (np.float64(largest) - np.float64(logit))


def cross_entropy_gradient(probability: Any, hit: Any, scale: Any) -> Any:
    """Return ``scale`` times the gradient of the loss with respect to one logit.

    ``probability`` is the softmax of the logit; ``hit`` is 1 for the logit of the target and 0 for the others.
    """
    return (probability - hit) * scale

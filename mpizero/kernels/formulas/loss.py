"""Define the formulas of the cross-entropy loss, for one row or element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def cross_entropy(total: Any, largest: Any, logit: Any) -> Any:
    """Return -log softmax in float64, from the row's sum of exp(x - largest), its maximum and the target's logit."""
    return math.log(np.float64(total)) + (np.float64(largest) - np.float64(logit))


def cross_entropy_gradient(probability: Any, hit: Any, scale: Any) -> Any:
    """Return the gradient of a logit; ``hit`` is 1 for the target's logit and 0 for the others."""
    return (probability - hit) * scale

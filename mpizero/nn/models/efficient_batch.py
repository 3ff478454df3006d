"""Find the number of samples with which a model's matrix products are about as fast as the machine can compute them.

A product of (m, k) by (k, n) is fast where none of its three sizes is small. Two of them are a weight's, the third is
the number of rows: samples, or samples times positions of a sequence. So with as many rows as the weight is wide, more
rows make the product hardly faster. docs/measurements.md has the rates from which the three constants are chosen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpizero.nn.models.block_model import model_operations

#: Fewest and most rows of a product that count as enough. Between them the square root of the largest weight's size is.
_FEWEST, _MOST = 512, 1024
#: Floating-point operations of a block, forward and backward, beside which the time of its Python calls is small.
_OPERATIONS = 2**24


def efficient_samples(model: Any) -> int | None:
    """Return the smallest number of samples with which a model's matrix products reach about 0.95 of their best rate.

    It depends on the model's shapes alone, not on the machine, so that it is the same in every job. Samples count as
    long as the longest that the model takes. Not collective.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The whole model. It needs an attribute ``sample_shape``, and blocks that count their operations (see
        :meth:`mpizero.nn.Layer.operations`).

    Returns
    -------
    int or None
        Number of samples, at least 1. None if the model lacks one of the two, makes no products, or fails in counting.
    """
    if not hasattr(model, "sample_shape") or not hasattr(model, "blocks"):
        return None
    try:
        with np.errstate(all="ignore"):  # layers that do not count their products compute with zeros to find them
            return _enough(model)
    except Exception:  # code of the user's own; where the count is needed, `mpizero plan` names what is wrong
        return None


def _enough(model: Any) -> int | None:
    counted = {name: found.forward for name, found in model_operations(model, tuple(model.sample_shape)).items()}
    counted = {name: forward for name, forward in counted.items() if forward}
    if not counted:
        return None
    sizes = [int(spec.size) for name in counted for spec in model.blocks[name].specs()]
    forward = math.ceil(sum(counted.values()))
    rows = min(_MOST, max(_FEWEST, math.isqrt(max(sizes, default=0))))
    work = 3 * forward  # backward twice as much; not what is counted, so that a recomputed forward changes nothing
    return max(1, _quotient(rows * 2 * sum(sizes), forward), _quotient(len(counted) * _OPERATIONS, work))


def _quotient(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return int(-(-a // b))

"""Compute statistics of the values of an array."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.tools.elements import Report, blocks, element_types, widened
from mpizero.types import Array


@dataclass(frozen=True)
class ArrayStatistics:
    """Hold statistics of the finite values of an array, computed in float64.

    Attributes
    ----------
    minimum, maximum, mean, norm : float or None
        None if no value is finite. The norm is the root of the sum of squares.
    not_finite : int
        Number of values that are NaN or infinite; they are left out of the other statistics.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    not_finite: int


def statistics(reader: Reader, path: str, report: Report | None = None, element: str | None = None) -> ArrayStatistics:
    """Read an array block by block, verified, and return its statistics.

    Collective over the communicator that the checkpoint was opened with. ``report`` is called with the number of bytes
    of each block. A caller that reads many arrays passes the ``element`` type of each, from one call of
    :func:`element_types`; without it, this function calls :func:`element_types` every time.
    """
    element = element or element_types(reader)[path]
    parts = [_figures(widened(values, element)) for _, values in blocks(reader, path, report)]
    lost = sum(size - count for size, count, *_ in parts)
    parts = [part for part in parts if part[1]]
    if not parts:
        return ArrayStatistics(None, None, None, None, lost)
    _, counts, lows, highs, sums, squares = zip(*parts, strict=True)
    mean, norm = math.fsum(sums) / sum(counts), math.sqrt(math.fsum(squares))
    return ArrayStatistics(min(lows), max(highs), mean, norm, lost)


def _figures(values: Array) -> tuple[int, int, float, float, float, float]:
    """Return the number of values and of finite values; of the finite ones minimum, maximum, sum, sum of squares."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return values.size, 0, 0.0, 0.0, 0.0, 0.0
    with np.errstate(over="ignore"):
        squares = float(np.square(finite).sum())
    return values.size, finite.size, float(finite.min()), float(finite.max()), float(finite.sum()), squares

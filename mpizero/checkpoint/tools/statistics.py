"""Compute statistics of the values of an array of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.tools.elements import Report, blocks, element_types, widened
from mpizero.types import Array


@dataclass(frozen=True)
class ArrayStatistics:
    """Hold statistics of the finite values of an array, computed in float64; a complex element counts as two values.

    Attributes
    ----------
    minimum, maximum, mean, norm : float or None
        Statistics of the finite values; None if no value is finite. The norm is the square root of the sum of squares.
    not_finite : int
        Number of values that are NaN or infinite. The other statistics do not include them.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    not_finite: int


def statistics(reader: Reader, path: str, report: Report | None = None, element: str | None = None) -> ArrayStatistics:
    """Read and verify an array block by block, and return its statistics.

    Collective over the communicator with which the checkpoint was opened. ``report`` is called with the number of bytes
    of each block after it was read. ``element`` is the element type from :func:`element_types`. With None this function
    calls :func:`element_types` itself, which is slow for a caller that reads many arrays.
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
    """Return the number of values; then number, minimum, maximum, sum and sum of squares of the finite values."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return values.size, 0, 0.0, 0.0, 0.0, 0.0
    with np.errstate(over="ignore"):
        squares = float(np.square(finite).sum())
    return values.size, finite.size, float(finite.min()), float(finite.max()), float(finite.sum()), squares

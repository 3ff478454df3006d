"""Compare and summarize numbers, and compute checksums.

A :class:`Measurement` holds median and range of repeated measurements. A :class:`Rounding` computes from the type and
the lengths of sums by how much rounding alone can make two numbers differ. ``crc32`` has the values of ``zlib.crc32``,
and is about as fast as memory can be read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

from mpizero.types import Array

__all__ = ["Measurement", "Rounding", "crc32", "crc32_combine", "largest", "ordered_sum"]


@dataclass(frozen=True)
class Measurement:
    """Hold the median, the smallest (``least``) and the largest (``most``) of some measured numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measurement:
        """Return the median, the smallest and the largest of one or more numbers."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Measurement:
        """Summarize the ratios ``above[k] / below[k]`` of two equally long sequences."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        """Return the median and the range with two decimals: ``1.18 (1.16 to 1.20)``."""
        return self.text(2)

    def text(self, digits: int, factor: float = 1.0, unit: str = "") -> str:
        """Return the median and, in parentheses, the range as text.

        Each number is multiplied by ``factor``, rounded to ``digits`` decimals and followed by ``unit``.
        """
        middle, least, most = (f"{value * factor:.{digits}f}{unit}" for value in (self.median, self.least, self.most))
        return f"{middle} ({least} to {most})"

    def rounded(self, digits: int) -> dict[str, float]:
        """Return a dictionary of ``median``, ``least`` and ``most``, rounded to ``digits`` decimals, for JSON."""
        return {name: round(value, digits) for name, value in asdict(self).items()}


#: Relative change of a sum by another order of its terms, in units of the type's epsilon, for every doubling of its
#: length. BLAS and trees add in blocks, so the error grows with the logarithm of the length. Differences measured with
#: a small GPT stay below a tenth of this.
_PER_DOUBLING = 16.0
#: Relative rounding error of a few products and divisions of one element, in units of epsilon.
_OF_ELEMENT = 2.0
#: Distance from 1 to the next larger bfloat16.
_BFLOAT16 = 2.0**-7


@dataclass(frozen=True)
class Rounding:
    """Compare numbers of two trainings, allowing for rounding.

    Attributes
    ----------
    dtype : str
        Type of parameters and gradients.
    terms : float
        Number of terms of the longest sums.
    tolerance : float or None
        Difference that the parallel layout may cause, relative to the largest element of the compared arrays. None: the
        layout must not change a bit.
    roundings: int
        How often numbers are rounded to bfloat16 until the gradients of all ranks are summed (``Config.wire``). Each
        time, numbers that differ by little may be rounded to two neighbouring bfloat16 values.
    """

    dtype: str
    terms: float
    tolerance: float | None = None
    roundings: int = 0

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number of the type."""
        return float(np.finfo(self.dtype).eps)

    @property
    def of_sums(self) -> float:
        """Largest relative difference between sums of the same terms in another order."""
        return _PER_DOUBLING * self.epsilon * math.log2(2.0 + self.terms)

    @property
    def of_gradients(self) -> float | None:
        """The :attr:`tolerance` for summed gradients: larger if gradients are rounded to bfloat16."""
        return None if self.tolerance is None else self.tolerance + self.roundings * _BFLOAT16

    def near(self, actual: float, expected: float) -> bool:
        """Tell whether two numbers differ by no more than the rounding of sums or, if larger, :attr:`tolerance`."""
        return actual == expected or abs(actual - expected) <= max(self.of_sums, self.tolerance or 0.0) * abs(expected)

    def ratio(self, factor: float, counts: float) -> bool:
        """Tell whether ``factor`` equals ``counts``, a ratio of two counts, within rounding or :attr:`tolerance`."""
        return abs(factor - counts) <= max(self.of_sums, 8 * (self.tolerance or 0.0)) * counts

    def same(self, actual: float, expected: float) -> bool:
        """Tell whether two numbers are equal in all bits or, if there is a tolerance, within the tolerance."""
        if np.float64(actual).tobytes() == np.float64(expected).tobytes():
            return True
        return self.tolerance is not None and abs(actual - expected) <= self.tolerance * abs(expected)

    def close(self, actual: Array, expected: Array) -> bool:
        """Tell whether two arrays differ by no more than the rounding of sums or, if larger, :attr:`tolerance`.

        Differences are relative to the largest element of ``expected``; if that is 0, return False.
        """
        size = largest(expected)
        return size > 0 and largest(actual - expected) <= max(self.of_sums, self.tolerance or 0.0) * size

    def factor(
        self, actual: Sequence[Array], expected: Sequence[Array], *, keep_one: bool = False, summed: bool = False
    ) -> float | None:
        """Return the factor f with ``actual = f * expected`` for all elements; None if there is no such factor.

        The equation must hold for every element within rounding and :attr:`tolerance`, and ``expected`` must have at
        least two elements that are not zero. A factor so close to 1 that rounding and tolerance may explain it is
        returned only with ``keep_one``. With ``summed``, the elements may also differ by as much as sums of the same
        terms in another order.
        """
        a, b = (np.concatenate([np.ravel(v) for v in arrays]).astype(np.float64) for arrays in (actual, expected))
        scale = np.concatenate([np.full(v.size, largest(v)) for v in expected])  # sums of tied uses cancel
        square = float(b @ b)
        if not np.isfinite(a).all() or not 0 < square < np.inf or np.count_nonzero(b) < 2:
            return None
        factor, allowed = float(a @ b) / square, self.tolerance or 0.0
        allowed = max(allowed, self.of_sums) if summed else allowed
        bound = _OF_ELEMENT * self.epsilon * abs(factor) * (np.abs(b) + scale) + allowed * abs(factor) * largest(b)
        bound += _OF_ELEMENT * float(np.finfo(self.dtype).smallest_subnormal)
        if factor == 0 or not (np.abs(a - factor * b) <= bound).all():
            return None
        return factor if keep_one or abs(factor - 1) >= 2 * _OF_ELEMENT * self.epsilon + 8 * allowed else None


def largest(values: Array) -> float:
    """Return the largest magnitude of the elements; 0 for an empty array."""
    return float(np.max(np.abs(values), initial=0.0))


def ordered_sum(values: Iterable[float]) -> float:
    """Add numbers from first to last, rounding each sum; ``sum`` of Python 3.12 and later corrects rounding errors."""
    total = 0.0
    for value in values:
        total += value
    return total

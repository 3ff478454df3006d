"""Bound the difference of numbers that differ by rounding alone, for the type and the length of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpizero.types import Array

#: Rounding of a sum in another order, in units of the type's epsilon, for every doubling of its length. BLAS and trees
#: add in blocks, whose error grows with the logarithm; a small GPT stays below a tenth of this.
_PER_DOUBLING = 16.0
#: Rounding of a few products and divisions of one element.
_OF_ELEMENT = 2.0


@dataclass(frozen=True)
class Rounding:
    """Bound what rounding may change in the numbers of one training.

    Attributes
    ----------
    dtype : str
        Of parameters and gradients.
    terms : float
        Terms of the longest sums.
    tolerance : float or None
        What the layout may differ by, relative to the largest element of what is compared; None compares bits.
    """

    dtype: str
    terms: float
    tolerance: float | None = None

    @property
    def epsilon(self) -> float:
        """Distance of 1 to the next number of the type."""
        return float(np.finfo(self.dtype).eps)

    @property
    def of_sums(self) -> float:
        """Return the relative difference that sums in another order may have."""
        return _PER_DOUBLING * self.epsilon * math.log2(2.0 + self.terms)

    def near(self, found: float, expected: float) -> bool:
        """Tell whether two numbers are apart by no more than sums in another order."""
        return found == expected or abs(found - expected) <= max(self.of_sums, self.tolerance or 0.0) * abs(expected)

    def ratio(self, factor: float, counts: float) -> bool:
        """Tell whether a factor is a ratio of two counts."""
        return abs(factor - counts) <= max(self.of_sums, 8 * (self.tolerance or 0.0)) * counts

    def same(self, found: float, expected: float) -> bool:
        """Tell whether two numbers are as equal as the layout must have them."""
        if np.float64(found).tobytes() == np.float64(expected).tobytes():
            return True
        return self.tolerance is not None and abs(found - expected) <= self.tolerance * abs(expected)

    def close(self, found: Array, expected: Array) -> bool:
        """Tell whether all elements are apart by no more than sums in another order."""
        size = largest(expected)
        return size > 0 and largest(found - expected) <= max(self.of_sums, self.tolerance or 0.0) * size

    def factor(
        self, found: Sequence[Array], expected: Sequence[Array], *, keep_one: bool = False, summed: bool = False
    ) -> float | None:
        """Return the one number that all elements of ``expected`` are multiplied by; None if there is none.

        Every element has to bear it within its own rounding, and at least two that are not zero; nothing below a few
        epsilon counts as a factor, unless ``keep_one``. ``summed`` allows for sums in another order.
        """
        a, b = (np.concatenate([np.ravel(v) for v in arrays]).astype(np.float64) for arrays in (found, expected))
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
    """Return the largest magnitude; 0 of nothing."""
    return float(np.max(np.abs(values), initial=0.0))

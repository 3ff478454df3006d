"""Compare vectors of the whole model, and locate the first element that differs. Nothing here is collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mpizero.layout.flat import ParameterUse
from mpizero.train.verify.verdicts import Finding
from mpizero.types import Array


@dataclass(frozen=True)
class Vectors:
    """Hold the values of one quantity, such as the gradient, in the layout and in one process.

    ``found`` and ``expected`` are flat vectors of the whole model. ``bound`` is the absolute difference allowed; None
    if the bits must be equal. ``entries`` are the tensors in the vectors; None means the parameters.
    """

    quantity: str
    found: Array
    expected: Array
    bound: float | None
    entries: Sequence[ParameterUse] | None = None

    def mask(self, entry: ParameterUse) -> Array:
        """Return a mask of the elements of a tensor that differ by more than ``bound``, or in a bit if it is None."""
        a, b = (values[entry.span.start : entry.span.stop] for values in (self.found, self.expected))
        bits = f"u{a.dtype.itemsize}"
        different: Array = a.view(bits) != b.view(bits)
        if self.bound is not None and different.any():
            with np.errstate(invalid="ignore"):
                different &= ~(np.abs(a - b) <= self.bound) & ~(np.isnan(a) & np.isnan(b))
        return different


class LocatedDifference(NamedTuple):
    """Hold a finding, and ``places``, the indices of the differing elements in the flat vector of the quantity.

    ``of_parameters`` tells whether that is a vector of the parameters' elements.
    """

    finding: Finding
    places: Array = np.empty(0, np.int64)
    of_parameters: bool = True

    def told(self, **changes: Any) -> LocatedDifference:
        """Return a copy with some attributes of the finding changed. Not collective."""
        return self._replace(finding=replace(self.finding, **changes))


def difference(vectors: Vectors, entry: ParameterUse, mask: Array, tensors: int) -> LocatedDifference:
    """Describe the elements of a tensor that differ, those of ``mask``; in all, ``tensors`` tensors differ."""
    places = np.flatnonzero(mask)
    first = int(places[0])
    found, expected = (float(v[entry.span.start + first]) for v in (vectors.found, vectors.expected))
    finding = Finding(
        0,
        vectors.quantity,
        entry.spec.name,
        index=tuple(int(i) for i in np.unravel_index(first, entry.spec.shape)),
        found=found,
        expected=expected,
        differing=int(places.size),
        size=entry.spec.size,
        tensors=tensors,
    )
    return LocatedDifference(finding, entry.span.start + places, vectors.entries is None)

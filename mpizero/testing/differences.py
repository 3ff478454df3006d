"""Describe the first difference in bits between two nested values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def first_difference(found: Any, expected: Any, place: str = "result") -> str:
    """Return a description of the first difference in bits between two nested values; "" if equal. Not collective.

    ``place`` names the values in the description.
    """
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        if list(found) != list(expected):
            return f"{place} has keys {list(found)}, expected {list(expected)}"
        pairs = [(found[key], expected[key], f"{place}[{key!r}]") for key in expected]
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{place} has {len(found)} items, expected {len(expected)}"
        pairs = [(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return _leaf_difference(found, expected, place)
    return next(filter(None, (first_difference(*pair) for pair in pairs)), "")


def _leaf_difference(found: Any, expected: Any, place: str) -> str:
    a, b = np.asarray(found), np.asarray(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{place} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    if a.dtype.hasobject:
        return "" if found == expected else f"{place} is {found!r}, expected {expected!r}"
    if a.tobytes() == b.tobytes():
        return ""
    rows = [np.frombuffer(v.tobytes(), np.dtype((np.void, v.itemsize))) for v in (a, b)]
    wrong = [i for i, (p, q) in enumerate(zip(*rows, strict=True)) if p.tobytes() != q.tobytes()]
    first = wrong[0]
    values = f"{a.reshape(-1)[first]!r}, expected {b.reshape(-1)[first]!r}"
    return f"{place} differs in {len(wrong)} of {a.size} elements, first at {first}: {values}"

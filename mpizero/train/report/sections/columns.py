"""Format columns of tables: all numbers of a column in one unit, with as many digits after the point."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpizero._util.text import PREFIXES


def seconds_column(values: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest of some times, and the numbers in it."""
    return ("ms", _shown(values, 1e-3)) if max(values, default=0.0) < 1 else ("s", _shown(values, 1.0))


def bytes_column(values: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest of some sizes, and the numbers in it."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if max(values, default=0.0) >= s), PREFIXES[-1])
    return f"{prefix}B", _shown(values, scale) if prefix else [f"{value:,.0f}" for value in values]


def _shown(values: Sequence[float], scale: float) -> list[str]:
    """Format numbers so that the largest has four digits or more; what is less than the last digit is told as such."""
    largest = max(values, default=0.0) / scale
    digits = min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest > 0 else 0
    least = 10.0**-digits
    return [
        f"< {least:.{digits}f}" if 0 < value / scale < least / 2 else f"{value / scale:,.{digits}f}" for value in values
    ]

"""Ratios of measurements taken next to each other, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the spread of at least one figure."""
        return cls(statistics.median(figures), min(figures), max(figures))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """Return the spread of the ratios inside the rounds: ``above[k] / below[k]``."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        """Give two digits after the point: ``1.18 (1.16 to 1.20)``."""
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"

    def rounded(self, digits: int) -> dict[str, Any]:
        """Return it for JSON."""
        return {name: round(value, digits) for name, value in asdict(self).items()}

"""Summarize repeated measurements by median and range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Measurement:
    """Hold the median, least and most of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Measurement:
        """Return the summary of at least one figure. Not collective."""
        return cls(statistics.median(figures), min(figures), max(figures))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Measurement:
        """Return the summary of the ratios inside the rounds: ``above[k] / below[k]``. Not collective."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        """Give two digits after the point: ``1.18 (1.16 to 1.20)``. Not collective."""
        return self.text(2)

    def text(self, digits: int, factor: float = 1.0, unit: str = "") -> str:
        """Write the median and, in parentheses, the range, each times ``factor``. Not collective."""
        middle, least, most = (f"{value * factor:.{digits}f}{unit}" for value in (self.median, self.least, self.most))
        return f"{middle} ({least} to {most})"

    def rounded(self, digits: int) -> dict[str, float]:
        """Return it for JSON. Not collective."""
        return {name: round(value, digits) for name, value in asdict(self).items()}

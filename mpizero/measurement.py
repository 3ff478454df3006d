"""Summarize repeated measurements by median and range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Measurement:
    """Hold the median, the least and the greatest of some measured numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Measurement:
        """Summarize one or more numbers."""
        return cls(statistics.median(figures), min(figures), max(figures))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Measurement:
        """Summarize the ratios ``above[k] / below[k]``, one for each round ``k`` in which both were measured."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        """Return the median and the range with two decimals: ``1.18 (1.16 to 1.20)``."""
        return self.text(2)

    def text(self, digits: int, factor: float = 1.0, unit: str = "") -> str:
        """Return the median and, in parentheses, the range, each multiplied by ``factor``, with ``digits`` decimals."""
        middle, least, most = (f"{value * factor:.{digits}f}{unit}" for value in (self.median, self.least, self.most))
        return f"{middle} ({least} to {most})"

    def rounded(self, digits: int) -> dict[str, float]:
        """Return median, least and most by name, rounded, as plain numbers for JSON."""
        return {name: round(value, digits) for name, value in asdict(self).items()}

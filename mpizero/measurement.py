"""Summarize repeated measurements by median and range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Measurement:
    """Hold the median, the smallest (``least``) and the largest (``most``) of some measured numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Measurement:
        """Return the median, the smallest and the largest of one or more numbers."""
        return cls(statistics.median(figures), min(figures), max(figures))

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

"""Compute the figures of a step and of a run for the JSON lines that ``mpizero train`` writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Number of first steps that are left out of the median speed: they compile kernels and touch memory first.
WARM_UP_STEPS = 3


def finite(value: float | None) -> float | None:
    """Return ``value``, but None for NaN and infinities, which JSON cannot express."""
    return value if value is None or math.isfinite(value) else None


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity if it is too large for a float."""
    return math.exp(loss) if loss < 709 else math.inf


@dataclass
class Speed:
    """Measure the speed of every step in tokens or samples per second, and the median over undisturbed steps.

    Disturbed are the first steps of a run, and a step after a checkpoint or a validation.

    Attributes
    ----------
    unit : str
        "tokens" or "samples".
    """

    unit: str
    _rates: list[float] = field(default_factory=list)
    _all: list[float] = field(default_factory=list)
    _disturbed: bool = False

    def step(self, units: float, seconds: float) -> float:
        """Record that a step of ``units`` tokens or samples took ``seconds``, and return its units per second."""
        rate = units / seconds if seconds > 0 else 0.0
        self._all.append(rate)
        if len(self._all) > WARM_UP_STEPS and not self._disturbed:
            self._rates.append(rate)
        self._disturbed = False
        return rate

    def disturb(self) -> None:
        """Leave the next step out of the median; called after a checkpoint or a validation, which slow it down."""
        self._disturbed = True

    def median(self) -> float | None:
        """Return the median speed of the undisturbed steps, or of all steps if there are none; None without steps."""
        rates = self._rates or self._all
        return statistics.median(rates) if rates else None


def short(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits; return "-" for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def shortened(figures: Sequence[tuple[str, float | None]]) -> dict[str, str]:
    """Format pairs of a name and a number for the progress line; return the texts by name."""
    return {name: short(value) for name, value in figures}

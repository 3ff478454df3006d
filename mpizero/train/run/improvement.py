"""Find out by a validation metric which step is the best so far, and when a run no longer improves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mpizero._util.names import nearest
from mpizero.errors import ConfigError

#: Metrics that a validation may have without metrics of the user.
OWN_METRICS = ("validation_loss", "perplexity", "accuracy")


@dataclass
class Improvement:
    """Follow one validation metric over a run; every rank has the same figures, and so decides the same.

    Parameters
    ----------
    metric : str
        Name of the metric, of which small values are good; "-" before the name says that large ones are.
    patience : int or None
        Number of validations in a row without an improvement after which the run ends; None never ends it.
    min_delta : float
        A value is an improvement, for ``patience``, if it is better than the last improvement by more than this.
    measured : str
        How the metric is measured; values that were measured otherwise are not compared.

    Attributes
    ----------
    value, step : float and int, or None
        The best value so far, as the metric has it, and the step after which it was measured.
    reference : float or None
        The value of the last improvement.
    stalled : int
        Number of validations since then.
    """

    metric: str = "validation_loss"
    patience: int | None = None
    min_delta: float = 0.0
    measured: str = ""
    value: float | None = None
    step: int | None = None
    reference: float | None = None
    stalled: int = 0

    @property
    def name(self) -> str:
        """The metric's name without the sign."""
        return self.metric.removeprefix("-")

    @property
    def exhausted(self) -> bool:
        """True if there were ``patience`` validations without an improvement."""
        return self.patience is not None and self.stalled >= self.patience

    @property
    def reason(self) -> str:
        """Text that says why the run ends, if :attr:`exhausted`."""
        found = "no value was finite" if self.value is None else f"best {self.value:.6g} after step {self.step}"
        return f"no improvement of {self.name} in {self.stalled} validations ({found})"

    def see(self, step: int, figures: Mapping[str, float | None]) -> bool:
        """Take the figures of a validation after ``step``; return True if the value is the best so far.

        Not collective. A value that is not finite (None) is no improvement.

        Raises
        ------
        ConfigError
            If the figures have no such metric.
        """
        if self.name not in figures:
            raise ConfigError(
                f"best={self.metric!r}: this model has no such metric; its validations have {', '.join(figures)}"
            )
        value = figures[self.name]
        better = value is not None and (self.value is None or self._score(value) < self._score(self.value))
        if value is not None and (
            self.reference is None or self._score(value) < self._score(self.reference) - self.min_delta
        ):
            self.reference, self.stalled = value, 0
        else:
            self.stalled += 1
        if better:
            self.value, self.step = value, step
        return better

    def _score(self, value: float) -> float:
        return -value if self.metric.startswith("-") else value

    def state(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint keeps."""
        names = ("metric", "measured", "value", "step", "reference", "stalled")
        return {name: getattr(self, name) for name in names}

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Take the values of a checkpoint; return a message if they are of another metric, and left out, else ""."""
        if not saved:
            return ""
        if saved.get("metric") != self.metric:
            return f"the best value so far was of {saved.get('metric')}: {self.metric} begins anew"
        if (before := saved.get("measured", self.measured)) != self.measured:  # checkpoints of before do not have it
            return f"the best {self.name} so far was measured on {before}: it begins anew on {self.measured}"
        self.value, self.step, self.reference = (saved.get(name) for name in ("value", "step", "reference"))
        self.stalled = int(saved.get("stalled", 0))
        return ""


def check_metric(metric: str, known: Collection[str]) -> None:
    """Raise :class:`ConfigError` if no validation has a metric of this name. ``known`` are the user's metrics."""
    names = (*OWN_METRICS, *known)
    if metric.removeprefix("-") not in names:
        raise ConfigError(
            f"no validation metric of this name{nearest(metric.removeprefix('-'), names)}; there are "
            f'{", ".join(names)}, and a "-" before it says that large values are good'
        )

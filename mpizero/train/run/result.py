"""Define the result of a training run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpizero.train.run.metrics import finite


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Hold the result of a run that has ended; the same on every rank.

    Attributes
    ----------
    steps : int
        Number of steps that the run has done, those before a resume included.
    loss : float or None
        Loss of the last step, or of the last iterate of a method of whole vectors; None if it was not finite.
    parameters_sha256 : str
        SHA-256 of the bytes of all parameters, in declared order.
    ranks : int
        Number of ranks.
    strategy : str
        Name of the ZeRO strategy, such as "zero2".
    layout : dict
        Sizes of the axes "pipeline", "tensor", "data" and "context", and the "schedule" (None without a pipeline).
    unit : str
        "tokens" or "samples".
    speed : float or None
        Median of these units per second over undisturbed steps; None if there was no step.
    parameter_count : int
        Number of parameter elements of the whole model.
    losses : array of float
        Losses of the steps of this call, the last one of which is ``steps``.
    validations : tuple of dict
        Figures of each validation of this call: "step", "validation_loss", "perplexity" or "accuracy", and the user's
        own metrics.
    overrides : tuple of dict
        Settings that were changed when the run was resumed, each with "step", "key", "was" and "now".
    stopped : str
        The reason for which the run has ended before its last step: no improvement, a callback, or "converged: " with
        the message of a method of whole vectors; else "".
    best : dict or None
        The best value of the metric that decides: "metric", "value", "step", and "checkpoint" (its path, None if it is
        not kept). None without such a metric.
    method : dict or None
        The end of a method of whole vectors: "converged", "message", "iterations", and "largest_gradient", the largest
        magnitude in the gradient at the last iterate. None with any other optimizer.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.linspace(0.0, 1.0, 8).reshape(8, 1)
    >>> source = mz.data.ArraySource(x, 2 * x)
    >>> line = mz.nn.MLP(1, [], 1, task="regression", dtype="float64")
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     arguments = {"optimizer": mz.Adam(lr=0.1), "steps": 2, "global_batch": 4, "progress": False}
    ...     with mz.Trainer(line, source, config, **arguments, validation=0.25, validate_every=2) as trainer:
    ...         result = trainer.fit()
    >>> result.ranks, result.strategy, result.unit, len(result.parameters_sha256)
    (1, 'zero2', 'samples', 64)
    >>> sorted(result.history[-1])
    ['loss', 'step', 'validation_loss']
    """

    steps: int
    loss: float | None
    parameters_sha256: str
    ranks: int
    strategy: str
    layout: dict[str, Any]
    unit: str
    speed: float | None
    parameter_count: int
    losses: array[float] = field(default_factory=lambda: array("d"), repr=False)
    validations: Sequence[dict[str, Any]] = ()
    overrides: Sequence[dict[str, Any]] = ()
    stopped: str = ""
    best: dict[str, Any] | None = None
    method: dict[str, Any] | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dictionary for each step of this call: "step", "loss", and the figures of a validation after it."""
        found = {one["step"]: one for one in self.validations}
        first = self.steps - len(self.losses) + 1
        return [
            {"step": step, "loss": finite(loss), **found.get(step, {})} for step, loss in enumerate(self.losses, first)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the values that ``mpizero train`` prints and the file ``run_complete`` holds."""
        found: dict[str, Any] = {
            "steps": self.steps,
            "loss": self.loss,
            "parameters_sha256": self.parameters_sha256,
            "ranks": self.ranks,
            "strategy": self.strategy,
            "tokens_per_second": self.speed if self.unit == "tokens" else None,
            "parameter_count": self.parameter_count,
            "layout": self.layout,
        }
        if self.unit == "samples":
            found["samples_per_second"] = self.speed
        if self.overrides:
            found["overrides"] = list(self.overrides)
        if self.stopped:
            found["stopped"] = self.stopped
        if self.best is not None:
            found["best"] = self.best
        if self.method is not None:
            found["method"] = self.method
        return found

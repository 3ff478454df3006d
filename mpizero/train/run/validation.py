"""Evaluate a model on validation samples, and compute mean loss, perplexity and accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero.layout import Grains
from mpizero.train.callbacks.user_metrics import UserMetrics
from mpizero.train.run.metrics import finite, perplexity
from mpizero.train.run.setup import RunSetup, validation_count


@dataclass(frozen=True)
class Validation:
    """Hold sums over the validation samples, and compute mean loss, perplexity and accuracy from them.

    Attributes
    ----------
    loss_sum, weight : float
        Sums over the validation samples of all ranks.
    correct : int or None
        Number of right predictions; None if the model predicts no scores of classes.
    predictions : int
        Number of predictions from which ``correct`` was counted.
    task : str
        "language", "classification", "regression", or "" if it is unknown.
    """

    loss_sum: float
    weight: float
    correct: int | None
    predictions: int
    task: str

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / self.weight if self.weight else math.nan

    def figures(self) -> dict[str, Any]:
        """Return the loss and, by task, perplexity or accuracy, with their names in the step's JSON line."""
        found: dict[str, Any] = {"validation_loss": finite(self.loss)}
        if self.task == "language":
            found["perplexity"] = finite(perplexity(self.loss)) if math.isfinite(self.loss) else None
        elif self.task != "regression" and self.correct is not None:
            found["accuracy"] = self.correct / self.predictions if self.predictions else None
        return found


def validate(setup: RunSetup) -> dict[str, Any]:
    """Evaluate the model on ``validate_samples`` validation samples, evenly spaced among all; return all metrics.

    With ``validate_ema`` all are computed with the average of the parameters, the user's own, too.

    Collective over the run's ranks.
    """
    model, loop, source = setup.model, setup.loop, setup.validation
    count = validation_count(loop, source)
    chosen = np.arange(count, dtype=np.int64) * len(source) // count
    size, group = model.grain_size(loop.global_batch), model.batch_group
    loss_sum, weight, correct, predictions = 0.0, 0.0, 0, 0
    scored, own_metrics = True, UserMetrics(setup.metrics, model)
    for start in range(0, count, loop.global_batch):
        part = chosen[start : start + loop.global_batch]
        samples = source.samples(part[Grains(len(part), size).samples_of(group.rank, group.size)])
        found = model.evaluate(*samples, ema=loop.validate_ema)
        loss_sum, weight = loss_sum + found.loss_sum, weight + found.weight
        scored = scored and found.correct is not None
        correct, predictions = correct + (found.correct or 0), predictions + found.predictions
        with _averaged(model, use=loop.validate_ema and bool(setup.metrics)):
            own_metrics.add(source, part, size, samples)
    sums = Validation(loss_sum, weight, correct if scored else None, predictions, setup.record.task)
    return {**sums.figures(), **own_metrics.figures()}


@contextmanager
def _averaged(model: Any, *, use: bool) -> Iterator[None]:
    """Let functions of the user, which agree on their errors, see the average in place of the parameters."""
    with model.engine.with_average(use=use, agreed=True):
        try:
            if use:
                model.invalidate_cache()
            yield
        finally:
            if use:
                model.invalidate_cache()

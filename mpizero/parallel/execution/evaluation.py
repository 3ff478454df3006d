"""Compute the loss of a batch, and count its correct predictions, without training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.execution.sequential import Runner, RunOf
from mpizero.types import Array


class _Sums(NamedTuple):
    """Hold the three values that an evaluation unpacks to."""

    loss_sum: float
    weight: float
    correct: int | None


class Evaluation(_Sums):
    """Hold the result of an evaluation: sums over the samples of all ranks. It unpacks to the first three attributes.

    Attributes
    ----------
    loss_sum : float
        Sum of the samples' losses.
    weight : float
        Total weight of the samples, as the loss returns it.
    correct : int or None
        Number of predictions whose largest score is that of the target class. None if predictions are not scores of
        classes, or targets are not class numbers.
    predictions : int
        Number of predictions that ``correct`` was counted from: those whose target is not negative.
    """

    predictions: int = 0

    def __new__(cls, loss_sum: float, weight: float, correct: int | None, predictions: int = 0) -> Evaluation:
        """Make the tuple of the first three values, and keep the fourth as an attribute."""
        made = super().__new__(cls, loss_sum, weight, correct)
        made.predictions = predictions
        return made

    @property
    def loss(self) -> float:
        """The mean loss, ``loss_sum / weight``; NaN if the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None if ``correct`` is None or there are no predictions."""
        return None if self.correct is None or not self.predictions else self.correct / self.predictions


def _are_scores(prediction: Any, targets: Array) -> bool:
    """Tell whether the prediction of every sample has one score per class, and its target is the number of a class."""
    if not isinstance(prediction, np.ndarray):
        return False
    return prediction.shape[:-1] == targets.shape and targets.dtype.kind in "iu"


def evaluate(
    batch: GlobalBatch, runner: Runner, scalars: GrainScalars, rounds: int, run_of: RunOf, *, scores: bool
) -> Evaluation:
    """Return the sum of losses, the weight and the number of correct predictions over the global batch.

    Collective over all ranks. A prediction is correct if the class with the highest score is the target.

    Parameters
    ----------
    batch : GlobalBatch
        This rank's grains.
    runner : Runner
        Runs the model forward.
    scalars : GrainScalars
        Collects losses, weights and failures.
    rounds : int
        Number of forward passes of the rank that makes the most. Every rank joins the collectives of as many passes.
    run_of : callable
        Takes the index of a micro-batch's first sample and its number of samples, and returns the ``Run`` of a training
        pass over them; here it is used with ``training=False``.
    scores : bool
        Whether this rank adds the losses of its grains to the sums. True on one of the ranks that compute the same
        losses, and never on a rank without the last pipeline stage.
    """
    right, predictions, scored, done = 0, 0, True, 0
    runner.ready()
    try:
        for grain in batch.grains.values():
            for number, (gx, gy, _) in enumerate(grain.micro_batches):
                done += 1
                run = replace(run_of(*grain.place(number)), training=False)
                loss, weight, prediction = runner.loss(gx, gy, run)
                if not scores or scalars.error is not None:
                    continue
                scalars.add(grain.number, loss, weight)
                scored = scored and isinstance(gy, np.ndarray) and _are_scores(prediction, gy)
                if scored:
                    right += int((prediction.argmax(-1) == gy).sum())
                    predictions += int((gy >= 0).sum())
    except Exception as error:
        if not isinstance(error, runner.agreeable):
            raise
        scalars.fail(error)  # every forward pass that began has taken part in all its gathers
    for _ in range(done, rounds):
        runner.loss(None, None)
    totals = scalars.agree()
    counts = np.array([right, predictions, not scored], np.int64)
    scalars.everyone.allreduce(counts, "sum", "correct predictions")
    return Evaluation(totals.loss, totals.weight, None if counts[2] else int(counts[0]), int(counts[1]))

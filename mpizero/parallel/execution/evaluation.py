"""Compute the loss of a batch, and count its correct predictions, without training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.execution.sequential import Runner, RunOf


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
        Number of correct predictions, as the loss's method ``correct`` counts them: for cross-entropy those whose
        largest score is that of the target class. None if predictions are not right or wrong.
    predictions : int
        Number of predictions that ``correct`` was counted from: those whose target counts.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> with mz.distribute(mz.nn.MLP(2, [4], 2), mz.AdamW(lr=0.1), comm="self") as model:
    ...     for _ in range(10):
    ...         _ = model.train(x, y)
    ...     found = model.evaluate(x, y)
    >>> found.weight, found.correct, found.accuracy, found.loss == found.loss_sum / 2
    (2.0, 2, 1.0, True)
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


def count_correct(loss: Any, prediction: Any, targets: Any) -> tuple[int, int] | None:
    """Return how many predictions are correct, and how many there are; None if they are not right or wrong.

    The method ``correct(prediction, target)`` of the loss counts them. For a loss without this method they are counted
    if each prediction is one score per class, and its target the number of a class or negative.
    """
    own = getattr(loss, "correct", None)
    if prediction is None:  # of a black box, or where a layer of another stage has raised
        return None
    if callable(own):
        counted: tuple[int, int] | None = own(prediction, targets)
        return counted
    arrays = isinstance(prediction, np.ndarray) and isinstance(targets, np.ndarray)
    if not arrays or prediction.shape[:-1] != targets.shape or targets.dtype.kind not in "iu":
        return None
    return int((prediction.argmax(-1) == targets).sum()), int((targets >= 0).sum())


def evaluate(
    batch: GlobalBatch, runner: Runner, scalars: GrainScalars, rounds: int, run_of: RunOf, *, scores: bool, loss: Any
) -> Evaluation:
    """Return the sum of losses, the weight and the number of correct predictions over the global batch.

    Collective over all ranks.

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
    loss : Loss or None
        The loss of whole predictions, which counts correct ones (:func:`count_correct`).
    """
    right, predictions, scored, done = 0, 0, True, 0
    runner.ready()
    try:
        for grain in batch.grains.values():
            for number, (gx, gy, _) in enumerate(grain.micro_batches):
                done += 1
                run = replace(run_of(*grain.place(number)), training=False)
                loss_sum, weight, prediction = runner.loss(gx, gy, run)
                if not scores or scalars.error is not None:
                    continue
                scalars.add(grain.number, loss_sum, weight)
                counted = count_correct(loss, prediction, gy) if scored else None
                scored = counted is not None
                if counted is not None:
                    right, predictions = right + counted[0], predictions + counted[1]
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

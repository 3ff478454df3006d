"""Compute the loss of a batch, and count its correct predictions, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.execution.sequential import Runner, RunOf
from mpizero.types import Array


def _are_scores(prediction: Any, targets: Array) -> bool:
    """Tell whether the prediction of every sample has one score per class, and its target is the number of a class."""
    if not isinstance(prediction, np.ndarray):
        return False
    return prediction.shape[:-1] == targets.shape and targets.dtype.kind in "iu"


def evaluate(
    batch: GlobalBatch, runner: Runner, scalars: GrainScalars, rounds: int, run_of: RunOf, *, scores: bool
) -> tuple[float, float, int | None]:
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

    Returns
    -------
    (float, float, int or None)
        Sum of losses, weight, and number of correct predictions; the last is None if predictions are not class scores.
    """
    right, scored, done = 0, True, 0
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
    except Exception as error:
        if not isinstance(error, runner.agreeable):
            raise
        scalars.fail(error)  # every forward pass that began has taken part in all its gathers
    for _ in range(done, rounds):
        runner.loss(None, None)
    totals = scalars.agree()
    counts = np.array([right, not scored], np.int64)
    scalars.everyone.allreduce(counts, "sum", "correct predictions")
    return totals.loss, totals.weight, None if counts[1] else int(counts[0])

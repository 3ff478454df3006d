"""Compute losses and correct predictions of a batch, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.execution.sequential import Runner, RunOf
from mpizero.types import Array


def _are_scores(prediction: Any, targets: Array) -> bool:
    """Tell whether each prediction is a score per class and each target the number of a class."""
    if not isinstance(prediction, np.ndarray):
        return False
    return prediction.shape[:-1] == targets.shape and targets.dtype.kind in "iu"


def evaluate(
    batch: GlobalBatch, runner: Runner, scalars: GrainScalars, rounds: int, run_of: RunOf, *, scores: bool
) -> tuple[float, float, int | None]:
    """Return loss sum, weight and number of correct predictions over all ranks' grains. Collective over all ranks.

    Parameters
    ----------
    batch : GlobalBatch
        This rank's grains.
    runner : Runner
        Runs the model forward.
    scalars : GrainScalars
        Collects losses, weights and failures.
    rounds : int
        Number of forward passes that every rank must join.
    run_of : callable
        Returns the ``Run`` of a training pass over the same samples.
    scores : bool
        Whether this rank adds the losses of its grains: it has the last stage, and no other rank adds the same ones.

    Returns
    -------
    (float, float, int or None)
        The last is None if predictions are not scores of classes.
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

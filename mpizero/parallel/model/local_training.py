"""Train a separate copy of the model on each rank and average the copies every few steps, for LocalSGDOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np

from mpizero._util.pytree import count_samples
from mpizero.comm.agreement import all_ranks, collective, recorded
from mpizero.comm.reduce import mean_over_ranks
from mpizero.errors import DataError
from mpizero.parallel.batch.redistribute import NO_SAMPLES
from mpizero.parallel.batch.step_scalars import check_weight, tree_total
from mpizero.parallel.engine import Engine
from mpizero.parallel.execution.evaluation import Evaluation
from mpizero.parallel.model.parameter_access import ParameterAccess
from mpizero.parallel.placement import placement
from mpizero.parallel.step_report import StepReport
from mpizero.types import Array


class LocalTraining(ParameterAccess):
    """Train a separate copy of the model on each rank, and average the copies; for :class:`LocalSGDOptimizer`.

    Methods are collective unless they say otherwise.
    """

    @recorded
    def become_local(self, every: int) -> None:
        """Give every rank its own copy of the parameters; from now on ``train`` averages them every ``every`` steps."""
        values, device = self.get_parameters(), self.engine.compute_device.device_number
        integers = self.engine.integers
        self.engine.close()
        self._engine = Engine(self._wrapped, self._config.replace(comm="self"), placement(self.strategy), device=device)
        self.engine.integers.copy_from(integers)
        self.engine.prints_notices = self.rank == 0
        self._mean_every, self._pending = every, None
        self._update_local_shard_from_full(values)

    @collective
    def average_parameters(self) -> None:
        """Set the parameters of every rank to their mean over the ranks."""
        self._average()

    def _average(self) -> None:
        self._update_local_shard_from_full(mean_over_ranks(self._config.communicator, self.engine.store.values))

    def _train_alone(self, x: Any, y: Any) -> float:
        return self._step_and_average(lambda engine: engine.train(x, y) if count_samples(x, y) else None)

    def _stepped_alone(self, report: StepReport) -> StepReport:
        """Store the report of a step that this rank made alone, and return it. Not collective.

        The engine of one rank reports rank 0; this is replaced by the rank's number in ``config.comm``.
        """
        found = tuple(replace(bad, rank=self.rank) for bad in report.non_finite)
        report = replace(report, non_finite=found, skipped=str(found[0]) if found else None)
        self._stepped(report)
        return report

    def _step_and_average(self, step: Callable[[Engine], StepReport | None]) -> float:
        """Call ``step`` with every rank's engine, and after each ``every``-th step average the parameters.

        Return the mean loss over the batches of all ranks. ``step`` returns None on a rank that has no samples: its
        parameters stay as they are until they are averaged.
        """
        comm, engine = self._config.communicator, self.engine
        with all_ranks(comm, first=True):
            made = step(engine)
            report = self._idle(engine) if made is None else self._stepped_alone(made)
        sent = comm.counters.bytes_sent
        loss, weight = self._sum_over_ranks([report.loss * report.weight, report.weight]).tolist()
        if weight == 0:  # a step that was made has a positive one
            raise DataError(NO_SAMPLES)
        if made is None:
            engine.step_number += 1
        if engine.step_number % self._mean_every == 0:
            self._average()
        self.last_step = replace(report, loss=loss / weight, weight=weight, bytes_sent=comm.counters.bytes_sent - sent)
        return self.last_step.loss

    @staticmethod
    def _idle(engine: Engine) -> StepReport:
        """Return the report of a step in which this rank has no samples. Not collective."""
        updater = engine.updater
        assert updater is not None  # local training begins with a bound optimizer
        scale = engine.current_loss_scale()
        return StepReport(updater.step_count, 0.0, 0.0, updater.rate, None, None, 0, (), scale, scale)

    def _evaluate_alone(self, x: Any, y: Any, loss: Any) -> Evaluation:
        """Evaluate each rank's samples with that rank's parameters, and return the sums over all ranks.

        ``correct`` is None if a rank's predictions are not scores of classes.
        """
        found = Evaluation(0.0, 0.0, 0)
        with all_ranks(self._config.communicator, first=True):
            if count_samples(x, y):
                found = self.engine.evaluate(x, y, loss, weightless=True)
        values = [found.loss_sum, found.weight, found.correct or 0, found.predictions, found.correct is None]
        loss_sum, weight, correct, predictions, unscored = self._sum_over_ranks(values).tolist()
        check_weight(weight)
        return Evaluation(loss_sum, weight, None if unscored else int(correct), int(predictions))

    def _sum_over_ranks(self, values: list[float]) -> Array:
        comm = self._config.communicator
        table = np.empty((comm.size, len(values)))
        comm.allgather(np.array(values, np.float64), table.reshape(-1), "sums of local steps")
        return tree_total(table)

    def _twin(self, wrapped: Any) -> Self:
        copy = super()._twin(wrapped)
        if self._mean_every:
            copy.become_local(self._mean_every)
        return copy

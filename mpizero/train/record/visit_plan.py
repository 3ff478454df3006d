"""Plan the training that a run does: the memory of each rank, and the timetable of its pipeline.

No block of the model is run for it: that could take as long as many steps, and user code would run unasked. So the plan
has what the library allocates, but no activations; ``mpizero plan`` has those, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from mpizero.data import Source
from mpizero.errors import ConfigError
from mpizero.layout import Costs, Simulation, simulate
from mpizero.layout.schedules import FORWARD
from mpizero.planning import TrainingPlan
from mpizero.sharding.config import placement
from mpizero.sharding.partition import ParallelLayout
from mpizero.train.events import PipelineCell


class VisitPlan:
    """Plan a training. Not collective.

    Parameters
    ----------
    model : ShardedModelBase
        The sharded model with its optimizer.
    strategy : str
        Name of the strategy.
    global_batch : int
        Samples in a step.
    nodes : sequence of int
        By rank, the number of its node.
    source : Source or OnlineSource
        The samples. One is read where the plan depends on it.
    """

    def __init__(self, model: Any, strategy: str, global_batch: int, nodes: Sequence[int], source: Any) -> None:
        self._model, self._strategy, self._global_batch = model, strategy, global_batch
        self._nodes, self._source = nodes, source

    @cached_property
    def _training(self) -> TrainingPlan:
        config, parallel_layout = self._model.config, self._model.parallel_layout or ParallelLayout()
        together = self._nodes.count(0)
        if list(self._nodes) != [rank // together for rank in range(len(self._nodes))]:
            raise ConfigError("nodes have different numbers of ranks, or their ranks do not follow one another")
        x, y = np.zeros((1, 1)), np.zeros((1, 1))
        # The operations of stages and the bytes of shared samples depend on what a sample is.
        if (parallel_layout.pipeline > 1 or config.grain_assignment == "dynamic") and isinstance(self._source, Source):
            x, y = self._source.samples(np.arange(1))
        return TrainingPlan(
            model=self._model.wrapped_model,
            optimizer=self._model.optimizer.wrapped_optimizer,
            config=config,
            loss_scale=config.loss_scale(None) is not None,
            row=placement(self._strategy),
            parallel_layout=parallel_layout,
            ranks=len(self._nodes),
            ranks_per_node=together,
            global_batch=self._global_batch,
            x=x,
            y=y,
            tries=False,
        )

    def memory(self, rank: int) -> tuple[dict[str, int], dict[str, int], str]:
        """Return a rank's bytes by part, on the host and on its GPU, and why there is no plan ("" if there is one)."""
        try:
            host, device = self._training.allocated(rank)
        except Exception as error:  # of a model that a plan cannot read: no reason not to train it
            return {}, {}, f"{type(error).__name__}: {error}"
        return {part: held.mine for part, held in host.items()}, device, ""

    def timetable(self, runner: Any, micro_batches: int) -> tuple[str, list[PipelineCell]]:
        """Return what the costs of cells are, and the planned cells of a pipeline, as :class:`PipelineTimetable` has.

        ``runner`` executes the pipeline, whose first replica has so many ``micro_batches``.
        """
        costs, found = "operations", None
        with suppress(Exception):  # as above
            found = self._training.simulation if self._training.micro_batches == micro_batches else None
        if found is None or not found.makespan:
            schedule = runner.schedule(micro_batches)
            costs, found = "equal", simulate(schedule, Costs.uniform(schedule.chunks), present=micro_batches)
        return costs, _cells(found, micro_batches)


def _cells(simulation: Simulation, micro_batches: int) -> list[PipelineCell]:
    events = [
        (stage, event)
        for stage, timed in enumerate(simulation.events)
        for event in timed
        if event.instruction.micro < micro_batches
    ]
    forward = [event.end - event.start for _, event in events if event.instruction.kind == FORWARD]
    unit = sum(forward) / len(forward) or 1.0
    return [
        PipelineCell(
            stage,
            event.instruction.chunk,
            event.instruction.micro,
            event.instruction.kind,
            round(event.start / unit, 4),
            round(event.end / unit, 4),
        )
        for stage, event in events
    ]

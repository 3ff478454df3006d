"""Create a rank's runner and evaluator: for a pipeline stage, a whole model of blocks, or a black box."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.comm import ProcessGrid
from mpizero.guard import guard
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.device.compute_device import ComputeDevice
from mpizero.parallel.execution.evaluators import BlockEvaluator
from mpizero.parallel.execution.sequential import Runner, SequentialRunner, agreeable_errors
from mpizero.parallel.gradients.unwritten_gradients import check_function, check_layers
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.partition.local_model import PartitionedModel
from mpizero.types import BlockModel


def make_runner(
    partitioned: PartitionedModel,
    grid: ProcessGrid,
    store: ParameterStore,
    scalars: GrainScalars,
    device: ComputeDevice,
    loss_scale: Callable[[], float],
) -> Runner:
    """Create this rank's runner: of its pipeline stage, of a whole model of blocks, or of a black box. Not collective.

    ``loss_scale`` returns the current loss scale.
    """
    kinds: Any = {
        "counts": grid.here.tensor == 0,  # tensor ranks find the same losses
        "agreeable": agreeable_errors(grid),
        "compute_device": device,
    }
    always = "gradients" in guard.current().debug
    if not isinstance(partitioned.local, BlockModel):
        from mpizero.parallel.execution.black_box import BlackBoxEvaluator

        box = BlackBoxEvaluator(partitioned.local, store)
        if box.in_place:
            kinds["marks"] = check_function(partitioned.local.loss_and_grad, scalars.frozen, always=always)
        return SequentialRunner(box, scalars, partitioned, **kinds)
    kinds["marks"] = check_layers(partitioned.local.blocks, scalars.frozen, always=always)
    provider = device.parameter_provider(store)
    if grid.pipeline.size > 1:
        from mpizero.parallel.execution.pipeline import PipelineRunner

        return PipelineRunner(partitioned, provider, grid.pipeline, scalars, loss_scale, **kinds)
    evaluator = BlockEvaluator(partitioned.local, provider, loss_scale, partitioned.run_on)
    return SequentialRunner(evaluator, scalars, partitioned, **kinds)

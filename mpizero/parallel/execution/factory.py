"""Which runner and evaluator a rank needs: for a pipeline stage, a whole model of blocks, or a black box."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.comm.supervision import guard
from mpizero.parallel.execution.evaluators import BlackBoxEvaluator, BlockEvaluator
from mpizero.parallel.execution.pipeline import PipelineRunner
from mpizero.parallel.execution.sequential import Runner, SequentialRunner, agreeable_errors
from mpizero.parallel.gradients.unwritten_gradients import WriteCheck

if TYPE_CHECKING:
    from mpizero.parallel.engine import Engine


def make_runner(engine: Engine) -> Runner:
    """Return what runs this rank's blocks: those of a pipeline stage, or the whole model. Not collective."""
    grid, stage, scalars, scale = engine.grid, engine.stage, engine.scalars, engine.current_loss_scale
    kinds: Any = {
        "counts": grid.here.tensor == 0,  # tensor ranks find the same losses
        "agreeable": agreeable_errors(grid),
        "compute_device": engine.compute_device,
    }
    if not engine.block_model:
        return SequentialRunner(BlackBoxEvaluator(stage.model, engine.store), scalars, stage, **kinds)
    always = "gradients" in guard.current().debug
    kinds["marks"] = WriteCheck(stage.model.blocks, scalars.frozen, always=always)
    lender = engine.compute_device.lender(engine.store)
    if grid.pipeline.size > 1:
        return PipelineRunner(stage, lender, grid.pipeline, scalars, scale, **kinds)
    return SequentialRunner(BlockEvaluator(stage.model, lender, scale, stage.run_on), scalars, stage, **kinds)

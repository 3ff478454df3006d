"""Shard models and optimizers over ranks: one engine executes every strategy (DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP)."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.parallel.config import ShardingConfig as ShardingConfig
    from mpizero.parallel.diagnostics.bad_steps import BadStep as BadStep
    from mpizero.parallel.diagnostics.bad_steps import dump_bad_step as dump_bad_step
    from mpizero.parallel.diagnostics.bad_steps import read_bad_step as read_bad_step
    from mpizero.parallel.diagnostics.replay import Replay as Replay
    from mpizero.parallel.diagnostics.replay import replay_bad_step as replay_bad_step
    from mpizero.parallel.execution.evaluation import Evaluation as Evaluation
    from mpizero.parallel.minimization.minimize import MinimizeResult as MinimizeResult
    from mpizero.parallel.minimization.minimize import minimize as minimize
    from mpizero.parallel.model.base import ShardedModelBase as ShardedModelBase
    from mpizero.parallel.model.communication_optimizers import (
        GradientCompressionOptimizer as GradientCompressionOptimizer,
    )
    from mpizero.parallel.model.communication_optimizers import LocalSGDOptimizer as LocalSGDOptimizer
    from mpizero.parallel.model.fit import OptimizationOptions as OptimizationOptions
    from mpizero.parallel.model.fit import OptimizationResult as OptimizationResult
    from mpizero.parallel.model.hybrid import HybridShardedModel as HybridShardedModel
    from mpizero.parallel.model.hybrid import HybridShardedOptimizer as HybridShardedOptimizer
    from mpizero.parallel.model.hybrid import PipelineParallelModel as PipelineParallelModel
    from mpizero.parallel.model.hybrid import TensorParallelModel as TensorParallelModel
    from mpizero.parallel.model.manual_gradients import Gradients as Gradients
    from mpizero.parallel.model.metadata import ModelMetadata as ModelMetadata
    from mpizero.parallel.model.optimizers import ShardedOptimizer as ShardedOptimizer
    from mpizero.parallel.model.strategies import DDPModel as DDPModel
    from mpizero.parallel.model.strategies import DDPOptimizer as DDPOptimizer
    from mpizero.parallel.model.strategies import FSDPModel as FSDPModel
    from mpizero.parallel.model.strategies import FSDPOptimizer as FSDPOptimizer
    from mpizero.parallel.model.strategies import ZeRO1Model as ZeRO1Model
    from mpizero.parallel.model.strategies import ZeRO1Optimizer as ZeRO1Optimizer
    from mpizero.parallel.model.strategies import ZeRO2Model as ZeRO2Model
    from mpizero.parallel.model.strategies import ZeRO2Optimizer as ZeRO2Optimizer
    from mpizero.parallel.model.strategies import ZeRO3Model as ZeRO3Model
    from mpizero.parallel.model.strategies import ZeRO3Optimizer as ZeRO3Optimizer
    from mpizero.parallel.model.strategies import distribute as distribute
    from mpizero.parallel.partition.block_timing import measured_costs as measured_costs
    from mpizero.parallel.step_report import BadSteps as BadSteps
    from mpizero.parallel.step_report import NonFinite as NonFinite
    from mpizero.parallel.step_report import StepReport as StepReport
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)

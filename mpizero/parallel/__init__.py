"""Shard models and optimizers over ranks: one engine executes every strategy (DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP)."""

from typing import TYPE_CHECKING

from mpizero.names_on_use import names_on_use

if TYPE_CHECKING:
    from mpizero.parallel.config import ShardingConfig
    from mpizero.parallel.diagnostics.bad_steps import BadStep, dump_bad_step, read_bad_step
    from mpizero.parallel.diagnostics.replay import Replay, replay_bad_step
    from mpizero.parallel.execution.evaluation import Evaluation
    from mpizero.parallel.minimization.minimize import MinimizeResult, minimize
    from mpizero.parallel.model.base import ShardedModelBase
    from mpizero.parallel.model.communication_optimizers import GradientCompressionOptimizer, LocalSGDOptimizer
    from mpizero.parallel.model.fit import OptimizationOptions, OptimizationResult
    from mpizero.parallel.model.hybrid import (
        HybridShardedModel,
        HybridShardedOptimizer,
        PipelineParallelModel,
        TensorParallelModel,
    )
    from mpizero.parallel.model.manual_gradients import Gradients
    from mpizero.parallel.model.metadata import ModelMetadata
    from mpizero.parallel.model.optimizers import ShardedOptimizer
    from mpizero.parallel.model.strategies import (
        DDPModel,
        DDPOptimizer,
        FSDPModel,
        FSDPOptimizer,
        ZeRO1Model,
        ZeRO1Optimizer,
        ZeRO2Model,
        ZeRO2Optimizer,
        ZeRO3Model,
        ZeRO3Optimizer,
        distribute,
    )
    from mpizero.parallel.partition.block_timing import measured_costs
    from mpizero.parallel.skipped_steps import BadSteps
    from mpizero.parallel.step_report import NonFinite, StepReport

__all__ = [
    "BadStep",
    "BadSteps",
    "DDPModel",
    "DDPOptimizer",
    "Evaluation",
    "FSDPModel",
    "FSDPOptimizer",
    "GradientCompressionOptimizer",
    "Gradients",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "LocalSGDOptimizer",
    "MinimizeResult",
    "ModelMetadata",
    "NonFinite",
    "OptimizationOptions",
    "OptimizationResult",
    "PipelineParallelModel",
    "Replay",
    "ShardedModelBase",
    "ShardedOptimizer",
    "ShardingConfig",
    "StepReport",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO1Optimizer",
    "ZeRO2Model",
    "ZeRO2Optimizer",
    "ZeRO3Model",
    "ZeRO3Optimizer",
    "distribute",
    "dump_bad_step",
    "measured_costs",
    "minimize",
    "read_bad_step",
    "replay_bad_step",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = names_on_use(__name__, __all__)

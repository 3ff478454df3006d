"""Sharded models and optimizers: one engine, one placement table, the strategies by name."""

from mpizero.parallel.bad_steps import BadStep, dump_bad_step, read_bad_step
from mpizero.parallel.base import Gradients, ShardedModelBase
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.gradient_compression import GradientCompressionOptimizer
from mpizero.parallel.hybrid import (
    HybridShardedModel,
    HybridShardedOptimizer,
    PipelineParallelModel,
    TensorParallelModel,
)
from mpizero.parallel.local_sgd import LocalSGDOptimizer
from mpizero.parallel.loop import OptimizationOptions, OptimizationResult
from mpizero.parallel.metadata import ModelMetadata
from mpizero.parallel.models import DDPModel, FSDPModel, ZeRO1Model, ZeRO2Model, ZeRO3Model, distribute
from mpizero.parallel.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    ShardedOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpizero.parallel.replay import Replay, replay_bad_step
from mpizero.parallel.report import NonFinite, StepReport
from mpizero.parallel.skipping import BadSteps
from mpizero.parallel.timing import BlockTimes, measure_blocks, measured_costs

__all__ = [
    "BadStep",
    "BadSteps",
    "BlockTimes",
    "DDPModel",
    "DDPOptimizer",
    "FSDPModel",
    "FSDPOptimizer",
    "GradientCompressionOptimizer",
    "Gradients",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "LocalSGDOptimizer",
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
    "measure_blocks",
    "measured_costs",
    "read_bad_step",
    "replay_bad_step",
]

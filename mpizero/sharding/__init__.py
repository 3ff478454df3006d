"""Shard models and optimizers over ranks: one engine executes every strategy (DDP, ZeRO-1, ZeRO-2, ZeRO-3, FSDP)."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.sharding.config import Config as Config
    from mpizero.sharding.config import ShardingConfig as ShardingConfig
    from mpizero.sharding.diagnostics import BadStep as BadStep
    from mpizero.sharding.diagnostics import Replay as Replay
    from mpizero.sharding.diagnostics import dump_bad_step as dump_bad_step
    from mpizero.sharding.diagnostics import read_bad_step as read_bad_step
    from mpizero.sharding.diagnostics import replay_bad_step as replay_bad_step
    from mpizero.sharding.fit import OptimizationOptions as OptimizationOptions
    from mpizero.sharding.fit import OptimizationResult as OptimizationResult
    from mpizero.sharding.forward_backward import Evaluation as Evaluation
    from mpizero.sharding.mesh import Mesh as Mesh
    from mpizero.sharding.minimization import MinimizeResult as MinimizeResult
    from mpizero.sharding.minimization import minimize as minimize
    from mpizero.sharding.model import Gradients as Gradients
    from mpizero.sharding.model import Model as Model
    from mpizero.sharding.model import distribute as distribute
    from mpizero.sharding.optimizer import GradientCompressionOptimizer as GradientCompressionOptimizer
    from mpizero.sharding.optimizer import LocalSGDOptimizer as LocalSGDOptimizer
    from mpizero.sharding.optimizer import ShardedOptimizer as ShardedOptimizer
    from mpizero.sharding.parameter_access import ModelMetadata as ModelMetadata
    from mpizero.sharding.pipeline import measured_costs as measured_costs
    from mpizero.sharding.step_report import BadSteps as BadSteps
    from mpizero.sharding.step_report import NonFinite as NonFinite
    from mpizero.sharding.step_report import StepReport as StepReport
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)

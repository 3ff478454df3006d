"""ZeRO, tensor, pipeline and hybrid parallel training over MPI, with the same bits on any number of ranks.

Public names are imported on first use, so ``import mpizero`` takes milliseconds and needs no MPI. Outside of an MPI job
the import changes nothing in the process. In a process that a launcher such as mpiexec has started as a rank the import
installs hooks that end all ranks when one fails. If the job has several ranks, the import also starts a thread that
reports this rank's status to the other ranks (``install_in_job`` in ``guard/guard.py``). The environment variable
``MPIZERO_EMBEDDED=1`` prevents hooks and thread; see docs/embedding.md.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpizero._util.launch import BY_MPI
from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    __version__: str

    # What __all__ lists, by topic.
    # isort: off
    from mpizero.sharding import Mesh as Mesh
    from mpizero.sharding import Config as Config
    from mpizero.sharding import distribute as distribute
    from mpizero.sharding import Model as Model
    from mpizero.adapters import FunctionModel as FunctionModel
    from mpizero.train.trainer import Trainer as Trainer
    from mpizero.train.setup import TrainingResult as TrainingResult
    from mpizero.train.callbacks import Callback as Callback
    from mpizero.train.callbacks import TensorBoard as TensorBoard
    from mpizero.train.loop import Preempted as Preempted
    from mpizero.sharding import minimize as minimize
    from mpizero.sharding import BadSteps as BadSteps
    from mpizero.sharding import Evaluation as Evaluation

    from mpizero.optim import SGD as SGD
    from mpizero.optim import Adam as Adam
    from mpizero.optim import AdamW as AdamW
    from mpizero.optim import RMSprop as RMSprop
    from mpizero.optim import Lion as Lion
    from mpizero.optim import LAMB as LAMB
    from mpizero.optim import Muon as Muon
    from mpizero.optim import SOAP as SOAP
    from mpizero.optim import LBFGS as LBFGS
    from mpizero.optim import NewtonCG as NewtonCG
    from mpizero.optim import NonlinearCG as NonlinearCG
    from mpizero.optim import ParameterGroup as ParameterGroup
    from mpizero.optim import DynamicLossScale as DynamicLossScale
    from mpizero.optim import Tikhonov as Tikhonov
    from mpizero.optim import TotalVariation as TotalVariation

    from mpizero.tools.ensemble import run_members as run_members
    from mpizero.tools.ensemble import Member as Member
    from mpizero.tools.ensemble import summarize_members as summarize_members
    from mpizero.comm import InMemoryCommunicator as InMemoryCommunicator

    from mpizero import adapters as adapters
    from mpizero import checkpoint as checkpoint
    from mpizero import comm as comm
    from mpizero import data as data
    from mpizero import errors as errors
    from mpizero import nn as nn
    from mpizero import optim as optim
    from mpizero import testing as testing

    # Not listed in __all__: packages for contributors, and names of an earlier way to the same models.
    from mpizero import kernels as kernels
    from mpizero import layout as layout
    from mpizero import sharding as sharding
    from mpizero.sharding import GradientCompressionOptimizer as GradientCompressionOptimizer
    from mpizero.sharding import Gradients as Gradients
    from mpizero.sharding import LocalSGDOptimizer as LocalSGDOptimizer
    from mpizero.sharding import ModelMetadata as ModelMetadata
    from mpizero.sharding import OptimizationOptions as OptimizationOptions
    from mpizero.sharding import OptimizationResult as OptimizationResult
    from mpizero.sharding import ShardedOptimizer as ShardedOptimizer
    from mpizero.sharding import ShardingConfig as ShardingConfig
    from mpizero.sharding.compatibility import DDPModel as DDPModel
    from mpizero.sharding.compatibility import DDPOptimizer as DDPOptimizer
    from mpizero.sharding.compatibility import FSDPModel as FSDPModel
    from mpizero.sharding.compatibility import FSDPOptimizer as FSDPOptimizer
    from mpizero.sharding.compatibility import HybridShardedModel as HybridShardedModel
    from mpizero.sharding.compatibility import HybridShardedOptimizer as HybridShardedOptimizer
    from mpizero.sharding.compatibility import PipelineParallelModel as PipelineParallelModel
    from mpizero.sharding.compatibility import ShardedModelBase as ShardedModelBase
    from mpizero.sharding.compatibility import TensorParallelModel as TensorParallelModel
    from mpizero.sharding.compatibility import ZeRO1Model as ZeRO1Model
    from mpizero.sharding.compatibility import ZeRO1Optimizer as ZeRO1Optimizer
    from mpizero.sharding.compatibility import ZeRO2Model as ZeRO2Model
    from mpizero.sharding.compatibility import ZeRO2Optimizer as ZeRO2Optimizer
    from mpizero.sharding.compatibility import ZeRO3Model as ZeRO3Model
    from mpizero.sharding.compatibility import ZeRO3Optimizer as ZeRO3Optimizer

_lazy, __dir__, __all__ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Import and return a public name when it is first used; ``__version__``, too, is found only then."""
    return import_module("mpizero._util.text").mpizero_version() if name == "__version__" else _lazy(name)


if any(name in os.environ for name in BY_MPI):
    import_module("mpizero.guard.guard").install_in_job()

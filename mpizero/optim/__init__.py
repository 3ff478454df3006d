"""Provide optimizers that update flat arrays, learning-rate schedules, clipping and loss scaling, all without MPI."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.optim.flat_optimizer import FlatOptimizer as FlatOptimizer
    from mpizero.optim.flat_optimizer import ParameterGroup as ParameterGroup
    from mpizero.optim.muon import Muon as Muon
    from mpizero.optim.optimizers import LAMB as LAMB
    from mpizero.optim.optimizers import SGD as SGD
    from mpizero.optim.optimizers import Adam as Adam
    from mpizero.optim.optimizers import AdamW as AdamW
    from mpizero.optim.optimizers import Lion as Lion
    from mpizero.optim.optimizers import RMSprop as RMSprop
    from mpizero.optim.scaling import DynamicLossScale as DynamicLossScale
    from mpizero.optim.schedules import Schedule as Schedule
    from mpizero.optim.schedules import constant as constant
    from mpizero.optim.schedules import cosine as cosine
    from mpizero.optim.schedules import linear as linear
    from mpizero.optim.soap import SOAP as SOAP
    from mpizero.optim.tensor_optimizer import TensorOptimizer as TensorOptimizer
    from mpizero.optim.tensor_optimizer import TensorStep as TensorStep
    from mpizero.optim.vectors.conjugate_gradient import NonlinearCG as NonlinearCG
    from mpizero.optim.vectors.lbfgs import LBFGS as LBFGS
    from mpizero.optim.vectors.method import VectorMethod as VectorMethod
    from mpizero.optim.vectors.newton_cg import NewtonCG as NewtonCG
    from mpizero.optim.vectors.regularization import Tikhonov as Tikhonov
    from mpizero.optim.vectors.regularization import TotalVariation as TotalVariation
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)

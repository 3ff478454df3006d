"""Provide optimizers that update flat arrays, learning-rate schedules, clipping and loss scaling, all without MPI."""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.optim.elementwise import LAMB as LAMB
    from mpizero.optim.elementwise import SGD as SGD
    from mpizero.optim.elementwise import Adam as Adam
    from mpizero.optim.elementwise import AdamW as AdamW
    from mpizero.optim.elementwise import DynamicLossScale as DynamicLossScale
    from mpizero.optim.elementwise import FlatOptimizer as FlatOptimizer
    from mpizero.optim.elementwise import Lion as Lion
    from mpizero.optim.elementwise import ParameterGroup as ParameterGroup
    from mpizero.optim.elementwise import RMSprop as RMSprop
    from mpizero.optim.minimizers import LBFGS as LBFGS
    from mpizero.optim.minimizers import NewtonCG as NewtonCG
    from mpizero.optim.minimizers import NonlinearCG as NonlinearCG
    from mpizero.optim.minimizers import VectorMethod as VectorMethod
    from mpizero.optim.regularization import Tikhonov as Tikhonov
    from mpizero.optim.regularization import TotalVariation as TotalVariation
    from mpizero.optim.schedules import Schedule as Schedule
    from mpizero.optim.schedules import constant as constant
    from mpizero.optim.schedules import cosine as cosine
    from mpizero.optim.schedules import linear as linear
    from mpizero.optim.whole_tensor import SOAP as SOAP
    from mpizero.optim.whole_tensor import Muon as Muon
    from mpizero.optim.whole_tensor import TensorOptimizer as TensorOptimizer
    from mpizero.optim.whole_tensor import TensorStep as TensorStep
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)

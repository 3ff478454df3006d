"""Provide optimizers that update flat arrays, learning-rate schedules, clipping and loss scaling, all without MPI."""

from typing import TYPE_CHECKING

from mpizero.names_on_use import names_on_use

if TYPE_CHECKING:
    from mpizero.optim.flat_optimizer import FlatOptimizer, ParameterGroup
    from mpizero.optim.muon import Muon
    from mpizero.optim.optimizers import LAMB, SGD, Adam, AdamW, Lion, RMSprop
    from mpizero.optim.scaling import DynamicLossScale
    from mpizero.optim.schedules import Schedule, constant, cosine, linear
    from mpizero.optim.soap import SOAP
    from mpizero.optim.tensor_optimizer import TensorOptimizer, TensorStep
    from mpizero.optim.vectors.conjugate_gradient import NonlinearCG
    from mpizero.optim.vectors.lbfgs import LBFGS
    from mpizero.optim.vectors.method import VectorMethod
    from mpizero.optim.vectors.newton_cg import NewtonCG
    from mpizero.optim.vectors.regularization import Tikhonov, TotalVariation

__all__ = [
    "LAMB",
    "LBFGS",
    "SGD",
    "SOAP",
    "Adam",
    "AdamW",
    "DynamicLossScale",
    "FlatOptimizer",
    "Lion",
    "NewtonCG",
    "NonlinearCG",
    "Muon",
    "ParameterGroup",
    "RMSprop",
    "Schedule",
    "VectorMethod",
    "TensorOptimizer",
    "TensorStep",
    "Tikhonov",
    "TotalVariation",
    "constant",
    "cosine",
    "linear",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = names_on_use(__name__, __all__)

"""Provide optimizers that update flat arrays, learning-rate schedules, clipping and loss scaling, all without MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpizero.names import unknown_names
from mpizero.optim.adapted import AdaptedOptimizer, adapt, learning_rate, optimizer_name
from mpizero.optim.averaging import EMA, AveragingOptimizer, averaging, plain
from mpizero.optim.flat_optimizer import FlatOptimizer, ParameterGroup, RowSum
from mpizero.optim.muon import Muon
from mpizero.optim.optimizers import LAMB, SGD, Adam, AdamW, Lion, RMSprop
from mpizero.optim.scaling import DynamicLossScale, LossScaleState, clip_factor
from mpizero.optim.schedules import Schedule, constant, cosine, linear
from mpizero.optim.soap import SOAP
from mpizero.optim.state_arrays import state_size, state_specs, tensor_state_size
from mpizero.optim.tensor_optimizer import TensorOptimizer, TensorStep, takes_whole, tensor_slots
from mpizero.optim.vectors.conjugate_gradient import NonlinearCG
from mpizero.optim.vectors.lbfgs import LBFGS
from mpizero.optim.vectors.method import VectorMethod
from mpizero.optim.vectors.newton_cg import NewtonCG
from mpizero.optim.vectors.regularization import Tikhonov, TotalVariation

__all__ = [
    "EMA",
    "LAMB",
    "LBFGS",
    "SGD",
    "SOAP",
    "Adam",
    "AdamW",
    "AdaptedOptimizer",
    "AveragingOptimizer",
    "DynamicLossScale",
    "FlatOptimizer",
    "Lion",
    "LossScaleState",
    "NewtonCG",
    "NonlinearCG",
    "Muon",
    "ParameterGroup",
    "RMSprop",
    "RowSum",
    "Schedule",
    "VectorMethod",
    "TensorOptimizer",
    "TensorStep",
    "Tikhonov",
    "TotalVariation",
    "adapt",
    "averaging",
    "clip_factor",
    "constant",
    "cosine",
    "learning_rate",
    "linear",
    "optimizer_name",
    "plain",
    "state_size",
    "state_specs",
    "takes_whole",
    "tensor_slots",
    "tensor_state_size",
]

if not TYPE_CHECKING:  # a checker of types would take any name for known
    __getattr__ = unknown_names(__name__, __all__)

"""Models of PyTorch with the weights of this library's."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

ACTIVATIONS = {"gelu": lambda: nn.GELU(approximate="tanh"), "silu": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh}


def fill(twin, arrays):
    """Give a module's parameters, in their order, copies of arrays in the module's own orientation."""
    with torch.no_grad():
        for parameter, array in zip(twin.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(np.array(array)))
    return twin


def perceptron_twin(model, named):
    """PyTorch's form of an :class:`mpizero.nn.MLP`; its matrices are transposed."""
    widths = (model.features, *model.hidden, model.outputs)
    layers = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs, dtype=getattr(torch, str(model.dtype))), ACTIVATIONS[model.activation]()]
    return fill(nn.Sequential(*layers[:-1]), [value.T for value in named.values()])


def perceptron_loss(task, prediction, target):
    """The mean loss of the task."""
    return (nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss)(prediction, target)

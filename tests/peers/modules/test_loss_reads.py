"""A loss that reads what the given module keeps of a pass is an error: its copy makes the passes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import ConfigError  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Variational(nn.Module):
    """Keep a divergence beside the output, whose weight the program sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.beta, self.divergence = nn.Linear(3, 3), 0.5, 0.0

    def forward(self, x: Any) -> Any:
        return self.keep(self.layer(x))

    def keep(self, y: Any) -> Any:
        self.divergence = (y**2).sum()
        return y

    def set_beta(self, beta: float) -> None:
        self.beta = beta

    def total(self) -> Any:
        return self.beta * self.divergence

    def loss(self, prediction: Any, target: Any) -> Any:
        return squares(prediction, target) + self.divergence


def squares(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).sum()


NET = Variational()


def by_global_name(prediction: Any, target: Any) -> Any:
    return squares(prediction, target) + NET.divergence


def by_another_function(prediction: Any, target: Any) -> Any:
    return by_global_name(prediction, target)


class Holder:
    def __init__(self, net: Any) -> None:
        self.net = net

    def __call__(self, prediction: Any, target: Any) -> Any:
        return squares(prediction, target) + self.net.divergence


def given(prediction: Any, target: Any, net: Any) -> Any:
    return squares(prediction, target) + net.divergence


LOSSES = {
    "global name": by_global_name,
    "closure": (lambda net: lambda p, t: squares(p, t) + net.divergence)(NET),
    "another function": by_another_function,
    "a method of the module that is called": lambda p, t: squares(p, t) + NET.total(),
    "a method of the module": NET.loss,
    "an object": Holder(NET),
    "partial": partial(given, net=NET),
}


@pytest.mark.parametrize("how", LOSSES)
def test_it_is_told_when_the_model_is_made(how: str) -> None:
    with pytest.raises(ConfigError, match=r"reads 'divergence' of the module that was given.*parameter module"):
        TorchModel(NET, LOSSES[how])


def with_module(prediction: Any, target: Any, module: Any) -> Any:
    return squares(prediction, target) + module.total()


@pytest.mark.parametrize("loss", [with_module, lambda p, t: squares(p, t) * NET.beta, nn.MSELoss(reduction="sum")])
def test_what_no_pass_keeps_may_be_read(loss: Any) -> None:
    with mz.distribute(TorchModel(NET, loss), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        assert placed.train(X, X) > 0

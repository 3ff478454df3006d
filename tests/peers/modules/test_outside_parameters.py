"""A parameter that the module does not have would never be trained or saved: computing with it is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import LayoutError  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
LOSS = nn.MSELoss(reduction="sum")
SCALE = nn.Parameter(torch.ones(3))


class Layers(nn.Module):
    """Hold layers in a list, which registers nothing."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.first, self.kept = nn.Linear(3, 3), kept

    def forward(self, x: Any) -> Any:
        for layer in self.kept.values() if isinstance(self.kept, dict) else self.kept:
            x = layer(x) if callable(layer) else x * layer
        return self.first(x)


class Scaled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * SCALE


class Forces(nn.Linear):
    """Differentiate by a tensor that each pass makes."""

    def forward(self, x: Any) -> Any:
        x = x.detach().requires_grad_()
        energy = super().forward(x).pow(2).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0] + x


def squares(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).sum()


def train(net: Any, loss: Any = LOSS, **given: Any) -> float:
    with mz.distribute(TorchModel(net, loss, **given), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        return placed.train(X, X)


MODULES = {
    "a list of modules": (lambda: Layers([nn.Linear(3, 3)]), r"kept', of shape \(3, 3\), .*nn.ModuleList"),
    "a dictionary of parameters": (lambda: Layers({"a": nn.Parameter(torch.ones(3))}), r"kept', of shape \(3,\)"),
    "a tensor": (lambda: Layers([torch.ones(3, requires_grad=True)]), r"kept', of shape \(3,\)"),
    "a global name": (lambda: Scaled(3, 3), r"a tensor, of shape \(3,\)"),
}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("how", MODULES)
def test_one_that_the_module_does_not_register_is_named(how: str, blocks: bool) -> None:
    make, told = MODULES[how]
    net = nn.Sequential(nn.Linear(3, 3), make())
    with pytest.raises(LayoutError, match=told):
        train(net, blocks=net if blocks else None)


@pytest.mark.parametrize(
    "loss",
    [lambda p, t: squares(p, t) * SCALE.sum(), lambda p, t, module: squares(p, t) * SCALE.sum()],
    ids=["of the prediction", "with the module"],
)
def test_one_of_the_loss_alone_is_told(loss: Any) -> None:
    with pytest.raises(LayoutError, match=r"of shape \(3,\).*never be trained"):
        train(nn.Linear(3, 3), loss)


def teacher_of_loss(prediction: Any, target: Any) -> Any:
    with torch.no_grad():
        target = target * SCALE
    return squares(prediction, target)


def test_what_needs_no_gradient_and_what_a_pass_makes_itself_may_be_used() -> None:
    train(Layers([torch.ones(3)]))
    train(Layers([nn.Linear(3, 3).requires_grad_(False)]))
    train(Forces(3, 3), unused=["bias"])
    train(nn.Linear(3, 3), teacher_of_loss)

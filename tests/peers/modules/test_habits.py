"""Habits of PyTorch programs either mean what they mean there, or are errors that say what to write."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import ConfigError, DataError, LayoutError  # noqa: E402
from tests.peers.placing import placed as place  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
LOSS = nn.MSELoss(reduction="sum")


class Still(nn.Module):
    """Keep its batch norm in evaluation mode, by a ``train()`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x))


@pytest.mark.parametrize("blocks", [None, ["layer", "norm"]])
@pytest.mark.parametrize("make", [Still, lambda: Still().train()])
def test_a_train_of_the_users_own_keeps_submodules_in_evaluation_mode(make: Any, blocks: Any) -> None:
    with mz.distribute(TorchModel(make, LOSS, blocks=blocks), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.train(X, X)
        found = placed.named_parameters()
    assert not found["norm.running_mean"].any()
    assert found["norm.weight"].std() > 0  # trained


def net() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def test_the_hash_is_that_of_the_values_whatever_the_blocks() -> None:
    hashes = set()
    for blocks in (None, ["0", "1", "2"]):
        with place(TorchModel(net, LOSS, blocks=blocks), "self", micro_batch=4) as placed:
            placed.train(X, X)
            assert list(placed.named_parameters())[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
            hashes.add(placed.parameters_sha256())
    assert len(hashes) == 1


class Force(nn.Module):
    """Return the derivative of a potential; ``graph`` says whether it makes its own graph."""

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.graph, self.potential = graph, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.graph or torch.is_grad_enabled()):
            x = x.requires_grad_()
            return torch.autograd.grad(self.potential(x).sum(), x, create_graph=True)[0]


def test_a_forward_that_differentiates_is_evaluated_if_it_makes_its_graph() -> None:
    with mz.distribute(TorchModel(Force(True), LOSS), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.train(X, X)
        placed.evaluate(X, X)
        assert placed.predict(X).shape == X.shape
    with mz.distribute(TorchModel(Force(False), LOSS), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.train(X, X)
        with pytest.raises(DataError, match=r"Force: its forward differentiates .*enable_grad.*test_habits\.py:\d+"):
            placed.evaluate(X, X)


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (Pair(X, X), "a tuple of 2 becomes 2 arguments; a list or a dataclass is one"),
        ({"inputs": X}, "a dictionary becomes keyword arguments, inputs"),
    ],
)
def test_an_input_of_other_arguments_is_told(x: Any, told: str) -> None:
    model = TorchModel(Still, LOSS)
    with mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self")) as placed, pytest.raises(DataError, match=told):
        placed.train(x, X)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("module", "loss", "told"),
    [
        (Spectrum(), LOSS, r"'weight' is complex: .*torch\.view_as_real"),
        (lambda: torch.jit.trace(nn.Linear(3, 3), torch.zeros(2, 3)), LOSS, r"compiled by torch\.jit"),
        (net, nn.MSELoss, r"loss is the class MSELoss: make one of it, MSELoss\(reduction='sum'\)"),
    ],
    ids=["complex", "scripted", "loss class"],
)
def test_what_cannot_be_taken_says_what_can(module: Any, loss: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TorchModel(module, loss)


def test_contexts_of_pytorch_around_a_model_are_errors() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="into the module's forward"):
        TorchModel(net, LOSS)
    with mz.distribute(TorchModel(nn.Linear(3, 3), LOSS), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
            placed.train(X, X)
        with torch.no_grad():
            placed.train(X, X)


def masked(prediction: Any, target: Any) -> Any:
    """A mean over what is known, times the number of samples: right only where all know equally much."""
    return (((prediction - target["y"]) ** 2 * target["m"]).sum() / target["m"].sum()) * len(prediction)


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_a_first_grain_that_adds_up_by_chance_or_is_no_number_does_not_hide_the_next(first: float) -> None:
    known = np.ones_like(X)
    known[0], known[3, 1:] = first, 0
    with place(TorchModel(net, masked), "self") as placed, pytest.raises(LayoutError, match="no sum"):
        placed.train(X, {"y": X, "m": known})


def test_spectral_norm_says_how_to_name_its_estimates_and_trains_then() -> None:
    def make() -> Any:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3))

    told = pytest.raises(LayoutError, match=r"averaged= if it is .* as in spectral_norm")
    with mz.distribute(TorchModel(make, LOSS), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed, told:
        placed.train(X, X)
    model = TorchModel(make, LOSS, averaged=["*._u", "*._v"])
    with mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        assert placed.train(X, X) > 0

"""A loss that is given the module, or the input, trains as in PyTorch: penalties on weights, residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import ConfigError, MpizeroError  # noqa: E402
from mpizero.testing import check_model  # noqa: E402
from tests.peers import placing  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.uniform(0, 1, (16, 2))
Y = np.sin(X.sum(1, keepdims=True))


def net(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    drop = nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.BatchNorm1d(8), drop, nn.Linear(8, 1)).double()


def plain_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def derivative(u: Any, x: Any) -> Any:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def residual(prediction: Any, target: Any, x: Any) -> Any:
    """The squares of u' + u - cos."""
    return ((derivative(prediction, x)[:, :1] + prediction - torch.cos(x.sum(1, keepdim=True))) ** 2).sum()


def penalty(prediction: Any, target: Any, *, module: Any) -> Any:
    weights = sum((parameter**2).sum() for parameter in module.parameters())
    return ((prediction - target) ** 2).sum() + 1e-3 * len(target) * weights


def points(prediction: Any, target: Any, module: Any, x: Any) -> Any:
    """Another pass of the module, in the middle between samples and zero."""
    middle = (x.detach() / 2).requires_grad_()
    u = module(middle)
    return ((derivative(u, middle) - 1) ** 2).sum() + ((prediction - target) ** 2).sum()


def trained(module: Any, loss: Any, ranks: int = 1, strategy: str = "ddp", steps: int = 20, **layout: Any) -> Any:
    """Return the hash of the parameters, the parameters by name, and how the model is evaluated on the samples."""
    given = {"micro_batch": 4, "optimizer": mz.SGD(0.05)} | layout
    return placing.trained(
        lambda: TorchModel(module, loss), (X, Y), ranks, strategy, steps=steps,
        result=lambda one, x, y: (one.parameters_sha256(), dict(one.named_parameters()), one.evaluate(x, y)), **given,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [residual, penalty, points])
def test_it_trains_as_pytorch_does(loss: Any) -> None:
    _, found, scored = trained(plain_net, loss, 2, "zero3")
    theirs = plain_net()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.05)

    def value() -> Any:
        x, y = torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)
        given = {"module": theirs, "x": x}
        names = {residual: ["x"], penalty: ["module"], points: ["module", "x"]}[loss]
        return loss(theirs(x), y, **{name: given[name] for name in names}) / len(X)

    for _ in range(20):
        optimizer.zero_grad()
        value().backward()
        optimizer.step()
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(found[name], parameter.detach().numpy(), rtol=1e-11, atol=1e-13)
    assert scored.loss_sum / scored.weight == pytest.approx(value().item(), rel=1e-11)


@pytest.mark.parametrize("loss", [residual, points])
def test_dropout_and_statistics_have_the_same_bits_on_every_layout(loss: Any) -> None:
    layouts: Any = (
        (1, "ddp", {}),
        (2, "zero2", {}),
        (3, "zero3", {"ranks_per_node": 1}),
        (2, "zero1", {"share_node_memory": False}),
    )
    found = {trained(lambda: net(0.1), loss, *ranks, 3, **layout)[0] for *ranks, layout in layouts}
    assert len(found) == 1


def test_it_predicts_is_checked_and_gives_its_state_back() -> None:
    module = plain_net()
    model = TorchModel(module, residual, frozen=["0.bias"])
    with mz.distribute(model, mz.SGD(0.05), mesh=mz.Mesh("self")) as placed:
        expected = module(torch.from_numpy(X)).detach().numpy()
        np.testing.assert_allclose(placed.predict(X), expected, rtol=1e-12)
        placed.train(X, Y)
        state = model.state_dict(placed.named_parameters())
        assert set(state) == set(module.state_dict())
        assert torch.equal(state["0.bias"], module.state_dict()["0.bias"])
        assert not torch.equal(state["0.weight"], module.state_dict()["0.weight"])
    assert check_model(TorchModel(plain_net, points), X[:4], Y[:4]).right


GLOBAL = plain_net()


def with_global(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).sum() + 1e-3 * sum((p**2).sum() for p in GLOBAL.parameters())


def calls_global(prediction: Any, target: Any) -> Any:
    return ((GLOBAL(target.expand(-1, 2)) - prediction) ** 2).sum()


def by_other_points(prediction: Any, target: Any) -> Any:
    at = torch.from_numpy(X[: len(target)]).requires_grad_()
    return (derivative(prediction, at) ** 2).sum()


def once_a_call(prediction: Any, target: Any, module: Any) -> Any:
    return ((prediction - target) ** 2).sum() + 1e-5 * sum((p**2).sum() for p in module.parameters())


def mean(prediction: Any, target: Any, x: Any) -> Any:
    return (derivative(prediction, x) ** 2).mean()


WRONG = {
    "refers to weights": (GLOBAL, with_global, r"with_global at .* reads '0\.weight' of the module that was given"),
    "calls the module": (
        GLOBAL,
        calls_global,
        r"calls_global at .* reads '0\.weight' .*loss\(prediction, target, module\)",
    ),
    "no graph": (plain_net, by_other_points, r"\(test_given_module.py:\d+ in derivative\) differentiates what"),
    "penalty once": (plain_net, once_a_call, r"once_a_call .*multiply a term that does not depend on the samples"),
    "mean": (plain_net, mean, "is no sum over samples: the loss is"),
}


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("what", WRONG)
def test_a_term_in_the_wrong_place_is_told(what: str, micro_batch: int) -> None:
    module, loss, message = WRONG[what]
    with pytest.raises(MpizeroError, match=message):
        trained(module, loss, micro_batch=micro_batch)


def test_blocks_and_a_loss_that_needs_all_parameters_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="the loss has a parameter module, so module and loss run together: leave blocks"
    ):
        TorchModel(plain_net, penalty, blocks=["0", "1", "2"])

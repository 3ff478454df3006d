"""A module whose copy was trained says that it has its start values, until it is filled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from mpizero.errors import ConfigError  # noqa: E402

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
LOSS = nn.MSELoss(reduction="sum")


def module() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("blocks", [None, ["0", "1", "2"]])
def test_its_first_call_says_so_with_the_line(blocks: Any, capfd: Any) -> None:
    net, x = module(), torch.from_numpy(X)
    model = TorchModel(net, LOSS, blocks=blocks)
    with mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        net(x)  # not trained yet
        copies = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        placed.predict(X)
        placed.train(X, X)
        placed.evaluate(X, X)
        assert "start values" not in capfd.readouterr().err
        for other in copies:
            other(x)
        assert "start values" not in capfd.readouterr().err
        for _ in range(2):
            net(x)
        told = capfd.readouterr().err
        assert told.count("start values") == 1
        assert "Sequential is called (test_left_behind.py:" in told
        expected = placed.predict(X)
        filled = model.fill(placed.named_parameters())
    assert filled is net
    np.testing.assert_allclose(net.eval()(x).detach(), expected, rtol=1e-5)


USES = {
    "its state_dict": (lambda net: net.state_dict(), "Sequential is asked for its state_dict"),
    "a submodule's state_dict": (lambda net: net[0].state_dict(), "Linear is asked for its state_dict"),
    "a call of a submodule": (lambda net: net[2](torch.from_numpy(X)), "Linear is called"),
}


@pytest.mark.parametrize("use", USES)
def test_so_says_every_other_use_of_its_values(use: str, capfd: Any) -> None:
    net, (taken, told) = module(), USES[use]
    with mz.distribute(TorchModel(net, LOSS), mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        taken(net)  # not trained yet
        placed.train(X, X)
        assert "start values" not in capfd.readouterr().err
        for _ in range(2):
            taken(net)
    said = capfd.readouterr().err
    assert said.count("start values") == 1
    assert f"{told} (test_left_behind.py:" in said


def test_a_filled_module_says_nothing(capfd: Any) -> None:
    net, x = module(), torch.from_numpy(X)
    model = TorchModel(net, LOSS)
    with mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        placed.train(X, X)
        net.load_state_dict(model.state_dict(placed.named_parameters()))
    net(x)
    net[0](x)
    net.state_dict()
    assert "start values" not in capfd.readouterr().err


def test_a_module_that_a_function_made_is_not_there_to_fill() -> None:
    model = TorchModel(module, LOSS)
    with pytest.raises(ConfigError, match=r"made by a function: give one, fill\(arrays, module\)"):
        model.fill(model.start_values)
    other = model.fill(model.start_values, module())
    assert torch.equal(other[0].weight, torch.from_numpy(model.start_values["0.weight"]))


def test_values_that_are_loaded_too_late_are_told_and_before_they_count(capfd: Any) -> None:
    net, other = module(), module().state_dict()
    model = TorchModel(net, LOSS)
    net.load_state_dict(other)
    with mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self")) as placed:
        assert np.array_equal(placed.named_parameters()["0.weight"], other["0.weight"])
        assert "other values" not in capfd.readouterr().err
        net.load_state_dict(module().state_dict())
        assert "Sequential is given other values (test_left_behind.py:" in capfd.readouterr().err
        model.fill(placed.named_parameters())
        placed.train(X, X)
        net.load_state_dict(model.state_dict(placed.named_parameters()))  # as fill does
    assert "other values" not in capfd.readouterr().err


@pytest.mark.parametrize("needed", [False, True])
def test_a_parameter_that_is_frozen_or_thawed_too_late_is_an_error(needed: bool) -> None:
    net = module()
    net[0].requires_grad_(not needed)
    model = TorchModel(net, LOSS)
    net[0].requires_grad_(needed)
    with pytest.raises(ConfigError, match=rf"'0.weight' has requires_grad={needed} now.*frozen=\["):
        mz.distribute(model, mz.SGD(0.1), mesh=mz.Mesh("self"))

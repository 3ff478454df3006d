"""`mz.nn.freeze` freezes parameters of modules and functions of other libraries, as their own `frozen=` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero._util.names import selected  # noqa: E402
from mpizero.adapters.jax import JaxModel  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from tests.peers import placing  # noqa: E402

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)
LOSS = nn.MSELoss(reduction="sum")


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))


def with_module(prediction: Any, target: Any, module: Any) -> Any:
    return LOSS(prediction, target)


def affine(parameters: Any, x: Any) -> Any:
    return x @ parameters["weight"] + parameters["bias"]


def squares(prediction: Any, y: Any) -> Any:
    return ((prediction - y) ** 2).sum()


def of_jax(**given: Any) -> Any:
    start = {str(k): {"weight": np.full(shape, 0.1, "f4"), "bias": np.zeros(shape[1], "f4")}
             for k, shape in ((0, (4, 3)), (3, (3, 2)))}  # fmt: skip
    if given.pop("blocks", False):
        return JaxModel(start, squares, blocks={"0": affine, "3": affine}, **given)
    return JaxModel(start, lambda p, x, y: squares(affine(p["3"], affine(p["0"], x)), y), **given)


MODELS = {
    "one module": lambda **given: TorchModel(net, LOSS, **given),
    "blocks": lambda **given: TorchModel(net, LOSS, blocks=["0", "1", "2", "3"], **given),
    "with its loss": lambda **given: TorchModel(net, with_module, **given),
    "jax": of_jax,
    "jax blocks": lambda **given: of_jax(blocks=True, **given),
}


def trained(model: Any, ranks: int = 1, strategy: str = "ddp") -> tuple[str, dict[str, Any]]:
    return placing.trained(
        lambda: model, (X, Y), ranks, strategy, optimizer=mz.AdamW(0.1), micro_batch=4,
        result=lambda placed, *_: (str(placed.parameters_sha256()), dict(placed.named_parameters())),
    )  # fmt: skip


PATTERNS = ["0.*"], ["*.bias"], ["3.weight", "0.bias"]


@pytest.mark.parametrize(
    ("kind", "patterns", "ranks"),
    [(kind, PATTERNS[(i + ranks) % 3], ranks) for i, kind in enumerate(MODELS) for ranks in (1, 2)],
)
def test_frozen_parameters_stay_and_all_others_train(kind: str, patterns: Any, ranks: int) -> None:
    make, strategy = MODELS[kind], ("ddp", "zero3")[ranks - 1]
    frozen = mz.nn.freeze(make(), patterns)
    before = dict(frozen.start_values if hasattr(frozen, "start_values") else frozen.parameters)
    sha, after = trained(frozen, ranks, strategy)
    names = set(selected(list(before), "", patterns))
    assert {name for name in before if np.array_equal(before[name], after[name])} == names
    assert trained(make(frozen=sorted(names)))[0] == sha


def test_a_frozen_parameter_needs_no_gradient() -> None:
    def make() -> Any:
        module = net()
        module.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return module

    for loss in (LOSS, with_module):
        model = mz.nn.freeze(TorchModel(make, loss), ["unused"])
        _, after = trained(model)
        assert np.array_equal(model.start_values["unused"], after["unused"])
        assert not np.array_equal(model.start_values["0.weight"], after["0.weight"])

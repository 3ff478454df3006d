"""Masked parameters, gradients and settings are refused on all ranks; nothing is changed by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import MpizeroError
from mpizero.testing import run_in_threads

MASKED = np.ma.masked_array(np.arange(1.0, 3.0), mask=[0, 1])
ONES = np.ones(2)
LOST = "is a masked array, whose mask would be lost: give a.filled"


def model(gradient: Any = ONES, integer: Any = 0) -> mz.FunctionModel:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        return 1.0, {"w": gradient, "n": integer}, float(len(batch[0]))

    return mz.FunctionModel({"w": np.ones(2)}, loss_and_grad, integers={"n": 0})


def stepped(given: mz.FunctionModel) -> Any:
    return lambda placed: placed.train(np.ones((4, 1)), np.ones(4))


CALLS = {
    "set_parameters": (model(), lambda placed: placed.set_parameters(MASKED), "vector of all parameters"),
    "with_parameters": (model(), lambda placed: placed.with_parameters(MASKED), "vector of all parameters"),
    "load_named": (model(), lambda placed: placed.load_named({"w": MASKED, "n": 0}), "parameter 'w'"),
    "an integer": (
        model(),
        lambda placed: placed.load_named({"w": np.ones(2), "n": np.ma.masked_array(1)}),
        "integer array 'n'",
    ),
    "a gradient": (model(MASKED), stepped(model()), "loss_and_grad .*returned a gradient of 'w' that"),
    "a new integer": (model(integer=np.ma.masked_array(1)), stepped(model()), "returned a value of 'n' that"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_masked_parameters_and_gradients_are_refused_by_name(name: str, ranks: int) -> None:
    given, call, told = CALLS[name]

    def run(comm: Any) -> None:
        with (
            mz.ShardingConfig(comm=comm, micro_batch=1) as config,
            mz.distribute(given, mz.SGD(lr=0.1), strategy="zero2", config=config) as placed,
        ):
            with pytest.raises(MpizeroError, match=f"{told}.* {LOST}"):
                call(placed)
            assert placed.get_parameters().tolist() == [1.0, 1.0]

    run_in_threads(ranks, run)


def far(values: Any) -> tuple[float, Any]:
    return 0.0, np.ma.masked_array(np.zeros(2), mask=[0, 1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: mz.FunctionModel({"w": MASKED}, far), "parameter 'w'"),
        (lambda: mz.FunctionModel({"w": np.ones(2)}, far, integers={"n": np.ma.masked_array(1)}), "integer array 'n'"),
        (lambda: mz.Tikhonov(1.0, reference=MASKED), "Tikhonov: reference"),
        (lambda: mz.LBFGS(preconditioner={"w": MASKED}), r"LBFGS: preconditioner\['w'\]"),
        (lambda: minimized(bounds={"w": (MASKED, None)}), r"bounds.*: a bound"),
        (lambda: minimized(regularization={"w": far}), "the regularization of 'w' returned a gradient that"),
        (lambda: mz.nn.bind(line(), {**mz.nn.initial_parameters(line()), "output.linear.bias": MASKED[:1]}), "bias'"),
    ],
)
def test_masked_settings_are_refused_by_name(make: Any, told: str) -> None:
    with pytest.raises(MpizeroError, match=f"{told} {LOST}"):
        make()


def test_layers_called_without_ranks_refuse_masked_inputs() -> None:
    params, x = mz.nn.bind(line(), mz.nn.initial_parameters(line())), np.ma.masked_array(np.ones((3, 2)))
    with pytest.raises(MpizeroError, match="x is a masked array"):
        mz.nn.evaluate(line(), params, x)


def line() -> Any:
    return mz.nn.MLP(2, [], 1, dtype="float64")


def minimized(**terms: Any) -> Any:
    def loss_and_grad(p: Any, batch: Any) -> Any:
        return float(((p["w"] - 1) ** 2).sum()), {"w": 2 * (p["w"] - 1)}, 1.0

    with mz.distribute(mz.FunctionModel({"w": np.zeros(2)}, loss_and_grad), None, comm="self") as placed:
        return mz.minimize(placed, (np.ones((1, 1)), np.ones(1)), **terms)

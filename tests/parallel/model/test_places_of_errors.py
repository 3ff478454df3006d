"""An error of a layer names its block, under every strategy and for every call; a user's keeps its traceback."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import DataError, MpizeroError, RemoteError
from mpizero.testing import run_in_threads
from tests.parallel.parallel_layouts import Chain

STRATEGIES = {
    "ddp": mz.DDPModel,
    "zero1": mz.ZeRO1Model,
    "zero2": mz.ZeRO2Model,
    "zero3": mz.ZeRO3Model,
    "pipeline": mz.PipelineParallelModel,
    "tensor": mz.TensorParallelModel,
}
CALLS = {
    "train": lambda model, x, y: model.train(x, y),
    "compute_gradients": lambda model, x, y: model.compute_gradients(x, y),
    "evaluate": lambda model, x, y: model.evaluate(x, y),
    "predict": lambda model, x, y: model.predict(x),
}


class Broken(mz.nn.Tanh):
    """A layer of a user's, with a mistake."""

    def forward(self, params, x, run=None):
        return x.reshape(3, 7), None


class BackwardBroken(mz.nn.Tanh):
    """A layer of a user's, whose backward pass has a mistake."""

    def backward_input(self, params, cache, dy):
        return dy.reshape(3, 7), None


def errors(strategy, call, inner, ranks):
    """Return the error of every rank."""

    def work(comm):
        config = mz.ShardingConfig(comm=comm, micro_batch=2)
        x, y = np.ones((4, 4), np.float32), np.ones((4, 6), np.float32)
        network = Chain({"encoder.0": mz.nn.Linear(4, 6), "encoder.1": mz.nn.Tanh(), "encoder.2": inner})
        with config, STRATEGIES[strategy](network, config) as model:
            try:
                CALLS[call](model, x, y)
            except Exception as error:
                return error
        raise AssertionError("no error")

    return run_in_threads(ranks, work)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_input_that_does_not_fit_names_block_layer_and_shapes(strategy, call):
    text = "block 'encoder.2', Linear: takes 5 features on the last axis, the input has shape"
    ranks = 1 + (list(STRATEGIES).index(strategy) + list(CALLS).index(call)) % 2
    found = errors(strategy, call, mz.nn.Linear(5, 4), ranks)
    assert all(isinstance(error, MpizeroError) and text in str(error) for error in found)
    assert any(isinstance(error, DataError) for error in found)


@pytest.mark.parametrize(
    ("call", "inner", "ranks"), [("train", Broken(), 2), ("predict", Broken(), 1), ("train", BackwardBroken(), 2)]
)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "tensor"])
def test_an_error_of_a_users_layer_keeps_its_traceback_and_is_told_the_block(strategy, call, inner, ranks):
    found = errors(strategy, call, inner, ranks)
    own = [error for error in found if not isinstance(error, RemoteError)]
    assert own
    for error in own:
        shown = "".join(traceback.format_exception(error))
        assert "reshape(3, 7)" in shown
        assert shown.rstrip().splitlines()[-1].startswith(f"In block 'encoder.2': {type(inner).__name__}.")
    for error in found:
        if isinstance(error, RemoteError):
            assert "ValueError: cannot reshape" in str(error)
            assert f"({__name__.rpartition('.')[2]}.py:" in str(error)

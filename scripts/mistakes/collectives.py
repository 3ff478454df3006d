"""Make mistakes with calls that all ranks must make together, and with arguments that must be the same on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import case
import numpy as np

import mpizero as mz

SEVERAL = (2, 4)
#: How every report of ranks that call different things ends up.
DIFFERS = "CollectiveMismatch: collective #"


def placed(strategy: str = "zero2", **settings: Any) -> tuple[Any, Any]:
    """Return a linear model sharded over all ranks, and its optimizer, after one training step."""
    config = case.config(**settings)
    wrapped = mz.FunctionModel(case.parameters(), case.squares, predict=lambda p, x: x @ p["weight"] + p["bias"])
    model = mz.distribute(wrapped, mz.AdamW(lr=0.01), strategy=strategy, config=config)
    model.train(*case.samples())
    return model, model.optimizer


def apart(*says: str) -> Any:
    """Declare a mistake in which ranks call different things; the report has these texts."""
    return case.mistake(DIFFERS, *says, status=76, ranks=SEVERAL)


def differs(*says: str) -> Any:
    """Declare a mistake in which an argument differs between ranks; the report has these texts."""
    return case.mistake(*says, status=78, ranks=SEVERAL)


def on_rank_0(method: str, call: Callable[[Any], Any], done: str, strategy: str = "zero2") -> Any:
    """Return a mistake of many scripts: calls ``method`` of the model on rank 0 only, before all ranks train."""

    @apart(f"Model.{method} at", "Model.train at")
    def mistake() -> None:
        model, _ = placed(strategy)
        if case.rank() == 0:
            call(model)
        model.train(*case.samples())

    mistake.__doc__ = done
    return mistake


@apart("Model.compute_gradients at", "Model.train at")
def gradients_on_one_rank():
    """Call compute_gradients on one rank where the others call train."""
    model, _ = placed()
    if case.rank() == 1:
        model.compute_gradients(*case.samples())
    else:
        model.train(*case.samples())
    print(model.parameters_sha256())


@apart("Model.compute_gradients at", "Model.train at")
def gradients_on_one_rank_with_checks():
    """Call compute_gradients on one rank where the others call train, under ZeRO-3 with ``check_every=1``."""
    model, _ = placed("zero3", check_every=1)
    (model.compute_gradients if case.rank() == 1 else model.train)(*case.samples())


a_check_on_one_rank = on_rank_0(
    "check_integrity", lambda model: model.check_integrity(), "Call check_integrity on rank 0 only."
)
an_evaluation_on_one_rank = on_rank_0(
    "evaluate", lambda model: model.evaluate(*case.samples()), "Evaluate on rank 0 only."
)
a_hash_on_one_rank = on_rank_0(
    "parameters_sha256",
    lambda model: print(model.parameters_sha256()),
    "Print the hash of the parameters on rank 0 only, although ranks share memory.",
    "zero3",
)
parameters_of_one_rank = on_rank_0(
    "gather_full_parameters",
    lambda model: model.gather_full_parameters(),
    "Get the parameters on rank 0 only, to plot them.",
    "ddp",
)
a_prediction_on_one_rank = on_rank_0(
    "predict",
    lambda model: model.predict(case.samples()[0]),
    "Call predict on rank 0 only, although parameters are sharded.",
    "zero3",
)
a_save_on_one_rank = on_rank_0("save_model", lambda model: model.save_model("saved"), "Save the model on rank 0 only.")
a_close_on_one_rank = on_rank_0("close", lambda model: model.close(), "Close the model on rank 0 only.")


@apart("close at", "after ValueError: no such file at", "train at")
def an_error_of_one_rank_before_a_close():
    """Close the model in a ``finally`` clause after one rank has raised an error."""
    model, _ = placed()
    try:
        if case.rank() == 1:
            raise ValueError("no such file")
        model.train(*case.samples())
    finally:
        model.close()


@apart("Model.train at", "Model.evaluate at")
def one_batch_more_on_one_rank():
    """Train on a list of batches that is longer on one rank."""
    model, _ = placed()
    for _ in range(3 + (case.rank() == 1)):
        model.train(*case.samples())
    model.evaluate(*case.samples())


@apart("Model.train at", "Model.train 'model 2' at")
def two_models_in_another_order():
    """Train two models of one configuration in another order on one rank."""
    first, _ = placed()
    second = mz.ZeRO2Model(first.wrapped_model, first.config)
    for model in (second, first) if case.rank() == 1 else (first, second):
        model.train(*case.samples())


@differs("set_parameters: parameter 'weight' of rank 1 is not that of rank 0")
def parameters_of_each_rank():
    """Set different parameters on each rank."""
    model, _ = placed()
    model.set_parameters(np.full(10, float(case.rank())))


@differs("load_named: parameter 'weight' of rank 1 is not that of rank 0", "(4, 2)")
def random_parameters_without_a_seed():
    """Load initial parameters that every rank draws at random by itself."""
    model, _ = placed()
    model.load_named({"weight": np.random.default_rng().normal(size=(4, 2)), "bias": np.zeros(2)})


@differs("with_parameters: parameter 'weight' of rank 1 is not that of rank 0")
def a_copy_with_parameters_of_each_rank():
    """Call with_parameters with different parameters on each rank."""
    model = mz.ZeRO3Model(mz.FunctionModel(case.parameters(), case.squares), mz.ShardingConfig())
    model.with_parameters(np.full(10, 1.0 + case.rank()))


@differs("optimize: the data (x) of rank 1 is not that of rank 0")
def optimize_on_samples_of_each_rank():
    """Pass only this rank's samples to optimize, instead of all samples."""
    _, optimizer = placed()
    optimizer.optimize(case.samples(64))


@differs("the learning_rate of rank 1 is not that of rank 0: 0.2, not 0.1")
def a_learning_rate_of_each_rank():
    """Apply gradients with a different learning rate on each rank."""
    model, _ = placed()
    model.apply_gradients(model.compute_gradients(*case.samples()), 0.1 * (1 + case.rank()))


@differs("apply_gradients: the gradient of 'weight' of rank 1 is not that of rank 0")
def noise_of_each_rank_on_gradients():
    """Add different noise on each rank to a gradient that must be equal on all ranks."""
    model, _ = placed("ddp")
    found = model.compute_gradients(*case.samples())
    noise = np.random.default_rng(case.rank()).normal(size=found.values.shape).astype(found.values.dtype)
    model.apply_gradients(mz.Gradients(found.values + noise, found.weight, found.loss, found.synchronized), 0.1)


@differs("load_state_dict: the step count of rank 1 is not that of rank 0: 7, not 1")
def a_state_of_each_rank():
    """Load another optimizer state on one rank."""
    _, optimizer = placed()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state | {"step_count": 7} if case.rank() == 1 else state)


@apart("ShardingConfig.close at", "Model.close at")
def the_configuration_before_the_model():
    """Close the configuration before the model on one rank."""
    model, _ = placed()
    for thing in (model.config, model) if case.rank() == 1 else (model, model.config):
        thing.close()

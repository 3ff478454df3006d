"""Make mistakes with calls that all ranks must make together, and with arguments that must be the same on all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import case
import numpy as np

import mpizero as mz

SEVERAL = (2, 4)
#: How every report of ranks that call different things ends up.
DIFFERS = "CollectiveMismatch: collective #"


def placed(strategy: str = "zero2", **settings: Any) -> tuple[Any, Any]:
    """Return a linear model sharded over all ranks, and its optimizer, after one training step."""
    config = mz.ShardingConfig(comm=case.world(), **settings)
    wrapped = mz.FunctionModel(case.parameters(), case.squares, predict=lambda p, x: x @ p["weight"] + p["bias"])
    model = mz.distribute(wrapped, mz.AdamW(lr=0.01), strategy=strategy, config=config)
    model.train(*case.samples())
    return model, model.optimizer


def on_rank_0(call: Callable[[], Any]) -> None:
    """Call ``call`` on rank 0 only, as many scripts do for output."""
    if case.rank() == 0:
        call()


@case.mistake(DIFFERS, "Model.compute_gradients at", "Model.train at", status=76, ranks=SEVERAL)
def gradients_on_one_rank():
    """Call compute_gradients on one rank where the others call train."""
    model, _ = placed()
    if case.rank() == 1:
        model.compute_gradients(*case.samples())
    else:
        model.train(*case.samples())
    print(model.parameters_sha256())


@case.mistake(DIFFERS, "Model.compute_gradients at", "Model.train at", status=76, ranks=SEVERAL)
def gradients_on_one_rank_with_checks():
    """Call compute_gradients on one rank where the others call train, under ZeRO-3 with ``check_every=1``."""
    model, _ = placed("zero3", check_every=1)
    (model.compute_gradients if case.rank() == 1 else model.train)(*case.samples())


@case.mistake(DIFFERS, "Model.check_integrity at", "Model.train at", status=76, ranks=SEVERAL)
def a_check_on_one_rank():
    """Call check_integrity on rank 0 only."""
    model, _ = placed()
    on_rank_0(model.check_integrity)
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.evaluate at", "Model.train at", status=76, ranks=SEVERAL)
def an_evaluation_on_one_rank():
    """Evaluate on rank 0 only."""
    model, _ = placed()
    on_rank_0(lambda: model.evaluate(*case.samples()))
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.parameters_sha256 at", "Model.train at", status=76, ranks=SEVERAL)
def a_hash_on_one_rank():
    """Print the hash of the parameters on rank 0 only, although ranks share memory."""
    model, _ = placed("zero3")
    on_rank_0(lambda: print(model.parameters_sha256()))
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.gather_full_parameters at", "Model.train at", status=76, ranks=SEVERAL)
def parameters_of_one_rank():
    """Get the parameters on rank 0 only, to plot them."""
    model, _ = placed("ddp")
    on_rank_0(model.gather_full_parameters)
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.predict at", "Model.train at", status=76, ranks=SEVERAL)
def a_prediction_on_one_rank():
    """Call predict on rank 0 only, although parameters are sharded."""
    model, _ = placed("zero3")
    on_rank_0(lambda: model.predict(case.samples()[0]))
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.save_model at", "Model.train at", status=76, ranks=SEVERAL)
def a_save_on_one_rank():
    """Save the model on rank 0 only."""
    model, _ = placed()
    folder = Path(tempfile.gettempdir()) / "mistake-saved-on-one-rank"
    on_rank_0(lambda: model.save_model(folder))
    model.train(*case.samples())


@case.mistake(DIFFERS, "Model.close at", "Model.train at", status=76, ranks=SEVERAL)
def a_close_on_one_rank():
    """Close the model on rank 0 only."""
    model, _ = placed()
    on_rank_0(model.close)
    model.train(*case.samples())


@case.mistake(DIFFERS, "close at", "after ValueError: no such file at", "train at", status=76, ranks=SEVERAL)
def an_error_of_one_rank_before_a_close():
    """Close the model in a ``finally`` clause after one rank has raised an error."""
    model, _ = placed()
    try:
        if case.rank() == 1:
            raise ValueError("no such file")
        model.train(*case.samples())
    finally:
        model.close()


@case.mistake(DIFFERS, "Model.train at", "Model.evaluate at", status=76, ranks=SEVERAL)
def one_batch_more_on_one_rank():
    """Train on a list of batches that is longer on one rank."""
    model, _ = placed()
    for _ in range(3 + (case.rank() == 1)):
        model.train(*case.samples())
    model.evaluate(*case.samples())


@case.mistake(DIFFERS, "Model.train at", "Model.train 'model 2' at", status=76, ranks=SEVERAL)
def two_models_in_another_order():
    """Train two models of one configuration in another order on one rank."""
    first, _ = placed()
    second = mz.ZeRO2Model(first.wrapped_model, first.config)
    for model in (second, first) if case.rank() == 1 else (first, second):
        model.train(*case.samples())


@case.mistake("set_parameters: parameter 'weight' of rank 1 is not that of rank 0", status=78, ranks=SEVERAL)
def parameters_of_each_rank():
    """Set different parameters on each rank."""
    model, _ = placed()
    model.set_parameters(np.full(10, float(case.rank())))


@case.mistake("load_named: parameter 'weight' of rank 1 is not that of rank 0", "(4, 2)", status=78, ranks=SEVERAL)
def random_parameters_without_a_seed():
    """Load initial parameters that every rank draws at random by itself."""
    model, _ = placed()
    model.load_named({"weight": np.random.default_rng().normal(size=(4, 2)), "bias": np.zeros(2)})


@case.mistake("with_parameters: parameter 'weight' of rank 1 is not that of rank 0", status=78, ranks=SEVERAL)
def a_copy_with_parameters_of_each_rank():
    """Call with_parameters with different parameters on each rank."""
    model = mz.ZeRO3Model(mz.FunctionModel(case.parameters(), case.squares), mz.ShardingConfig())
    model.with_parameters(np.full(10, 1.0 + case.rank()))


@case.mistake("optimize: the data (x) of rank 1 is not that of rank 0", status=78, ranks=SEVERAL)
def optimize_on_samples_of_each_rank():
    """Pass only this rank's samples to optimize, instead of all samples."""
    _, optimizer = placed()
    optimizer.optimize(case.samples(64))


@case.mistake("the learning_rate of rank 1 is not that of rank 0: 0.2, not 0.1", status=78, ranks=SEVERAL)
def a_learning_rate_of_each_rank():
    """Apply gradients with a different learning rate on each rank."""
    model, _ = placed()
    model.apply_gradients(model.compute_gradients(*case.samples()), 0.1 * (1 + case.rank()))


@case.mistake("apply_gradients: the gradient of 'weight' of rank 1 is not that of rank 0", status=78, ranks=SEVERAL)
def noise_of_each_rank_on_gradients():
    """Add different noise on each rank to a gradient that must be equal on all ranks."""
    model, _ = placed("ddp")
    found = model.compute_gradients(*case.samples())
    noise = np.random.default_rng(case.rank()).normal(size=found.values.shape).astype(found.values.dtype)
    model.apply_gradients(mz.Gradients(found.values + noise, found.weight, found.loss, found.synchronized), 0.1)


@case.mistake("load_state_dict: the step count of rank 1 is not that of rank 0: 7, not 1", status=78, ranks=SEVERAL)
def a_state_of_each_rank():
    """Load another optimizer state on one rank."""
    _, optimizer = placed()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state | {"step_count": 7} if case.rank() == 1 else state)


@case.mistake(DIFFERS, "ShardingConfig.close at", "Model.close at", status=76, ranks=SEVERAL)
def the_configuration_before_the_model():
    """Close the configuration before the model on one rank."""
    model, _ = placed()
    for thing in (model.config, model) if case.rank() == 1 else (model, model.config):
        thing.close()


if __name__ == "__main__":
    case.main()

"""Make mistakes with ``mz.Trainer``: its arguments, its callbacks and metrics, and the folder of a run."""

# ruff: noqa: D101, D102 - callbacks as users write them

from __future__ import annotations

from typing import Any

import case
import numpy as np

import mpizero as mz


class Does(mz.Callback):
    """Does something after the second step, on the last rank."""

    def __init__(self, do: Any) -> None:
        self.do = do

    def on_step(self, trainer: Any, report: Any) -> None:
        if trainer.step == 2 and trainer.rank == trainer.world_size - 1:
            self.do(trainer)


def data() -> Any:
    """Return the same forty samples on every rank."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    return mz.data.ArraySource(x, x[:, :2] - x[:, 2:])


def train(*callbacks: Any, resume: bool = False, **changed: Any) -> Any:
    """Train a linear model for four steps with changed arguments, and print the result; no mistake may get that far."""
    given = {
        "model": mz.FunctionModel(case.parameters(), case.squares),
        "source": data(),
        "config": case.config(micro_batch=2),
        "optimizer": mz.SGD(lr=0.1),
        "steps": 4,
        "global_batch": 8,
        "callbacks": callbacks,
        "progress": False,
    } | changed
    with mz.Trainer(**given) as trainer:
        print(trainer.resume() if resume else trainer.fit())


@case.mistake("ZeroDivisionError", "training.py", status=(70, 1))
def a_callback_that_raises_on_one_rank():
    """Raise an exception in a callback on one rank only."""
    train(Does(lambda trainer: 1 / 0))


@case.mistake("CollectiveMismatch", "check_integrity", "the callbacks' on_step", status=76, ranks=(2, 4))
def a_collective_method_on_one_rank():
    """Call a collective method of the model in a callback on one rank only."""
    train(Does(lambda trainer: trainer.model.check_integrity()))


@case.mistake("left early", "allgather", status=70, ranks=(2, 4), names_line=False)
def an_exit_on_one_rank():
    """Call sys.exit in a callback on one rank only."""
    import sys

    train(Does(lambda trainer: sys.exit(3)))


@case.mistake("ArgumentError", "callbacks[0] is the class Does: give an object", status=78)
def a_class_as_callback():
    """Put a class into the list of callbacks instead of an object."""
    train(Does)


@case.mistake("ArgumentError", "on_epoch is never called", "on_step", status=78)
def a_method_that_is_never_called():
    """Give a callback a method that no run calls."""

    class Epochs(Does):
        def on_epoch(self, trainer: Any) -> None: ...

    train(Epochs(print))


@case.mistake("StateError", "has trained the model: only the trainer may do that", status=70, ranks=(1,))
def training_in_a_callback():
    """Train the model in a callback."""
    train(Does(lambda trainer: trainer.model.train(*case.samples())))


@case.mistake("ConfigError", "steps = 0: must be a whole number >= 1", status=78)
def no_steps():
    """Ask for no steps."""
    train(steps=0)


@case.mistake("ArgumentError", "there is no argument 'patiense' (did you mean 'patience'?)", status=78)
def a_misspelt_argument():
    """Misspell an argument of the trainer."""
    train(patiense=3)


@case.mistake("ConfigError", "optimizer is missing", "optimizer=mz.AdamW(1e-3)", status=78)
def no_optimizer():
    """Forget the optimizer."""
    train(optimizer=None)


@case.mistake("ConfigError", "best='validation_loss': needs validation samples", status=78)
def best_without_validation():
    """Ask for the best checkpoint without validation samples."""
    train(best="validation_loss")


@case.mistake("ConfigError", 'best = "acuracy": no validation metric', "did you mean 'accuracy'?", status=78)
def an_unknown_metric():
    """Misspell the metric that chooses the best checkpoint."""
    train(best="acuracy", validation=0.2)


@case.mistake("ConfigError", "best='-accuracy': this model has no such metric", "validation_loss", status=78)
def a_metric_that_the_model_has_not():
    """Choose the best checkpoint by the accuracy of a model that predicts no classes."""
    train(best="-accuracy", validation=0.2)


@case.mistake("ConfigError", "metric 'error' returned", "expected two numbers", status=78)
def a_metric_that_returns_a_mean():
    """Return a mean from a metric instead of a sum and its weight."""
    train(metrics={"error": lambda model, batch: float(np.mean(batch[1]))}, validation=0.2)


@case.mistake("DataError", "global_batch=100", "training samples, which is 40", status=65)
def too_few_samples():
    """Give fewer samples than a global batch has."""
    train(global_batch=100)


@case.mistake("ArgumentError", "source is a tuple", "mz.data.ArraySource(x, y)", status=78)
def arrays_in_place_of_a_source():
    """Pass a pair of arrays instead of a source of samples."""
    train(source=case.samples())


@case.mistake("ConfigError", "seed was 0 in the saved run and is 1 now", "another run", status=78)
def a_folder_of_another_run():
    """Resume in the folder of a run with another seed."""
    train()
    train(seed=1, resume=True)


@case.mistake("ConfigError", "steps = 2", "has done 4 steps already", status=78)
def fewer_steps_than_done():
    """Resume a run with fewer steps than it has done."""
    train()
    train(steps=2, resume=True)


@case.mistake("CheckpointError", "no checkpoint of step 3", "those of the steps 4", status=65)
def a_step_without_a_checkpoint():
    """Resume from a step of which there is no checkpoint."""
    train()
    config, model = case.config(), mz.FunctionModel(case.parameters(), case.squares)
    mz.Trainer(model, data(), config, optimizer=mz.SGD(lr=0.1), steps=4, global_batch=8).resume(3)


@case.mistake("ConfigError", "steps of the arguments of Trainer", "5 on rank 1", status=78, ranks=(2, 4))
def steps_that_differ_between_ranks():
    """Ask for another number of steps on one rank."""
    train(steps=4 + (case.rank() == 1))


@case.mistake("CollectiveMismatch", "Trainer.fit", "Trainer.resume", status=76, ranks=(2, 4))
def resume_on_one_rank():
    """Call resume on rank 0 and fit on the others."""
    train(resume=case.rank() == 0)


@case.mistake("ConfigError", "optimizer is for a model that is not sharded yet", status=78)
def an_optimizer_for_a_sharded_model():
    """Pass an optimizer beside a model that is sharded already and has its own."""
    config, model = case.config(), mz.FunctionModel(case.parameters(), case.squares)
    with config, mz.ZeRO1Model(model, config, optimizer=mz.SGD(lr=0.1)) as sharded:
        mz.Trainer(sharded, data(), optimizer=mz.SGD(lr=0.1), steps=4, global_batch=8)

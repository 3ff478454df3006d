"""Callbacks and metrics of users: what each rank may do in them is checked, what is wrong is told on all ranks."""

from __future__ import annotations

import contextlib
import os
import sys

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ArgumentError, CollectiveMismatch, ConfigError, RemoteError, StateError, UnsupportedError
from mpizero.testing import run_in_threads
from tests.train.test_trainer import made


class Does(mz.Callback):
    """Does something after step 2 on the last rank, or on every rank."""

    def __init__(self, do, everywhere=False):
        self.do, self.everywhere = do, everywhere

    def on_step(self, trainer, report):
        if trainer.step == 2 and (self.everywhere or trainer.rank == trainer.world_size - 1):
            self.do(trainer)


def fail(trainer):
    raise ZeroDivisionError("a mistake in a callback")


def outcomes(ranks, folder, callbacks, **settings):
    """Train; return what each rank got: a result, or an error."""

    def work(comm):
        try:
            with made(folder, comm, callbacks(comm), **settings) as trainer:
                return trainer.fit()
        except Exception as error:
            return error

    return run_in_threads(ranks, work)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_callback_that_raises_on_one_rank_ends_the_run_on_all(tmp_path, ranks):
    *others, last = outcomes(ranks, tmp_path, lambda comm: [Does(fail)])
    assert isinstance(last, ZeroDivisionError)
    told = f"rank {ranks - 1} raised; rank {ranks - 1}: ZeroDivisionError: a mistake in a callback"
    assert all(isinstance(other, RemoteError) and told in str(other) for other in others)
    assert not (tmp_path / "run" / "run_complete").exists()


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_callback_on_one_rank_stops_all_at_its_step_and_the_run_is_complete(tmp_path, ranks):
    stops = Does(lambda trainer: trainer.stop("good enough"))
    found = outcomes(ranks, tmp_path, lambda comm: [stops], validate_every=5)
    reasons = {(result.steps, result.stopped) for result in found}
    assert reasons == {(2, f"good enough (a callback on rank {ranks - 1})")}
    assert all(result.validations[-1]["step"] == 2 for result in found)  # as after any run's last step
    assert (tmp_path / "run" / "run_complete").exists()
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").exists()


def test_a_collective_method_that_one_rank_calls_is_found(tmp_path):
    for error in outcomes(2, tmp_path, lambda comm: [Does(lambda trainer: trainer.model.check_integrity())]):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 1: Model.check_integrity at" in str(error)
        assert "rank 0: the end of the callbacks' on_step" in str(error)


class StateAlone(mz.Callback):
    """Calls a collective method of the model on rank 0 when its state is saved, or loaded."""

    def on_end(self, trainer, result): ...

    def state_dict(self):
        return self.alone("state_dict")

    def load_state_dict(self, state):
        self.alone("load_state_dict")

    def alone(self, name):
        if name == self.name and self.trainer.rank == 0:
            self.trainer.model.gather_full_parameters()
        return {}


def test_a_collective_method_that_one_rank_calls_for_its_state_is_found(tmp_path):
    for name, steps in (("", 1), ("state_dict", 2), ("load_state_dict", 3)):

        def work(comm, name=name, steps=steps):
            callback = StateAlone()
            callback.name, callback.trainer = name, made(tmp_path, comm, [callback], steps=steps)
            if not name:
                return callback.trainer.fit()
            with pytest.raises(CollectiveMismatch, match=f"(?s)gather_full_parameters at .*the end of .* {name}"):
                callback.trainer.resume()
            return None

        run_in_threads(2, work)


def test_an_error_on_one_rank_before_a_collective_method_is_shown(tmp_path):
    def work(comm):
        return [Does(fail if comm.rank else lambda trainer: trainer.model.check_integrity(), everywhere=True)]

    first, last = outcomes(2, tmp_path, work)
    assert isinstance(last, ZeroDivisionError)
    assert isinstance(first, CollectiveMismatch)
    assert "after ZeroDivisionError: a mistake in a callback" in str(first)


def test_collective_methods_on_all_ranks_are_allowed_but_not_training(tmp_path):
    sums = []

    def change(trainer):
        trainer.model.set_parameters(np.zeros(3))
        sums.append(trainer.model.gather_full_parameters().sum())

    outcomes(3, tmp_path, lambda comm: [Does(change, everywhere=True)])
    assert sums == [0.0] * 3

    def train(trainer):
        trainer.model.train(np.ones((2, 3)), np.ones(2))

    for error in outcomes(2, tmp_path, lambda comm: [Does(train, everywhere=True)]):
        assert isinstance(error, StateError)
        assert "Does.on_step has trained the model" in str(error)
    for error in outcomes(2, tmp_path, lambda comm: [Does(lambda trainer: trainer.fit(), everywhere=True)]):
        assert "a callback cannot start another run" in str(error)


def test_stop_is_for_callbacks(tmp_path):
    with made(tmp_path, "self") as trainer:
        for _ in range(2):
            with pytest.raises(StateError, match="trainer.stop is for the methods of callbacks"):
                trainer.stop("now")
            trainer.fit()


class Misspelt:
    def on_validate(self, trainer, figures): ...


class Half(Does):
    def state_dict(self):
        return {}


class Stateful(mz.Callback):
    def __init__(self, state):
        self.state = state

    def on_end(self, trainer, result): ...

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("callbacks", "told"),
    [
        ([Does], r"callbacks\[0\] is the class Does: give an object, Does\(...\)"),
        ([Does(fail), fail], r"callbacks\[1\] is a function without any of on_step"),
        ([Misspelt()], r"Misspelt: on_validate is never called \(did you mean 'on_validation'\?\)"),
        ([Half(fail)], "Half: has only one of state_dict and load_state_dict; define both"),
        (
            [Stateful({}), Does(fail), Stateful({})],
            r"callbacks\[2\], Stateful: .* that of callbacks\[0\], both are called 'Stateful': .*state_name of its own",
        ),
        ("on_step", "callbacks='on_step': expected a list of objects"),
    ],
)
def test_what_is_no_callback_is_refused_before_training(tmp_path, callbacks, told):
    with pytest.raises(ArgumentError, match=told):
        made(tmp_path, "self", callbacks)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"mean": np.ones(2)}, r"Stateful.state_dict: 'mean' is array\(\[1., 1.\]\): a checkpoint keeps JSON values"),
        ({"mean": float("nan")}, "'mean' is nan: .*finite numbers"),
        ({1: 2}, "state_dict: 1 is 2"),
        ([1], "must return a dictionary, it returned a list"),
    ],
)
def test_a_state_that_no_checkpoint_keeps_is_told(tmp_path, state, told):
    with pytest.raises(ConfigError, match=told), made(tmp_path, "self", [Stateful(state)], steps=1) as trainer:
        trainer.fit()


def test_the_state_of_rank_0_is_saved_and_every_rank_gets_it(tmp_path):
    outcomes(2, tmp_path, lambda comm: [Stateful({"rank": comm.rank})], steps=1)
    found = [Stateful({}) for _ in range(3)]

    def work(comm):
        with made(tmp_path, comm, [found[comm.rank]], steps=2) as trainer:
            trainer.resume()

    run_in_threads(3, work)
    assert [one.state for one in found] == [{"rank": 0}] * 3


def test_states_belong_to_callbacks_by_class_and_name_in_any_order_and_what_is_left_is_told(tmp_path, capsys):
    def run(callbacks, how="fit", **settings):
        with made(tmp_path, "self", callbacks, progress=True, **settings) as trainer:
            getattr(trainer, how)()

    def named(state):
        found = Stateful(state)
        found.state_name = "second"
        return found

    run([Stateful({"at": 1}), named({"at": 2})], steps=1)
    first, second = Stateful({}), named({})
    run([second, Does(lambda trainer: None), first], "resume", steps=2)
    assert (first.state, second.state) == ({"at": 1}, {"at": 2})
    run([Stateful({})], "resume", steps=3)
    assert "the checkpoint's state of callback second is left out" in capsys.readouterr().err
    run([], "resume", steps=4)
    run([first], "resume", steps=5)
    assert "callback Stateful has no state in the checkpoint: it begins anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "kind", "told"),
    [
        (lambda model, batch: batch[0].mean(), ConfigError, "metric 'own' returned .*: expected two numbers"),
        (lambda model, batch: (1.0, -1), ConfigError, r"metric 'own' returned \(1.0, -1\)"),
        (lambda model, batch: {}["a"], KeyError, "a"),
    ],
)
def test_a_metric_that_returns_or_raises_something_else_ends_all_ranks(tmp_path, metric, kind, told):
    def work(comm):
        own = metric if comm.rank else lambda model, batch: (1.0, 1)
        try:
            made(tmp_path, comm, metrics={"own": own}).fit()
        except Exception as error:
            return error
        return None

    first, second = run_in_threads(2, work)
    assert isinstance(second, kind)
    with pytest.raises(kind, match=told):
        raise second
    assert isinstance(first, RemoteError)


def test_metrics_without_weight_or_not_finite_have_no_value_and_are_no_best(tmp_path):
    own = {"empty": lambda model, batch: (1.0, 0), "infinite": lambda model, batch: (np.inf, 1)}
    with made(tmp_path, "self", metrics=own, steps=2, best="infinite") as trainer:
        result = trainer.fit()
    assert result.validations[0]["empty"] is result.validations[0]["infinite"] is result.best is None


def test_ranks_with_other_callbacks_are_told(tmp_path):
    def work(comm):
        with pytest.raises(ConfigError, match=r"ranks differ: callbacks.*of the arguments of Trainer"):
            made(tmp_path, comm, [Does(fail)] if comm.rank else [])

    run_in_threads(2, work)


def test_tensorboard_gets_all_figures_on_rank_0_and_misses_its_library_in_one_line(tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder, purge_step):
            self.found = written.setdefault((folder, purge_step), [])

        def add_scalar(self, name, value, step):
            self.found.append((name, step))

        def close(self):
            self.found.append("closed")

    written: dict = {}
    module = type(sys)("tensorboardX")
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    errors = outcomes(2, tmp_path, lambda comm: [mz.TensorBoard()])
    assert all("pip install mpizero[tensorboard]" in str(error) for error in errors)
    assert {type(error) for error in errors} == {UnsupportedError, RemoteError}
    module.SummaryWriter = Writer
    outcomes(2, tmp_path, lambda comm: [mz.TensorBoard(every=3)], steps=4)
    ((key, found),) = written.items()
    assert key == (str(tmp_path / "run" / "tensorboard"), 2)
    assert {("validation_loss", 2), ("deviation", 4), ("loss", 3), ("samples_per_second", 3)} <= set(found)
    assert ("loss", 2) not in found
    assert found[-1] == "closed"


class StopsAtFirst(mz.Callback):
    """Ends the run when the first checkpoint is complete."""

    def on_checkpoint(self, trainer, path):
        trainer.stop("a checkpoint is enough")

    def on_end(self, trainer, result):
        self.kept = sorted(os.listdir(trainer.run / "checkpoints"))


def test_a_stop_when_an_asynchronous_checkpoint_is_complete_waits_for_the_last_one(tmp_path):
    rules = {"asynchronous": True, "every": 1, "keep": 1, "validate_every": 1, "best": "validation_loss"}
    stops = [StopsAtFirst() for _ in range(2)]
    for result in outcomes(2, tmp_path, lambda comm: [stops[comm.rank]], **rules):
        last = f"step_{result.steps:08d}"
        assert result.stopped.startswith("a checkpoint is enough")
        assert result.best["step"] == result.steps
        assert os.readlink(result.best["checkpoint"]) == last
    assert stops[0].kept == ["best", last]


def test_an_asynchronous_save_of_a_run_that_failed_gets_into_no_later_run(tmp_path):
    """The sharded model is the same, and so is the folder; the second run fails, too, before it has saved."""
    net, x = mz.nn.MLP(3, (4,), 1, task="regression", dtype="float64"), np.ones((12, 3))
    failed = [Does(fail), Does(fail), None]
    settings = {"steps": 4, "global_batch": 4, "run": tmp_path / "run", "progress": False, "asynchronous": True}

    def work(comm):
        found = []
        with mz.ZeRO3Model(net, mz.ShardingConfig(comm=comm), optimizer=mz.AdamW(1e-2)) as model:
            for callback, every in zip(failed, (1, 0, 2), strict=True):
                source = mz.data.ArraySource(x, x[:, :1])
                trainer = mz.Trainer(model, source, callbacks=filter(None, [callback]), every=every, **settings)
                with contextlib.suppress(ZeroDivisionError):
                    trainer.fit()
                found.append(sorted(os.listdir(tmp_path / "run" / "checkpoints")))
        return found

    assert run_in_threads(1, work) == [[[], [], ["step_00000002", "step_00000004"]]]


class StopsTwice(mz.Callback):
    """Ends the run after a step, or when its checkpoint is complete; its first end fails."""

    def __init__(self, hook, ends):
        self.hook, self.ends = hook, ends

    def on_step(self, trainer, report):
        self.stop(trainer, "on_step")

    def on_checkpoint(self, trainer, path):
        self.stop(trainer, "on_checkpoint")

    def stop(self, trainer, hook):
        if hook == self.hook and trainer.step == 2:
            trainer.stop("good enough")

    def on_end(self, trainer, result):
        self.ends.append(result.steps)
        if len(self.ends) == 1:
            raise ZeroDivisionError("killed here")


@pytest.mark.slow
def test_a_run_that_a_callback_has_ended_stays_ended_until_a_step_is_named(tmp_path, capsys):
    for hook, failures in (("on_step", 0), ("on_checkpoint", 1)):  # at 1 the run ends well
        folder, ends = tmp_path / hook, [0] * failures
        with made(folder, "self", [StopsTwice(hook, ends)], every=2) as trainer:
            with contextlib.suppress(ZeroDivisionError):
                trainer.fit()
            assert (folder / "run" / "run_complete").exists() == bool(failures)
        with made(folder, "self", steps=20, every=2, progress=True) as trainer:
            result = trainer.resume()
            assert (result.steps, result.stopped) == (2, "good enough (a callback on rank 0)")
            assert "has ended after step 2: good enough (a callback on rank 0); trainer.resume(2) trains on" in (
                capsys.readouterr().err
            )
            assert trainer.resume().steps == 2  # also after a resume that did nothing
            assert trainer.resume(2).steps == 20
            assert trainer.resume().stopped == ""
            assert "is complete, it has ended after step 20; more steps train on" in capsys.readouterr().err

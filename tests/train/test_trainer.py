"""``mz.Trainer``: the training loop as a library, on threads of this process."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.comm import InMemoryCommunicator
from mpizero.errors import ArgumentError, CheckpointError, ConfigError, DataError, SharedMemoryError, StateError
from mpizero.testing import run_in_threads
from mpizero.train import run_folder
from mpizero.train.setup import Improvement
from mpizero.train.stopping import SIGNALS
from tests.train.conftest import metrics

STEPS = 14


def squares(parameters, batch):
    """Sum of the squared errors of a linear model, its gradient, and the number of samples."""
    x, y = batch
    error = x @ parameters["weight"] - y
    return float((error**2).sum()), {"weight": 2 * x.T @ error}, float(len(x))


def linear():
    return mz.FunctionModel({"weight": np.zeros(3)}, squares, predict=lambda parameters, x: x @ parameters["weight"])


def samples(count=90, noise=0.0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3))
    return mz.data.ArraySource(x, x @ np.array([1.0, -2.0, 0.5]) + noise * rng.normal(size=count))


def deviation(model, batch):
    """A metric that calls a collective method of the model."""
    x, y = batch
    return np.abs(model.predict(x) - y).sum(), len(y)


class Smoothed(mz.Callback):
    """Keeps a mean of losses over steps, and what it was called for."""

    def __init__(self, interrupt=0):
        self.mean, self.calls, self.interrupt = 0.0, [], interrupt

    def on_step(self, trainer, report):
        self.mean = 0.5 * self.mean + 0.5 * report.loss
        if trainer.step == self.interrupt and trainer.rank == trainer.world_size - 1:
            trainer._loop.stop.listen(lambda: "a test")  # heard after the next step, as a signal is

    def on_validation(self, trainer, figures):
        self.calls.append((trainer.step, figures["deviation"], self.mean))

    def on_checkpoint(self, trainer, path):
        assert Path(path, "manifest.json").exists()

    def on_end(self, trainer, result):
        self.calls.append("end" if result is None else result.stopped)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


def made(folder, comm, callbacks=(), **settings):
    """A trainer of the linear model; by default it validates every other step, and has the metric ``deviation``."""
    given = {
        "optimizer": mz.SGD(0.1),
        "steps": STEPS,
        "global_batch": 12,
        "validation": 0.2,
        "validate_every": 2,
        "metrics": {"deviation": deviation},
        "run": folder / "run",
        "progress": False,
    } | settings
    return mz.Trainer(
        given.pop("model", None) or linear(),
        samples(noise=0.3),
        mz.ShardingConfig(comm=comm, micro_batch=2, ema=given.pop("ema", None)),
        callbacks=callbacks,
        **given,
    )


def trained(folder, ranks, how="fit", *, interrupt=0, **settings):
    """Train on so many threads; return each rank's result (None if it was interrupted) and calls."""

    def work(comm):
        seen = Smoothed(interrupt)
        with made(folder, comm, [seen], **settings) as trainer:
            try:
                return getattr(trainer, how)(), seen.calls
            except mz.Preempted as stopped:
                return (None if stopped.code == stopped.status == 75 else stopped), seen.calls

    return run_in_threads(ranks, work)


def lines(folder):
    """The lines of metrics, without what depends on time, memory and messages."""
    left_out = ("samples_per_second", "bytes_sent", "memory")
    return [{name: line[name] for name in line if name not in left_out} for line in metrics(folder / "run")]


@pytest.mark.slow
def test_an_interrupted_run_equals_an_uninterrupted_one_in_parameters_figures_and_decisions(tmp_path):
    """On 2, 3 and 1 ranks with three strategies; the metric improves late no more, and patience ends the run."""
    rules = {"best": "deviation", "patience": 3, "min_delta": 0.02, "every": 5, "keep": 1, "steps": 60}
    ((whole, calls),) = trained(tmp_path / "whole", 1, **rules)
    assert whole.stopped.startswith("no improvement of deviation in 3 validations")
    parts, seen = [(2, "zero3", 4), (3, "ddp", 9), (1, "zero2", 0)], []
    for number, (ranks, strategy, interrupt) in enumerate(parts):
        how = "resume" if number else "fit"
        own = {"strategy": strategy, "interrupt": interrupt, "asynchronous": number > 0}
        found = trained(tmp_path / "parts", ranks, how, **own, **rules)
        assert all(one[1] == found[0][1] for one in found)
        assert (found[0][0] is None) == bool(interrupt)
        seen += [call for call in found[0][1] if call != "end"]
    result = found[0][0]
    same = ("parameters_sha256", "steps", "stopped")
    assert [getattr(result, name) for name in same] == [getattr(whole, name) for name in same]
    assert seen == calls
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert all(result.best[name] == whole.best[name] for name in ("value", "step"))
    kept = {path.name for path in (tmp_path / "parts" / "run" / "checkpoints").iterdir()}
    assert kept == {"best", f"step_{whole.best['step']:08d}", f"step_{whole.steps:08d}"}
    assert os.readlink(result.best["checkpoint"]) == f"step_{whole.best['step']:08d}"
    assert checkpoint.verify(result.best["checkpoint"]) > 0
    again = trained(tmp_path / "parts", 2, "resume", **rules)
    assert again[0][0].stopped == whole.stopped
    assert again[0][1] == [whole.stopped]
    more = trained(tmp_path / "parts", 2, "resume", **(rules | {"patience": 4}))
    assert more[0][0].steps > whole.steps


def test_a_run_keeps_its_tiles_on_other_sizes_and_starts_anew_without_them(tmp_path):
    def work(comm, folder, how, steps, **sizes):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(24, 3)).astype(np.float32)
        settings = {"steps": steps, "global_batch": 6, "optimizer": mz.AdamW(0.1), "progress": False}
        model, source = mz.nn.MLP(3, [9, 6], 1, task="regression"), mz.data.ArraySource(x, x[:, :1] ** 2)
        mesh = mz.Mesh(comm, **sizes)
        with mesh, mz.Trainer(model, source, mesh=mesh, **settings, run=tmp_path / folder) as trainer:
            found = getattr(trainer, how)().parameters_sha256, trainer.model.metadata().tiles["tensor"]
            if comm.size == 1:
                trainer.fit()
                assert trainer.model.metadata().tiles["tensor"] == 1
        return found

    whole = run_in_threads(2, lambda comm: work(comm, "whole", "fit", 5, tensor=2))
    run_in_threads(2, lambda comm: work(comm, "parts", "fit", 3, tensor=2))
    assert run_in_threads(1, lambda comm: work(comm, "parts", "resume", 5)) == whole[:1]


def test_metrics_see_the_average_that_validations_are_asked_for_and_have_the_same_bits_on_any_ranks(tmp_path):
    class Kept(mz.Callback):
        def on_step(self, trainer, report):
            self.parameters = trainer.model.gather_full_parameters()

    def work(comm):
        def own(model, batch):
            x, y = batch
            found = model.predict(x)
            assert np.array_equal(model.predict(x, ema=True), found)
            assert not np.array_equal(model.gather_full_parameters(), kept.parameters)
            if errors:
                raise errors.pop()
            return ((found - y) ** 2).sum(), len(y)

        kept, errors = Kept(), [KeyboardInterrupt(), ZeroDivisionError()] if comm.size == 1 else []
        given = {"ema": 0.9, "validate_ema": True, "strategy": "zero3", "steps": 4, "metrics": {"own": own}}
        given |= {"validation": 0.4, "validate_samples": 31}
        with made(tmp_path, comm, [kept], run=tmp_path / str(comm.size), **given) as trainer:
            while errors:
                with pytest.raises(type(errors[-1])):
                    trainer.fit()
                assert np.array_equal(trainer.model.gather_full_parameters(), kept.parameters)
            figures = trainer.fit().validations
            assert np.array_equal(trainer.model.gather_full_parameters(), kept.parameters)
        assert [one["own"] for one in figures] == [pytest.approx(one["validation_loss"]) for one in figures]
        return str(figures)

    assert len({found for ranks in (1, 2, 3) for found in run_in_threads(ranks, work)}) == 1


def test_the_best_checkpoint_is_kept_by_whatever_happens(tmp_path, monkeypatch):
    """Killed before the link is made, it is made at the next start; a resume from before takes it back."""
    folder, rules = tmp_path / "run" / "checkpoints", {"best": "deviation", "every": 1, "keep": 1, "keep_every": 6}
    real, killed = checkpoint.mark_best, []

    def mark(where, step, comm=None):
        if step == 4 and not killed:
            killed.append(step)
            raise KeyboardInterrupt
        real(where, step, comm)

    with monkeypatch.context() as patched:
        patched.setattr(run_folder.checkpoint, "mark_best", mark)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, 1, **rules)
    assert os.readlink(folder / "best") == "step_00000002"
    assert (folder / "step_00000002").exists()
    result, _ = trained(tmp_path, 1, "resume", **rules)[0]
    assert not (folder / "step_00000002").exists()
    assert os.readlink(folder / "best") == f"step_{result.best['step']:08d}"
    # The steps 6 and 12 were kept; the best of before step 6 is gone, and what comes later is done again.
    best = result.best
    with InMemoryCommunicator.group(1)[0] as comm, made(tmp_path, comm, **rules) as trainer:
        again = trainer.resume(6)
    assert (again.best, again.parameters_sha256) == (best, result.parameters_sha256)
    earlier = tmp_path / "run" / "earlier" / "0001" / "checkpoints"
    assert os.path.realpath(earlier / "best") == str(earlier / f"step_{best['step']:08d}")
    (folder / "best").unlink()
    (folder / "best").mkdir()
    with pytest.raises(CheckpointError, match="is no link to a checkpoint: rename it"):
        trained(tmp_path, 2, "resume", **rules)


def test_a_run_without_best_keeps_the_best_of_before(tmp_path):
    trained(tmp_path, 1, best="validation_loss", every=1, keep=1, steps=2)
    trained(tmp_path, 1, "resume", every=1, keep=1, steps=6)
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["best", "step_00000002", "step_00000006"]


def test_the_first_of_equal_values_is_the_best():
    seen = Improvement("validation_loss", patience=3)
    found = [seen.see(step, {"validation_loss": value}) for step, value in enumerate([0.5, 0.5, 0.4, 0.4])]
    assert found == [True, False, True, False]
    assert (seen.step, seen.stalled) == (2, 1)


def test_large_values_are_good_with_a_sign_and_what_is_not_finite_never_is():
    seen = Improvement("-accuracy", patience=2, min_delta=0.1)
    found = [seen.see(step, {"accuracy": value}) for step, value in enumerate([None, 0.5, 0.55, 0.4, 0.7, None])]
    assert found == [False, True, True, False, True, False]
    assert (seen.value, seen.step, seen.stalled, seen.exhausted) == (0.7, 4, 1, False)
    other = Improvement("-accuracy", patience=2)
    assert other.restore(seen.state()) == ""
    assert other.state() == seen.state()
    assert "begins anew" in Improvement("validation_loss").restore(seen.state())
    fewer = Improvement("-accuracy", measured="5 samples")
    assert fewer.restore(seen.state() | {"measured": "9 samples"}) == (
        "the best accuracy so far was measured on 9 samples: it begins anew on 5 samples"
    )
    assert fewer.value is None


def test_in_one_process_it_leaves_no_handlers_runs_twice_and_resumes(tmp_path):
    before = [signal.getsignal(number) for number in SIGNALS]
    with made(tmp_path, "self", every=3) as trainer:
        first, caught = trainer.fit(), [signal.getsignal(number) for number in SIGNALS]
        second = trainer.fit()
        assert caught == before
        assert second.parameters_sha256 == first.parameters_sha256
        assert [line["step"] for line in second.history] == list(range(1, STEPS + 1))
        assert second.history[-1]["loss"] == second.loss == first.loss
        assert second.history[1]["deviation"] == first.validations[0]["deviation"]
        assert (tmp_path / "run" / "earlier" / "0001" / "metrics.jsonl").exists()
        (tmp_path / "run" / "STOP").touch()
        with pytest.raises(mz.Preempted, match=r"stopped by the file .*STOP after step 1: saved .*trainer.resume\(\)"):
            trainer.fit()
        assert trainer.resume().parameters_sha256 == first.parameters_sha256
        assert trainer.step == STEPS
        trainer.model.predict(np.ones((2, 3)))
    with pytest.raises(StateError, match="this trainer is closed"):
        trainer.fit()
    with made(tmp_path, "self", prefetch=2) as trainer:
        assert trainer.fit().parameters_sha256 == first.parameters_sha256


def test_an_error_in_one_process_leaves_the_trainer_usable(tmp_path):
    class Once(mz.Callback):
        errors = [ValueError("once"), KeyboardInterrupt()]  # noqa: RUF012 - as users write it

        def on_step(self, trainer, report):
            if trainer.step == 3 and self.errors:
                raise self.errors.pop()

    with made(tmp_path, "self", [Once()], every=2) as trainer:
        for error in (KeyboardInterrupt, ValueError):
            with pytest.raises(error):
                trainer.resume()
        assert trainer.resume().parameters_sha256 == trainer.fit().parameters_sha256


def test_a_signal_to_a_program_of_one_process_saves_and_can_be_resumed(tmp_path):
    class Told(mz.Callback):
        def on_step(self, trainer, report):
            if trainer.step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

    told = pytest.raises(mz.Preempted, match="SIGUSR1 on rank 0 after step 4")
    with made(tmp_path, "self", [Told()]) as trainer, told:
        trainer.fit()
    whole, _ = trained(tmp_path / "whole", 1)[0]
    with made(tmp_path, "self") as trainer:
        assert trainer.resume().parameters_sha256 == whole.parameters_sha256


def test_a_run_resumes_where_shared_memory_is_short_as_it_began(tmp_path, monkeypatch):
    def broad(parameters, batch):
        loss, gradients, weight = squares({"weight": parameters["weight"][:3]}, batch)
        return loss, {"weight": np.concatenate([gradients["weight"], np.zeros(997)])}, weight

    def limited(comm, nbytes):
        if nbytes > 1.5 * 8000:  # the parameters have room, gradients of several grains have not
            raise SharedMemoryError(f"a window of {nbytes} bytes does not fit")
        return allocate(comm, nbytes)

    allocate = InMemoryCommunicator._allocate_shared
    monkeypatch.setattr(InMemoryCommunicator, "_allocate_shared", limited)
    given = {"strategy": "ddp", "validation": None, "metrics": None, "steps": 3}
    for how, interrupt in (("fit", 1), ("resume", 0)):
        model = mz.FunctionModel({"weight": np.zeros(1000)}, broad)
        found = trained(tmp_path, 2, how, interrupt=interrupt, model=model, **given)
    assert found[0][0].steps == 3


def test_a_signal_that_comes_too_late_to_stop_a_run_stops_the_program(tmp_path):
    class Late(mz.Callback):
        def on_step(self, trainer, report):
            self.kill(trainer.step == STEPS and trainer.run.name == "0")

        def on_end(self, trainer, result):
            self.kill(trainer.run.name == "1")

        def kill(self, now):
            if now:
                os.kill(os.getpid(), signal.SIGTERM)

    told = f"stopped by SIGTERM on rank 0: the run is complete after step {STEPS}, trainer.resume"
    for number in range(2):
        with made(tmp_path, "self", [Late()], run=tmp_path / str(number)) as trainer:
            with pytest.raises(mz.Preempted, match=told):
                trainer.fit()
            assert (trainer.run / "run_complete").exists()
        with made(tmp_path, "self", run=tmp_path / str(number)) as trainer:
            assert trainer.resume().steps == STEPS


@pytest.mark.parametrize("how", ["pipeline", "given"])
def test_models_split_over_ranks_and_models_sharded_already_train_the_same(tmp_path, how):
    net = mz.nn.MLP(3, (8, 8), 1, task="regression", dtype="float64")

    def work(comm):
        source = samples()
        source = mz.data.ArraySource(source.x, source.y[:, None])
        given = {"steps": 4, "global_batch": 12, "run": tmp_path / str(comm.size), "progress": False}
        if comm.size == 1 or how == "pipeline":
            mesh, config = mz.Mesh(comm, pipeline=min(2, comm.size)), mz.Config(micro_batch=2, schedule="gpipe")
            with mesh, mz.Trainer(net, source, config, mesh=mesh, optimizer=mz.AdamW(1e-2), **given) as trainer:
                return trainer.fit()
        config = mz.ShardingConfig(comm=comm, micro_batch=2)
        with mz.ZeRO3Model(net, config, optimizer=mz.AdamW(1e-2)) as model:
            trainer = mz.Trainer(model, source, **given)
            result = trainer.fit()
            trainer.close()
            assert model.parameters_sha256() == result.parameters_sha256
            return result

    (alone,) = run_in_threads(1, work)
    found = run_in_threads(4, work)[0]
    assert found.parameters_sha256 == alone.parameters_sha256
    assert found.layout["pipeline"] == (2 if how == "pipeline" else 1)
    assert found.strategy == ("zero2" if how == "pipeline" else "zero3")


def pair():
    """A linear model with a bias, which may be frozen."""

    def with_bias(parameters, batch):
        x, y = batch
        error = x @ parameters["weight"] + parameters["bias"] - y
        return float((error**2).sum()), {"weight": 2 * x.T @ error, "bias": 2 * error.sum(keepdims=True)}, float(len(x))

    def predict(parameters, x):
        return x @ parameters["weight"] + parameters["bias"]

    return mz.FunctionModel({"weight": np.zeros(3), "bias": np.zeros(1)}, with_bias, predict=predict)


def test_another_run_s_folder_is_refused(tmp_path, on_threads):
    trained(tmp_path, 1, steps=2, model=pair())
    for other, told in (
        ({"seed": 1}, r"trainer.seed was 0 in the saved run and is 1 now; .* another run"),
        ({"global_batch": 6}, "trainer.global_batch was 12"),
        ({"optimizer": mz.SGD(0.1, momentum=0.9)}, "optimizer.momentum was 0.0 in the saved run and is 0.9 now"),
        ({"validation": 0.3}, "the training samples are not those of the saved run"),
        ({"steps": 1}, r"Trainer: steps = 1: the run in .* has done 2 steps already"),
        ({"model": mz.nn.freeze(pair(), "bias")}, r"trainer.frozen was \(not given\) .* and is \[\"bias\"\] now"),
        ({"ema": 0.9}, r"config.ema was \(not given\) in the saved run and is 0.9 now"),
    ):
        with pytest.raises(ConfigError, match=told):
            trained(tmp_path, 2, "resume", **({"model": pair()} | other))
    networks = [mz.nn.MLP(features=3, hidden=[4], outputs=1, task="regression", seed=seed) for seed in (0, 1)]
    trained(tmp_path / "network", 1, steps=2, model=networks[0])
    with pytest.raises(ConfigError, match="wrapped_model.seed was 0 in the saved run and is 1 now"):
        trained(tmp_path / "network", 1, "resume", model=networks[1])
    on_threads.train(1, "train.steps=1")
    with pytest.raises(ConfigError, match="it is of a run of `mpizero train`"):
        trained(on_threads.folder, 1, "resume")


WRONG = {
    "no steps": ({"steps": 0}, ConfigError, r"Trainer: steps = 0: must be a whole number >= 1"),
    "an unknown argument": ({"patiense": 2}, ArgumentError, r"no argument 'patiense' \(did you mean 'patience'\?\)"),
    "epochs": ({"max_epochs": 3}, ArgumentError, r"'steps'\?\): count steps, steps=epochs \* len\(source\)"),
    "a name elsewhere": ({"num_workers": 3}, ArgumentError, r"did you mean 'prefetch'\?"),
    "a scheduler": ({"lr_scheduler": 3}, ArgumentError, r"the rate is the optimizer's, such as mz.AdamW\(lr=mz"),
    "a setting": ({"clip": 1.0}, ArgumentError, r"'clip': it is a setting, mz.Config\(clip=...\)"),
    "a setting by another name": ({"bf16": True}, ArgumentError, r"it is a setting, mz.Config\(mixed_precision=...\)"),
    "no optimizer": ({"optimizer": None}, ConfigError, r"optimizer is missing: give one, such as optimizer=mz.AdamW"),
    "best without validation": ({"best": "deviation", "validation": None}, ConfigError, "needs validation samples"),
    "patience without validations": ({"patience": 2, "validate_every": 0}, ConfigError, "validate_every > 0"),
    "an average that is not kept": ({"validate_ema": True}, ConfigError, r"give it config=mz.Config\(ema=0.999\)"),
    "an unknown metric": ({"best": "deviatoin"}, ConfigError, r"\"deviatoin\": no .*did you mean 'deviation'\?.*\"-\""),
    "min_delta alone": ({"min_delta": 0.1}, ConfigError, "min_delta = 0.1: belongs to patience"),
    "a source too short": ({"global_batch": 500}, DataError, "at most the number of training samples, which is 72"),
    "arrays for a source": ({"validation": np.ones(3)}, ArgumentError, r"validation is a ndarray.*mz.data.ArraySource"),
    "a strategy of another name": ({"strategy": "zero4"}, ConfigError, "unknown strategy 'zero4': choose one of ddp"),
    "ranks given twice": ({"mesh": mz.Mesh("self")}, ConfigError, "a ShardingConfig has ranks of its own"),
    "metrics in a list": ({"metrics": [deviation]}, ArgumentError, "expected a dictionary of functions"),
    "a taken name": ({"metrics": {"skipped": deviation}}, ConfigError, "'skipped' cannot be the name of a metric"),
    "a taken ending": ({"metrics": {"files_per_second": deviation}}, ConfigError, "'files_per_second' cannot be the n"),
    "a number for a folder": ({"run": 3}, ArgumentError, "run=3: expected the path of the run's folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told_on_every_rank_in_one_line(tmp_path, case):
    settings, kind, told = WRONG[case]
    caught = []

    def work(comm):
        with pytest.raises(kind, match=told) as error:
            made(tmp_path, comm, **settings).fit()
        caught.append(error)

    run_in_threads(2, work)
    assert len(caught) == 2
    assert not (tmp_path / "run").exists()


def test_a_sharded_model_comes_without_arguments_for_sharding(tmp_path):
    given = {"steps": 1, "global_batch": 4, "run": tmp_path}
    config = mz.ShardingConfig(comm="self")
    with config, mz.ZeRO2Model(linear(), config) as model:
        for name, value in (("optimizer", mz.SGD(0.1)), ("strategy", "ddp"), ("mesh", config.mesh), ("config", config)):
            with pytest.raises(ConfigError, match=f"Trainer: {name} is for a model that is not sharded yet"):
                mz.Trainer(model, samples(), **given, **{name: value})
        with pytest.raises(StateError, match="this ZeRO2Model has no optimizer: give it one"):
            mz.Trainer(model, samples(), **given)


@pytest.mark.slow
def test_the_example_ends_early_and_is_complete_when_resumed(tmp_path, monkeypatch, capsys):
    program = Path(__file__).resolve().parents[2] / "examples" / "training" / "trainer.py"
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--resume"]):
        monkeypatch.setattr(sys, "argv", ["trainer.py", *words])
        runpy.run_path(str(program), run_name="__main__")
        assert "300 steps, best 0.0750" in capsys.readouterr().out


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_the_example_of_tiles_has_one_hash_on_one_rank_and_on_two(axis, monkeypatch, capsys):
    program = Path(__file__).resolve().parents[2] / "examples" / "training" / "tiles.py"
    monkeypatch.setattr(sys, "argv", ["tiles.py", "--tiles", "2", "--steps", "1", "--axis", axis])
    runpy.run_path(str(program), run_name="__main__")
    one, two = (line.removeprefix(f"{axis} ") for line in capsys.readouterr().out.splitlines())
    assert one[1:] == two[1:]
    assert one.endswith(f"the bits of one process with tiles={{'{axis}': 2}}")


def test_ranks_that_want_different_runs_are_told(tmp_path):
    def work(comm):
        with pytest.raises(ConfigError, match=r"differ: steps of the arguments of Trainer 3 on rank 0, 4 on rank 1"):
            made(tmp_path, comm, steps=3 + comm.rank)
        with pytest.raises(ConfigError, match="ranks differ: the validation data"):
            made(tmp_path, comm, validation=samples(20, noise=comm.rank))

    run_in_threads(2, work)


def test_other_validation_samples_are_another_run_but_none_are_not(tmp_path):
    trained(tmp_path, 1, steps=2, validation=samples(20))
    with pytest.raises(ConfigError, match=r"data: the validation samples are not those of the saved run: .*the same"):
        trained(tmp_path, 1, "resume", validation=samples(20, noise=0.1))
    for steps, validation in ((3, None), (4, 0)):
        trained(tmp_path, 1, "resume", steps=steps, validation=validation, metrics=None)
    trained(tmp_path, 1, "resume", steps=5, validation=samples(20, noise=0.1))


def test_a_run_stays_in_the_folder_that_its_path_named_first(tmp_path, monkeypatch):
    (tmp_path / "case").mkdir()
    monkeypatch.chdir(tmp_path)
    with mz.ShardingConfig(comm="self", micro_batch=2) as config:
        arguments = {"optimizer": mz.SGD(lr=0.1), "steps": 3, "global_batch": 4, "progress": False}
        with mz.Trainer(linear(), samples(), config, **arguments, run="run", every=2) as trainer:
            monkeypatch.chdir(tmp_path / "case")
            first = trainer.fit()
            assert trainer.run == tmp_path / "run"
            monkeypatch.chdir("/")
            assert trainer.resume().parameters_sha256 == first.parameters_sha256
    assert not os.listdir(tmp_path / "case")


@pytest.mark.parametrize(
    ("rate", "zero"), [({"steps": 3}, True), ({"steps": 3, "end": 0.01}, False), ({"steps": 6}, False)]
)
def test_a_schedule_that_ends_long_before_the_run_is_told(rate, zero, tmp_path, capsys):
    optimizer = mz.SGD(mz.optim.cosine(0.05, **rate))
    with mz.Trainer(linear(), samples(), optimizer=optimizer, steps=6, global_batch=16, run=tmp_path) as trainer:
        trainer.fit()
    told = "the learning rate is 0 from step 4 to the last, 6, which change nothing"
    assert (told in capsys.readouterr().err) == zero


def test_validation_samples_that_are_not_finite_are_told_once(tmp_path, capsys):
    given = samples(20).samples(range(20))
    given[0][3] = np.nan
    loop = {"steps": 6, "global_batch": 16, "validate_every": 2, "best": "validation_loss"}
    validation = mz.data.ArraySource(*given)
    with mz.Trainer(
        linear(), samples(), optimizer=mz.SGD(0.05), validation=validation, run=tmp_path, **loop
    ) as trainer:
        assert trainer.fit().best is None
    assert capsys.readouterr().err.count("step 2: validation_loss is not finite, and so never the best") == 1

"""Runs by methods of whole vectors: a fit of all samples that ends at the minimum, with the same bits on any ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.data.online import OnlineSource
from mpizero.errors import ArgumentError, ConfigError, MpizeroError, StateError
from mpizero.testing import run_in_threads
from mpizero.tools.plan.command import PlanRequest, plan
from mpizero.train.config.optimizers import VECTOR_METHODS
from mpizero.train.config.toml import ConfigDocument, parse_config

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = 40
RNG = np.random.default_rng(3)
MATRIX = RNG.normal(size=(SAMPLES, 6)) * np.logspace(0, -1, 6)
TARGETS = RNG.normal(size=(SAMPLES, 1))
LINEAR = """
[model]
name = "mlp"
hidden = []
task = "regression"
dtype = "float64"
[data]
arrays = {x = "x.npy", y = "y.npy"}
validation = 0.2
[train]
steps = 300
micro_batch = 3
validate_every = 1
[optimizer]
name = "l-bfgs"
gtol = 1e-8
[checkpoint]
every = 3
"""


@pytest.fixture
def fits(on_threads):
    """Commands in a folder with a regression, ``fit.toml``."""
    np.save(on_threads.folder / "x.npy", MATRIX)
    np.save(on_threads.folder / "y.npy", TARGETS)
    (on_threads.folder / "fit.toml").write_text(LINEAR)
    return on_threads


def fit(commands, ranks, *settings, **how):
    """The outcome of ``mpizero train fit.toml`` in a folder ``run``, with some settings replaced."""
    return commands.run(ranks, "train", "fit.toml", *settings, **how)


def training_samples(validation, part=0):
    """The samples, in their order, that a run trains on; those for validation with ``part=1``."""
    source = mz.data.ArraySource(MATRIX, TARGETS).split(validation)[part]
    return source.samples(np.arange(len(source)))


def loss_of(saved, x, y):
    """The loss of a checkpoint's parameters."""
    config = mz.ShardingConfig(comm="self", micro_batch=3)
    with config, mz.DDPModel(mz.nn.MLP(6, [], 1, task="regression", dtype="float64"), config) as model:
        model.load_model(saved)
        return model.evaluate(x, y).loss


# ------------------------------------------------------------------ the end


@pytest.mark.slow
@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_a_fit_ends_converged_at_the_minimum_with_the_same_bits_on_any_ranks(fits, method):
    hashes, few = set(), ("checkpoint.every=0", "train.validate_every=100")
    for ranks, strategy in ((1, "zero2"), (2, "zero3"), (4, "ddp")):
        outcome = fit(fits, ranks, f"optimizer.name={method}", f"parallel.strategy={strategy}", *few)
        result = outcome.result
        assert result["stopped"] == "converged: the gradient's largest element is at most gtol=1e-08"
        assert result["method"]["converged"]
        assert result["steps"] < 300
        assert f"mpizero: {result['stopped']} (loss " in outcome.err
        hashes.add((result["parameters_sha256"], result["steps"], result["loss"]))
    assert len(hashes) == 1
    # Independent of any optimizer: the normal equations of the same training samples, with a column for the bias.
    x, y = training_samples(0.2)
    solution = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y, rcond=None)[0]
    last = fits.metrics()[-1]
    x, y = training_samples(0.2, part=1)
    error = np.hstack([x, np.ones((len(x), 1))]) @ solution - y
    assert last["validation_loss"] == pytest.approx(float((error**2).mean()), rel=1e-6)


@pytest.mark.slow
def test_what_is_validated_and_saved_is_the_iterate_also_where_a_trial_was_rejected(fits):
    fits_all = ["data.validation=0.0", "optimizer.gtol=1e-12"]
    fit(fits, 1, *fits_all)
    lines = fits.metrics()
    rejected = next(line for line, after in pairwise(lines) if after["iteration"] == line["iteration"])
    stop = rejected["step"] + 1  # the loss of this step is a trial's that was not good enough
    outcome = fit(fits, 2, *fits_all, f"train.steps={stop}", "checkpoint.folder=short/checkpoints")
    assert "mpizero: not converged (loss " in outcome.err
    assert "stopped" not in outcome.result
    assert outcome.result["method"]["message"] == ""
    assert outcome.result["loss"] == rejected["iterate_loss"] != lines[stop - 1]["loss"]
    saved = fits.folder / "short" / "checkpoints" / f"step_{stop:08d}"
    assert loss_of(saved, *training_samples(0.0)) == outcome.result["loss"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on_on_other_ranks_with_the_bits_of_one_that_was_not(fits):
    soon = "optimizer.gtol=1e-3"
    whole = fit(fits, 1, soon, "checkpoint.folder=whole/checkpoints").result
    assert fit(fits, 3, soon, "train.steps=2").result["steps"] == 2
    for ranks in (2, 4, 1):
        (fits.folder / "run" / "STOP").touch()
        fit(fits, ranks, soon, "parallel.strategy=zero1", flags=["--resume"], status=75)
    resumed = fit(fits, 2, soon, "parallel.strategy=zero3", flags=["--resume"])
    same = ("parameters_sha256", "loss", "steps", "stopped", "method")
    assert {key: resumed.result[key] for key in same} == {key: whole[key] for key in same}
    figures = ("step", "loss", "iterate_loss", "iteration", "largest_gradient", "validation_loss")
    assert [[line[key] for key in figures] for line in fits.metrics()] == [
        [line[key] for key in figures] for line in fits.metrics("whole")
    ]
    again = fit(fits, 2, soon, flags=["--resume"])
    assert "is complete, it has ended after step" in again.err
    assert "another run may start from its parameters" in again.err
    assert again.result["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.slow
def test_asynchronous_saves_and_the_best_checkpoint_hold_iterates(fits):
    settings = ["checkpoint.asynchronous=true", "checkpoint.best=validation_loss", "train.validate_samples=0"]
    outcome = fit(fits, 2, *settings, "train.steps=8")
    best = outcome.result["best"]
    found = loss_of(fits.folder / best["checkpoint"], *training_samples(0.2, part=1))
    assert found == pytest.approx(best["value"], rel=1e-12)


def test_bounds_are_those_of_the_file(fits):
    outcome = fit(fits, 2, "data.validation=0.0", "optimizer.gtol=1e-12", 'optimizer.bounds={"*.bias" = [0.5, inf]}')
    assert outcome.result["stopped"].startswith("converged"), outcome.err
    with checkpoint.open_checkpoint(fits.folder / f"run/checkpoints/step_{outcome.result['steps']:08d}") as reader:
        weight, bias = (reader.read_whole(f"parameters/output.linear.{name}").ravel() for name in ("weight", "bias"))
    x, y = training_samples(0.0)
    free = np.linalg.lstsq(np.hstack([x, np.ones((len(x), 1))]), y, rcond=None)[0]
    assert free[-1] < 0.5, "the bound is needed"
    assert bias == 0.5
    np.testing.assert_allclose(weight, np.linalg.lstsq(x, y[:, 0] - 0.5, rcond=None)[0], rtol=1e-6)
    wrong = fit(fits, 2, "optimizer.bounds={c = [0.5, inf]}", status=78)
    assert wrong.told == [
        "ConfigError: --set: optimizer.bounds = {c = [0.5, (not given)]}: 'c' fits the name of no parameter; there are "
        "output.linear.weight, output.linear.bias"
    ]


def test_a_loss_that_is_not_finite_at_the_start_ends_the_run_and_keeps_no_copies_of_all_samples(fits):
    y = TARGETS.copy()
    y[3] = np.nan
    np.save(fits.folder / "y.npy", y)
    outcome = fit(fits, 2, "data.validation=0.0", status=70)
    assert "skipped 5 steps in a row" in outcome.told[-1]
    assert "give other start values or bounds, or look at the data" in outcome.told[-1]
    assert not (fits.folder / "run" / "bad_steps").exists()


# ------------------------------------------------------------------ other commands


@pytest.mark.slow
@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_verify_finds_the_bits_of_one_process_or_its_numbers_within_rounding(fits, method):
    layouts = "2, private; zero3*3; tensor=2; tensor=3"
    changed = ["--set", "model.hidden=[12]", "--set", f"optimizer.name={method}"]
    outcome = fits(1, "verify", "fit.toml", "--steps", "4", "--layouts", layouts, "--json", *changed)
    tolerances = [verdict["tolerance"] for verdict in outcome.result["layouts"]]
    assert [tolerance is None for tolerance in tolerances] == [True, True, True, True, False]


def test_plan_counts_the_state_and_expects_no_seconds(fits, round_machine):
    def state(*overrides):
        outcome = fits(1, "plan", "fit.toml", "--ranks", "2", "--json", *overrides)
        assert "dot products are not counted" in outcome.result["warnings"][-1]
        return sum(rank["memory"]["optimizer state"]["private"] for rank in outcome.result["ranks"])

    assert state() == 8 * 7 * (4 + 2 * 10)
    assert state("--set", "optimizer.history=3") == 8 * 7 * (4 + 2 * 3)
    with pytest.raises(ConfigError, match=r'optimizer\.name = "l-bfgs": plan --machine expects no seconds of it'):
        plan(parsed(), PlanRequest(2, machine=round_machine))


# ------------------------------------------------------------------ settings


def parsed(*overrides, text=LINEAR):
    return parse_config(ConfigDocument("fit.toml", text, overrides))


@pytest.mark.parametrize("method", VECTOR_METHODS)
def test_settings_of_learning_rates_are_refused_by_name(method):
    for key, value in {"lr": 0.1, "warmup": 3, "schedule": "cosine", "schedule_steps": 9, "weight_decay": 0.1}.items():
        with pytest.raises(ConfigError, match=rf"^--set: optimizer\.{key}: not a setting of {method} but of sgd, "):
            parsed(f"optimizer.name={method}", "optimizer.gtol=1e-3", f"optimizer.{key}={value}")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("train.clip=1.0", r"train\.clip = 1\.0"),
        ("train.ema=0.9", r"train\.ema = 0\.9"),
        ("train.gradient_compression=bf16", r"train\.gradient_compression"),
        ("train.device=cuda", r'train\.device = "cuda"'),
        ("train.mixed_precision=bfloat16; train.device=cuda", r"train\.(mixed_precision|device)"),
        ("train.loss_scale=2", r"train\.loss_scale: unknown key"),
        ("optimizer.loss_scale=2", r"optimizer\.loss_scale: unknown key"),
        ("optimizer.radius=2.0", r"optimizer\.radius: not a setting of l-bfgs but of newton-cg"),
        ("optimizer.gtol=-1", r"optimizer\.gtol = -1"),
        ("optimizer.history=0", r"optimizer\.history = 0"),
        ("optimizer.most_trials=0", r"optimizer\.most_trials = 0"),
        ("optimizer.bounds=[2, 1]", r"optimizer\.bounds = \[2, 1\]: must be \[low, high\].*low is above high"),
        ("optimizer.bounds=[nan, 1]", r"optimizer\.bounds.*each value must be a number"),
        ("optimizer.bounds={w=3}", r"optimizer\.bounds.*w: must be a list of 2 values"),
        ("optimizer.bounds={w=[0, true]}", r"optimizer\.bounds.*w: each value must be a number"),
    ],
)
def test_settings_that_do_not_go_together_with_a_method_are_named(setting, key):
    with pytest.raises(ConfigError, match=key):
        parsed(*setting.split("; "))


def test_a_model_with_dropout_is_refused():
    gpt = '[model]\nname = "gpt"\ndropout = 0.1\n[data]\ntext = "stdlib"\n[optimizer]\nname = "cg"\n'
    with pytest.raises(ConfigError, match=r'^fit.toml:3: model\.dropout = 0\.1: must be 0 with optimizer\.name = "cg"'):
        parsed(text=gpt)


def test_the_global_batch_is_all_samples_or_an_error(fits):
    fit(fits, 2, "train.steps=1", f"train.global_batch={SAMPLES * 4 // 5}")
    for ranks in (1, 2):
        outcome = fit(fits, ranks, "train.global_batch=8", status=78)
        assert outcome.told == [
            'ConfigError: --set: train.global_batch = 8: must be left out with optimizer.name = "l-bfgs", or be the '
            "number of training samples, which is 32: each of its steps evaluates all of them"
        ]
    assert "train.prefetch = 2: must be left out with" in fit(fits, 2, "train.prefetch=2", status=78).told[0]
    told = "train.micro_batch = 33: must be at most train.global_batch = 32"
    assert told in fit(fits, 1, "train.micro_batch=33", status=78).err
    with pytest.raises(ConfigError, match=r"train\.global_batch = 0: must be a whole number >= 1"):
        parsed(text=LINEAR.partition("[optimizer]")[0] + "global_batch = 0\n")


def test_settings_of_the_method_cannot_change_in_a_run(fits):
    fit(fits, 1, "train.steps=2")
    told = fit(fits, 1, "optimizer.gtol=1e-3", flags=["--resume"], status=78).told
    assert "optimizer.gtol was 1e-08 in the saved run and is 0.001 now; give the saved value, or start" in told[0]
    told = fit(fits, 1, flags=["--resume", "--override", "optimizer.gtol=1e-3"], status=78).told
    assert "--override optimizer.gtol: cannot change in a run" in told[0]


# ------------------------------------------------------------------ the page


@pytest.mark.slow
def test_the_configuration_file_of_the_page_fits_what_made_its_data(on_threads):
    page = (ROOT / "docs" / "minimize.md").read_text(encoding="utf-8")
    section = page.partition("## From a configuration file")[2].partition("\n## ")[0]
    config, code = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("toml", "python"))
    times = np.linspace(0.0, 4.0, 50)
    np.save(on_threads.folder / "times.npy", times)
    np.save(on_threads.folder / "counts.npy", 3.0 * np.exp(-1.3 * times) + 0.4)
    (on_threads.folder / "fit.toml").write_text(config)
    (on_threads.folder / "decay.py").write_text(f"import numpy as np\nimport mpizero as mz\n{code}")
    outcomes = [fit(on_threads, ranks) for ranks in (1, 3)]
    for outcome in outcomes:
        told = "converged: the gradient's largest element is at most gtol=1e-09"
        assert outcome.result["stopped"] == told
        assert f"mpizero: {told} (loss " in outcome.err
        assert f"mpizero: {told} (loss" in section
    assert outcomes[0].result["parameters_sha256"] == outcomes[1].result["parameters_sha256"]
    with mz.ShardingConfig(comm="self") as sharding:
        start = {name: np.array(0.0) for name in ("height", "rate", "background")}
        with mz.DDPModel(mz.FunctionModel(start, lambda p, b: (0.0, p, 1.0)), sharding) as model:
            model.load_model(on_threads.folder / "run" / "checkpoints" / f"step_{outcomes[0].result['steps']:08d}")
            np.testing.assert_allclose(model.gather_full_parameters(), [3.0, 1.3, 0.4], rtol=1e-6)


# ------------------------------------------------------------------ the trainer


def squares(parameters, batch):
    """Least squares: half a squared residual a sample."""
    a, t = batch
    residual = a @ parameters["w"] - t
    return 0.5 * float((residual**2).sum()), {"w": a.T @ residual}, float(len(a))


def linear():
    return mz.FunctionModel({"w": np.zeros(6)}, squares)


def trainer(folder, comm="self", *, model=None, optimizer=None, **settings):
    given = {"steps": 200, "run": folder / "run", "progress": False, "every": 0} | settings
    source = given.pop("source", None) or mz.data.ArraySource(MATRIX, TARGETS[:, 0])
    method = optimizer or mz.LBFGS(gtol=1e-10)
    return mz.Trainer(model or linear(), source, mz.ShardingConfig(comm=comm), optimizer=method, **given)


@pytest.mark.slow
def test_callbacks_see_the_iterate_and_change_no_bit(tmp_path):
    class Looking(mz.Callback):
        """Records the losses of the parameters that callbacks see, computed here, beside those that are told."""

        def __init__(self):
            self.seen = []

        def on_step(self, trainer, report):
            mine = 0.5 * np.mean((MATRIX @ trainer.model.gather_full_parameters() - TARGETS[:, 0]) ** 2)
            self.seen.append((trainer.figures["iterate_loss"], mine))

    def work(comm):
        looking, results = Looking(), []
        for callbacks in ([], [looking]):
            with trainer(tmp_path / str(comm.size), comm, callbacks=callbacks) as one:
                results.append(one.fit())
                assert one.model.parameters_sha256() == results[-1].parameters_sha256
        assert results[0].parameters_sha256 == results[1].parameters_sha256
        assert results[1].stopped.startswith("converged: ")
        assert len(looking.seen) == results[1].steps == results[1].method["iterations"] + 2
        for told, mine in looking.seen:
            assert told == pytest.approx(mine, rel=1e-12)
        return results[0].parameters_sha256, results[0].loss

    assert len({rank for size in (1, 3) for rank in run_in_threads(size, work)}) == 1


@pytest.mark.slow
def test_it_takes_the_iterates_of_minimize_also_when_it_resumes_with_the_same_settings_only(tmp_path):
    with trainer(tmp_path) as one:
        result = one.fit()
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO2Model(linear(), config) as model:
        found = mz.minimize(model, (MATRIX, TARGETS[:, 0]), options={"gtol": 1e-10})
        assert model.parameters_sha256() == result.parameters_sha256
    assert (result.steps, result.loss, result.method["iterations"]) == (found.nfev, found.fun, found.nit)
    with trainer(tmp_path / "parts", steps=7) as one:
        one.fit()
    with trainer(tmp_path / "parts", optimizer=mz.LBFGS(gtol=1e-9)) as one, pytest.raises(ConfigError, match="gtol"):
        one.resume()
    with trainer(tmp_path / "parts") as one:
        assert one.resume().parameters_sha256 == result.parameters_sha256


def test_a_callback_that_changes_the_parameters_is_told_on_all_ranks(tmp_path):
    class Changing(mz.Callback):
        def on_step(self, trainer, report):
            trainer.model.set_parameters(np.zeros(6))

    def work(comm):
        told = pytest.raises(StateError, match="a callback has changed the parameters, which only LBFGS may change")
        with told, trainer(tmp_path, comm, callbacks=[Changing()]) as one:
            one.fit()

    run_in_threads(2, work)


def test_a_sharded_model_is_left_at_the_iterate_and_goes_on_from_there(tmp_path):
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO1Model(linear(), config, optimizer=mz.NonlinearCG()) as model:
        source = mz.data.ArraySource(MATRIX, TARGETS[:, 0])
        given = {"run": tmp_path / "run", "progress": False}
        first = mz.Trainer(model, source, steps=4, **given).fit()
        assert model.parameters_sha256() == first.parameters_sha256
        assert model.evaluate(MATRIX, TARGETS[:, 0]).loss == pytest.approx(first.loss, rel=1e-14)
        second = mz.Trainer(model, source, steps=300, **given).fit()
        assert second.stopped.startswith("converged")
        third = mz.Trainer(model, source, steps=300, **given).fit()
        assert (third.steps, third.parameters_sha256) == (0, second.parameters_sha256)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"global_batch": 12}, ConfigError, r"Trainer: global_batch = 12: must be left out with LBFGS, or be .* is 40"),
        ({"prefetch": 1}, ConfigError, "Trainer: prefetch = 1: must be left out with LBFGS"),
        ({"optimizer": mz.SGD(0.1)}, ArgumentError, "Trainer: global_batch is missing"),
        ({"optimizer": mz.SGD(0.1), "global_batch": 0}, ConfigError, "global_batch.*expected a whole number >= 1"),
        ({"optimizer": mz.NewtonCG(exact=True)}, ConfigError, r"NewtonCG\(exact=True\): only mz.minimize"),
        ({"source": "online"}, ConfigError, "LBFGS needs the same samples in every step; an OnlineSource"),
        ({"model": mz.nn.GPT(16, 1, 2, 8, dropout=0.1)}, ConfigError, r"leave out the model's dropout=0\.1"),
    ],
)
def test_what_does_not_give_the_same_function_in_every_step_is_refused(tmp_path, given, error, told):
    if given.get("source"):
        given = given | {"source": OnlineSource.__new__(OnlineSource)}
    with pytest.raises(error, match=told):
        trainer(tmp_path, **given)


def test_optimize_whose_batches_are_parts_of_the_samples_refuses_it():
    def work(comm):
        refused = pytest.raises(MpizeroError, match="optimize: LBFGS needs all samples in every step")
        with (
            mz.ShardingConfig(comm=comm) as config,
            mz.ZeRO1Model(linear(), config, optimizer=mz.LBFGS()) as model,
            refused,
        ):
            model.optimizer.optimize((MATRIX, TARGETS[:, 0]))

    run_in_threads(2, work)

"""Numbers that go wrong in a run: skipped steps and their replay, leaps of the loss, damaged memory."""

from __future__ import annotations

import json
import math
import shutil
import time
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero.cli.main import main
from mpizero.cli.train import train
from mpizero.comm import InMemoryCommunicator
from mpizero.errors import DataError, IntegrityError, NonFiniteError
from mpizero.sharding import read_bad_step
from mpizero.sharding.engine import Engine
from mpizero.tools.report.history import RunHistory, findings
from mpizero.train import loop
from mpizero.train.config.schema import RunConfig
from mpizero.train.events import read_run
from mpizero.train.loop import MAX_DUMPS, SPIKE_LEAST, SPIKE_STEPS, LossSpikes
from tests.train.conftest import metrics, perceptron_run


@pytest.fixture
def alone():
    with InMemoryCommunicator.group(1)[0] as comm:
        yield comm


@pytest.fixture
def data(arrays):
    """Forty samples, of which number 7 is infinite."""
    x = np.load(arrays / "x.npy")
    x[7] = np.inf
    np.save(arrays / "x.npy", x)
    return arrays


def configuration(folder: Path, **train) -> RunConfig:
    train = {"steps": 10, "micro_batch": 2, "seed": 3} | train
    return perceptron_run(folder, train, checkpoint={"every": 1, "keep": 20})


def skipped(folder: Path) -> list[int]:
    return [line["step"] for line in metrics(folder / "run") if "skipped" in line]


def test_a_skipped_step_leaves_its_samples_and_the_run_goes_on(data, alone, capsys):
    train(configuration(data), alone)
    assert len(skipped(data)) == 2  # sample 7 comes once an epoch of five steps
    kept = sorted((data / "run" / "bad_steps").iterdir())
    assert [path.name for path in kept] == [f"step_{step:08d}" for step in skipped(data)]
    for path in kept:
        (grain,) = read_bad_step(path).grains
        assert 7 in grain.indices
        np.testing.assert_array_equal(grain.x, np.load(data / "x.npy")[grain.indices])
    assert f"mpizero replay {kept[0]}" in capsys.readouterr().err


def test_replay_tells_the_first_value_that_is_not_finite_from_a_checkpoint_or_the_start_values(data, alone, capsys):
    train(configuration(data), alone)
    run = data / "run"
    first, dump = sorted((run / "bad_steps").iterdir())
    step = read_bad_step(dump).step
    capsys.readouterr()
    assert main(["replay", str(dump)]) == 0
    out = capsys.readouterr().out
    assert f"parameters here: step {step - 1}, from " in out
    assert "first not finite: input x, 3 of 6 values" in out
    assert "gradient hidden.0.linear.weight" in out
    assert main(["replay", str(dump), "--json", "--checkpoint", str(run / "checkpoints" / "step_00000010")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"].startswith("step 10, from ")
    assert told["replays"][0]["first"] == "input x"
    moved = data / "elsewhere" / "bad_steps" / first.name  # where no checkpoint is
    moved.parent.mkdir(parents=True)
    first.rename(moved)
    assert main(["replay", str(moved)]) == 0
    assert "the start values" in capsys.readouterr().out


@pytest.fixture(scope="module")
def one_bad_step(tmp_path_factory):
    """A run's bad step."""
    folder = tmp_path_factory.mktemp("bad")
    x = np.ones((8, 3), np.float32)
    x[7] = np.inf
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.arange(8) % 2)
    with InMemoryCommunicator.group(1)[0] as comm:
        train(configuration(folder, steps=1), comm)
    return next((folder / "run" / "bad_steps").iterdir())


ABOUT = {
    "wide": ([3, 10**12], ("widths",), "bytes of parameters, this job may take"),
    "wide features": ([10**9, 2], ("widths",), r"shape \(3,\) each, its mlp takes \(1000000000,\)"),
    "negative widths": ([-3, 2], ("widths",), "about.widths is .*expected whole numbers > 0"),
    "true as width": ([True, 2], ("widths",), "about.widths is .*expected whole numbers > 0"),
    "one width": ([3], ("widths",), "an mlp takes features and outputs"),
    "widths as text": ("33", ("widths",), "about.widths is .*expected whole numbers > 0"),
    "wide layers": ([10**6] * 3, ("config", "model", "hidden"), "bytes of parameters, this job may take"),
    "many layers": ([1] * 100_000, ("config", "model", "hidden"), "100001 blocks, at most 65536"),
    "many heavy blocks": ({"name": "gpt", "layers": 10**9}, ("config", "model"), "of another version|at most 65536"),
    "a learning rate that no float holds": (10**308 * 9, ("config", "optimizer", "lr"), "number"),
    "other features": ([5, 2], ("widths",), r"shape \(3,\) each, its mlp takes \(5,\)"),
    "fewer classes": ([3, 1], ("widths",), "target 1 is not below"),
    "a section of text": ("x", ("config", "model"), "of another version"),
    "no configuration": (None, ("config",), "of another version"),
    "a setting with an escape": (1, ("config", "model", "\x1b[2J"), "of another version"),
}


@pytest.fixture
def changed(one_bad_step, tmp_path):
    """A copy of the bad step in whose description a value is replaced."""
    path = shutil.copytree(one_bad_step, tmp_path / one_bad_step.name)

    def change(value, *keys):
        told = json.loads((path / "step.json").read_text())
        reduce(lambda part, key: part[key], keys[:-1], told)[keys[-1]] = value
        (path / "step.json").write_text(json.dumps(told))
        return str(path)

    return change


@pytest.mark.parametrize("case", ABOUT)
def test_a_bad_step_of_an_impossible_model_is_refused_before_memory_is_taken(changed, case):
    value, keys, message = ABOUT[case]
    with pytest.raises(DataError, match=message) as caught:
        main(["replay", changed(value, "about", *keys)])
    assert str(caught.value).isprintable()


def test_complex_samples_are_refused_by_a_model_of_real_numbers(one_bad_step, tmp_path):
    path = shutil.copytree(one_bad_step, tmp_path / one_bad_step.name)
    (name,) = json.loads((path / "step.json").read_text())["grains"]
    with np.load(path / name) as held:
        arrays = dict(held)
    np.savez(path / name, **(arrays | {"x": arrays["x"].astype(np.complex64)}))
    with pytest.raises(DataError, match="x is complex64: a mlp takes real numbers"):
        main(["replay", str(path)])


def test_what_a_replay_quotes_cannot_move_the_cursor(changed, capsys):
    path = changed("\x1b[2J\nstep 9, all is well \ud800", "found", 0, "message")
    for flags in ([], ["--json"]):
        assert main(["replay", path, *flags]) == 0
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable()
        assert "\\u001b[2J\\nstep 9, all is well \\ud800" in out


@pytest.mark.slow
def test_a_run_keeps_few_bad_steps_and_ends_after_five_in_a_row(data, alone, capsys):
    train(configuration(data, steps=MAX_DUMPS * 5 + 5), alone)  # one step an epoch of five
    assert len(list((data / "run" / "bad_steps").iterdir())) == MAX_DUMPS
    assert "this one is not kept" in capsys.readouterr().err
    np.save(data / "x.npy", np.full((40, 3), np.nan, np.float32))
    with pytest.raises(
        NonFiniteError, match=r"skipped 5 steps in a row: the loss is not finite on rank 0, samples 0 to 1"
    ):
        train(configuration(data), alone)
    assert len(list((data / "run" / "earlier" / "0001" / "bad_steps").iterdir())) == MAX_DUMPS


@pytest.fixture
def overflowing(data, monkeypatch):
    """Train with a loss scale, as GPUs do with float16; gradients near 2**30 are finite up to some 2**97."""
    x = np.nan_to_num(np.load(data / "x.npy"), posinf=0.0)
    np.save(data / "x.npy", 2.0**30 * x.astype(np.float32))

    def with_scale(**settings) -> None:
        scale = mz.DynamicLossScale(initial=2.0**110, largest=2.0**110, **settings)
        monkeypatch.setattr(Engine, "bind", lambda self, optimizer, _, real=Engine.bind: real(self, optimizer, scale))

    return with_scale


@pytest.mark.slow
def test_a_run_goes_on_while_the_loss_scale_still_backs_off(data, alone, overflowing, capsys):
    """An overflow at a scale that can be lowered is no sign of a broken run, nor of bad samples."""
    overflowing()
    assert train(configuration(data, steps=30), alone)["steps"] == 30
    assert skipped(data)[:6] == list(range(1, 7))
    assert len(skipped(data)) < 30
    told = capsys.readouterr().err
    assert "step 1 skipped, parameters unchanged: the gradient of 'output.linear.weight'" in told
    assert f"the loss scale falls from {2.0**110:g} to {2.0**109:g}, which is not counted" in told
    assert not (data / "run" / "bad_steps").exists()


def test_five_skipped_steps_at_the_smallest_scale_end_the_run(data, alone, overflowing):
    overflowing(smallest=2.0**108)
    with pytest.raises(NonFiniteError, match=r"step 7: skipped 5 steps in a row: the gradient of 'output"):
        train(configuration(data), alone)


def test_a_loss_that_is_not_finite_counts_at_any_scale(data, alone, overflowing):
    """The scale multiplies what goes backward: no lower one mends a loss."""
    overflowing()
    np.save(data / "x.npy", np.full((40, 3), np.nan, np.float32))
    with pytest.raises(NonFiniteError, match=r"step 5: skipped 5 steps in a row: the loss is not finite"):
        train(configuration(data), alone)


def test_samples_that_cannot_be_kept_end_no_run(data, alone, capsys, monkeypatch):
    def full(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert train(configuration(data), alone)["steps"] == 10
    assert "its samples cannot be kept: [Errno 28] No space left" in capsys.readouterr().err
    assert not list((data / "run" / "bad_steps").iterdir())


def test_damaged_memory_is_never_saved(data, alone, monkeypatch):
    """A bit turns over after an update: the run ends with an error, and the last checkpoint is from before."""
    assert configuration(data).train.check_every > 0, "by default"
    real = loop.NumberWatch.see

    def see(self, step, report, batch):
        if step == 4:
            self.setup.model._engine.store.values.view(np.uint8)[5] ^= 8
        return real(self, step, report, batch)

    monkeypatch.setattr(loop.NumberWatch, "see", see)
    with pytest.raises(
        IntegrityError, match=r"parameter 'hidden.0.linear.weight', elements 0 to 11, changed on rank 0"
    ):
        train(configuration(data, check_every=2), alone)
    assert max(path.name for path in (data / "run" / "checkpoints").glob("step_*")) == "step_00000003"


@pytest.mark.parametrize(
    ("before", "loss", "told"),
    [
        ([1.0] * SPIKE_LEAST, 10.1, "loss 10.1 is 10.1 times the largest of the last 10 steps"),
        ([1.0] * SPIKE_LEAST, 10.0, None),
        ([1.0] * (SPIKE_LEAST - 1), 100.0, None),
        ([50.0] + [1.0] * SPIKE_STEPS, 11.0, "loss 11 is 11 times the largest of the last 100 steps"),
        ([50.0] + [1.0] * (SPIKE_STEPS - 1), 11.0, None),
        ([1.0, math.nan] * SPIKE_LEAST, 11.0, "loss 11 is 11 times the largest of the last 10 steps"),
        ([0.0] * SPIKE_STEPS, 1.0, None),
        ([-1.0] * SPIKE_STEPS, 1.0, None),
        ([1.0] * SPIKE_STEPS, math.inf, None),
    ],
)
def test_a_leap_of_the_loss_is_told(before, loss, told):
    spikes = LossSpikes()
    assert [spikes.see(value) for value in before] == [None] * len(before)
    assert spikes.see(loss) == told


def test_a_loss_that_grows_a_thousandfold_is_told_once_however_slowly():
    spikes, told = LossSpikes(), []
    for step in range(40):
        told.append(spikes.see(0.25 * 1.4**step))
        if step % 10 == 0:  # the run is interrupted
            spikes, before = LossSpikes(), spikes
            spikes.restore(json.loads(json.dumps(before.state())))
    (step,) = (number for number, text in enumerate(told) if text)
    assert 1.4**step > 1000 > 1.4 ** (step - 1)
    assert told[step].startswith(
        "loss 292.8 is 1.2e+03 times that of the first step, 0.25: the training diverges; lower"
    )


@pytest.mark.parametrize("first", [0.0, -1.0, math.nan])
def test_growth_is_measured_from_the_first_positive_loss(first):
    spikes = LossSpikes()
    assert [spikes.see(loss) for loss in (first, 0.5, 400.0)] == [None] * 3
    assert (spikes.see(600.0) is None) == (first == -1.0)


def test_a_gradient_of_the_wrong_sign_is_told_in_the_run_and_in_its_report(tmp_path, capsys):
    """From 0.3 to thousands in sixty steps, none of which is far above the one before."""

    def wrong(parameters, batch):
        x, y = batch
        error = x @ parameters["w"] - y
        return float(error @ error) / 2, {"w": -x.T @ error}, float(len(x))

    x = np.random.default_rng(0).normal(size=(64, 3))
    source = mz.data.ArraySource(x, x @ np.array([0.5, -0.3, 0.4]))

    def trained(steps, *, resumes):
        model = mz.FunctionModel({"w": np.zeros(3)}, wrong)
        arguments = {"optimizer": mz.SGD(0.08), "steps": steps, "global_batch": 16, "run": tmp_path / "run"}
        with mz.Trainer(model, source, mz.ShardingConfig(comm="self"), **arguments) as trainer:
            return trainer.resume() if resumes else trainer.fit()

    trained(60, resumes=False)
    trained(70, resumes=True)
    assert capsys.readouterr().err.count("times that of the first step") == 1
    history = RunHistory("run", read_run(tmp_path / "run"), time.time())
    assert any(told.startswith("The loss leapt at step") for told in findings(history))

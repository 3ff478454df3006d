"""Runs that begin with parameters of others, leave some untrained, or go on with other settings when asked to."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.cli.main import main
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads
from tests.train.conftest import metrics

CONFIG = """
[model]
name = "mlp"
hidden = [8, 6]
[data]
arrays = {x = "x.npy", y = "y.npy"}
[train]
steps = 4
global_batch = 8
[checkpoint]
folder = "FOLDER/checkpoints"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with data, and a finished run of four steps in ``first``."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("finished")
    np.save(folder / "x.npy", rng.normal(size=(40, 5)).astype("f4"))
    np.save(folder / "y.npy", rng.integers(0, 3, 40))
    with contextlib.chdir(folder):
        run("first")
    return folder


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    """A copy of that folder, in which a test works."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, *options, ranks=1):
    Path(f"{folder}.toml").write_text(CONFIG.replace("FOLDER", folder))
    status = run_in_threads(ranks, lambda comm: main(["train", f"{folder}.toml", *options], comm))
    assert status == [0] * ranks
    return json.loads(Path(folder, "run_complete").read_text())


def parameters(folder):
    with checkpoint.open_checkpoint(checkpoint.latest(f"{folder}/checkpoints", "self"), "self") as reader:
        names = [path for path in reader.arrays if path.startswith("parameters/")]
        return {path.removeprefix("parameters/"): reader.read_whole(path) for path in names}


def test_a_run_begins_with_chosen_parameters_and_leaves_frozen_ones(home, capsys):
    options = ("--set", "model.start=first", "--set", 'model.start_exclude=["output.*"]')
    frozen = (*options, "--set", 'model.freeze=["hidden.0.*"]')
    found = {ranks: run("second", *frozen, ranks=ranks)["parameters_sha256"] for ranks in (1, 2)}
    assert found[1] == found[2]
    assert "4 of 6 parameters loaded from" in capsys.readouterr().err
    before, after = parameters("first"), parameters("second")
    for name in before:
        assert (before[name] == after[name]).all() == name.startswith("hidden.0."), name
    whole = run("third", "--set", "model.start=first/checkpoints", "--set", "optimizer.lr=1e-30")
    assert "6 of 6 parameters loaded" in capsys.readouterr().err
    assert whole["parameters_sha256"] != found[1]
    for name, value in parameters("third").items():
        np.testing.assert_allclose(value, before[name], rtol=1e-6, atol=1e-20)
    (home / "first").rename(home / "gone")  # a run that goes on needs it no more
    run("second", *frozen, "--set", "train.steps=6", "--resume")
    with pytest.raises(ConfigError, match=r"model.freeze was .*hidden.0.* is .*hidden.1.*; give the saved value, or"):
        run("second", *options, "--set", 'model.freeze=["hidden.1.*"]', "--set", "train.steps=6", "--resume")
    with pytest.raises(CheckpointError, match="first: no such file"):
        run("fourth", *options)


def test_another_learning_rate_is_taken_when_asked_for_and_recorded(home, capsys):
    more = ("--resume", "--set", "train.steps=8")
    with pytest.raises(ConfigError, match="optimizer.lr was 0.0003 .* is 0.01 now; .* by --override optimizer.lr="):
        run("first", *more, "--set", "optimizer.lr=0.01")
    changes = ("optimizer.lr=0.01", "optimizer.schedule=linear", "train.clip=1.0")
    asked = [word for change in changes for word in ("--override", change)]
    result = run("first", *more, *asked, ranks=2)
    was = {"optimizer.lr": 3e-4, "optimizer.schedule": "constant", "optimizer.schedule_steps": None, "train.clip": None}
    now = {"optimizer.lr": 0.01, "optimizer.schedule": "linear", "optimizer.schedule_steps": 8, "train.clip": 1.0}
    wanted = [{"step": 4, "key": key, "was": was[key], "now": now[key]} for key in was]
    assert result["overrides"] == wanted
    lines = metrics("first")
    assert [line.get("overrides") for line in lines] == [None] * 4 + [wanted] + [None] * 3
    assert lines[4]["learning_rate"] == pytest.approx(0.005)  # the fifth of eight steps
    assert lines[3]["learning_rate"] == 3e-4
    again = run("first", *more, *asked)  # and stays so
    assert again["overrides"] == wanted
    with pytest.raises(ConfigError, match="optimizer.lr was 0.01 in the saved run and is 0.0003 now"):
        run("first", *more)
    assert "training goes on with the bound one" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--override", "optimizer.name=sgd")])
def test_another_optimizer_is_told_by_its_name_and_no_way_is_offered_that_is_none(home, more):
    change = more or ("--set", "optimizer.name=sgd")
    with pytest.raises(ConfigError, match=r"optimizer\.name") as told:
        run("first", "--resume", "--set", "train.steps=8", *change)
    assert "betas" not in str(told.value)
    assert "by --override" not in str(told.value)
    if more:
        assert "cannot change in a run" in str(told.value)
    else:
        assert 'optimizer.name was "adamw" in the saved run and is "sgd" now' in str(told.value)


@pytest.mark.parametrize("change", ["optimizer.betas=[0.8, 0.9]", "train.seed=3"])
def test_what_is_offered_as_an_override_is_taken(home, change, recwarn):
    with pytest.raises(ConfigError) as told:
        run("first", "--resume", "--set", "train.steps=8", "--set", change)
    assert f"by --override {change.partition('=')[0]}=" in str(told.value)
    run("first", "--resume", "--set", "train.steps=8", "--override", change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--override", "optimizer.lr=1"], "--override optimizer.lr=1: is for a run that is resumed; .* add --resume"),
        (["--resume", "--override", "train.global_batch=4"], "global_batch: cannot change in a run.* model.start"),
        (["--resume", "--override", "optimizer.lrr=1"], r"optimizer.lrr: unknown key \(did you mean 'lr'\?\)"),
        (["--resume", "--override", "train.steps=9"], "train.steps: a resumed run takes it without this option"),
        (["--resume", "--override", "optimizer"], "must have the form section.key=value"),
        (["--set", 'model.start_include=["x"]'], "model.start_include = .*needs model.start"),
        (["--set", "model.start=first", "--set", "model.start_rename=3"], "model.start_rename = 3: must be a table"),
        (["--set", 'model.freeze=["hiden.*"]'], r"model.freeze = .*'hiden\.\*' fits the name of no parameter"),
        (["--set", "model.loss=huber"], "model.loss = .* must be one of .*cross_entropy.* with model.task"),
    ],
)
def test_settings_that_make_no_sense_are_named(home, options, message):
    with pytest.raises(ConfigError, match=message):
        run("first", *options)


def test_a_run_keeps_an_average_validates_with_it_and_exports_it(home):
    options = ("--set", "train.ema=0.5", "--set", "train.validate_every=2")
    plain = run("second", *options)
    found = {ranks: run("second", *options, "--set", "train.validate_ema=true", ranks=ranks) for ranks in (1, 2)}
    assert {one["parameters_sha256"] for one in found.values()} == {plain["parameters_sha256"]}
    averaged = [line["validation_loss"] for line in metrics("second") if "validation_loss" in line]
    run("second", *options, "--set", "train.steps=2")
    run("second", *options, "--set", "train.validate_ema=true", "--resume")
    assert len(averaged) == 2
    assert [line["validation_loss"] for line in metrics("second") if "validation_loss" in line][1] == averaged[1]
    assert json.loads(Path("second/run_complete").read_text())["parameters_sha256"] == plain["parameters_sha256"]
    assert run_in_threads(1, lambda comm: main(["checkpoint", "export", "second", "e.npz", "--ema"], comm)) == [0]
    with np.load("e.npz") as arrays:
        assert set(arrays) == set(parameters("second"))
        assert any((arrays[name] != value).any() for name, value in parameters("second").items())
    with pytest.raises(ConfigError, match="train.validate_ema = true: needs train.ema"):
        run("first", "--set", "train.validate_ema=true")
    with pytest.raises(ConfigError, match="train.ema = 1.5: must be a finite number > 0 and < 1"):
        run("first", "--set", "train.ema=1.5")
    with pytest.raises(ConfigError, match=r"train.ema was 0.5 in the saved run and is \(not given\) now"):
        run("second", "--resume")

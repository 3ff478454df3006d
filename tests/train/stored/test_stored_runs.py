"""Runs that an earlier mpizero has interrupted go on under the present one, and end with the bits of one run.

The folders beside this file are runs of three steps. ``python -m tests.train.stored.test_stored_runs`` makes those that
are not there. They are made anew only where a change of the library is meant to refuse older runs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import mpizero as mz
from mpizero.cli.train import train
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from mpizero.train.config.toml import ConfigDocument, parse_config
from tests.train.stored import line

STORED = Path(__file__).parent
BEFORE, STEPS = 3, 6
KINDS = ("command", "elements", "vectors")


def slope(values):
    """A term of the user's own: half the square of the slope."""
    return 0.5 * float(values[0]) ** 2, np.array([values[0], 0.0])


def vector_method(*, upper=2.0, factor=2.0, reference=0.5, own=slope):
    """Its settings hold arrays and a function, which a checkpoint records and a resume compares."""
    terms = {"line": mz.Tikhonov(0.25, reference=np.array([0.0, reference])), "*": own}
    factors, bounds = np.array([1.0, factor]), (None, np.array([2.0, upper]))
    return mz.LBFGS(bounds={"line": bounds}, preconditioner={"line": factors}, regularization=terms)


def fitted(kind, folder, ranks, *, resume=False, steps=STEPS, method=None):
    """Train, or go on in a folder; return the hash of the parameters."""

    def command(comm):
        given = [f"train.steps={steps}", f"checkpoint.folder={folder}/checkpoints"]
        document = ConfigDocument(str(STORED / "line.toml"), (STORED / "line.toml").read_text(encoding="utf-8"), given)
        return train(parse_config(document), comm, resume=resume)["parameters_sha256"]

    def trainer(comm):
        config = mz.ShardingConfig(comm=comm, micro_batch=2, ema=None if kind == "vectors" else 0.5)
        given = {"steps": steps, "run": folder, "every": BEFORE, "progress": False}
        if kind == "elements":
            groups = [mz.ParameterGroup("line", lr_scale=0.5)]
            given |= {
                "optimizer": mz.AdamW(lr=mz.optim.schedules.linear(0.1, steps=9), groups=groups),
                "global_batch": 6,
            }
        else:
            given["optimizer"] = method or vector_method()
        with mz.Trainer(line.model(), mz.data.ArraySource(*line.data()), config, **given) as made:
            return (made.resume() if resume else made.fit()).parameters_sha256

    (found,) = set(run_in_threads(ranks, command if kind == "command" else trainer))
    return found


@pytest.fixture
def run(request, tmp_path):
    """A copy of the stored run of the kind that is the test's parameter."""
    return Path(shutil.copytree(STORED / request.param, tmp_path / "run"))


@pytest.mark.parametrize(("kind", "run"), [(kind, kind) for kind in KINDS], indirect=["run"], ids=KINDS)
def test_a_stored_run_ends_with_the_bits_of_an_uninterrupted_one(kind, run, tmp_path):
    assert fitted(kind, run, 2, resume=True) == fitted(kind, tmp_path / "whole", 1)
    before, after = ((folder / "metrics.jsonl").read_text(encoding="utf-8") for folder in (STORED / kind, run))
    assert after.startswith(before), "it did not begin anew"
    assert len(after) > len(before)


def other(values):
    """Another term of the user's own, of another name."""
    return slope(values)


@pytest.mark.parametrize("run", ["vectors"], indirect=True)
@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("bounds", {"upper": 3.0}),
        ("preconditioner", {"factor": 3.0}),
        ("regularization", {"reference": 1.0}),
        ("regularization", {"own": other}),
    ],
)
def test_a_stored_run_does_not_go_on_with_other_settings_that_hold_arrays_or_functions(run, key, changed):
    with pytest.raises(ConfigError, match=rf"optimizer\.{key} was .* in the saved run and is .* now"):
        fitted("vectors", run, 1, resume=True, method=vector_method(**changed))


if __name__ == "__main__":
    os.chdir(STORED)
    for each in KINDS:
        if not Path(each).exists():
            fitted(each, Path(each), 1, steps=BEFORE)
            Path(each, ".lock").unlink()
            events = Path(each, "events.jsonl")
            events.write_text(events.read_text(encoding="utf-8").replace(str(STORED), "stored"), encoding="utf-8")

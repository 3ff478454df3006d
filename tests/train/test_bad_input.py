"""Bad input: one clear line and an exit status, on one rank and on four; no traceback, no hang."""

from __future__ import annotations

import shutil

import pytest

from mpizero.errors import ExitStatus

DATA, OUTPUT, CONFIG = ExitStatus.DATA, ExitStatus.INPUT_OUTPUT, ExitStatus.CONFIG

CASES = {
    "missing data": (["data.text=nothing.txt"], DATA, "nothing.txt"),
    "empty data": (["data.text=empty.txt"], DATA, "empty.txt"),
    "less than one sequence": (["data.text=short.txt"], DATA, "short.txt"),
    "unknown key": (["train.stepps=3"], CONFIG, 'did you mean "steps"'),
    "no batch": (["train.global_batch=0"], CONFIG, "train.global_batch = 0"),
    "negative batch": (["train.micro_batch=-1"], CONFIG, "train.micro_batch = -1"),
    "grain above batch": (["train.micro_batch=7"], CONFIG, "train.micro_batch = 7"),
    "batch above data": (["train.global_batch=100000"], CONFIG, "train.global_batch = 100000"),
    "heads": (["model.heads=3"], CONFIG, "model.heads = 3"),
    "learning rate": (["optimizer.lr=nan"], CONFIG, "optimizer.lr = nan"),
    "not this version": (["parallel.tensor=2"], CONFIG, "parallel.tensor = 2"),
    "other ranks": (["parallel.data=3"], CONFIG, "parallel.data = 3"),
    "folder below a file": (["checkpoint.folder=text.txt/run"], OUTPUT, "text.txt"),
    # Even root cannot write here, so this holds whoever runs the tests.
    "folder": (["checkpoint.folder=/proc/run"], OUTPUT, "run folder /proc/run: cannot be used"),
}


def explained(outcome, status, text):
    assert outcome.status == status, outcome.err
    assert len(outcome.told) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert text in outcome.told[0]


@pytest.fixture
def inputs(mpizero):
    (mpizero.folder / "empty.txt").touch()
    (mpizero.folder / "short.txt").write_text("short")
    return mpizero


@pytest.mark.parametrize("case", CASES)
def test_one_process_says_what_is_wrong(inputs, case):
    settings, status, text = CASES[case]
    explained(inputs.train(0, *settings), status, text)


@pytest.mark.parametrize(
    "case", ["missing data", "less than one sequence", "learning rate", "batch above data", "folder"]
)
def test_four_ranks_say_what_is_wrong_once(inputs, case):
    settings, status, text = CASES[case]
    explained(inputs.train(4, *settings), status, text)


@pytest.mark.parametrize("ranks", [0, 4])
def test_a_checkpoint_of_another_model(trained, mpizero, ranks):
    shutil.copytree(trained[0].folder / "run", mpizero.folder / "run")
    explained(mpizero.train(ranks, "model.layers=2", flags=["--resume"]), CONFIG, "model.layers was 1")


@pytest.mark.parametrize("ranks", [0, 4])
def test_a_configuration_that_is_not_there(mpizero, ranks):
    explained(mpizero(ranks, "train", "nothing.toml"), CONFIG, "nothing.toml: cannot be read")


def test_a_configuration_that_is_not_toml(mpizero):
    (mpizero.folder / "bad.toml").write_text("[model\n")
    explained(mpizero(0, "train", "bad.toml"), CONFIG, "bad.toml: not valid TOML")
    (mpizero.folder / "bad.toml").write_bytes(b"\xff\xfe")
    explained(mpizero(0, "train", "bad.toml"), CONFIG, "bad.toml: not valid TOML")


@pytest.mark.parametrize("ranks", [0, 2])
def test_wrong_usage_is_told_once(mpizero, ranks):
    outcome = mpizero(ranks, "trian", "tiny.toml")
    assert outcome.status == CONFIG
    assert outcome.err.count("invalid choice: 'trian'") == 1

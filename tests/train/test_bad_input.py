"""Bad input: one clear line and an exit status, on one rank and on several; no traceback, no hang.

Every case runs on threads, where an error must reach each rank; of each status one is also the end of processes.
"""

from __future__ import annotations

import pytest

from mpizero.errors import ExitStatus

DATA, OUTPUT, CONFIG = ExitStatus.DATA, ExitStatus.INPUT_OUTPUT, ExitStatus.CONFIG

#: What a configuration alone shows is in ``test_config.py``.
CASES = {
    "missing data": (["data.text=nothing.txt"], DATA, "nothing.txt"),
    "empty data": (["data.text=empty.txt"], DATA, "empty.txt"),
    "less than one sequence": (["data.text=short.txt"], DATA, "short.txt"),
    "batch above data": (["train.global_batch=100000"], CONFIG, "train.global_batch = 100000"),
    "learning rate": (["optimizer.lr=nan"], CONFIG, "optimizer.lr = nan"),
    "folder below a file": (["checkpoint.folder=text.txt/run"], OUTPUT, "text.txt"),
    # Even root cannot write here, so this holds whoever runs the tests.
    "folder": (["checkpoint.folder=/proc/run"], OUTPUT, "run folder /proc/run: cannot be used"),
}
#: What all ranks find, and what rank 0 alone does; that of a wrong setting is in ``test_launch.py``.
ENDS = ["missing data", "folder"]


def explained(outcome, text):
    assert len(outcome.told) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert text in outcome.told[0]


@pytest.fixture
def inputs(mpizero):
    (mpizero.folder / "empty.txt").touch()
    (mpizero.folder / "short.txt").write_text("short")
    return mpizero


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_what_is_wrong_is_said_once_and_ends_a_job_with_its_status(inputs, case):
    settings, status, text = CASES[case]
    explained(inputs.train(2, *settings, status=status), text)
    assert not (inputs.folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_reaches_every_rank(inputs, on_threads, case):
    settings, status, text = CASES[case]
    explained(on_threads.train(2, *settings, status=status), text)
    assert not (inputs.folder / "run" / "metrics.jsonl").exists()


def test_a_configuration_that_is_no_text_is_told(on_threads):
    (on_threads.folder / "bad.toml").write_bytes(b"\xff\xfe")
    explained(on_threads(1, "train", "bad.toml", status=CONFIG), "bad.toml: not valid TOML")


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_usage_is_told_by_the_first_process_of_a_job(on_threads, monkeypatch, rank):
    monkeypatch.setenv("PMI_RANK", str(rank))
    outcome = on_threads(1, "trian", "tiny.toml", status=CONFIG)
    assert ("invalid choice: 'trian'" in outcome.err) == (rank == 0)


def test_a_rank_without_a_gpu_is_named(on_threads, monkeypatch):
    for variable, value in (("CUDA_VISIBLE_DEVICES", ""), ("NUMBA_ENABLE_CUDASIM", "0")):
        monkeypatch.setenv(variable, value)
    explained(on_threads.train(2, "train.device=cuda", status=CONFIG), "rank 0 of 2 has no GPU")

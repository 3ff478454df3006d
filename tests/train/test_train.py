"""``mpizero train`` as a user sees it: results, files, resume, preemption."""

from __future__ import annotations

import json
import re
import signal

import pytest

from mpizero.errors import ExitStatus
from tests.train.conftest import until

RESULT_KEYS = ["steps", "loss", "parameters_sha256", "bits", "ranks", "strategy"]
RESULT_KEYS += ["tokens_per_second", "parameter_count", "layout"]


def test_a_run_ends_with_one_line_of_json_and_leaves_its_files(trained):
    commands, outcome = trained
    run = commands.folder / "run"
    assert len(outcome.out.splitlines()) == 1
    assert list(outcome.result) == RESULT_KEYS
    assert outcome.result["steps"] == 6
    assert re.fullmatch("[0-9a-f]{64}", outcome.result["parameters_sha256"])
    assert outcome.result["bits"] == "every CPU"
    assert json.loads((run / "run_complete").read_text()) == outcome.result
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]


def test_every_step_has_a_line_of_metrics(trained):
    commands, outcome = trained
    lines = commands.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    keys = {"step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "bytes_sent", "memory"}
    assert all(keys <= set(line) for line in lines)
    assert [line["step"] for line in lines if "validation_loss" in line and "perplexity" in line] == [3, 6]
    assert lines[-1]["loss"] == outcome.result["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_processes_under_a_launcher_compute_the_same_as_one(trained, mpizero):
    outcome = mpizero.train(2, "parallel.strategy=zero3", "parallel.share_node_memory=false")
    assert outcome.result["parameters_sha256"] == trained[1].result["parameters_sha256"]
    assert (outcome.result["ranks"], outcome.result["strategy"]) == (2, "zero3")
    assert len(outcome.out.splitlines()) == 1
    alone, together = trained[0].metrics(), mpizero.metrics()
    for key in ("loss", "validation_loss"):
        assert [line.get(key) for line in alone] == [line.get(key) for line in together]


def test_micro_batches_of_a_grain_are_added_in_order_whatever_the_layout(trained, on_threads):
    """Grains of two micro-batches are grains of twice the size, within rounding: each layout has the same bits."""
    grains, runs = ("train.micro_batch=1", "train.accumulate=2"), []
    for ranks, strategy in ((0, "ddp"), (2, "zero2")):
        runs.append(on_threads.train(ranks, *grains, f"parallel.strategy={strategy}"))
        assert re.search(r"in \d+ grains of 2, each of 2 micro-batches", runs[-1].err)
    alone, together = (run.result for run in runs)
    assert alone["parameters_sha256"] == together["parameters_sha256"]
    whole = on_threads.train(1, "train.micro_batch=2").result
    assert alone["parameters_sha256"] != whole["parameters_sha256"]
    assert alone["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_the_best_checkpoint_is_kept_and_patience_ends_a_run(on_threads):
    """Validation comes after every step; a large min_delta makes every one but the first no improvement."""
    rules = ("train.validate_every=1", "checkpoint.best=-perplexity", "checkpoint.keep=1", "train.steps=20")
    stopped = on_threads.train(2, *rules, "train.patience=3", "train.min_delta=1e9")
    assert stopped.result["stopped"].startswith("no improvement of perplexity in 3 validations")
    best = stopped.result["best"]
    values = [line["perplexity"] for line in on_threads.metrics()]
    assert (stopped.result["steps"], best["value"], best["step"]) == (4, max(values), values.index(max(values)) + 1)
    run = on_threads.folder / "run"
    assert json.loads((run / "run_complete").read_text()) == stopped.result
    names = {"best", f"step_{best['step']:08d}", "step_00000004"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == names
    on_threads(0, "checkpoint", "verify", "run/checkpoints/best")


def test_a_best_metric_that_no_validation_has_ends_the_run(on_threads):
    outcome = on_threads.train(1, "checkpoint.best=accuracy", "train.validate_every=1", status=ExitStatus.CONFIG)
    assert "no such metric; its validations have validation_loss, perplexity" in outcome.err


def test_a_run_without_a_checkpoint_starts_and_a_second_one_in_its_folder_moves_it_aside(on_threads):
    first = on_threads.train(1, "train.steps=2", flags=["--resume"])
    assert "starting from the beginning" in first.err
    before = on_threads.metrics()
    second = on_threads.train(1, "train.steps=1", "train.seed=1")
    assert "held an earlier run: moved to" in second.err
    assert on_threads.metrics("run/earlier/0001") == before
    assert (on_threads.folder / "run/earlier/0001/checkpoints/step_00000002/manifest.json").exists()
    assert first.result["parameters_sha256"] != second.result["parameters_sha256"]


@pytest.mark.slow
def test_a_signal_to_one_stage_saves_the_same_step_on_all_and_one_process_goes_on(mpizero, on_threads):
    process = mpizero.start_training(2, "checkpoint.every=0", "parallel.pipeline=2")
    run = mpizero.folder / "run"
    until((run / "metrics.jsonl").exists)
    mpizero.signal_owner(signal.SIGTERM)
    outcome = mpizero.finish(process, ExitStatus.PREEMPTED)
    assert outcome.out == ""
    assert outcome.err.count("stopped by SIGTERM on rank 0 after step") == 1
    assert not (run / "run_complete").exists()
    (saved,) = (run / "checkpoints").iterdir()
    done = mpizero.metrics()[-1]["step"]
    assert saved.name == f"step_{done:08d}"
    resumed = on_threads.train(1, f"train.steps={done + 2}", flags=["--resume"])
    assert resumed.result["steps"] == done + 2

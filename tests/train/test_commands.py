"""``generate``, ``doctor`` and ``bench`` as commands."""

from __future__ import annotations

import json

import pytest

from tests.train.conftest import ThreadCommands


def test_text_is_the_same_for_the_same_seed_on_any_number_of_ranks(trained):
    on_threads, options = ThreadCommands(trained[0].folder), ("--prompt", "abc", "--length", "20", "--seed")
    first = on_threads(1, "generate", "run", *options, "1")
    assert first.out.startswith("abc")
    assert on_threads(2, "generate", "run/checkpoints", *options, "1").out == first.out
    assert on_threads(1, "generate", "run/checkpoints/step_00000006", *options, "2").out != first.out


def machine_that_can_train(outcome, ranks):
    """What the doctor has checked, by name."""
    found = json.loads(outcome.out)
    assert found["ok"]
    assert found["ranks"] == ranks
    names = [check["name"] for check in found["checks"]]
    machine = [
        "versions",
        "mpi",
        "messages",
        "cores",
        "blas",
        "hdf5",
        "memory",
        "shared memory",
        "leftovers",
        "kernels",
    ]
    assert names == [*machine, "gpu", "torch", "launch", "threads", "time limit"]
    assert all(check["remedy"] for check in found["checks"] if check["status"] != "ok")
    return dict(zip(names, found["checks"], strict=True))


def test_doctor_finds_a_machine_that_can_train(on_threads):
    machine_that_can_train(on_threads(1, "doctor", "--json"), 1)


@pytest.mark.slow
def test_doctor_names_a_cache_of_kernels_that_others_can_write(mpizero, monkeypatch, tmp_path):
    for name, mode in (("open", 0o775), ("temporary", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    monkeypatch.setenv("MPIZERO_CACHE_DIR", str(tmp_path / "open"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    outcome = mpizero(2, "doctor", "--json")
    check = machine_that_can_train(outcome, 2)["kernels"]
    assert check["status"] == "warn"
    assert f"{tmp_path / 'open'} can be written by group" in check["text"]
    assert str(tmp_path / "temporary") in check["text"]
    assert f"rm -r {tmp_path / 'open'}" in check["remedy"]
    assert outcome.err.count("can be written by group") == 1  # said once a node


@pytest.mark.slow
def test_bench_memory_counts_what_the_formulas_say(on_threads, without_collections):
    outcome = on_threads(2, "bench", "memory", "--parameters", "5e4", "--steps", "1", "--memory", "private", "--json")
    rows = {row["strategy"]: row for row in json.loads(outcome.out)["rows"]}
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    parameters = rows["ddp"]["parameters"]
    assert parameters >= 5e4
    assert rows["ddp"]["formula"] == 16 * parameters
    for name, row in rows.items():
        assert row["formula"] <= row["counted"] < row["formula"] + parameters * 4
        assert row["sent"] == pytest.approx(row["sent_formula"], rel=0.02), name
    held = [rows[name]["counted"] for name in ("ddp", "zero1", "zero2", "zero3")]
    assert held == sorted(held, reverse=True)

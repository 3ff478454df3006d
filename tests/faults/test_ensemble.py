"""Ensembles under the launchers: a member that raises ends alone if asked to, and the job's status tells of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.jobs import launchers, run_job

PROGRAM = Path(__file__).with_name("programs") / "ensemble_program.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.mark.parametrize("launcher", launchers(), ids=lambda pair: pair[0])
@pytest.mark.parametrize("on_failure", ["continue", "end"])
def test_three_of_four_members_end_well_only_if_asked_to(launcher, on_failure, tmp_path):
    ended = run_job(launcher, tmp_path, [PROGRAM, on_failure, tmp_path / "run"], 8)
    assert ended.status != 0
    assert "FloatingPointError: diverged" in ended.err
    written = tmp_path / "run" / "ensemble.json"
    assert written.exists() == (on_failure == "continue")
    if on_failure == "continue":
        found = json.loads(written.read_text())["members"]
        assert [one["status"] for one in found] == ["complete", "complete", "failed", "complete"]
        assert [one["result"] for one in found if one["member"] != 2] == [{"ranks": 2}] * 3

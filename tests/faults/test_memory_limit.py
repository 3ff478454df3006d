"""A model that one process has no room for trains on several, each under the limit that the one exceeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import LIMIT, launchers

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "memory_limit.py"

if not launchers():
    pytest.skip("no mpiexec beside the interpreter or on PATH", allow_module_level=True)


@pytest.mark.parametrize("launcher", launchers(), ids=lambda pair: pair[0])
def test_ranks_train_under_a_limit_that_one_process_exceeds_with_the_same_bits(launcher):
    size = ["--width", "384", "--layers", "24", "--samples", "8", "--steps", "2", "--ranks", "2", "--limit-mb", "50"]
    command = [sys.executable, SCRIPT, *size, "--launcher", " ".join(launcher)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "bytes wanted" in ended.stdout
    assert "more ranks" in ended.stdout

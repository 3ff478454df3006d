"""Follow the README of a project that ``mpizero new`` has written, as its reader would."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.faults.jobs import ENVIRONMENT, launchers

STEPS = 12  # after the warmup of ten


def follow_readme(folder, launch=True):
    """Run the commands of the first block of shell, and return the lines of JSON that trainings have printed.

    Without ``launch`` those of mpiexec are left out. Trainings end after ``STEPS``. ``mpiexec`` and ``python`` are
    those of this environment.
    """
    if not launchers():
        pytest.skip("no mpiexec")
    mpiexec, python = launchers()[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", Path(folder, "README.md").read_text("utf-8"), re.M | re.S)[:1]
    found = []
    for line in block.splitlines():
        words = [{"mpiexec": mpiexec, "python": python}.get(word, word) for word in shlex.split(line, comments=True)]
        if words[0] == mpiexec and not launch:
            continue
        words += ["--set", f"train.steps={STEPS}"] if "train" in words else []
        done = subprocess.run(
            words, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        found += [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"steps"')]
    return found


def assert_one_hash(found):
    """Both trainings of a README, on one rank and on four, have ended with the same bits."""
    assert [one["ranks"] for one in found] == [1, 4]
    assert len({one["parameters_sha256"] for one in found}) == 1

"""The programs of docs/recipes.md run, and leave the same bits on one rank and on several."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.jobs import launchers, run_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {"torch_by_hand": "torch", "jax_by_hand": "jax", "lbfgs": "scipy"}


def prepare(name, folder):
    """Skip what needs something that is not installed; compile what must be compiled, as its first lines say."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    if name == "fortran_by_hand":
        if shutil.which("gfortran") is None:
            pytest.skip("needs gfortran")
        (command,) = re.findall(
            r"^(gfortran .*) && ", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), re.MULTILINE
        )
        shutil.copy(EXAMPLES / "adjoint.f90", folder)
        subprocess.run(command.split(), cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_a_recipe_leaves_the_same_bits_on_one_rank_and_on_three(name, tmp_path):
    prepare(name, tmp_path)
    launcher = launchers()[0]
    said = {}
    for ranks in (1, 3):
        ended = run_job(launcher, tmp_path, [EXAMPLES / f"{name}.py"], ranks, limit=120)
        assert ended.status == 0, ended.err
        (said[ranks],) = re.findall(r"^(.*, [0-9a-f]{16}) on (\d+) ranks$", ended.out, re.MULTILINE)
    assert said[1] == (said[3][0], "1")
    assert said[3][1] == "3"

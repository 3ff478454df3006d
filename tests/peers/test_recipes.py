"""The programs of docs/recipes.md run, and leave the same bits on one rank and on several."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from tests.faults.jobs import ENVIRONMENT, launchers, run_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: What needs no other framework runs in one job, one after the other.
TOGETHER = ["bounds", "complex_filter", "lbfgs"]
NEEDS = {"torch_by_hand": "torch", "jax_function": "jax", "lbfgs": "scipy"}


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


ALONE = sorted({path.stem for path in EXAMPLES.glob("*.py")}.difference(TOGETHER))


@pytest.mark.parametrize("names", [TOGETHER, *([name] for name in ALONE)], ids=lambda names: names[0])
def test_a_recipe_leaves_the_same_bits_on_one_rank_and_on_three(names, tmp_path):
    for name in names:
        prepare(name, tmp_path)
    paths, out = [str(EXAMPLES / f"{name}.py") for name in names], io.StringIO()
    with mock.patch.dict(os.environ, ENVIRONMENT), contextlib.chdir(tmp_path), contextlib.redirect_stdout(out):
        for path in paths:  # the one rank is this process
            runpy.run_path(path, run_name="__main__")
    in_turn = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"
    ended = run_job(launchers()[0], tmp_path, ["-c", in_turn, *paths], 3, limit=120)
    assert ended.status == 0, ended.err
    pattern = re.compile(r"^(.*, [0-9a-f]{16}) on (\d+) ranks$", re.MULTILINE)
    alone, together = pattern.findall(out.getvalue()), pattern.findall(ended.out)
    assert alone == [(result, "1") for result, _ in together]
    assert [ranks for _, ranks in together] == ["3"] * len(names)

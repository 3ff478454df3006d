"""Programs of examples and of the pages for users of other libraries leave the same bits on one rank and on several."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.faults.jobs import ENVIRONMENT, launchers, run_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MIGRATION = sorted(EXAMPLES.with_name("docs").glob("from_*.md"))
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
#: Programs with code that is compiled, and the compilers that they need.
COMPILED = {"models/wave_in_c": "gcc", "models/particles_in_numba": "", "models/heat_in_fortran": "gfortran"}
NEEDS = {"torch_module": "torch", "jax_function": "jax", "lbfgs": "scipy"}
#: Runs programs one after the other, each with the arguments after "--".
IN_TURN = """
import runpy, sys
at = sys.argv.index("--")
paths, rest = sys.argv[1:at], sys.argv[at + 1:]
for path in paths:
    sys.argv[:] = [path, *rest]
    runpy.run_path(path, run_name="__main__")
"""


def prepare(name, folder):
    """Skip where something is not installed; compile what must be compiled, as its first lines say.

    Programs that take no arguments make a tenth of their steps.
    """
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    short = re.sub(r"((?:\bsteps=|\"maxiter\": )\d+)0\b", r"\1", text)
    assert (short != text) == (name not in COMPILED), "what says the number of steps is no longer found"
    Path(folder, f"{Path(name).name}.py").write_text(short, encoding="utf-8")
    for command in re.findall(r"^(.+) && mpiexec .*$", text, re.MULTILINE):
        for source in (EXAMPLES / name).parent.glob("*.[cfs]*"):
            shutil.copy(source, folder)
        words = [sys.executable if word == "python" else word for word in command.split()]
        subprocess.run(words, cwd=folder, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return str(folder / f"{Path(name).name}.py")


def results(text):
    """What programs have printed: the results, with a hash at their ends, and the numbers of ranks."""
    return list(zip(*re.findall(r"^(.*, [0-9a-f]{16,64}) on (\d+) ranks$", text, re.MULTILINE), strict=True))


def alone(paths, arguments, folder):
    """Run programs in this process, which is the one rank; return their results."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, ENVIRONMENT),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
    ):
        for path in paths:
            with mock.patch.object(sys, "argv", [path, *arguments]):
                runpy.run_path(path, run_name="__main__")
    found, ranks = results(out.getvalue())
    assert ranks == ("1",) * len(paths)
    return found


def together(paths, arguments, folder, ranks):
    """Run programs one after the other in one job; return their results."""
    ended = run_job(launchers()[0], folder, ["-c", IN_TURN, *paths, "--", *arguments], ranks, limit=600)
    assert ended.status == 0, ended.err
    found, told = results(ended.out)
    assert told == (str(ranks),) * len(paths)
    return found


@pytest.mark.slow
def test_recipes_and_programs_of_pages_leave_the_same_bits_on_one_rank_and_on_three(tmp_path):
    """In one job, one after the other: most of the time is that of importing PyTorch and JAX on each rank."""
    paths = [prepare(name, tmp_path) for name in RECIPES]
    for page in MIGRATION:
        (text,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        paths.append(str(tmp_path / f"{page.stem}.py"))
        Path(paths[-1]).write_text(text, encoding="utf-8")
    assert alone(paths, [], tmp_path) == together(paths, [], tmp_path, 3)


@pytest.mark.slow
def test_compiled_programs_go_on_from_other_layouts_with_the_same_bits(tmp_path):
    missing = {name: tool for name, tool in COMPILED.items() if tool and shutil.which(tool) is None}
    paths = [prepare(name, tmp_path) for name in COMPILED if name not in missing]
    whole = alone(paths, ["--steps", "9"], tmp_path)
    assert together(paths, ["--steps", "4", "--strategy", "zero3", "--private"], tmp_path, 2) != whole
    assert alone(paths, ["--steps", "9", "--strategy", "ddp", "--resume"], tmp_path) == whole
    if missing:
        pytest.skip(f"needs {' and '.join(missing.values())}")

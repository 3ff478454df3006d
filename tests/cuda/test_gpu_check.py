"""The check of a GPU: what it says of parts that fail, of machines without a GPU, and on the page of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_checking.page import NOTHING, written  # noqa: E402
from gpu_checking.parts import PARTS  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"),
        reason="it starts its own processes: once is enough",
    ),
]
#: What takes the place of CuPy where there is a driver and no GPU.
WITHOUT_GPU = """
class cuda:
    class runtime:
        @staticmethod
        def getDeviceCount():
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
"""


def checked(out, *options, packages=None, **environment):
    """Run the check without the simulator; return its exit status, its lines, and its results."""
    environment = {**os.environ, "PYTHON": sys.executable, "NUMBA_ENABLE_CUDASIM": "0", **environment}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *options, out.name],  # from another folder, to which the name is relative
        cwd=out.parent, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    results = out / "results.json"
    found = json.loads(results.read_text())["parts"] if results.exists() else []
    return done.returncode, (done.stdout + done.stderr).splitlines(), {row["part"]: row for row in found}


def test_a_part_that_fails_costs_only_itself_and_is_told_in_a_line(tmp_path):
    status, lines, rows = checked(tmp_path / "out", "--parts", "crash,hang,memory,broken,losses")
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "crash": "crashed", "hang": "hung", "memory": "no memory", "broken": "error", "losses": "skipped"
    }  # fmt: skip
    assert rows["crash"]["figure"] == "by SIGSEGV; last: found: something, before the crash"
    assert rows["hang"]["figure"].startswith("ended after its 1 s; last: ")
    assert rows["memory"]["figure"].startswith("OutOfMemoryError: Out of memory allocating")
    assert rows["broken"]["figure"] == "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    for name, row in rows.items():
        assert name == "losses" or sum(row["figure"] in line for line in lines) == 2  # when it ends, and in the table
    assert status == os.EX_UNAVAILABLE
    assert lines[-1].startswith("no GPU: no package cupy")
    again = checked(tmp_path / "out", "--parts", "failed", "--budget", "0")[2]
    assert {again[name]["verdict"] for name in ("crash", "hang", "memory", "broken")} == {"no time"}


def test_a_driver_without_a_gpu_is_told_with_its_words(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "cupy.py").write_text(WITHOUT_GPU)
    (packages / "numba_cuda.py").touch()
    status, lines, _ = checked(tmp_path / "out", "--parts", "kernels", packages=packages)
    assert status == os.EX_UNAVAILABLE
    assert lines[-1].startswith("no GPU: CuPy finds none: cudaErrorNoDevice")


def test_a_python_and_wheels_that_do_not_fit_are_told_in_a_line(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    status, lines, _ = checked(tmp_path / "out", PYTHON=str(old))
    assert (status, lines) == (1, ["mpizero needs Python 3.11 or newer; set PYTHON=/path/to/python"])
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    status, (line,), _ = checked(tmp_path / "out", "--wheels", str(wheels))
    assert status == 1
    assert "no wheels there" in line
    (wheels / "isal-1.0-cp39-cp39-manylinux1_x86_64.whl").touch()
    status, (line,), _ = checked(tmp_path / "out", "--wheels", str(wheels))
    assert status == 1
    assert "do not fit Python 3" in line


def test_wrong_options_are_told(tmp_path):
    status, lines, _ = checked(tmp_path, "--parts", "nothing")
    assert status != 0
    assert "unknown nothing" in lines[-1]


def result(verdict="ok", ok=True, rehearsal=False):
    findings = [{"name": "GPU", "ok": None, "figure": "NVIDIA H100, 580.1"}, {"name": "x", "ok": ok, "figure": "a|b"}]
    row = {"part": "facts", "seconds": 3.2, "limit": 20, "verdict": verdict, "figure": "a GPU", "findings": findings}
    return {"began": "2026-11-27 01:00 UTC", "rehearsal": rehearsal, "parts": [row]}


def test_the_page_of_gpus_has_the_results_of_a_gpu_or_says_that_there_are_none():
    page = (ROOT / "docs" / "gpu.md").read_text()
    if NOTHING in page:
        assert written(page, None) == page  # the parts and their limits, as they are
    text = written(page, result())
    assert f"**Checked on NVIDIA H100, 2026-11-27 01:00 UTC**: 1 of {len(PARTS)} parts are right." in text
    assert "| facts | 3 | ok | a GPU |" in text
    assert NOTHING not in text
    wrong = written(page, result("WRONG", ok=False))
    assert "not facts (WRONG)." in wrong
    assert "- facts: x: a\\|b" in wrong
    assert written(written(page, result()), None) == written(page, None)


def test_a_rehearsal_does_not_come_to_the_page(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(result(rehearsal=True)))
    page = (ROOT / "docs" / "gpu.md").read_text()
    status, lines, _ = checked(tmp_path, "--page")
    assert status == 1
    assert "say nothing of a GPU" in lines[-1]
    assert (ROOT / "docs" / "gpu.md").read_text() == page

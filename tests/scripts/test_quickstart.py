"""The quickstart says what is missing, and the way out, instead of ending in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: A Python that cannot make environments, and one that makes them without pip.
NO_VENV = 'case $* in *ensurepip*) exit 1 ;; *) exec python3 "$@" ;; esac'
NO_PIP = 'case $* in *"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;; *pip*) echo no route; exit 1 ;; esac'


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("exit 1", ["needs Python 3.11 or newer", "PYTHON="]),
        (NO_VENV, ["install python3-venv", "Nothing was trained"]),
        (NO_PIP, ["no route", "Nothing was trained", "HTTPS_PROXY"]),
    ],
)
def test_what_is_missing_ends_the_quickstart_with_the_way_out(tmp_path, python, told):
    for name in ("scripts/quickstart.sh", "scripts/environment.sh", "setup.cfg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("python", python), ("id", "echo 1000")):  # no root, who would install what is missing
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (stubs / name).chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stubs / "python"), "VENV": str(tmp_path / "venv")}
    environment["PATH"] = f"{stubs}:{environment['PATH']}"

    ended = subprocess.run(
        [tmp_path / "scripts/quickstart.sh"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert ended.returncode == 1
    assert all(words in ended.stderr for words in told)
    assert "\x1b" not in ended.stdout + ended.stderr

"""The script that measures how a checkout is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "structure_report.py"
#: A package of three rooms in a chain, with one cycle for types and one class of two modules.
SOURCES = {
    "__init__.py": "import numpy as np\n",
    "parallel/__init__.py": "",
    "parallel/engine.py": "from mpizero.parallel.batch import cut\nfrom mpizero.parallel.batch.cut import Part\n",
    "parallel/batch/__init__.py": "",
    "parallel/batch/cut.py": (
        "from typing import TYPE_CHECKING\nfrom mpizero.parallel.grid import Grid\n"
        "if TYPE_CHECKING:\n    from mpizero.parallel.engine import Engine\nclass Part: pass\n"
    ),
    "parallel/grid.py": (
        '"""Text\n\nof two lines."""\n\n# a comment\nimport mpizero.cli\nclass Grid: pass\nclass Part: pass\n'
    ),
    "cli.py": "",
}


def figures(folder: Path) -> dict[str, object]:
    command = [sys.executable, SCRIPT, folder, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_small_package_is_measured(tmp_path):
    files = {f"mpizero/{name}": text for name, text in SOURCES.items()}
    for name, text in (files | {"tests/test_structure.py": 'FLOORS = {"": 2, "parallel": 1, "cli": 3}\n'}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = figures(tmp_path)
    expected = {
        "lines of tests": 1,
        "lines of code of mpizero": 11,
        "tokens of mpizero": 62,
        "modules besides __init__": 4,
        "median lines of code of a module": 2.5,
        "lines of code of the largest": 5,
        "the largest module": "mpizero.parallel.batch.cut",
        "modules in the largest folder": 2,
        "largest fan-out": 1,
        "arrows upwards": 1,
        "the arrows upwards": ["mpizero.parallel.grid imports mpizero.cli"],
        "the engine's package": "mpizero.parallel",
        "rooms of it": 3,
        "levels of rooms": 3,
        "arrows between rooms": 2,
        "import cycles at run time": 0,
        "the cycles with types": ["mpizero.parallel.batch.cut mpizero.parallel.engine"],
        "collaborators of the engine": 1,
        "... of them in its package": 1,
        "the class names defined twice": ["Part"],
    }
    assert {name: found[name] for name in expected} == expected


def test_a_walk_counts_the_moves_between_modules_of_a_package(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from walk import Walk

    scope = {name: {"__name__": name} for name in ("own.a", "own.b", "owner.c")}
    exec("def leaf(): pass", scope["own.b"])
    exec("def through(call): call()", scope["owner.c"])
    exec("def start(leaf, through): leaf(); through(leaf); own(); own()\ndef own(): pass", scope["own.a"])
    walk = Walk("own")
    sys.setprofile(walk)
    scope["own.a"]["start"](scope["own.b"]["leaf"], scope["owner.c"]["through"])
    sys.setprofile(None)
    assert walk.figures() == {"modules": 2, "functions": 3, "calls": 5, "moves": 4}
    assert walk.modules() == {"own.a": 3, "own.b": 2}

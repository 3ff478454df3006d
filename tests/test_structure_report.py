"""The script that measures how a checkout is built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "structure_report.py"
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
    "parallel/grid.py": "class Grid: pass\nclass Part: pass\n",
}
#: Stands for everything that the measured step needs of the package.
STEP = """
from mpizero.parallel.grid import Grid
class nn:
    GPT = staticmethod(lambda **_: None)
class data: pass
ShardingConfig = AdamW = lambda **_: None
class ZeRO2Model:
    def __init__(self, *_): pass
    __enter__ = lambda self: self
    __exit__ = lambda self, *_: None
    train = lambda self, x, y: Grid()
class ZeRO2Optimizer:
    __init__ = set_model = lambda self, *_: None
"""


def figures(folder: Path) -> dict[str, object]:
    ended = subprocess.run([sys.executable, SCRIPT, folder, "--json"], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


def test_a_small_package_is_measured(tmp_path):
    testing = "def run_in_threads(count, work):\n    return [work(None) for _ in range(count)]\n"
    sources = SOURCES | {"__init__.py": STEP, "testing.py": testing}
    sources["parallel/grid.py"] += "Grid.__init__ = lambda self: None\n"
    for name, text in sources.items():
        path = tmp_path / "mpizero" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = figures(tmp_path)
    expected = {
        "lines of tests": 0,
        "modules of mpizero": 7,
        "modules in the largest folder": 2,
        "rooms of parallel": 3,
        "levels of rooms": 3,
        "arrows between rooms": 2,
        "import cycles at run time": 0,
        "the cycles with types": ["mpizero.parallel.batch.cut mpizero.parallel.engine"],
        "collaborators of the engine": 1,
        "... of them of parallel": 1,
        "the class names defined twice": ["Part"],
    }
    assert {name: found[name] for name in expected} == expected

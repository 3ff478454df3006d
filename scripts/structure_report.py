"""Print numbers about the structure of the sources: lines, modules, levels and cycles of imports, modules of a step.

    python scripts/structure_report.py [FOLDER] [--json]

FOLDER is a checkout of mpizero of any version (default: this one). A *room* of ``mpizero.parallel`` is one of its
sub-packages, or a module directly in it. *Levels* is the number of modules (or rooms) in the longest chain of imports,
where all members of a cycle count. *Arrows* is the number of pairs in which one module (or room) imports the other.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARALLEL, ENGINE = "mpizero.parallel", "mpizero.parallel.engine"

Graph = dict[str, set[str]]

#: A program that prints the files whose functions one ZeRO-2 step of two ranks calls, after three other steps.
STEP = """
import sys
import numpy as np
import mpizero as mz
from mpizero.testing import run_in_threads

def work(comm):
    config = mz.ShardingConfig(comm=comm, micro_batch=4)
    called, tokens = set(), np.arange(8 * 16).reshape(8, 16) % 251
    with mz.ZeRO2Model(mz.nn.GPT(dim=16, layers=2, heads=2, sequence=16), config) as model:
        mz.ZeRO2Optimizer(mz.AdamW(lr=1e-3), config).set_model(model)
        for step in range(4):
            if step == 3:
                sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
            model.train(tokens, tokens)
            sys.setprofile(None)
    return called

print(*sorted(set.union(*run_in_threads(2, work))), sep="\\n")
"""


class Sources:
    """Parse the modules of a checkout and their imports, without importing them."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, {}
        for path in sorted((root / "mpizero").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    def imports(self, *, typing: bool = False) -> Graph:
        """Return for each module of mpizero the modules of mpizero that it imports.

        Imports under ``if TYPE_CHECKING`` are left out unless ``typing`` is True.
        """
        graph = {name: {found for found in self._imported(name, typing) if found in self.paths} for name in self.paths}
        return {name: found - {name} for name, found in graph.items()}

    def _imported(self, module: str, typing: bool) -> Iterator[str]:
        package = module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]
        nodes = list(ast.walk(self.trees[module]))
        guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        skipped = set() if typing else {inner for guard in guards for inner in ast.walk(guard)}
        for node in nodes:
            if isinstance(node, ast.Import) and node not in skipped:
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node not in skipped:
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, [base, node.module]))
                inner = [f"{source}.{alias.name}" for alias in node.names]
                yield from (name if name in self.paths else source for name in inner)

    def twice(self) -> list[str]:
        """Return the names that are public classes in more than one module."""
        names = Counter(
            node.name
            for parsed in self.trees.values()
            for node in parsed.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
        return sorted(name for name, count in names.items() if count > 1)

    def folders(self) -> Counter[str]:
        """Return the number of modules in each folder; ``__init__.py`` does not count."""
        paths = [path.relative_to(self.root) for path in self.paths.values() if path.name != "__init__.py"]
        return Counter(path.parent.as_posix() for path in paths)


def below(graph: Graph, package: str) -> Graph:
    """Return the part of an import graph between modules of ``package``, without its ``__init__``."""
    kept = {name for name in graph if name.startswith(package + ".")}
    return {name: graph[name] & kept for name in kept}


def merged(graph: Graph, depth: int) -> Graph:
    """Return an import graph in which modules are merged if the first ``depth`` parts of their names are equal."""
    rooms: Graph = defaultdict(set)
    for name, targets in graph.items():
        room = ".".join(name.split(".")[:depth])
        rooms[room] |= {".".join(target.split(".")[:depth]) for target in targets} - {room}
    return dict(rooms)


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of an import graph, by Tarjan's algorithm.

    A component comes after those that it imports.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            start = stack.index(name)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def levels(graph: Graph) -> int:
    """Return the number of modules in the longest chain of imports; all members of a cycle count."""
    height: dict[str, int] = {}
    for members in components(graph):
        outside = {target for name in members for target in graph[name]} - set(members)
        height |= dict.fromkeys(members, len(members) + max((height[target] for target in outside), default=0))
    return max(height.values(), default=0)


def arrows(graph: Graph) -> int:
    """Return the number of edges of an import graph."""
    return sum(map(len, graph.values()))


def cycles(graph: Graph) -> list[str]:
    """Return the import cycles: strongly connected components of more than one member, each as a line of names."""
    return [" ".join(members) for members in components(graph) if len(members) > 1]


def lines(folder: Path) -> int:
    """Return the number of lines of all Python files below a folder."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))


def step_modules(root: Path) -> list[str]:
    """Run one ZeRO-2 step of the checkout ``root`` in a new process; return the modules whose functions it calls."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", STEP], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"the ZeRO-2 step failed in {root}:\n{ended.stderr}")
    paths = [Path(line).resolve() for line in ended.stdout.splitlines()]
    inside = [path.relative_to(root) for path in paths if path.is_relative_to(root / "mpizero")]
    return sorted(".".join(path.with_suffix("").parts) for path in inside)


def report(root: Path) -> dict[str, Any]:
    """Return all printed values for the checkout ``root``, by the text that is printed before each."""
    sources = Sources(root)
    runtime, typing = sources.imports(), sources.imports(typing=True)
    parallel = below(runtime, PARALLEL)
    rooms = merged(parallel, 3)
    largest, count = sources.folders().most_common(1)[0]
    engine, step, twice = runtime[ENGINE], step_modules(root), sources.twice()
    return {
        **{f"lines of {name}": lines(root / name) for name in ("mpizero", "scripts", "tests")},
        "modules of mpizero": len(sources.paths),
        "modules in the largest folder": count,
        "the largest folder": largest,
        "rooms of parallel": len(rooms),
        "levels of rooms": levels(rooms),
        "arrows between rooms": arrows(rooms),
        "rooms that import each other": sum(len(line.split()) for line in cycles(rooms)),
        "modules of parallel": len(parallel),
        "levels of modules": levels(parallel),
        "arrows between modules": arrows(parallel),
        "import cycles at run time": len(cycles(runtime)),
        "import cycles with types": len(cycles(typing)),
        "the cycles with types": cycles(typing),
        "lines of the engine": len(sources.paths[ENGINE].read_bytes().splitlines()),
        "collaborators of the engine": len(engine),
        "... of them in parallel": sum(name.startswith(PARALLEL) for name in engine),
        "modules that a ZeRO-2 step calls": len(step),
        "... of them of parallel": sum(name.startswith(PARALLEL) for name in step),
        "class names defined twice": len(twice),
        "the class names defined twice": twice,
    }


def main() -> None:
    """Print the values as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    root = options.folder.resolve()
    if not (root / "mpizero").is_dir():
        parser.error(f"{root} has no folder mpizero")
    figures = report(root)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:34} {value if not isinstance(value, list) else '; '.join(value) or '-'}")


if __name__ == "__main__":
    main()

"""Print numbers about the structure of the sources: sizes of modules, levels and cycles of imports, modules of a step.

    python scripts/structure_report.py [FOLDER] [--json] [--static]

FOLDER is a checkout of mpizero of any version (default: this one). *Modules* are all but ``__init__``. *Lines of code*
are without blank lines, comments and docstrings; *tokens* are without comments. *Fan-out* is the number of modules that
a module imports. An *arrow upwards* is an import of a higher floor, by the table in the checkout's
``tests/test_structure.py``. A *room* of the engine's package is one of its sub-packages, or a module directly in it.
*Levels* is the number of modules (or rooms) in the longest chain of imports, where all members of a cycle count.
*Arrows* is the number of pairs in which one module (or room) imports the other. The figures of a step are those of
``scripts/walk.py`` on 2 ranks; for them and for the modules that are loaded the checkout is run, unless ``--static`` is
given.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens
from typing import Any

from harness.jobs import ROOT, launchers, well
from harness.options import plain

Graph = dict[str, set[str]]

#: Tokens that are no code, or only its layout.
NO_CODE = {COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL}
#: A program that prints how many modules are loaded to use the trainer.
LOAD = """
import sys
import mpizero as mz
mz.Trainer
files = [getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if name.startswith("mpizero.")]
print(sum(not file.endswith("__init__.py") for file in files))
"""
WALK = Path(__file__).with_name("walk.py")


class Sources:
    """Parse the modules of a checkout and their imports, without importing them."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, {}
        for path in sorted((root / "mpizero").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    @property
    def modules(self) -> list[str]:
        """The names of all modules but ``__init__``."""
        return [name for name, path in self.paths.items() if path.name != "__init__.py"]

    @property
    def engine(self) -> str:
        """The name of the module that runs a training step."""
        return next(name for name in self.paths if name.endswith(".engine"))

    def code(self, module: str) -> tuple[int, int]:
        """Return how many lines of code and how many tokens a module has; docstrings are tokens and no code."""
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        texts = {
            (node.body[0].lineno, node.body[0].col_offset)
            for node in ast.walk(self.trees[module])
            if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None
        }
        found = [t for t in generate_tokens(StringIO(self.texts[module]).readline) if t.type not in NO_CODE]
        lines = {line for t in found if t.start not in texts for line in range(t.start[0], t.end[0] + 1)}
        return len(lines), len(found)

    def upwards(self) -> list[str] | None:
        """Return the imports of higher floors, by the table ``FLOORS`` of the checkout's tests; None without it."""
        path = self.root / "tests" / "test_structure.py"
        nodes = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        table = [n.value for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "FLOORS"]
        if not table:
            return None
        floors = ast.literal_eval(table[0])
        parts = {name: name.partition(".")[2] for name in self.paths}
        floor = {name: floors.get(part, floors[part.partition(".")[0]]) for name, part in parts.items()}
        pairs = [(name, target) for name, targets in self.imports(typing=True).items() for target in sorted(targets)]
        return [f"{name} imports {target}" for name, target in pairs if floor[target] > floor[name]]

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


def measured(root: Path) -> dict[str, Any]:
    """Return the values of the checkout ``root`` for which its package is run: a step, and the modules loaded."""
    own = {"cwd": root, "environment": {"PYTHONPATH": str(root)}}
    step = well(launchers()[0].command(2, [WALK]), **own).answer["step"]
    return {
        "modules that a ZeRO-2 step passes": step["modules"],
        "functions that it calls": step["functions"],
        "its calls": step["calls"],
        "its moves between modules": step["moves"],
        "modules that mz.Trainer loads": int(well([sys.executable, "-c", LOAD], **own).out),
    }


def sizes(sources: Sources) -> dict[str, Any]:
    """Return numbers about the sizes of modules."""
    code = {name: sources.code(name) for name in sources.paths}
    of_modules = {name: code[name][0] for name in sources.modules}
    largest = max(of_modules, key=of_modules.__getitem__)
    return {
        "lines of code of mpizero": sum(lines for lines, _ in code.values()),
        "tokens of mpizero": sum(tokens for _, tokens in code.values()),
        "modules besides __init__": len(of_modules),
        "median lines of code of a module": statistics.median(of_modules.values()),
        "lines of code of the largest": of_modules[largest],
        "the largest module": largest,
    }


def report(root: Path, *, static: bool = False) -> dict[str, Any]:
    """Return all printed values for the checkout ``root``, by the text that is printed before each."""
    sources = Sources(root)
    runtime, typing = sources.imports(), sources.imports(typing=True)
    engine = sources.engine
    package = engine.rpartition(".")[0]
    inside = below(runtime, package)
    rooms = merged(inside, package.count(".") + 2)
    folder, count = sources.folders().most_common(1)[0]
    widest = max(runtime, key=lambda name: len(runtime[name]))
    twice, upwards = sources.twice(), sources.upwards()
    return {
        **{f"lines of {name}": lines(root / name) for name in ("mpizero", "scripts", "tests")},
        **sizes(sources),
        "modules in the largest folder": count,
        "the largest folder": folder,
        "largest fan-out": len(runtime[widest]),
        "the module that has it": widest,
        "imports of modules": arrows(runtime),
        **({} if upwards is None else {"arrows upwards": len(upwards), "the arrows upwards": upwards}),
        "the engine's package": package,
        "rooms of it": len(rooms),
        "levels of rooms": levels(rooms),
        "arrows between rooms": arrows(rooms),
        "rooms that import each other": sum(len(line.split()) for line in cycles(rooms)),
        "modules of it": len(inside),
        "levels of modules": levels(inside),
        "arrows between modules": arrows(inside),
        "import cycles at run time": len(cycles(runtime)),
        "import cycles with types": len(cycles(typing)),
        "the cycles with types": cycles(typing),
        "lines of the engine": len(sources.texts[engine].splitlines()),
        "collaborators of the engine": len(runtime[engine]),
        "... of them in its package": sum(name.startswith(package) for name in runtime[engine]),
        "class names defined twice": len(twice),
        "the class names defined twice": twice,
        **({} if static else measured(root)),
    }


def main() -> None:
    """Print the values as a table, or as JSON."""
    parser = plain(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="a checkout")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--static", action="store_true", help="leave out what the checkout is run for")
    options = parser.parse_args()
    root = options.folder.resolve()
    if not (root / "mpizero").is_dir():
        parser.error(f"{root} has no folder mpizero")
    figures = report(root, static=options.static)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:34} {value if not isinstance(value, list) else '; '.join(value) or '-'}")


if __name__ == "__main__":
    main()

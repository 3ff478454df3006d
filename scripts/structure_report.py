"""Print numbers about the structure of the sources: sizes of modules, levels and cycles of imports.

    python scripts/structure_report.py [FOLDER] [--json]

FOLDER is a checkout of mpizero of any version (default: this one). *Modules* are all but ``__init__``. *Lines of code*
are without blank lines, comments and docstrings; *tokens* are without comments. *Fan-out* is the number of modules that
a module imports. An *arrow upwards* is an import of a higher floor, by the table in the checkout's
``tests/test_structure.py``. A *room* of the engine's package is one of its sub-packages, or a module directly in it.
*Levels* is the number of modules (or rooms) in the longest chain of imports, where all members of a cycle count.
*Arrows* is the number of pairs in which one module (or room) imports the other. Nothing is run: ``scripts/walk.py`` has
the modules of a step.
"""

from __future__ import annotations

import ast
import gc
import json
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from harness.jobs import ROOT
from harness.options import plain

Graph = dict[str, set[str]]

#: Tokens that are no code, or only its layout.
NO_CODE = {tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE, tokenize.NL}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """Parse the modules of a checkout and their imports, without importing them.

    By the dotted name of a module, ``paths`` has its file, and ``nodes`` all nodes of its syntax tree, of which the
    first is the tree itself.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, {}
        for path in sorted((root / "mpizero").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        gc.disable()  # half a million objects, which no collection of garbage need ever look at
        self.nodes = {
            name: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
            for name, path in self.paths.items()
        }
        gc.freeze()
        gc.enable()

    @property
    def modules(self) -> list[str]:
        """The names of all modules but ``__init__``."""
        return [name for name, path in self.paths.items() if path.name != "__init__.py"]

    @property
    def engine(self) -> str:
        """The name of the module that runs a training step."""
        return next(name for name in self.paths if name.endswith(".engine"))

    @cache  # noqa: B019 - there are as many as checkouts
    def code(self, module: str) -> tuple[int, int]:
        """Return how many lines of code and how many tokens a module has; docstrings are tokens and no code."""
        documented = [node for node in self.nodes[module] if isinstance(node, DOCUMENTED)]
        texts = {
            (node.body[0].lineno, node.body[0].col_offset)
            for node in documented
            if ast.get_docstring(node, clean=False) is not None
        }
        with self.paths[module].open(encoding="utf-8") as source:
            found = [token for token in tokenize.generate_tokens(source.readline) if token.type not in NO_CODE]
        lines = {line for t in found if t.start not in texts for line in range(t.start[0], t.end[0] + 1)}
        return len(lines), len(found)

    @cache  # noqa: B019
    def imported(self, module: str) -> list[tuple[str, int, str]]:
        """Return every import anywhere in a module: what, in which line, and "types" if only type checkers see it.

        An import by a call of ``import_module`` is "called", all others are "".
        """
        package = module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]
        nodes = self.nodes[module]
        guards = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        for_types = {inner for guard in guards for inner in ast.walk(guard)}
        found = []
        for node in nodes:
            names, kind = list[str](), "types" if node in for_types else ""
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, [base, node.module]))
                inner = [f"{source}.{alias.name}" for alias in node.names]
                names = [name if name in self.paths else source for name in inner]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                kind = "called"
                names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            found += [(name, node.lineno, kind) for name in names]
        return found

    def imports(self, *, typing: bool = False) -> Graph:
        """Return for each module of mpizero the modules of mpizero that it imports; with ``typing`` also for types."""
        kinds = ("", "types") if typing else ("",)
        graph = {module: {name for name, _, kind in self.imported(module) if kind in kinds} for module in self.paths}
        return {module: found & set(self.paths) - {module} for module, found in graph.items()}

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

    def classes(self) -> dict[str, list[str]]:
        """Return for the name of each public class the modules that define one."""
        found = defaultdict(list)
        for module, (tree, *_) in self.nodes.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(module)
        return found


def merged(graph: Graph, package: str, depth: int = sys.maxsize) -> Graph:
    """Return the part of an import graph between modules of ``package``, without its ``__init__``.

    Modules are merged if the first ``depth`` parts of their names are equal.
    """

    def room(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    kept = {name for name in graph if name.startswith(package + ".")}
    rooms: Graph = {room(name): set() for name in kept}
    for name in kept:
        rooms[room(name)] |= {room(target) for target in graph[name] & kept} - {room(name)}
    return rooms


def reached(graph: Graph) -> Graph:
    """Return for each module those that it imports, directly or not."""
    found = {}
    for module in graph:
        seen, waiting = set[str](), [module]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        found[module] = seen
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Return the import cycles: the names of all modules that reach one another, for each such set."""
    reach = reached(graph)
    return [list(c) for c in sorted({tuple(sorted(o for o in r if m in reach[o])) for m, r in reach.items() if m in r})]


def levels(graph: Graph) -> int:
    """Return the number of modules in the longest chain of imports; all members of a cycle count."""
    members = {name: frozenset([name]) for name in graph} | {name: frozenset(c) for c in cycles(graph) for name in c}

    @cache
    def height(those: frozenset[str]) -> int:
        outside = {members[target] for name in those for target in graph[name]} - {those}
        return len(those) + max(map(height, outside), default=0)

    return max(map(height, members.values()), default=0)


def arrows(graph: Graph) -> int:
    """Return the number of edges of an import graph."""
    return sum(map(len, graph.values()))


def report(root: Path) -> dict[str, Any]:
    """Return all printed values for the checkout ``root``, by the text that is printed before each."""
    sources = Sources(root)
    runtime, typing, engine = sources.imports(), sources.imports(typing=True), sources.engine
    package = engine.rpartition(".")[0]
    inside, rooms = (merged(runtime, package, depth) for depth in (sys.maxsize, package.count(".") + 2))
    folders = Counter(sources.paths[name].parent.relative_to(root).as_posix() for name in sources.modules)
    widest = max(runtime, key=lambda name: len(runtime[name]))
    code = {name: sources.code(name) for name in sources.paths}
    of_modules = {name: code[name][0] for name in sources.modules}
    largest = max(of_modules, key=of_modules.__getitem__)
    twice, upwards = sorted(name for name, where in sources.classes().items() if len(where) > 1), sources.upwards()
    return {
        **{f"lines of {name}": _lines(root / name) for name in ("mpizero", "scripts", "tests")},
        "lines of code of mpizero": sum(lines for lines, _ in code.values()),
        "tokens of mpizero": sum(tokens for _, tokens in code.values()),
        "modules besides __init__": len(of_modules),
        "median lines of code of a module": statistics.median(of_modules.values()),
        "lines of code of the largest": of_modules[largest],
        "the largest module": largest,
        "modules in the largest folder": folders.most_common(1)[0][1],
        "the largest folder": folders.most_common(1)[0][0],
        "largest fan-out": len(runtime[widest]),
        "the module that has it": widest,
        "imports of modules": arrows(runtime),
        **({} if upwards is None else {"arrows upwards": len(upwards), "the arrows upwards": upwards}),
        "the engine's package": package,
        "rooms of it": len(rooms),
        "levels of rooms": levels(rooms),
        "arrows between rooms": arrows(rooms),
        "rooms that import each other": sum(map(len, cycles(rooms))),
        "modules of it": len(inside),
        "levels of modules": levels(inside),
        "arrows between modules": arrows(inside),
        "import cycles at run time": len(cycles(runtime)),
        "import cycles with types": len(cycles(typing)),
        "the cycles with types": [" ".join(members) for members in cycles(typing)],
        "lines of the engine": len(sources.paths[engine].read_bytes().splitlines()),
        "collaborators of the engine": len(runtime[engine]),
        "... of them in its package": sum(name.startswith(package) for name in runtime[engine]),
        "class names defined twice": len(twice),
        "the class names defined twice": twice,
    }


def _lines(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    """Print the values as a table, or as JSON."""
    parser = plain(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="a checkout")
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

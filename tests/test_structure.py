"""The rules that keep the package in order, read from its source: floors, doors, cycles, budgets, docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mpizero"

#: A module imports lower floors or its own package.
FLOORS = {
    "text": -1,  # errors quote files of others
    "frames": -1,  # ... and name the user's own lines
    "errors": 0,
    "types": 0,
    "crc": 0,
    "launched": 0,
    "fingerprint": 0,
    "names": 1,
    "faults": 1,
    "sampletree": 1,
    "signatures": 1,
    "layout": 1,
    "kernels": 1,
    "comm": 2,  # its exact sums execute layout's tree programs with kernels
    "nn": 2,
    "optim": 2,
    "data": 3,
    "checkpoint": 3,
    "parallel": 4,
    "adapters": 4,
    "planning": 5,
    "train": 6,
    "__main__": 7,
    "testing": 7,
    "": 8,  # mpizero/__init__.py only gathers the public names
}
#: The packages that may import a library which is slow to import or decides what the process can do.
DOORS = {
    "mpi4py": {"comm", "testing"},  # the fixture hands out a communicator of its own
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "h5py": {"data", "checkpoint"},
    "tqdm": {"train"},
    "safetensors": {"checkpoint"},
    "isal": {"crc"},
    "cupy": {"kernels", "comm"},
    "cupy_backends": {"kernels"},
    "sklearn": {"data"},
}
#: Modules that may read the process's environment.
ENVIRONMENT = {
    "mpizero.frames",
    "mpizero",
    "mpizero.faults",
    "mpizero.train.cli.main",
    "mpizero.comm.supervision.guard",
    "mpizero.comm.startup.launch",
    "mpizero.kernels.cache",
    "mpizero.kernels.blas",
}
MAX_FUNCTION, MAX_FILE, MAX_PARAMETERS = 60, 400, 6
#: "module" or "module.function": why it is over the budget.
LONG: dict[str, str] = {
    "mpizero.optim.flat_optimizer.apply_tree": "the arguments of the fused kernel that it calls",
    "mpizero.optim.adapted.apply_tree": "the same signature",
    "mpizero.optim.optimizers.direction_tree": "the arguments of the fused kernel that it calls",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def section(module: str) -> str:
    """First part below ``mpizero``: the name a floor belongs to."""
    return module.split(".")[1] if "." in module else ""


def imported(module: str, typing: bool = True) -> Iterator[tuple[str, int]]:
    """Every module that ``module`` imports, anywhere in its source, with the line; maybe without those for types."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    guards = [n for n in ast.walk(tree(path)) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = set() if typing else {inner for guard in guards for inner in ast.walk(guard)}
    for node in ast.walk(tree(path)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner if inner in modules() else source), node.lineno
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from ((arg.value, node.lineno) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module}.{node.name}", node


def in_every(chosen: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a check of a module: thousands of tests would take longer to count than to run."""

    def made(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for module in chosen:
                try:
                    check(module)
                except AssertionError as error:
                    failed.append(f"{module}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return made


def test_the_package_is_found_whole():
    assert {section(module) for module in modules()} >= {"errors", "types", "layout", "comm", "kernels", "nn", "optim"}
    assert {section(module) for module in modules()} <= set(FLOORS), "a new package needs a floor"


@in_every(modules())
def test_a_module_imports_only_lower_floors_or_its_own_package(module):
    own = section(module)
    wrong = [
        f"line {line}: {name} is on floor {FLOORS[section(name)]}, {module} on {FLOORS[own]}"
        for name, line in imported(module)
        if name.partition(".")[0] == "mpizero" and section(name) != own and FLOORS[section(name)] >= FLOORS[own]
    ]
    assert not wrong, "\n".join(wrong)


@in_every(modules())
def test_a_library_is_imported_only_behind_its_door(module):
    wrong = [
        f"line {line}: {name} belongs behind {sorted(DOORS[name.partition('.')[0]])}"
        for name, line in imported(module)
        if section(module) not in DOORS.get(name.partition(".")[0], {section(module)})
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycle():
    graph = {m: {name for name, _ in imported(m, typing=False) if name in modules()} - {m} for m in modules()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@in_every(modules())
def test_no_module_keeps_state_in_a_global_statement(module):
    lines = [node.lineno for node in ast.walk(tree(modules()[module])) if isinstance(node, ast.Global)]
    assert not lines, f"`global` in lines {lines}"


@in_every(modules())
def test_the_environment_is_read_only_where_it_may_be(module):
    lines = [
        node.lineno
        for node in ast.walk(tree(modules()[module]))
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "environb", "getenv", "putenv", "unsetenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert module in ENVIRONMENT or not lines, f"os.environ in lines {lines}"


@in_every(modules())
def test_mpi_objects_are_never_freed_by_the_garbage_collector(module):
    """A communicator freed at a moment that differs between ranks deadlocks."""
    assert not [name for name, _ in functions(module) if name.endswith(".__del__")]


@in_every(modules())
def test_files_and_functions_stay_short(module):
    length = len(modules()[module].read_text(encoding="utf-8").splitlines())
    long = [f"{module}: {length} lines"] if length > MAX_FILE and module not in LONG else []
    for name, node in functions(module):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION and name not in LONG:
            long.append(f"{name}: {lines} lines")
    assert not long, "\n".join(long)


@in_every([m for m in modules() if section(m) != "kernels"])
def test_functions_take_few_positional_parameters(module):
    """Kernels are exempt: their arguments are the arrays and ranges of one loop."""
    many = []
    for name, node in functions(module):
        count = len([a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in {"self", "cls"}])
        if count > MAX_PARAMETERS and name not in LONG:
            many.append(f"{name}: {count} parameters")
    assert not many, "\n".join(many)


def _public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, name)


@in_every([m for m in modules() if m != "mpizero.types"])
def test_public_names_have_a_docstring(module):
    """The protocols of ``types`` are exempt: their class docstring is the contract of one-line members."""
    exempt = {"overload", "setter"}
    bare = [
        name
        for name, node in _public(tree(modules()[module]).body, module)
        if ast.get_docstring(node) is None
        and not exempt & {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
    ]
    assert not bare, f"without docstring: {bare}"


def test_twin_kernels_have_the_same_names():
    alone = {"launch.py"}  # what a CUDA kernel needs to be started
    names = {
        twin: {path.name for path in (PACKAGE / "kernels" / twin).glob("[!_]*.py")} - alone
        for twin in ("cpu", "cuda", "reference")
    }
    assert names["cpu"] == names["cuda"]
    assert names["cpu"] == names["reference"]


def test_allow_lists_name_only_what_exists():
    present = {name for module in modules() for name, _ in functions(module)} | set(modules())
    assert set(LONG) <= present
    assert set(modules()) >= ENVIRONMENT


def test_importing_the_package_loads_no_heavy_library():
    """The first line of every script must not cost seconds, nor start MPI."""
    heavy = ["numba", "llvmlite", "h5py", "mpi4py", "tqdm", "sklearn", "cupy", "safetensors"]
    code = f"import mpizero, sys; print(*[name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []


def test_planning_starts_no_mpi():
    """Where a job of several ranks plans, the others have left: whoever starts MPI would wait for them."""
    code = "import mpizero.train.plan, mpizero.planning, sys; print('mpi4py.MPI' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == ["False"]

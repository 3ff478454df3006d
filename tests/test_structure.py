"""Keep the package in order, by reading its source: rooms, floors, doors, cycles, budgets, names, words, docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests import vocabulary

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from structure_report import Graph, Sources, cycles  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))
PACKAGE = ROOT / "mpizero"
SOURCES = Sources(ROOT)
#: The file of every module of the package, by its dotted name.
MODULES = SOURCES.paths
#: The kernels in plain NumPy.
REFERENCE = ROOT / "tests" / "support" / "reference"

#: A module imports lower floors or its own package. Of a package's module that has a floor of its own, that counts.
FLOORS = {
    "types": -3,
    "_util.text": -2,  # errors quote files of others, and name the user's own lines
    "errors": -1,
    "_util": 0,
    "layout": 1,
    "guard": 1,
    "kernels": 1,
    "comm": 2,  # its exact sums execute layout's tree programs with kernels
    "nn": 2,
    "optim": 2,
    "checkpoint": 3,
    "data": 3.5,  # it reads .npy and .npz files by the safe reader of checkpoints
    "sharding": 4,
    "adapters": 4,
    "tools.plan.counts": 4.5,  # a run records its plan: what computes it knows no trainer
    "tools.plan.memory": 4.5,
    "tools.plan.traffic": 4.5,
    "tools.plan.plan": 4.5,
    "train": 5,
    "tools": 6,
    "cli": 7,
    "testing": 7,
    "__main__": 8,
    "": 9,  # mpizero/__init__.py only gathers the public names
}
#: The packages that may import a library which is slow to import or decides what the process can do.
DOORS = {
    "mpi4py": {"comm", "guard", "testing"},  # the fixture hands out a communicator of its own
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "h5py": {"data", "checkpoint"},
    "tqdm": {"train"},
    "tensorboardX": {"train"},
    "matplotlib": {"tools"},
    "safetensors": {"checkpoint"},
    "isal": {"_util", "data"},
    "cupy": {"kernels"},
    "cupy_backends": {"kernels"},
    "sklearn": {"data"},
    "zarr": {"data"},
    "h5netcdf": {"data"},
    "torch": {"adapters"},
    "jax": {"adapters"},
    "greenlet": {"nn"},
}
_UPDATES = tuple(
    f"mpizero.{name}" for name in ("optim", "sharding.update", "sharding.vectors", "sharding.whole_tensors")
)
#: Packages and modules with those that they import nothing of, although their floors would let them, and why.
CLOSED = {
    "mpizero.sharding.forward_backward": (_UPDATES, "a pass ends with gradients"),
    "mpizero.sharding.pipeline": (_UPDATES, "a pass ends with gradients"),
    "mpizero.sharding.device": (_UPDATES, "passes run on it"),
}
#: Modules that may read the process's environment.
ENVIRONMENT = {
    "mpizero",
    "mpizero._util.faults",
    "mpizero._util.text",
    "mpizero.cli.main",
    "mpizero.comm.mpi",  # Slurm's variables
    "mpizero.comm.startup",
    "mpizero.guard.guard",
    "mpizero.kernels.machine_code",
    "mpizero.kernels.matmul",
    "mpizero.kernels.recording",
    "mpizero.train.trainer",  # Slurm's variables
    "mpizero.adapters.jax.function",  # XLA reads its number of threads there
    "mpizero.adapters.torch.call",
}
#: Lines of a function, and its positional parameters.
MAX_FUNCTION, MAX_PARAMETERS = 60, 6
#: A module is a chapter: lines of code (without blank lines, comments and docstrings) that it has at least and at most,
#: its lines in all, and the modules of the library that it imports.
MIN_CODE, MAX_CODE, MAX_LINES, MAX_FAN_OUT = 80, 800, 1400, 25
#: Lines of code of the whole package: what is added has to make something else superfluous, or change this number.
MAX_PACKAGE = 57_082
#: Modules that a folder of tests may hold.
MAX_TEST_MODULES = 20
#: Modules that import each other for annotations only, and why that is right.
TYPING_CYCLES: dict[frozenset[str], str] = {
    frozenset(f"mpizero.sharding.{name}" for name in ("fit", "model", "optimizer")): (
        "users get the optimizer from the model and the model from the optimizer, both with their types"
    )
}
#: What a module imports late although that imports it, and why that is right.
LATE = {("mpizero.nn.layer", "mpizero.nn.tensor_parallel"): "any layer can be split, and the split forms are layers"}
#: Public classes of one name, and why that is right.
TWO_CLASSES = {
    "Layer": "the protocol in types.py and the base class of the layers that follow it",
    "Schedule": "a pipeline's, and a learning rate's: both public names of the library",
}
#: Folders of a package whose modules may have the names of modules in its other folders, and why.
TWINS = {
    "kernels/cpu": "each kernel has a twin of its name in every folder",
    "kernels/cuda": "each kernel has a twin of its name in every folder",
    "adapters/jax": "an adapter to a library has a module for blocks",
    "tools/bench": "what a tool measures has the name of what another plans",
    "tools/verify": "a tool has a module for its command",
}
#: First words of docstrings that do not tell what a thing does.
NO_VERBS = re.compile(r"(What|Where|Who|Whoever|Whose|Whether|How|That|Of|Sums|Which)\b")
#: "module" or "module.function" that is not within its budget, and why.
EXEMPT: dict[str, str] = {
    "mpizero.errors": "two dozen exceptions of a line each, with an example each; their place is part of their names",
    "mpizero.__main__": "the entry of python -m mpizero",
    "mpizero._util.faults": "what only tests use stands apart",
    "mpizero._util.numbers": "it loads NumPy, which the texts of errors must not need",
    "mpizero.kernels.memory": "loops that move memory, which no layer and no optimizer needs, of a few lines each",
    "mpizero.optim.schedules": "an idea of its own, which no optimizer needs",
}


def nodes(module: str) -> list[ast.AST]:
    """All nodes of a module's syntax tree."""
    return SOURCES.nodes[module]


def tree(module: str) -> ast.Module:
    return nodes(module)[0]


def section(module: str) -> str:
    """First part below ``mpizero``: the package that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def floor(module: str) -> float:
    """Return the floor of a module, or else that of its package."""
    return FLOORS.get(module.partition(".")[2], FLOORS[section(module)])


def imported(module: str) -> list[tuple[str, int]]:
    """Every module that ``module`` imports, anywhere in its source, with the line."""
    return [(name, line) for name, line, _ in SOURCES.imported(module)]


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in nodes(module):
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
    assert {section(module) for module in MODULES} >= {"errors", "types", "layout", "comm", "kernels", "nn", "optim"}
    assert {section(module) for module in MODULES} <= set(FLOORS), "a new package needs a floor"


@in_every(MODULES)
def test_a_module_imports_only_lower_floors_or_its_own_package(module):
    wrong = [
        f"line {line}: {name} is on floor {floor(name)}, {module} on {floor(module)}"
        for name, line in imported(module)
        if name.partition(".")[0] == "mpizero" and section(name) != section(module) and floor(name) >= floor(module)
    ]
    assert not wrong, "\n".join(wrong)


@in_every(MODULES)
def test_a_library_is_imported_only_behind_its_door(module):
    wrong = [
        f"line {line}: {name} belongs behind {sorted(DOORS[name.partition('.')[0]])}"
        for name, line in imported(module)
        if section(module) not in DOORS.get(name.partition(".")[0], {section(module)})
    ]
    assert not wrong, "\n".join(wrong)


@in_every(MODULES)
def test_a_package_imports_nothing_of_those_that_are_closed_to_it(module):
    wrong = [
        f"line {line}: {name}, but {why}"
        for package, (closed, why) in CLOSED.items()
        for name, line in imported(module)
        if f"{module}.".startswith(f"{package}.") and f"{name}.".startswith(tuple(f"{other}." for other in closed))
    ]
    assert not wrong, "\n".join(wrong)


def _graph(*, typing: bool) -> Graph:
    """Every module with the modules of the package that it imports but late; maybe also those for annotations."""
    late = {m: {m} | {name for module, name in LATE if module == m} for m in MODULES}
    found = {m: {n for n, _, kind in SOURCES.imported(m) if typing or kind != "types"} for m in MODULES}
    return {m: found[m] & set(MODULES) - late[m] for m in MODULES}


def test_imports_have_no_cycle():
    assert not cycles(_graph(typing=False))


def test_no_module_patches_another_when_it_is_imported():
    """Who imports only one of the two would get something else: a name is bound by the module that has it."""
    found = []
    for module in MODULES:
        for node in tree(module).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                found.append(f"{module}, line {node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_imports_for_annotations_have_no_cycle_without_a_reason():
    wrong = [found for found in cycles(_graph(typing=True)) if not any(known >= set(found) for known in TYPING_CYCLES)]
    assert not wrong, f"modules that import each other: {wrong}"


def _folders(root: Path) -> dict[str, list[Path]]:
    """Every folder below ``root`` with its modules; ``__init__.py`` does not count."""
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        if path.name != "__init__.py":
            found[path.parent.relative_to(root).as_posix()].append(path)
    return found


def test_no_folder_of_tests_holds_more_modules_than_one_idea_needs():
    full = {folder: len(paths) for folder, paths in _folders(ROOT / "tests").items() if len(paths) > MAX_TEST_MODULES}
    assert not full, f"more than {MAX_TEST_MODULES} modules in a folder of tests: {full}"


def test_every_package_says_what_it_holds():
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert len(packages) > 20
    silent = [name for name in packages if not ast.get_docstring(tree(name))]
    assert not silent, f"packages without a docstring: {silent}"
    bare = [folder for folder in _folders(PACKAGE) if not (PACKAGE / folder / "__init__.py").is_file()]
    assert not bare, f"folders without __init__.py: {bare}"


def test_a_public_class_has_a_name_of_its_own():
    found = SOURCES.classes().items()
    twice = {name: where for name, where in found if len(where) > 1 and name not in TWO_CLASSES}
    assert not twice, f"classes that share a name: {twice}"


def test_a_module_has_a_name_of_its_own_in_its_package():
    found = defaultdict(list)
    for folder, paths in _folders(PACKAGE).items():
        if folder not in TWINS:
            for path in paths:
                found[folder.partition("/")[0], path.stem].append(folder)
    twice = {name: folders for name, folders in found.items() if len(folders) > 1}
    assert not twice, f"modules that share a name: {twice}"


def _exists(name: str) -> bool:
    """Whether a page's ``name.py`` is a module: its path from the root or the package, or its name alone."""
    if "/" in name:
        return (ROOT / name).is_file() or (PACKAGE / name).is_file()
    return any(path.name == name for path in MODULES.values())


def test_the_page_for_contributors_names_what_exists():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    wrong = [name for name in re.findall(r"`([\w/]+\.py)`", page) if not _exists(name)]
    assert not wrong, f"docs/architecture.md names modules that do not exist: {wrong}"
    drawn = {line.split()[0].removesuffix("/") for line in page.splitlines() if re.match(r"\s*\w+/\s", line)}
    packages = set(_folders(PACKAGE)) - {"."}
    unnamed = [name for name in sorted(packages) if f"{name}/" not in page and name.rpartition("/")[2] not in drawn]
    assert not unnamed, f"docs/architecture.md names no module and no folder of {unnamed}"


@pytest.mark.slow
def test_retired_words_do_not_come_back():
    """Each word has one meaning, which the field gave it; tests/vocabulary.py says what to write instead."""
    found = vocabulary.uses(ROOT)
    wrong = [
        f"{word.pattern} -> {word.use}\n    " + "\n    ".join(found[word.pattern])
        for word in vocabulary.RETIRED
        if found[word.pattern]
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_begin_with_what_a_thing_does():
    wrong = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node)
                if said and NO_VERBS.match(said):
                    wrong.append(f"{module}.{getattr(node, 'name', '')}: {said.splitlines()[0]}")
    assert not wrong, "begin with a verb:\n" + "\n".join(wrong)


@in_every(MODULES)
def test_no_module_keeps_state_in_a_global_statement(module):
    lines = [node.lineno for node in nodes(module) if isinstance(node, ast.Global)]
    assert not lines, f"`global` in lines {lines}"


@in_every(MODULES)
def test_the_environment_is_read_only_where_it_may_be(module):
    lines = [
        node.lineno
        for node in nodes(module)
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "environb", "getenv", "putenv", "unsetenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert module in ENVIRONMENT or not lines, f"os.environ in lines {lines}"


@in_every(MODULES)
def test_mpi_objects_are_never_freed_by_the_garbage_collector(module):
    """A communicator freed at a moment that differs between ranks deadlocks."""
    assert not [name for name, _ in functions(module) if name.endswith(".__del__")]


@in_every(SOURCES.modules)
def test_a_module_is_a_chapter(module):
    code, lines = SOURCES.code(module)[0], len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert code >= MIN_CODE or module in EXEMPT, f"{code} lines of code, less than {MIN_CODE}: a page of which chapter?"
    assert code <= MAX_CODE, f"{code} lines of code, more than {MAX_CODE}"
    assert lines <= MAX_LINES, f"{lines} lines, more than {MAX_LINES}"


@in_every([m for m in MODULES if m not in {"mpizero", "mpizero.cli.main"}])
def test_a_module_imports_few_others(module):
    found = {name for name, _ in imported(module) if name in MODULES and name != module}
    assert len(found) <= MAX_FAN_OUT, f"imports {len(found)} modules of mpizero, more than {MAX_FAN_OUT}"


def test_the_package_stays_small():
    code = sum(SOURCES.code(module)[0] for module in MODULES)
    assert code <= MAX_PACKAGE, f"{code} lines of code, more than {MAX_PACKAGE}: what has become superfluous?"


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function, without its docstring."""
    first = node.body[0]
    documented = ast.get_docstring(node, clean=False) is not None
    said = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - said


@in_every(MODULES)
def test_functions_stay_short(module):
    """Their documentation does not count: it must be complete."""
    lines = {name: _length(node) for name, node in functions(module)}
    long = [f"{name}: {count} lines" for name, count in lines.items() if count > MAX_FUNCTION and name not in EXEMPT]
    assert not long, "\n".join(long)


@in_every([m for m in MODULES if section(m) != "kernels"])
def test_functions_take_few_positional_parameters(module):
    """Kernels are exempt: their arguments are the arrays and ranges of one loop."""
    many = []
    for name, node in functions(module):
        count = len([a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in {"self", "cls"}])
        if count > MAX_PARAMETERS and name not in EXEMPT:
            many.append(f"{name}: {count} parameters")
    assert not many, "\n".join(many)


def _public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, name)


@in_every([m for m in MODULES if m != "mpizero.types"])
def test_public_names_have_a_docstring(module):
    """The protocols of ``types`` are exempt: their class docstring is the contract of one-line members."""
    exempt = {"overload", "setter"}
    bare = [
        name
        for name, node in _public(tree(module).body, module)
        if ast.get_docstring(node) is None
        and not exempt & {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
    ]
    assert not bare, f"without docstring: {bare}"


def test_twin_kernels_have_the_same_names():
    alone = {"launch.py"}  # what a CUDA kernel needs to be started
    folders = {"cpu": PACKAGE / "kernels/cpu", "cuda": PACKAGE / "kernels/cuda", "reference": REFERENCE}
    names = {twin: {path.name for path in folder.glob("[!_]*.py")} - alone for twin, folder in folders.items()}
    assert names["cpu"] == names["cuda"]
    assert names["cpu"] == names["reference"]


def test_allow_lists_name_only_what_exists():
    present = {name for module in MODULES for name, _ in functions(module)} | set(MODULES)
    assert set(EXEMPT) <= present
    assert set(TWINS) <= set(_folders(PACKAGE))
    assert set(MODULES) >= ENVIRONMENT
    assert {(module, name) for module in MODULES for name, _ in imported(module)} >= set(LATE)
    assert set(MODULES) >= {name for package, (closed, _) in CLOSED.items() for name in (package, *closed)}


def test_what_is_imported_loads_no_more_than_it_needs():
    """No heavy library with the package: the first line of every script must not cost seconds. No MPI for a plan:

    where a job of several ranks plans, the others have left, and whoever starts MPI would wait for them.
    """
    steps = ("mpizero", "mpizero.Trainer", "mpizero.tools.plan.command, mpizero.tools.plan")
    code = f"import {steps[0]}, sys; print(*sys.modules); {steps[1]}; print(*sys.modules); import {steps[2]}"
    command = [sys.executable, "-c", f"{code}; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    package, trainer, planner = (set(line.split()) for line in done.stdout.splitlines())
    assert not package & {"numba", "llvmlite", "h5py", "mpi4py", "tqdm", "sklearn", "cupy", "safetensors"}
    assert "mpizero.train.trainer" in trainer
    assert not [name for name in trainer if name.startswith(("mpizero.tools.plan", "mpizero.tools.bench"))]
    assert "mpizero.tools.plan.plan" in planner
    assert "mpi4py.MPI" not in planner


def test_a_checkpoint_is_loaded_without_methods_of_whole_vectors(tmp_path):
    """Only what they have saved, or a model that they train, needs their modules."""
    code = """
import sys
import numpy as np
import mpizero as mz
with mz.distribute(mz.nn.MLP(3, [4], 2), mz.optim.AdamW(), strategy="zero1") as model:
    model.train(np.ones((4, 3), np.float32), np.ones(4, np.int64))
    model.save_model(sys.argv[1])
    model.load_model(sys.argv[1])
    model.optimizer.load_state_dict(model.optimizer.state_dict())
print(*[name for name in sys.modules if name.startswith("mpizero.optim.minimizers")])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split() == []

"""Show that a restructuring has moved code without changing it: compare the package with that of an earlier revision.

    python scripts/moved.py [REVISION] [--folder CHECKOUT] [--diff] [--added]

Every function, method, class, constant and statement of REVISION (default: main) must stand somewhere in the working
tree, as often as before. Files, classes of methods, names of imported modules in front of names, and imports inside of
functions may differ; docstrings may not, but for dotted names and paths in them. Printed are:

missing, changed     what stands nowhere, or only with another content
duplicated           what stands in more places than before
colliding            names that a module or a class binds twice: the last one wins in silence
stale                dotted names, paths and imports of modules, files and folders that are no more
placed               what reads ``__file__``, ``__name__`` or frames and stands in another file now: is it still right?

The exit status is 1 if there is any of these but the last.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mpizero"
#: Files in which names and paths are looked for; the changelog tells of the past.
SEARCHED, HISTORY = (".py", ".md", ".toml", ".cfg", ".sh"), "CHANGELOG.md"
DOTTED = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")
PATH = re.compile(r"(?<![\w/.])(?:\w+/)+(?:\w+\.py)?")
#: Names whose values depend on the file in which they stand, or on how many files lie between caller and user.
BY_PLACE = re.compile(r"__file__|__name__|__package__|__module__|_getframe|stacklevel|f_globals")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Files = Mapping[str, str]


class Piece(NamedTuple):
    """Describe one piece of the code: its path, its name with that of its class, and its content, normalized."""

    path: str
    qualified: str
    content: str

    @property
    def name(self) -> str:
        """The name without that of the class."""
        return self.qualified.rpartition(".")[2]

    def __str__(self) -> str:
        """Return name and file."""
        return f"{self.qualified} ({self.path})"


# ---------------------------------------------------------------------- the content of a piece


def module_of(path: str) -> str:
    """Return the dotted name of the module in a file."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(node: ast.AST, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the own modules and names that are imported inside a node: the name bound, the module, and the name there.

    The name there is "" if the module itself is bound.
    """
    package = module_of(path) if path.endswith("__init__.py") else module_of(path).rpartition(".")[0]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            for alias in inner.names:
                if alias.asname and _is_own(alias.name):
                    yield alias.asname, alias.name, ""
        elif isinstance(inner, ast.ImportFrom):
            base = package.rsplit(".", inner.level - 1)[0] if inner.level else ""
            source = ".".join(filter(None, [base, inner.module]))
            for alias in inner.names if _is_own(source) else ():
                yield alias.asname or alias.name, source, alias.name


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


class Normalizer(ast.NodeTransformer):
    """Make equal what may differ: prefixes of modules, own imports, and dotted names and paths in texts.

    A name that is not local to its function becomes ``::name``, so that one that a local name hides counts as changed.
    """

    def __init__(self, imported: Iterable[tuple[str, str, str]], modules: frozenset[str]) -> None:
        self.modules, self.names, self.scopes = dict[str, str](), dict[str, str](), list[set[str]]()
        self.known = modules
        for bound, source, name in imported:
            if not name or f"{source}.{name}" in modules:
                self.modules[bound] = f"{source}.{name}" if name else source
            else:
                self.names[bound] = name

    def visit_FunctionDef(self, node: Any) -> Any:
        """Visit a function with its local names."""
        for outside in ("decorator_list", "returns"):  # and defaults, which are rarely names of parameters
            value = getattr(node, outside)
            new = [self.visit(one) for one in value] if isinstance(value, list) else value and self.visit(value)
            setattr(node, outside, new)
        self.scopes.append(local_names(node))
        node.args = self.visit(node.args)
        node.body = [new for one in node.body if (new := self.visit(one)) is not None] or [ast.Pass()]
        self.scopes.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        """Visit a lambda with its parameters."""
        self.scopes.append(local_names(node))
        self.generic_visit(node)
        self.scopes.pop()
        return node

    def visit_Import(self, node: ast.Import) -> Any:
        """Leave out imports of own modules."""
        node.names = [alias for alias in node.names if not _is_own(alias.name)]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Leave out imports from own modules."""
        return None if node.level or _is_own(node.module or "") else node

    def visit_If(self, node: ast.If) -> Any:
        """Leave out conditions that only imports of own modules depended on."""
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_Name(self, node: ast.Name) -> Any:
        """Mark a name that is not local."""
        if any(node.id in scope for scope in self.scopes):
            return node
        return ast.copy_location(ast.Name(f"::{self.names.get(node.id, node.id)}", node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Take a module in front of a name away."""
        head = node.value
        while isinstance(head, ast.Attribute):
            head = head.value
        if isinstance(head, ast.Name) and not any(head.id in scope for scope in self.scopes):
            module, names = self.modules.get(head.id), ast.unparse(node).split(".")[1:]
            if module is not None:
                while len(names) > 1 and (inner := f"{module}.{names[0]}") in self.known:
                    module, names = inner, names[1:]
                found: ast.expr = ast.Name(f"::{names[0]}", ast.Load())
                for name in names[1:]:
                    found = ast.Attribute(found, name, node.ctx)
                return ast.copy_location(found, node)
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        """Shorten dotted names and paths in a text."""
        if isinstance(node.value, str):
            text = DOTTED.sub(self._shortened, node.value)
            text = re.sub(r"[\w/]*\w\.py\b", "FILE", text)
            text = " ".join(text.split()) if "\n" in text else text  # methods are further to the right
            return ast.copy_location(ast.Constant(text), node)
        return node

    def _shortened(self, match: re.Match[str]) -> str:
        return "MODULE" if match[0] in self.known else match[0].rpartition(".")[2]


def local_names(function: Any) -> set[str]:
    """Return the names that a function or lambda binds: parameters, variables, functions and imports inside."""
    found = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    left: list[ast.AST] = list(function.body) if isinstance(function.body, list) else [function.body]
    outer = set[str]()
    while left:
        node = left.pop()
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer |= set(node.names)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0] for a in node.names if not _is_own(a.name)}
        elif isinstance(node, ast.ImportFrom) and not (node.level or _is_own(node.module or "")):
            found |= {alias.asname or alias.name for alias in node.names}
        if not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found - outer


def pieces_of(path: str, text: str, modules: frozenset[str]) -> Iterator[Piece]:
    """Yield all pieces of a module: functions and methods, heads of classes, constants, and other statements."""
    tree = ast.parse(text)
    imported = list(imports_in(tree, path))

    def content(node: ast.AST) -> str:
        changed = Normalizer(imported, modules).visit(node)
        return "" if changed is None else ast.unparse(ast.fix_missing_locations(changed))

    def cut(body: list[ast.stmt], prefix: str) -> Iterator[Piece]:
        for node in body:
            if isinstance(node, FUNCTIONS):
                yield Piece(path, prefix + node.name, content(node))
            elif isinstance(node, ast.ClassDef):
                yield from cut(
                    [one for one in node.body if isinstance(one, (*FUNCTIONS, ast.ClassDef))], f"{node.name}."
                )
                rest = [one for one in node.body if not isinstance(one, (*FUNCTIONS, ast.ClassDef))]
                node.body = rest or [ast.Pass()]
                yield Piece(path, prefix + node.name, content(node))
            elif name := ", ".join(bound_by(node)):
                if not isinstance(node, ast.Import | ast.ImportFrom) and name != "__all__":
                    yield Piece(path, prefix + name, content(node))
            elif not _is_text(node) and (found := content(node)):
                yield Piece(path, f"statement {found.splitlines()[0]:.60}", found)

    yield from cut(tree.body, "")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def bound_by(node: ast.stmt) -> list[str]:
    """Return the names that one statement of a module binds, of a definition, an assignment or an import."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return []


# ---------------------------------------------------------------------- two trees


def collisions(path: str, text: str) -> dict[str, list[str]]:
    """Return the names that a module, or a class in it, binds by several statements that differ; with the statements.

    Overloads, setters of properties and ``_`` are no collisions.
    """
    found: dict[str, list[str]] = {}
    tree = ast.parse(text)
    for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        bound: dict[str, list[str]] = defaultdict(list)
        for node in owner.body:
            decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
            if any(one.endswith(("overload", ".setter", ".deleter")) for one in decorators):
                continue
            for name in bound_by(node):
                origin = f"from {node.module} {name}" if isinstance(node, ast.ImportFrom) else ast.unparse(node)
                if origin not in bound[name]:
                    bound[name].append(origin)
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        found |= {f"{prefix}{name} ({path})": all_ for name, all_ in bound.items() if len(all_) > 1 and name != "_"}
    return found


class Comparison(NamedTuple):
    """Hold what differs between two trees, as lines; ``changed`` is of pairs of pieces."""

    missing: list[str]
    changed: list[tuple[Piece, Piece]]
    duplicated: list[str]
    colliding: list[str]
    placed: list[str]
    added: list[str]


def compared(before: Files, after: Files) -> Comparison:
    """Compare the package's files of two trees, by path."""
    cut: dict[tuple[str, str], list[Piece]] = {}
    for files in (before, after):
        modules = frozenset(map(module_of, files))
        cut |= {file: list(pieces_of(*file, modules)) for file in files.items() if file not in cut}
    pieces = [[piece for file in files.items() for piece in cut[file]] for files in (before, after)]
    places: list[dict[tuple[str, str], list[Piece]]] = [defaultdict(list), defaultdict(list)]
    for side, found in zip(places, pieces, strict=True):
        for piece in found:
            side[piece.name, piece.content].append(piece)
    old, new = places
    lost = [piece for key, found in old.items() for piece in found[len(new.get(key, ())) :]]
    gained = [piece for key, found in new.items() if key not in old for piece in found]
    changed: list[tuple[Piece, Piece]] = []
    for piece in list(lost):
        same = [other for other in gained if other.name == piece.name]
        if same:
            closest = max(same, key=lambda other: (other.qualified == piece.qualified, other.path == piece.path))
            changed.append((piece, closest))
            lost.remove(piece)
            gained.remove(closest)
    twice = [found for key, found in new.items() if key in old and len(found) > len(old[key])]
    known = [bound for path, text in before.items() for bound in collisions(path, text).values()]
    double = {line: bound for path, text in after.items() for line, bound in collisions(path, text).items()}
    moved = [
        f"{found[0]}, before in {old[key][0].path}"
        for key, found in new.items()
        if key in old and BY_PLACE.search(key[1]) and {p.path for p in found} != {p.path for p in old[key]}
    ]
    return Comparison(
        sorted(map(str, lost)),
        changed,
        sorted(f"{len(old[found[0].name, found[0].content])} -> {', '.join(map(str, found))}" for found in twice),
        sorted(line for line, bound in double.items() if bound not in known),
        sorted(moved),
        sorted(map(str, gained)),
    )


# ---------------------------------------------------------------------- names and paths that are no more


class Gone(NamedTuple):
    """Hold what an earlier tree has had and the present one has not: modules, and paths of files and folders."""

    modules: frozenset[str]
    paths: frozenset[str]

    @classmethod
    def between(cls, before: Iterable[str], after: Iterable[str]) -> Gone:
        """Return what is gone; the arguments are all paths of two trees."""
        trees = [set(paths) for paths in (before, after)]
        modules = [{module_of(p) for p in tree if p.startswith(f"{PACKAGE}/") and p.endswith(".py")} for tree in trees]
        paths = []
        for tree in trees:
            folders = {f"{parent}/" for path in tree for parent in PurePosixPath(path).parents}
            paths.append({path for path in tree if path.endswith(".py")} | folders)
        gone = paths[0] - paths[1]
        return cls(frozenset(modules[0] - modules[1]), frozenset(gone | {p.removeprefix(f"{PACKAGE}/") for p in gone}))

    def names_in(self, path: str, text: str) -> Iterator[tuple[int, str]]:
        """Yield line and text of every name or path in a file that is no more."""
        for number, line in enumerate(text.splitlines(), 1):
            for match in DOTTED.finditer(line):
                parts = match[0].split(".")
                if any(".".join(parts[:end]) in self.modules for end in range(2, len(parts) + 1)):
                    yield number, match[0]
            for match in PATH.finditer(line):
                parts = match[0].split("/")
                starts = ["/".join(parts[:end]) + "/" for end in range(1, len(parts))]
                if any(one in self.paths for one in (match[0], *starts)):
                    yield number, match[0]
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom):
                    for _, source, name in imports_in(node, path):
                        if f"{source}.{name}" in self.modules and source not in self.modules:
                            yield node.lineno, f"from {source} import {name}"


# ---------------------------------------------------------------------- the command


def git(folder: Path, *arguments: str) -> bytes:
    """Return the output of a command of git in a checkout."""
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True).stdout


def package_at(folder: Path, revision: str) -> dict[str, str]:
    """Return the package's files at a revision, by path."""
    with tarfile.open(fileobj=io.BytesIO(git(folder, "archive", revision, PACKAGE))) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def difference(before: Piece, after: Piece) -> str:
    """Return the lines in which two contents differ."""
    contents = (piece.content.splitlines() for piece in (before, after))
    return "\n".join(difflib.unified_diff(*contents, before.path, after.path, lineterm="", n=1))


def main() -> int:
    """Compare the trees that the command line names, print the differences, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="main", help="the revision before (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--diff", action="store_true", help="print the lines that have changed")
    parser.add_argument("--added", action="store_true", help="print what is new, too")
    options = parser.parse_args()
    folder = options.folder.resolve()
    listed = git(folder, "ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
    present = [path for path in listed if (folder / path).is_file()]
    texts = {path: (folder / path).read_text(encoding="utf-8") for path in present if path.endswith(SEARCHED)}
    own = {path: text for path, text in texts.items() if path.startswith(f"{PACKAGE}/") and path.endswith(".py")}
    found = compared(package_at(folder, options.revision), own)
    gone = Gone.between(git(folder, "ls-tree", "-r", "--name-only", options.revision).decode().splitlines(), present)
    stale = [
        f"{path}:{number}: {name}"
        for path, text in texts.items()
        if path != HISTORY
        for number, name in sorted(set(gone.names_in(path, text)))
    ]
    changed = [
        f"{one} -> {other.path}" + (f"\n{difference(one, other)}" if options.diff else "")
        for one, other in found.changed
    ]
    wrong = {
        "missing": found.missing,
        "changed": changed,
        "duplicated": found.duplicated,
        "colliding": found.colliding,
        "stale": stale,
    }
    for title, lines in (wrong | {"placed": found.placed, "added": found.added if options.added else []}).items():
        print(*(f"{title}: {line}" for line in lines), sep="\n", end="\n" if lines else "")
    print(", ".join(f"{len(lines)} {title}" for title, lines in (wrong | {"added": found.added}).items()))
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())

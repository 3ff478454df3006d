"""Connect the generated pages with Sphinx: write them before it reads, and find what docstrings refer to."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.ext.autodoc.mock import mock

from generator.api_pages import write_reference
from generator.program_pages import rewritten, write_programs
from generator.public_names import is_member, public_names


def missing(library: str) -> bool:
    """Tell whether a library is not installed."""
    return find_spec(library) is None


def short_names(mocked: list[str]) -> dict[str, str]:
    """Return public classes by the name that docstrings use in the types of parameters."""
    with mock(mocked):
        classes = [one for one in public_names().values() if inspect.isclass(one.value)]
    return {one.name: one.full for one in reversed(classes)}


def connect(app: Any) -> None:
    """Connect this module's functions to the events of a build."""
    app.connect("config-inited", only_own_types, priority=900)  # after numpydoc's
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_source)
    app.connect("missing-reference", find_reference)


def only_own_types(app: Any, config: Any) -> None:
    """Take out numpydoc's links to the documentation of Python and NumPy, which no build may fetch."""
    config.numpydoc_xref_aliases_complete = config.numpydoc_xref_aliases


def write_pages(app: Any) -> None:
    """Write the pages that are not in the repository, and keep whose they are."""
    with mock(app.config.autodoc_mock_imports):
        pages = write_reference(Path(app.srcdir, "reference"))
        app.whose = {f"reference/{page}": full for full, page in pages.items()}
        app.documented = documented()
    write_programs()


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Rewrite the links of a Markdown page."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        source[0] = rewritten(source[0], path.relative_to(app.srcdir).as_posix())


def documented() -> dict[int, str]:
    """Return the full names of all public objects and of their methods, by the object's identity."""
    found: dict[int, str] = {}
    classes = {id(one.value) for one in public_names().values() if inspect.isclass(one.value)}
    for full, one in public_names().items():
        if inspect.isclass(one.value) or inspect.isroutine(one.value):
            found.setdefault(id(one.value), full)
        for base in one.value.__mro__ if inspect.isclass(one.value) else ():
            if base is not one.value and id(base) in classes:
                break  # that one's page has them
            found |= {id(value): f"{full}.{name}" for name, value in vars(base).items() if is_member(name, value)}
    return found


def find_reference(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Find what a docstring refers to as Python would in the module that defines it, and link its public name.

    What is not public, and types that are other libraries', are shown without a link; what does not exist is a warning.
    """
    if node.get("refdomain") != "py":
        return None
    places = scopes(app.whose.get(node["refdoc"], "mpizero"))
    found = meaning(node["reftarget"].lstrip("~."), places)
    if id(found) in app.documented:
        node["refspecific"] = False
        return env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", app.documented[id(found)], node, contnode
        )
    in_text = isinstance(node.parent, nodes.paragraph)
    return None if in_text and found is None else contnode


def scopes(full: str) -> list[Any]:
    """Return where the docstring of a public name may find other names: its class, its modules, the package."""
    module, _, name = full.rpartition(".")
    value = getattr(import_module(module), name) if module else import_module(full)
    classes = value.__mro__ if inspect.isclass(value) else [value]
    modules = [sys.modules.get(getattr(one, "__module__", None) or "") for one in classes]
    return [*classes, *filter(None, modules), import_module(module or full), import_module("mpizero")]


def meaning(target: str, places: list[Any]) -> Any:
    """Return what a dotted name means in the first of some places that knows it, or as the name of a module; or None.

    An attribute that only instances have is known by its annotation.
    """
    parts = target.split(".")
    for place in places:
        found = place
        for part in parts:
            found = getattr(found, part, None) or vars(found).get("__annotations__", {}).get(part)
            if found is None:
                break
        else:
            return found
    known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in sys.modules]
    if not known:
        return None
    found = sys.modules[".".join(parts[: known[-1]])]
    for part in parts[known[-1] :]:
        found = getattr(found, part, None)
    return found

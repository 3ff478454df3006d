"""Import the modules of a package's public names when the names are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any


def names_on_use(package: str, known: Sequence[str], modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return a function to use as the ``__getattr__`` of ``package``, whose public names are ``known``.

    It imports the module of a name when the name is first used, so a training of many ranks imports what it needs, and
    no more. The modules are those that the package imports from under ``if TYPE_CHECKING:``, where checkers of types
    and readers find them. ``modules`` are names that are modules of the package. For every other name the function
    raises ``UnknownNameError``, which suggests the most similar name.
    """
    homes: dict[str, str] = {}

    def found(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if not homes:
            homes.update(_homes(package))
        if name not in homes:
            return import_module("mpizero.names").unknown_names(package, known)(name)
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return found


def _homes(package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a package imports under ``if TYPE_CHECKING:``, and the module that it imports it from."""
    import ast  # takes milliseconds, which ``import mpizero`` alone need not

    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = (inner for inner in node.body if isinstance(inner, ast.ImportFrom))
            yield from ((alias.name, str(inner.module)) for inner in imports for alias in inner.names)

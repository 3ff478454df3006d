"""Load the public names of a package lazily: a name's module is imported when the name is first used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the ``__init__.py`` of ``package``, which calls this.

    The public names are those that this file imports as themselves (``from module import name as name``, one name in a
    statement), usually under ``if TYPE_CHECKING:``, where they cost nothing, and checkers of types and readers find
    them. So a process imports only what it uses. For other names ``__getattr__`` raises ``UnknownNameError`` with the
    most similar one.
    """
    homes = dict(_homes(package))
    names = sorted(homes)

    def find(name: str) -> Any:
        if name not in homes:
            if name.startswith("__"):  # inspect asks so while it goes through a namespace, which must not change
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            if not name.isidentifier() or find_spec(f"{package}.{name}") is None:
                return import_module("mpizero.names").unknown_names(package, names)(name)
            # ``from package import module`` asks for the name first, so no similar name is searched for: that is slow.
            alike = "".join(f"; did you mean {public!r}?" for public in names if public.lower() == name)
            text = f"module {package!r} has no public name {name!r}, which is a module of it{alike}"
            raise import_module("mpizero.errors").UnknownNameError(text)
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, names.copy, names


def lazy_modules(package: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` for the ``__init__.py`` of a package that imports its modules when they are first used."""

    def find(name: str) -> Any:
        if name.isidentifier() and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"{package} has no module {name!r}")

    return find


def _homes(package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a package imports as itself, and the module that it imports it from."""
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    for module, name in re.findall(r"from (\S+) import \(?\s*(\w+) as \2\b", source):
        yield name, module

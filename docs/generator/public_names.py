"""List the public names of the package, from ``__all__``: each has one page of the reference."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mpizero._util.names import declared

DOCS = Path(__file__).resolve().parents[1]
#: Packages that ``__all__`` of their parent does not name, because importing them needs another library.
OF_OTHER_LIBRARIES = ("mpizero.adapters.torch", "mpizero.adapters.jax")


@dataclass(frozen=True)
class PublicName:
    """Hold a name as users write it, such as ``mpizero.nn.GPT``, and the object that it means."""

    module: str
    name: str
    value: Any

    @property
    def full(self) -> str:
        """Return the name with its module."""
        return f"{self.module}.{self.name}"

    @property
    def title(self) -> str:
        """Return the name as users write it after ``import mpizero as mz``, without ``mz``."""
        return self.full.removeprefix("mpizero.")

    @property
    def summary(self) -> str:
        """Return the first paragraph of the docstring, without links, or the value of a number or a tuple."""
        said = inspect.getdoc(self.value) if callable(self.value) or inspect.ismodule(self.value) else None
        first = (said or f"``{self.value!r}``").partition("\n\n")[0].replace("\n", " ")
        return re.sub(r":\w+:`~?([^`]*)`", r"``\1``", first)


def own_names(module: ModuleType) -> list[str]:
    """Return a module's public names: ``__all__``, or what is defined in it; of ``mpizero`` also those not listed."""
    if module.__name__ == "mpizero":
        return sorted((name for part in declared("mpizero") for name in part), key=str.lower)
    defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
    return sorted(dict.fromkeys(getattr(module, "__all__", defined)), key=str.lower)


def public_modules() -> list[str]:
    """Return the packages and modules whose names are public, ``mpizero`` first."""
    root = import_module("mpizero")
    named = [f"mpizero.{n}" for n in own_names(root) if isinstance(getattr(root, n), ModuleType)]
    return ["mpizero", *sorted([*named, *OF_OTHER_LIBRARIES])]


def public_names(modules: list[str] | None = None) -> dict[str, PublicName]:
    """Return all public names by their full name; what two modules export under one name is the shorter one's."""
    found: dict[str, PublicName] = {}
    seen: set[tuple[int, str]] = set()
    for module in modules or public_modules():
        for name in own_names(import_module(module)):
            one = PublicName(module, name, getattr(import_module(module), name))
            if isinstance(one.value, ModuleType) and one.full in public_modules() or (id(one.value), name) in seen:
                continue
            seen.add((id(one.value), name))
            found[one.full] = one
    return found


def is_member(name: str, value: Any) -> bool:
    """Tell whether a value in a class's namespace is a method or property that has a place in the documentation."""
    plain = getattr(value, "__func__", value)
    return name[0] != "_" and (inspect.isroutine(plain) or isinstance(plain, property)) and bool(plain.__doc__)


def library_groups(page: str | None = None) -> list[tuple[list[str], str]]:
    """Return the rows of the tables of names in ``docs/library.md``: the names, and what they are."""
    text = page if page is not None else (DOCS / "library.md").read_text(encoding="utf-8")
    sections = re.findall(
        r"^## (?:Seven names|All other names|Classes of single strategies)\n(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", "\n".join(sections), re.MULTILINE)
    return [(re.findall(r"`(\w+)`", names), said) for names, said in rows]

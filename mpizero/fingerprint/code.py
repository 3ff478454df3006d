"""Inspect code objects: whose they are, which global variables they read, and which fields they change."""

from __future__ import annotations

import dis
import inspect
import os
import types
from pathlib import Path

_OWN, _STANDARD = str(Path(__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep
#: Methods that change the object they are called on. A variable that a function changes in this way is its own memory
#: (a counter, a cache) and is not compared between ranks.
_CHANGES = (
    "add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update", "write",
)  # fmt: skip

#: Methods of models, layers, losses, optimizers and schedules that the library calls during training.
_CALLED = ("__call__", "backward", "forward", "loss", "loss_and_grad", "predict", "update")


def is_standard(file: str) -> bool:
    """Tell whether a file belongs to Python's standard library."""
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file


def is_users(file: str | None, module: str) -> bool:
    """Tell whether code is the user's: not of an installed package, or typed into an interactive session."""
    if file is None or file.startswith("<"):
        return module == "__main__"
    return not (file.startswith((_OWN, _STANDARD)) or "-packages" + os.sep in file)


def variables(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return two sets of names: global variables that a code object reads, and variables that it changes.

    Functions defined inside of it are included. A change counts if it is an assignment or a call of a method in
    :data:`_CHANGES`; other changes are not seen.
    """
    read, changed = set[str](), set[str]()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = variables(inner)
            read, changed = read | found[0], changed | found[1]
    steps = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    for (operation, name), *later in zip(steps, steps[1:], steps[2:], strict=False):
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(name)
        stored = any(following == "STORE_SUBSCR" for following, _ in later) or later[1] == ("COPY", 2)  # a[i] += 1
        if operation in ("STORE_GLOBAL", "STORE_DEREF") or (
            operation.startswith("LOAD_") and isinstance(name, str) and (stored or later[0][1] in _CHANGES)
        ):
            changed.add(name)
    return read, changed


def kept_by(kind: type) -> set[str]:
    """Return the fields that the methods of a class change when the library calls them.

    The methods of :data:`_CALLED` are read, and the methods that these call in turn. Only the kinds of changes that
    :func:`variables` sees are found, and assignments to attributes.
    """
    changed, left, seen = set[str](), list(_CALLED), set[str]()
    while left:
        name = left.pop()
        method = inspect.getattr_static(kind, name, None)
        if name in seen or not isinstance(method, types.FunctionType):
            continue
        seen.add(name)
        left += method.__code__.co_names
        changed |= variables(method.__code__)[1] | _stored(method.__code__)
    return changed


def _stored(code: types.CodeType) -> set[str]:
    """Return the attributes of its first argument (``self``) that a function assigns, by = or += and the like.

    Attributes that it multiplies or divides are left out: they are settings, such as a decaying learning rate, and must
    be compared between ranks. Counters need not be.
    """
    steps = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    read, first = {name for operation, name, _ in steps if operation == "LOAD_ATTR"}, code.co_varnames[:1]
    found = set[str]()
    for (*_, sign), (before, value, _), (operation, name, _) in zip(steps, steps[1:], steps[2:], strict=False):
        own = before == "SWAP" or (value[-1:] if isinstance(value, tuple) else (value,)) == first
        if operation == "STORE_ATTR" and own and not (name in read and sign.strip("=") in ("*", "/", "**")):
            found.add(name)
    return found

"""Inspect code objects: whether they are the user's, which variables they read, and which fields they change."""

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
    """Tell whether a source file belongs to Python's standard library."""
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file


def is_users(file: str | None, module: str) -> bool:
    """Tell whether code is the user's own: in a file outside of Python and installed packages, or typed interactively.

    ``file`` is the path of the source file, or None; ``module`` is the name of the module.
    """
    if file is None or file.startswith("<"):
        return module == "__main__"
    return not (file.startswith((_OWN, _STANDARD)) or "-packages" + os.sep in file)


def variables(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return two sets of names: the global variables that a code object reads, and the variables that it changes.

    Functions defined inside of the code are included. Only assignments and calls of the methods in :data:`_CHANGES` are
    recognized as changes.
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
    """Return the names of the fields that methods of a class change when mpizero calls these methods.

    The methods that are inspected are the ones in :data:`_CALLED`, and the methods that they call in turn. Only the
    changes that :func:`variables` recognizes, and assignments to attributes, are found.
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
    """Return the attributes of its first argument (``self``) that a function assigns, for example by ``=`` or ``+=``.

    Attributes that the function multiplies or divides in place (``*=``, ``/=``) are left out. They are taken for
    settings, such as a decaying learning rate, which must be compared between ranks. Counters need not be compared.
    """
    steps = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    read, first = {name for operation, name, _ in steps if operation == "LOAD_ATTR"}, code.co_varnames[:1]
    found = set[str]()
    for (*_, sign), (before, value, _), (operation, name, _) in zip(steps, steps[1:], steps[2:], strict=False):
        own = before == "SWAP" or (value[-1:] if isinstance(value, tuple) else (value,)) == first
        if operation == "STORE_ATTR" and own and not (name in read and sign.strip("=") in ("*", "/", "**")):
            found.add(name)
    return found

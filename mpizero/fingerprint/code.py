"""Find the origin of code, the global variables that it reads, and the fields of its object that it changes."""

from __future__ import annotations

import dis
import inspect
import os
import types
from pathlib import Path

_OWN, _STANDARD = str(Path(__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep
#: Methods that change what they are called on: a function keeps its own account in such a variable.
_CHANGES = (
    "add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update", "write",
)  # fmt: skip

#: What the library calls of models, layers, losses, optimizers and schedules while it works.
_CALLED = ("__call__", "backward", "forward", "loss", "loss_and_grad", "predict", "update")


def is_standard(file: str) -> bool:
    """Tell whether a file is of Python's own library. Not collective."""
    return file.startswith(_STANDARD) and "-packages" + os.sep not in file


def is_users(file: str | None, module: str) -> bool:
    """Tell whether code is the user's own: of no installed library, or typed in. Not collective."""
    if file is None or file.startswith("<"):
        return module == "__main__"
    return not (file.startswith((_OWN, _STANDARD)) or "-packages" + os.sep in file)


def variables(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the global variables that some code and the functions within it read, and all that they change.

    Not collective. What is changed by other means than those of :data:`_CHANGES` and assignments is not seen.
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
    """Return the fields that the methods of a class change when the library calls them, and those that they call.

    Not collective. Of what is changed, as little is seen as by :func:`variables`.
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
    """Return the attributes of its first argument that a function assigns, by = or += and the like.

    Without those that it multiplies: a rate that falls is a setting, a count that grows is none.
    """
    steps = [(each.opname, each.argval, each.argrepr) for each in dis.get_instructions(code)]
    read, first = {name for operation, name, _ in steps if operation == "LOAD_ATTR"}, code.co_varnames[:1]
    found = set[str]()
    for (*_, sign), (before, value, _), (operation, name, _) in zip(steps, steps[1:], steps[2:], strict=False):
        own = before == "SWAP" or (value[-1:] if isinstance(value, tuple) else (value,)) == first
        if operation == "STORE_ATTR" and own and not (name in read and sign.strip("=") in ("*", "/", "**")):
            found.add(name)
    return found

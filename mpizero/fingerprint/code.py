"""Whose some code is, and which variables it takes from around it."""

from __future__ import annotations

import dis
import os
import types
from pathlib import Path

_OWN, _STANDARD = str(Path(__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep
#: Methods that change what they are called on: a function keeps its own account in such a variable.
_CHANGES = (
    "add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update", "write",
)  # fmt: skip


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
        stored = any(following == "STORE_SUBSCR" for following, _ in later)
        if operation in ("STORE_GLOBAL", "STORE_DEREF") or (
            operation.startswith("LOAD_") and isinstance(name, str) and (stored or later[0][1] in _CHANGES)
        ):
            changed.add(name)
    return read, changed

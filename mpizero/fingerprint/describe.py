"""Describe, for error messages, a value and the path to it inside another value."""

from __future__ import annotations

import datetime
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np

PLAIN = frozenset({bool, int, float, complex, str, bytes, bytearray, type(None), type(Ellipsis), type(NotImplemented)})
#: Classes of modules that are not imported for this alone, which would take 5 ms: who has such a value has the module.
_RARE = (("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID"))
_SHOWN = 120


class _Rare(type):
    def __instancecheck__(cls, value: object) -> bool:
        return any(isinstance(value, getattr(sys.modules.get(module), name, ())) for module, name in _RARE)


class Rare(metaclass=_Rare):
    """Have the values of some classes of Python's library as instances, without their modules."""


BY_REPR = (range, slice, Rare, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)


def words(subject: str, steps: Iterable[str]) -> str:
    """Return the name of a part of a value for a message, such as "dropout of block 'encoder.2'".

    ``subject`` is the name of the whole value ("block 'encoder.2'"). ``steps`` are the expressions that lead from it to
    the part (".dropout").
    """
    first, *rest = [step for step in steps if step and step != ".fingerprint"] or [""]
    if first.startswith("['"):
        first = first[2:-2]
    path = first.removeprefix(".") + "".join(rest)
    if path == "lr":
        return "learning rate"
    return f"{path} of {subject}" if path else subject


def shown(value: Any) -> str:
    """Return a short text that describes a value in a message; unlike ``repr`` it never contains a memory address."""
    if isinstance(value, np.ndarray):
        first = ", ".join(f"{v:.7g}" if isinstance(v, float) else str(v) for v in value.flat[:3].tolist())
        return f"{value.dtype} array of shape {value.shape} [{first}{', ...' if value.size > 3 else ''}]"
    if isinstance(value, functools.partial):
        return f"partial of {shown(value.func)}"
    if isinstance(value, types.MethodType):
        return shown(value.__func__)
    if isinstance(value, types.FunctionType | types.CodeType):
        code = value if isinstance(value, types.CodeType) else value.__code__
        return f"{code.co_qualname} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, set | frozenset):
        text = "{" + ", ".join(sorted(map(shown, value))) + "}"
    elif isinstance(value, np.generic):
        text = repr(value.item())
    elif type(value) in PLAIN or isinstance(value, (*BY_REPR, PurePath, np.dtype, Enum)) or all_plain(value):
        text = repr(value)
    elif type(value) in (list, tuple):
        inner = ", ".join(type(item).__qualname__ if isinstance(item, list | tuple) else shown(item) for item in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner})"
    else:
        return type(value).__qualname__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def qualified_name(value: Any) -> str:
    """Return the name of a class or function with its module, or with ``mpizero`` alone if it is this library's."""
    module = value.__module__
    return f"{'mpizero' if str(module).startswith('mpizero.') else module}.{value.__qualname__}"


def all_plain(value: Any) -> bool:
    """Tell whether a value is a list, tuple or deque that contains only numbers, strings and other simple constants."""
    return isinstance(value, list | tuple | deque) and PLAIN.issuperset(map(type, value))

"""Tell whether values of JSON, which anybody may have written, have the forms that a reader computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin

#: Numbers of larger magnitude are taken for damage, or for values that are not finite: a few of them have no sum.
LARGEST = 1e300
#: The last time that has a date in all systems' calendars, in seconds since 1970.
LATEST = 1e11


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number that can be added to others. Not collective."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_step(value: Any) -> bool:
    """Tell whether a value is the number of a step. Not collective."""
    return type(value) is int and 0 <= value < 2**63


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the type ``hint``: plain types, None, unions, lists and dictionaries with texts as keys.

    Whole numbers have at most 64 bits; ``Any`` is any value. Not collective.
    """
    if hint is Any:
        return True
    if isinstance(hint, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(one, parts[1]) for one in value.values())
    if hint is float:
        return is_number(value) and math.isfinite(value)
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, hint)


def plain(value: Any) -> Any:
    """Return ``value`` in JSON values: other objects as text, and numbers that are not finite too. Not collective."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)

"""Parse JSON that is not trusted, strictly and with limits on memory and nesting."""

from __future__ import annotations

import json
import sys
from math import isfinite
from typing import Any, NoReturn

#: The most memory in bytes that parsing may take, and the deepest nesting of dictionaries and lists.
MEMORY_LIMIT, DEPTH_LIMIT = 96 * 1024 * 1024, 32
#: The most characters of an integer: those of the largest float64, with a sign.
_INTEGER = 310


def parse(data: bytes) -> Any:
    """Parse JSON in UTF-8 and return its value.

    Raises
    ------
    ValueError
        If ``data`` is not JSON, contains a number beyond the range of float64 or a key twice, is nested too deeply, or
        would take too much memory. The message says which, and the caller must add the name of the file.
    """
    if (memory := memory_of(data)) > MEMORY_LIMIT:
        raise ValueError(f"would take {memory} bytes of memory, at most {MEMORY_LIMIT} are allowed")
    try:
        found = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite, parse_int=_bounded
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error!s:.200}") from None
    if depth_of(found) > DEPTH_LIMIT:
        raise ValueError(f"nested more than {DEPTH_LIMIT} levels deep")
    return found


def memory_of(data: bytes) -> int:
    """Return an upper bound on the bytes of memory that parsing ``data`` takes.

    It is computed from the numbers of brackets, commas and bytes.
    """
    return 190 * (data.count(b"{") + data.count(b"[")) + 72 * data.count(b",") + 3 * len(data)


def depth_of(value: object) -> int:
    """Return the number of levels of dictionaries, lists and tuples in ``value``.

    The function does not recurse, because a crafted file could exhaust the stack.
    """
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list, tuple))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def is_count(value: object, least: int = 0) -> bool:
    """Tell whether a value from a file is an int from ``least`` to 2**63 - 1; it is False for bools and for 1.0."""
    return type(value) is int and least <= value < 2**63


def is_number(value: object) -> bool:
    """Tell whether a value from a file is a finite number > 0 within the range of float64."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # type: ignore[operator]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _finite(number: str) -> float:
    if not isfinite(value := float(number)):
        raise ValueError("a number is too large")
    return value


def _bounded(number: str) -> int:
    if len(number) > _INTEGER or abs(value := int(number)) > sys.float_info.max:
        raise ValueError("a number is too large")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")

"""Check settings of ``[data]``: a check returns the value to use, or raises ValueError that says what is allowed."""

from __future__ import annotations

from typing import Any

from mpizero._util.checks import Unexpected, whole
from mpizero._util.names import nearest
from mpizero.train.config.setting_checks import flag, many, text


def arrays(value: Any) -> Any:
    """Check ``data.arrays``: it must be "digits", or a table with file paths under the keys ``x`` and ``y``."""
    if value == "digits":
        return value
    return table("x", "y", hint=' or "digits" (scikit-learn\'s handwritten digits)')(value)


def patterns(value: Any) -> tuple[str, ...]:
    """Check ``data.text``, one or several file patterns, or "stdlib" alone; return the patterns as a tuple."""
    if value in ("digits", ["digits"]):
        raise ValueError('is for text; scikit-learn\'s digits are data.arrays = "digits"')
    result: tuple[str, ...] = many(text, least=1)([value] if isinstance(value, str) else value)
    if "stdlib" in result and len(result) > 1:
        raise ValueError('"stdlib" (this Python\'s own sources) stands alone')
    return result


def table(*keys: str, hint: str = "") -> Any:
    """Return a check for tables: they must have exactly the keys ``keys``, with strings that are not empty.

    ``hint`` is added to the error message.
    """
    allowed = "must be a table {" + ", ".join(f'{key} = "..."' for key in keys) + "}" + hint

    def check(value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise ValueError(allowed)
        for key in value:
            if key not in keys:
                raise ValueError(f"{allowed}; {key} is unknown{nearest(key, keys)}")
        for key in keys:
            if key not in value:
                raise ValueError(f"{allowed}; {key} is missing")
            try:
                text(value[key])
            except ValueError as error:
                raise ValueError(f"{allowed}; {key} {error}") from None
        return dict(value)

    return check


def stored(value: Any) -> dict[str, Any]:
    """Check ``data.hdf5``: it must be a table with the keys ``path``, ``x`` and ``y``, and maybe others.

    It stays as JSON can hold it; :func:`source_arguments` makes arguments of it.
    """
    example = 'must be a table such as {path = "*.h5", x = "x", y = "y"}'
    if not isinstance(value, dict):
        raise ValueError(example)
    if unknown := [key for key in value if key not in _STORED]:
        raise ValueError(f"{example}; {unknown[0]} is unknown{nearest(unknown[0], tuple(_STORED))}")
    if missing := [key for key in ("path", "x", "y") if key not in value]:
        raise ValueError(f"{example}; {missing[0]} is missing")
    found = {}
    for key, given in value.items():
        try:
            found[key] = _STORED[key](given)
        except ValueError as error:
            be = "must be " if isinstance(error, Unexpected) else ""
            raise ValueError(f"{example}; {key} {be}{error}") from None
    return found


def _texts(value: Any) -> Any:
    return text(value) if isinstance(value, str) else list(many(text, least=1)(value))


def _array_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return _texts(value)
    return {key: text(name) for key, name in value.items()}


def source_arguments(table: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a :class:`~mpizero.data.FileSource` that a checked table holds."""
    by_axis = {
        key: {int(axis): number for axis, number in table[key].items()} for key in ("window", "stride") if key in table
    }
    return table | by_axis


def _by_axis(value: Any) -> dict[str, int]:
    """Check a table from axes, which are strings in TOML, to numbers."""
    if not isinstance(value, dict) or not all(str(axis).isdecimal() for axis in value):
        raise ValueError("must be a table from axes to numbers, such as {0 = 4}")
    return {axis: whole(1)(length) for axis, length in value.items()}


_STORED = {
    "path": _texts,
    "x": _array_names,
    "y": _array_names,
    "axis": whole(0),
    "window": _by_axis,
    "stride": _by_axis,
    "lead": whole(0),
    "allow_nan": flag,
}

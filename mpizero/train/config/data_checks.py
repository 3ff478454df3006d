"""Check settings of ``[data]``: a check returns the value to use, or raises ValueError that says what is allowed."""

from __future__ import annotations

from typing import Any

from mpizero.names import nearest
from mpizero.train.config.setting_checks import many, text


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

"""Check the ids of an embedding."""

from __future__ import annotations

from typing import Any


def inside(index: Any, rows: Any) -> Any:
    """Tell whether ``index`` is the index of a row in a table of ``rows`` rows: ``0 <= index < rows``."""
    return (index >= 0) & (index < rows)

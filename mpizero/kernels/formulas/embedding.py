"""Decide which ids of an embedding name a row."""

from __future__ import annotations

from typing import Any


def inside(index: Any, rows: Any) -> Any:
    """Tell whether ``index`` names a row of a table of ``rows`` rows."""
    return (index >= 0) & (index < rows)

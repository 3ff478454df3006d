"""Define the formulas of attention computed tile by tile."""

from __future__ import annotations

from typing import Any


def keys_seen(query: Any, offset: Any, keys: Any) -> Any:
    """Return how many keys of a tile a query sees, where query 0 stands ``offset`` places after key 0."""
    seen = query + 1 + offset
    if seen < 0:
        return 0
    return seen if seen < keys else keys


def rescaled(total: Any, factor: Any, part: Any) -> Any:
    """Return a running sum under a new maximum, with a part added to it."""
    return total * factor + part

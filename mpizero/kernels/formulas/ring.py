"""Define the formulas of attention that is computed tile by tile."""

from __future__ import annotations

from typing import Any


def keys_seen(query: Any, offset: Any, keys: Any) -> Any:
    """Return how many of a tile's ``keys`` keys query number ``query`` sees under the causal mask: the first ones.

    Query 0 of the tile is ``offset`` positions after key 0 in the sequence.
    """
    seen = query + 1 + offset
    if seen < 0:
        return 0
    return seen if seen < keys else keys


def rescaled(total: Any, factor: Any, part: Any) -> Any:
    """Return ``total * factor + part``: a sum after its maximum has changed, with the part of one tile added."""
    return total * factor + part

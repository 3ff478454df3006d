"""Define the formulas of the causal softmax."""

from __future__ import annotations

from typing import Any


def visible_keys(query: Any, queries: Any, keys: Any) -> Any:
    """Return how many keys a query sees: the last query sees all, each one before sees one fewer."""
    seen = query + 1 + keys - queries
    return seen if seen > 0 else 0


def softmax_gradient(p: Any, dp: Any, dot: Any, scale: Any) -> Any:
    """Return the gradient of a score, from the row's dot product of p and dp."""
    return scale * (p * (dp - dot))

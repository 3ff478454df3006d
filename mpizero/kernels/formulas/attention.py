"""Define the formulas of the causal softmax, for one query or one score."""

from __future__ import annotations

from typing import Any


def visible_keys(query: Any, queries: Any, keys: Any) -> Any:
    """Return how many keys query number ``query`` of ``queries`` sees under the causal mask: the first ones.

    The last query sees all ``keys`` keys, and every other query sees one key fewer than the next query (at least 0).
    """
    seen = query + 1 + keys - queries
    return seen if seen > 0 else 0


def softmax_gradient(p: Any, dp: Any, dot: Any, scale: Any) -> Any:
    """Return the gradient of one score of a query, where p = softmax(scale * scores).

    ``p`` is the score's probability, ``dp`` the gradient of the probability, and ``dot`` the sum of p * dp over all
    keys of the query.
    """
    return scale * (p * (dp - dot))

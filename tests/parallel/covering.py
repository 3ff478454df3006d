"""Short lists of cases in place of full products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

from mpizero.testing import run_in_threads
from tests.parallel.models import MEMORIES, STRATEGIES


def covering(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few rows of the product of the columns in which every pair of values of two columns occurs."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in product(*(range(len(each)) for each in columns))}
    missing, found = set[Any]().union(*pairs.values()), []
    while missing:
        row = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[row]
        found.append(tuple(column[index] for column, index in zip(columns, row, strict=True)))
    return found


#: Numbers of ranks, strategies and memories: every pair occurs.
LAYOUTS = covering((1, 2, 3, 4), STRATEGIES, MEMORIES)


def on_layouts(body: Callable[[Any, str, dict[str, Any]], Any], rows: Sequence[Any] = tuple(LAYOUTS)) -> None:
    """Call ``body(comm, strategy, memory)`` on the threads of every layout."""
    for size, strategy, memory in rows:
        run_in_threads(size, lambda comm, s=strategy, m=memory: body(comm, s, m))

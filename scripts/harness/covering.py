"""Choose a few rows of a table that have every pair of values which any of its rows has."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the numbers of a few rows that have every pair of values, in two columns, which any row has.

    The row with the most pairs that are still missing is taken, again and again.
    """
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    # What a row adds only becomes less: the first of the heap whose count is still true is the best.
    heap = [(-len(mine), number) for number, mine in enumerate(pairs)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        _, number = heapq.heappop(heap)
        pairs[number] &= missing
        if heap and -len(pairs[number]) > heap[0][0]:
            heapq.heappush(heap, (-len(pairs[number]), number))
        else:
            chosen.append(number)
            missing -= pairs[number]
    return sorted(chosen)

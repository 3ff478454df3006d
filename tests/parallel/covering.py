"""Short lists of cases in place of full products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few rows of the product of the columns in which every pair of values of two columns occurs."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in product(*(range(len(each)) for each in columns))}
    missing, found = set[Any]().union(*pairs.values()), []
    while missing:
        row = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[row]
        found.append(tuple(column[index] for column, index in zip(columns, row, strict=True)))
    return found

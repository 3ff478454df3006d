"""Compute sums, maxima and dot products of one row of a matrix, in an order that is the same on every CPU.

LLVM does not vectorize a sum of floats in the order of the loop, because that would change the order. These functions
use a fixed order that can be vectorized. A row is cut into blocks of at most ``BLOCK`` elements. A block is first
reduced to h = (its size) / 8 sums: sum j adds elements j, j + h, j + 2 h, ..., j + 7 h. Four lanes then add these h
sums. At last the sums of the blocks are added in order.
"""

from __future__ import annotations

from typing import Any

#: Number of elements of a row that are summed at once.
BLOCK = 2048
FOLD = BLOCK // 4
#: Number of elements of temporary memory that functions with a parameter ``scratch`` need.
SCRATCH = FOLD + BLOCK


def fold_sum(x: Any, fold: Any) -> Any:
    """Return the sum of at most ``BLOCK`` elements ``x``; ``fold`` is temporary memory of ``FOLD`` elements."""
    T = x.dtype.type  # noqa: N806
    h = x.size >> 3
    for j in range(h):
        fold[j] = ((x[j] + x[j + h]) + (x[j + 2 * h] + x[j + 3 * h])) + (
            (x[j + 4 * h] + x[j + 5 * h]) + (x[j + 6 * h] + x[j + 7 * h])
        )
    a, b, c, d = T(0), T(0), T(0), T(0)
    q = h >> 2
    for j in range(q):
        a += fold[j]
        b += fold[j + q]
        c += fold[j + 2 * q]
        d += fold[j + 3 * q]
    for j in range(4 * q, h):
        a += fold[j]
    for j in range(8 * h, x.size):
        b += x[j]
    return (a + b) + (c + d)


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers; return ``b`` if one of them is NaN."""
    return a if a > b else b


def row_max(x: Any, fold: Any) -> Any:
    """Return the largest element of a non-empty row ``x``; if the row holds a NaN, any number may be returned.

    ``fold`` is temporary memory of ``FOLD`` elements.
    """
    first = x[0]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        h = part.size >> 2
        for j in range(h):
            fold[j] = larger(larger(part[j], part[j + h]), larger(part[j + 2 * h], part[j + 3 * h]))
        a, b, c, d = first, first, first, first
        q = h >> 2
        for j in range(q):
            a = larger(fold[j], a)
            b = larger(fold[j + q], b)
            c = larger(fold[j + 2 * q], c)
            d = larger(fold[j + 3 * q], d)
        for j in range(4 * q, h):
            a = larger(fold[j], a)
        for j in range(4 * h, part.size):
            b = larger(part[j], b)
        first = larger(larger(a, b), larger(c, d))
    return first


def row_sum(x: Any, fold: Any) -> Any:
    """Return the sum of a row ``x``; ``fold`` is temporary memory of ``FOLD`` elements."""
    total = x.dtype.type(0)
    for start in range(0, x.size, BLOCK):
        total += fold_sum(x[start : start + BLOCK], fold)
    return total


def row_dot(x: Any, y: Any, scratch: Any) -> Any:
    """Return the dot product of two rows; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        a, b = x[start : start + BLOCK], y[start : start + BLOCK]
        for j in range(a.size):
            terms[j] = a[j] * b[j]
        total += fold_sum(terms[: a.size], fold)
    return total


def row_dot3(x: Any, y: Any, z: Any, scratch: Any) -> Any:
    """Return the sum of (x * y) * z over three rows; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        a, b, c = x[start : start + BLOCK], y[start : start + BLOCK], z[start : start + BLOCK]
        for j in range(a.size):
            terms[j] = (a[j] * b[j]) * c[j]
        total += fold_sum(terms[: a.size], fold)
    return total


def row_square_sum(x: Any, center: Any, scratch: Any) -> Any:
    """Return the sum of (x - center)**2 over a row; ``scratch`` is temporary memory of ``SCRATCH`` elements."""
    total = x.dtype.type(0)
    fold, terms = scratch[:FOLD], scratch[FOLD:SCRATCH]
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        for j in range(part.size):
            terms[j] = (part[j] - center) * (part[j] - center)
        total += fold_sum(terms[: part.size], fold)
    return total

"""Add arrays in the order of the binary tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from mpizero.kernels import backend, namespace
from mpizero.types import Array

#: Elements of a block: a block of all terms is added before the next one, so it stays in the cache.
FOLD_BLOCK = 1 << 15
#: Kernels that add as many terms in one pass.
_KERNELS = {2: "add_two", 4: "add_four", 8: "add_eight"}


def fold(operation: np.ufunc, terms: Sequence[Array] | Array, out: Array) -> None:
    """Combine the arrays ``terms`` by ``operation``, in the order of the binary tree, and write the result to ``out``.

    Term i is leaf i of the tree of ``layout/sum_tree.py``. So a group whose ranks pass sums of 2, 4, 8, ... successive
    leaves gets the bits of a group whose ranks pass the leaves themselves. Not collective. All arrays have the same
    shape, of at least one dimension. ``out`` may be the first term.
    """
    if len(terms) == 1:
        out[...] = terms[0]
    elif operation is np.add and out.flags.c_contiguous and _has_kernel(terms):
        _add([term.reshape(1, -1) for term in terms], 0, out.reshape(1, -1))
    else:
        _fold_in_blocks(operation, terms, out)


def sums_of_parts(terms: Sequence[Array], axis: int, sizes: Sequence[int]) -> list[Array]:
    """Return the sum of the terms in parts of the given sizes along ``axis``, each as a new contiguous array.

    The order is that of :func:`fold`. Not collective.
    """
    first = terms[0]
    before, after = first.shape[:axis], first.shape[axis + 1 :]
    parts = [namespace(first).empty((*before, size, *after), first.dtype) for size in sizes]
    bounds = pairwise(accumulate(sizes, initial=0))
    if _has_kernel(terms):
        rows, inner = prod(before), prod(after)
        matrices = [term.reshape(rows, first.shape[axis] * inner) for term in terms]
        for part, (start, stop) in zip(parts, bounds, strict=True):
            _add(matrices, start * inner, part.reshape(rows, (stop - start) * inner))
    else:
        for part, (start, stop) in zip(parts, bounds, strict=True):
            fold(np.add, [term[(*(slice(None),) * axis, slice(start, stop))] for term in terms], part)
    return parts


def _has_kernel(terms: Sequence[Array] | Array) -> bool:
    known = len(terms) in _KERNELS and terms[0].dtype.char in "fd"
    return known and all(term.flags.c_contiguous for term in terms)


def _add(terms: Sequence[Array], start: int, out: Array) -> None:
    """Add columns of 2-D arrays, from number ``start`` on, by a kernel that reads all terms in one pass."""
    if out.size:
        getattr(backend(out).reduction, _KERNELS[len(terms)])(*terms, start, out)


def _fold_in_blocks(operation: np.ufunc, terms: Sequence[Array] | Array, out: Array) -> None:
    length = out.shape[0]
    in_blocks = len(terms) > 2 and isinstance(out, np.ndarray)  # on a GPU they would only cost launches
    step = max(1, FOLD_BLOCK * length // max(1, out.size)) if in_blocks else length
    for start in range(0, length, max(1, step)):
        _fold_block(operation, [term[start : start + step] for term in terms], out[start : start + step])


def _fold_block(operation: np.ufunc, terms: Sequence[Array], out: Array | None = None) -> Array:
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1  # the leaves below the root's left child
    left, right = _fold_block(operation, terms[:half], out), _fold_block(operation, terms[half:])
    result: Array = operation(left, right, out=out)
    return result

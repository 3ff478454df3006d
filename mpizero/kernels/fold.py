"""Add arrays in the order of the binary tree, a block of elements at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpizero.types import Array

#: Elements of a block: a block of all terms is added before the next one, so it stays in the cache.
FOLD_BLOCK = 1 << 15


def fold(operation: np.ufunc, terms: Sequence[Array] | Array, out: Array) -> None:
    """Combine the arrays ``terms`` by ``operation``, in the order of the binary tree, and write the result to ``out``.

    Term i is leaf i of the tree of ``layout/tree.py``. So a group whose ranks pass sums of 2, 4, 8, ... successive
    leaves gets the bits of a group whose ranks pass the leaves themselves. Not collective. All arrays have the same
    shape, of at least one dimension. ``out`` may be the first term.
    """
    if len(terms) == 1:
        out[...] = terms[0]
        return
    length = out.shape[0]
    step = max(1, FOLD_BLOCK * length // max(1, out.size)) if len(terms) > 2 else length
    for start in range(0, length, max(1, step)):
        _fold_block(operation, [term[start : start + step] for term in terms], out[start : start + step])


def _fold_block(operation: np.ufunc, terms: Sequence[Array], out: Array | None = None) -> Array:
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1  # the leaves below the root's left child
    left, right = _fold_block(operation, terms[:half], out), _fold_block(operation, terms[half:])
    result: Array = operation(left, right, out=out)
    return result

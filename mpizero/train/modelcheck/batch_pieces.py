"""Cut batches into pieces as training does, make their arrays read-only, and detect changes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero._util.pytree import SampleTree, leaves_of, map_arrays, map_leaves
from mpizero.errors import DataError
from mpizero.types import Array


def sample_count(x: Any, y: Any) -> int | None:
    """Return how many samples a batch has; None if it cannot be cut into samples."""
    try:
        tree = SampleTree.of(x=x, y=y)
        return None if tree.uncut else tree.count()
    except DataError:
        return None


def cut(tree: Any, start: int, stop: int) -> Any:
    """Return the samples ``start`` to ``stop - 1`` as contiguous arrays, as training passes them to a model."""
    return map_arrays(lambda array: np.ascontiguousarray(array[start:stop]), tree)


def read_only(tree: Any) -> Any:
    """Return the same nested containers, with a read-only view in the place of every array."""

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        shown: Array = leaf.view()
        shown.flags.writeable = False
        return shown

    return map_leaves(view, tree)


def content(tree: Any) -> tuple[bytes, ...]:
    """Return the bytes of all arrays in nested containers, so that changes of the arrays can be detected."""
    return tuple(leaf.tobytes() for leaf in leaves_of(tree) if isinstance(leaf, np.ndarray))

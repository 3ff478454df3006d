"""Batches as trees of arrays: cut, and given away so that they cannot be written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested tuples, lists and mappings. Not collective."""
    if isinstance(tree, Mapping):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, function) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(value, function) for value in tree)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and mappings. Not collective."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for value in tree:
        yield from leaves(value)


def sample_count(*trees: Any) -> int | None:
    """Return the length of the first axis of all leaves; None where they have none in common. Not collective."""
    found = list(leaves(trees))
    counts = {len(leaf) if getattr(leaf, "ndim", 0) > 0 else -1 for leaf in found if leaf is not None}
    return counts.pop() if len(counts) == 1 and -1 not in counts else None


def cut(tree: Any, start: int, stop: int) -> Any:
    """Return samples ``start:stop`` as contiguous arrays, as training gives them. Not collective."""
    return mapped(tree, lambda leaf: None if leaf is None else np.ascontiguousarray(leaf[start:stop]))


def read_only(tree: Any) -> Any:
    """Return the same with read-only views in the place of arrays. Not collective."""

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        shown = leaf.view()
        shown.flags.writeable = False
        return shown

    return mapped(tree, view)


def content(tree: Any) -> tuple[bytes, ...]:
    """Return the bytes of all arrays. Not collective."""
    return tuple(leaf.tobytes() for leaf in leaves(tree) if isinstance(leaf, np.ndarray))

"""Describe trees of arrays without their values, so that another rank can receive the arrays and build the tree."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np

from mpizero._util.checks import native
from mpizero._util.pytree import leaves_of, map_leaves, outline, paths_of
from mpizero.comm.communicator import Communicator
from mpizero.errors import LayoutError
from mpizero.types import Array


class ArrayShape(NamedTuple):
    """Hold the shape of an array and the name of its dtype."""

    dims: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.dims) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        """Return dtype and shape, such as ``float32[4, 7]``."""
        return f"{self.dtype}{list(self.dims)}"


@dataclass(frozen=True)
class TreeForm:
    """Describe a tree of arrays: its structure, and the shape and dtype of each array.

    A tree is an array, or tuples, lists, dictionaries and dataclasses of trees; None may stand in place of a tree. Two
    forms are equal if structure, shapes and dtypes are.

    Attributes
    ----------
    shapes : tuple of ArrayShape
        The arrays, in the order of the tree.
    structure : str
        The structure as text: "*" for a single array.
    template : tree
        The tree with the number of each array in place of the array.
    """

    shapes: tuple[ArrayShape, ...]
    structure: str
    template: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any, what: str) -> Self:
        """Return the form of the tree ``value``; ``what`` names the tree in error messages. Not collective.

        Raises
        ------
        LayoutError
            If a leaf is not an array.
        DataError
            If a dictionary has a key that is neither a string nor an integer.
        """
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return cls((ArrayShape(tuple(value.shape), value.dtype.name),), "*", 0)
        leaves = leaves_of(value)
        for place, leaf in enumerate(leaves):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                path, _ = list(paths_of(**{what: value}))[place]
                raise LayoutError(f"{path} is of type {type(leaf).__name__}; expected an array, or None")
        shapes = tuple(ArrayShape(tuple(leaf.shape), leaf.dtype.name) for leaf in leaves)
        numbers = count()
        return cls(shapes, repr(outline(value, what)), map_leaves(lambda _: next(numbers), value))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(shape.nbytes for shape in self.shapes)

    def __str__(self) -> str:
        """Return the shapes of the arrays, for error messages."""
        shapes = iter(self.shapes)
        return (
            str(next(shapes))
            if self.structure == "*"
            else str(map_leaves(lambda _: _Shown(next(shapes)), self.template))
        )

    def build(self, arrays: Sequence[Array | None]) -> Any:
        """Return the tree of this form that has the given arrays, which are in its order. Not collective."""
        return map_leaves(lambda number: arrays[number], self.template)

    def packed(self) -> bytes:
        """Return the form as bytes, for :meth:`unpacked` on another rank. Not collective.

        Raises
        ------
        LayoutError
            If an instance of a class that other ranks cannot find is part of the tree.
        """
        try:
            return pickle.dumps((self.shapes, self.structure, self.template))
        except Exception as error:  # pickle raises errors of any kind
            raise LayoutError(
                f"{self} cannot be sent to another rank: {type(error).__name__}: {error}; use tuples, lists, "
                "dictionaries, or classes at the top level of a module"
            ) from error

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        """Return the form that :meth:`packed` has turned into ``data``. Not collective."""
        return cls(*pickle.loads(data))


def packable(value: Any, what: str) -> TreeForm:
    """Return the form of the tree ``value`` if it can be sent; ``what`` names the tree. Not collective.

    Raises
    ------
    LayoutError
        If it cannot, see :meth:`TreeForm.of` and :meth:`TreeForm.packed`.
    """
    form = TreeForm.of(value, what)
    if form.structure != "*":
        form.packed()
    return form


def broadcast_tree(comm: Communicator, form: TreeForm | None, value: Any, root: int, tag: str) -> Any:
    """Return the tree ``value`` of rank ``root``, which has the given form, on all ranks. Collective over ``comm``.

    The arguments ``form`` and ``value`` of the other ranks are not used.
    """
    told: TreeForm = comm.broadcast_object(form, root, tag)
    mine = comm.rank == root
    arrays = (
        [np.ascontiguousarray(native(a)) for a in leaves_of(value)] if mine else [np.empty(*s) for s in told.shapes]
    )
    for array in arrays:
        comm.broadcast(array, root, tag)
    return told.build(arrays)


class _Shown(str):
    """Hold text that ``repr`` shows without quotes."""

    __slots__ = ()

    def __new__(cls, value: object) -> _Shown:
        """Return the text of ``value``."""
        return super().__new__(cls, str(value))

    def __repr__(self) -> str:
        """Return the text itself."""
        return str(self)

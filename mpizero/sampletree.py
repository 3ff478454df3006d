"""Cut and join samples of a batch: arrays with samples on the first axis, alone or nested in other objects.

[Note: trees of arrays] A tuple (named or not), list, dictionary, dataclass or SimpleNamespace is a node, and so is
None, which holds nothing; everything else is a leaf. A leaf is an array of samples if it is a NumPy array with at least
one axis, or has ``__array__`` that gives one without leaving the host (tensors of PyTorch and JAX, datasets of h5py):
functions and layers are given NumPy arrays in its place. Arrays of objects, numbers, strings and objects of other
classes cannot be cut into samples, and neither can a tree that holds one.
"""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpizero.errors import DataError
from mpizero.types import Array

#: Puts a tree together from what comes in the place of its leaves.
_Build = Callable[[Iterator[Any]], Any]

#: Nodes inside of nodes, at most: one that holds itself has no end.
_DEPTH = 64


class _Uncut(Exception):
    """Raised for a leaf that cannot be cut; names it."""


class _Node(NamedTuple):
    """Hold the children of a node, by the text that names them after its path, and a maker of nodes like it."""

    kind: str
    labels: list[str]
    children: list[Any]
    make: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class SampleTree:
    """Hold the arrays of a tree of samples, and a function that builds the tree again.

    Attributes
    ----------
    leaves : tuple of Array
        In the order of the tree; empty where it cannot be cut.
    paths : tuple of str
        Their names: ``x``, ``x['mask']``, ``y[0].weight``.
    form : str
        Structure, types and shapes of samples, for people; equal of trees that can be joined.
    uncut : str
        Why it cannot be cut into samples, naming the first such leaf and its type; empty where it can.
    build : callable
        Makes such a tree of other leaves, from an iterator over them.
    """

    leaves: tuple[Array, ...]
    paths: tuple[str, ...]
    form: str
    uncut: str
    build: _Build

    @classmethod
    def of(cls, **values: Any) -> SampleTree:
        """Look at the samples of each name; :attr:`build` returns a tuple of as many. Not collective.

        Raises
        ------
        DataError
            A leaf that is an array but cannot be taken as one, naming it and the way out.
        """
        walk = _Walk()
        try:
            parts = [walk.look(value, name, 0) for name, value in values.items()]
        except _Uncut as found:
            return cls((), (), "", str(found), lambda leaves: tuple(values.values()))
        form = ", ".join(f"{name} {form}" for name, (_, form) in zip(values, parts, strict=True))
        if not walk.leaves:
            return cls((), (), "", f"{' and '.join(values)} hold no arrays", lambda leaves: tuple(values.values()))
        builds = [build for build, _ in parts]
        return cls(tuple(walk.leaves), tuple(walk.paths), form, "", lambda leaves: tuple(b(leaves) for b in builds))

    @classmethod
    def nothing(cls) -> SampleTree:
        """Return a tree without arrays. Not collective."""
        return cls((), (), "", "", lambda leaves: ())

    @property
    def named(self) -> Iterator[tuple[str, Array]]:
        """The arrays with their paths."""
        return zip(self.paths, self.leaves, strict=True)

    def count(self) -> int:
        """Return the number of samples; 1 if there is nothing to count, or it cannot be cut. Not collective.

        Raises
        ------
        DataError
            If the arrays differ in it: names them and their numbers.
        """
        found: dict[int, str] = {}
        for path, leaf in self.named:
            found.setdefault(len(leaf), path)
        if len(found) > 1:
            told = ", ".join(f"{path} has {count}" for count, path in list(found.items())[:8])
            advice = "; pad sequences of different lengths into one array" if len(self.leaves) > 2 else ""
            raise DataError(f"the arrays of a batch must have equally many samples on their first axis: {told}{advice}")
        return next(iter(found), 1)

    def cut(self, part: slice) -> Any:
        """Return the tree of some of its samples, as :attr:`build` does. Not collective."""
        return self.build(iter([leaf[part] for leaf in self.leaves]))


class _Walk:
    """Walk through a tree, leaf by leaf."""

    def __init__(self) -> None:
        self.leaves: list[Array] = []
        self.paths: list[str] = []

    def look(self, value: Any, path: str, depth: int) -> tuple[_Build, str]:
        """Take the leaves below ``path``; return what builds such a tree, and its form."""
        if (node := None if type(value) is np.ndarray else _node(value)) is None:
            leaf = _samples(value, path)
            self.leaves.append(leaf)
            self.paths.append(path)
            return next, f"{_dtype_name(leaf.dtype)}{leaf.shape[1:]}"
        if depth == _DEPTH:
            raise DataError(f"{path[:200]}... is nested more than {_DEPTH} levels deep: does it hold itself?")
        parts = [
            self.look(child, path + label, depth + 1) for label, child in zip(node.labels, node.children, strict=True)
        ]
        told = ", ".join(f"{label} {form}" for label, (_, form) in zip(node.labels, parts, strict=True))
        builds = [build for build, _ in parts]
        return lambda leaves: node.make([build(leaves) for build in builds]), f"{node.kind}({told})"


def _node(value: Any) -> _Node | None:
    """Return what a node holds; None for a leaf."""
    kind = type(value).__name__
    if value is None:
        return _Node("None", [], [], lambda children: None)
    if isinstance(value, Mapping):
        keys = list(value)
        return _Node(kind, [f"[{key!r}]" for key in keys], [value[key] for key in keys], partial(_mapping, value, keys))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Node(kind, [f".{name}" for name in value._fields], list(value), type(value)._make)  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return _Node(kind, [f"[{i}]" for i in range(len(value))], list(value), partial(_sequence, value))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        names = list(vars(value)) if isinstance(value, SimpleNamespace) else [field.name for field in fields(value)]
        held = [getattr(value, name) for name in names]
        return _Node(kind, [f".{name}" for name in names], held, partial(_record, value, names))
    return None


def _mapping(like: Mapping[Any, Any], keys: list[Any], children: list[Any]) -> Any:
    held = dict(zip(keys, children, strict=True))
    if type(like) is dict or not isinstance(like, dict | UserDict):
        return held  # of a file, for one, which a copy would write to
    twin = copy(like)
    twin.update(held)
    return twin


def _sequence(like: Any, children: list[Any]) -> Any:
    return type(like)(children)


def _record(like: Any, names: list[str], children: list[Any]) -> Any:
    twin = copy(like)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(twin, name, child)  # also where it is frozen
    return twin


def _samples(value: Any, path: str) -> Array:
    """Return a leaf as an array with samples on its first axis."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{path} is a masked array, whose mask would be lost: give the values and the mask as two arrays, for "
            "example {'values': a.filled(0), 'mask': a.mask}"
        )
    if not isinstance(value, np.ndarray) and (isinstance(value, type) or not hasattr(value, "__array__")):
        raise _Uncut(f"{path} is {_called(value)}")
    try:
        array = np.asarray(value)
    except Exception as error:
        raise DataError(
            f"{path} is a {_class(value)} that does not become a NumPy array: {type(error).__name__}: {error}; bring "
            "it to the host as numbers before, for example by .detach().cpu().numpy()"
        ) from error
    if array.dtype.hasobject:
        raise _Uncut(f"{path} is {'an array' if isinstance(value, np.ndarray) else f'a {_class(value)}'} of objects")
    if not array.ndim:
        raise _Uncut(f"{path} is a single {array.dtype} ({_class(value)}), without an axis of samples")
    return array


_dtype_name = lru_cache(maxsize=256)(str)  # which takes longer than all else that is done with a leaf


def _class(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _called(value: Any) -> str:
    """Name a leaf that is no array, and the way out where it is known."""
    if isinstance(value, bool | int | float | complex):
        return f"a number ({_class(value)}), not an array: numpy.asarray makes one of lists of numbers"
    return f"a {_class(value)}, not an array"


# ---------------------------------------------------------------------- conveniences


def as_arrays(value: Any) -> Any:
    """Return samples with NumPy arrays for leaves; what cannot be cut is returned itself. Not collective."""
    return map_arrays(lambda array: array, value)


def map_arrays(function: Callable[[Array], Any], value: Any) -> Any:
    """Return a tree of what ``function`` gives for each array of samples; what cannot be cut is returned itself.

    Not collective.
    """
    if type(value) is np.ndarray and value.ndim and not value.dtype.hasobject:
        return function(value)
    tree = SampleTree.of(x=value)
    return value if tree.uncut else tree.build(map(function, tree.leaves))[0]


def join(trees: Sequence[Any]) -> Any:
    """Return one tree of the samples of some of the same structure, in their order. Not collective.

    Raises
    ------
    DataError
        Of more than one, if they cannot be joined.
    """
    if len(trees) == 1:
        return trees[0]
    looked = [SampleTree.of(x=tree) for tree in trees]
    if odd := next((tree for tree in looked if tree.uncut or tree.form != looked[0].form), None):
        raise DataError(f"samples cannot be joined: {odd.uncut or f'{looked[0].form} and {odd.form}'}")
    return looked[0].build(map(np.concatenate, zip(*(tree.leaves for tree in looked), strict=True)))[0]


def leaves_of(value: Any) -> list[Any]:
    """Return all leaves of a tree as they are, arrays or not. Not collective."""
    node = _node(value)
    return [value] if node is None else [leaf for child in node.children for leaf in leaves_of(child)]


def paths_of(**values: Any) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of some trees as they are, with their paths. Not collective."""
    for path, value in values.items():
        node = _node(value)
        if node is None:
            yield path, value
        else:
            yield from paths_of(**dict(zip([path + label for label in node.labels], node.children, strict=True)))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a tree of what ``function`` gives for each leaf, array or not. Not collective."""
    node = _node(value)
    return function(value) if node is None else node.make([map_leaves(function, child) for child in node.children])


def count_samples(*values: Any) -> int:
    """Return how many samples trees have together, which must be equally many. Not collective."""
    return SampleTree.of(**dict(zip("xy", values, strict=False))).count()


# ---------------------------------------------------------------------- in files


def outline(value: Any, path: str = "x") -> Any:
    """Return the structure of a tree in plain JSON: a leaf is ``"*"``, a node what it is and what it holds.

    Not collective.

    Raises
    ------
    DataError
        A key of a dictionary that is neither a string nor a whole number.
    """
    node = _node(value)
    if node is None:
        return "*"
    inside = [outline(child, path + label) for label, child in zip(node.labels, node.children, strict=True)]
    if isinstance(value, Mapping):
        keys = list(value)
        if odd := [key for key in keys if type(key) not in (str, int)]:
            raise DataError(f"{path} has the key {odd[0]!r:.80}: only strings and whole numbers can be kept in a file")
        return {"dict": [list(pair) for pair in zip(keys, inside, strict=True)]}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {"tuple" if isinstance(value, tuple) else "list": inside}
    names = [label[1:] for label in node.labels]
    kind = "named" if isinstance(value, tuple) else "record"
    return None if value is None else {kind: [list(pair) for pair in zip(names, inside, strict=True)]}


def of_outline(told: Any, leaves: Iterator[Any], depth: int = 0) -> Any:
    """Make a tree of a structure that :func:`outline` gave, and leaves. Not collective.

    Dictionaries, lists and tuples are plain ones; a named tuple is one of the same fields, and a dataclass a
    :class:`types.SimpleNamespace`: a file names no class.

    Raises
    ------
    ValueError
        If it is no structure, or there are too few leaves.
    """
    if told is None:
        return None
    if told == "*":
        if (leaf := next(leaves, None)) is None:
            raise ValueError("the structure has more arrays than the file")
        return leaf
    if (
        depth == _DEPTH
        or not isinstance(told, dict)
        or len(told) != 1
        or not isinstance(next(iter(told.values())), list)
    ):
        raise ValueError(f"not a structure: {told!r:.80}")
    kind, inside = next(iter(told.items()))
    if kind in ("list", "tuple"):
        children = [of_outline(child, leaves, depth + 1) for child in inside]
        return children if kind == "list" else tuple(children)
    if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in inside):
        raise ValueError(f"not a structure: {told!r:.80}")
    held = {key: of_outline(child, leaves, depth + 1) for key, child in inside}
    if len(held) < len(inside):
        raise ValueError(f"a key occurs twice: {told!r:.80}")
    if kind == "dict":
        return held
    if kind not in ("named", "record") or not all(isinstance(key, str) and key.isidentifier() for key in held):
        raise ValueError(f"not a structure: {told!r:.80}")
    return namedtuple("Batch", held)(**held) if kind == "named" else SimpleNamespace(**held)

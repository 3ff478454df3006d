"""Cut batches into samples, and join batches; a batch is an array with samples on its first axis, or a tree of arrays.

[Note: trees of arrays] ``x`` and ``y`` of a batch may be trees: arrays inside of tuples (named or not), lists,
dictionaries, dataclasses and SimpleNamespaces. Those containers are nodes, and so is None, which holds nothing.
Everything else is a leaf. A leaf is an array of samples if it is a NumPy array with at least one axis, or if its
``__array__`` returns one (tensors of PyTorch and JAX on the host, datasets of h5py). In the second case functions and
layers receive the NumPy array in place of the leaf. An array in another byte order is replaced by a copy in this
machine's byte order: ranks exchange arrays as bytes, and a single rank must give the same results. Any other leaf (an
array of objects, a number, a string) cannot be cut into samples. A tree with such a leaf cannot be cut either.
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

from mpizero._util.checks import native, unmasked_samples
from mpizero.errors import DataError
from mpizero.types import Array

#: Function that builds a tree again, given an iterator over the values that take the places of its leaves.
_Build = Callable[[Iterator[Any]], Any]

#: Most levels of nodes inside of nodes. The limit stops the walk through a node that contains itself.
_DEPTH = 64


class _Uncut(Exception):
    """Raised for a leaf (an object in a tree, other than its containers) that cannot be cut; the message names it."""


class _Node(NamedTuple):
    """Hold a container of a tree: its type's name, its children, their labels (``[0]``, ``.weight``) and ``make``.

    ``make(children)`` returns a node of the same type with the given children.
    """

    kind: str
    labels: list[str]
    children: list[Any]
    make: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class SampleTree:
    """Hold the arrays of a tree of samples, and a function that builds a tree of the same structure from other arrays.

    Attributes
    ----------
    leaves : tuple of Array
        The arrays, in the order in which a depth-first walk meets them; empty if the tree cannot be cut into samples.
    paths : tuple of str
        The names of the arrays, such as ``x``, ``x['mask']`` or ``y[0].weight``.
    form : str
        The structure, and the type and shape of one sample of each array, as text for messages. Trees with equal forms
        can be joined.
    uncut : str
        The reason why the tree cannot be cut into samples: the first leaf that is no array of samples, with its name
        and type, or that there are no arrays; "" if the tree can be cut.
    build : callable
        Function that takes an iterator over other leaves and returns a tree of the same structure with these leaves.
    """

    leaves: tuple[Array, ...]
    paths: tuple[str, ...]
    form: str
    uncut: str
    build: _Build

    @classmethod
    def of(cls, **values: Any) -> SampleTree:
        """Collect the arrays of one tree for each keyword (``x``, ``y``).

        :attr:`build` returns a tuple with one tree for each keyword.

        Raises
        ------
        DataError
            If a leaf is an array that cannot be used (it is masked, or not on the host). The message names the leaf and
            says what to do.
        """
        walk = _Walk()
        try:
            parts = [walk.look(value, name, 0) for name, value in values.items()]
        except _Uncut as error:
            return cls((), (), "", str(error), lambda leaves: tuple(values.values()))
        form = ", ".join(f"{name} {form}" for name, (_, form) in zip(values, parts, strict=True))
        if not walk.leaves:
            return cls((), (), "", f"{' and '.join(values)} hold no arrays", lambda leaves: tuple(values.values()))
        builds = [build for build, _ in parts]
        return cls(tuple(walk.leaves), tuple(walk.paths), form, "", lambda leaves: tuple(b(leaves) for b in builds))

    @property
    def named(self) -> Iterator[tuple[str, Array]]:
        """Iterator over pairs of a path and its array."""
        return zip(self.paths, self.leaves, strict=True)

    def count(self) -> int:
        """Return the number of samples: the length of each array. It is 1 if the tree has no arrays or cannot be cut.

        Raises
        ------
        DataError
            If the arrays have different lengths. The message names arrays and their lengths.
        """
        lengths: dict[int, str] = {}
        for path, leaf in self.named:
            lengths.setdefault(len(leaf), path)
        if len(lengths) > 1:
            text = ", ".join(f"{path} has {count}" for count, path in list(lengths.items())[:8])
            advice = "; pad sequences of different lengths into one array" if len(self.leaves) > 2 else ""
            raise DataError(f"the arrays of a batch must have equally many samples on their first axis: {text}{advice}")
        return next(iter(lengths), 1)

    def cut(self, part: slice) -> Any:
        """Return a tuple of the trees (:attr:`build`) with only the samples of the slice ``part`` of every array."""
        return self.build(iter([leaf[part] for leaf in self.leaves]))


class _Walk:
    """Walk through trees and collect their arrays and the paths of the arrays."""

    def __init__(self) -> None:
        self.leaves: list[Array] = []
        self.paths: list[str] = []

    def look(self, value: Any, path: str, depth: int) -> tuple[_Build, str]:
        """Append the leaves of ``value`` to the collected arrays; return the function that rebuilds it, and its form.

        The form is the text of :attr:`SampleTree.form`. ``path`` is the name of ``value``; the paths of its leaves
        begin with it. ``depth`` is the number of nodes that enclose ``value``.
        """
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
        forms = ", ".join(f"{label} {form}" for label, (_, form) in zip(node.labels, parts, strict=True))
        builds = [build for build, _ in parts]
        return lambda leaves: node.make([build(leaves) for build in builds]), f"{node.kind}({forms})"


def _node(value: Any) -> _Node | None:
    """Return the container ``value``, taken apart by one level, as a :class:`_Node`; None for any other object."""
    kind = type(value).__name__
    if value is None:
        return _Node("None", [], [], lambda children: None)
    if isinstance(value, Mapping):
        keys = list(value)
        return _Node(kind, [f"[{key!r}]" for key in keys], [value[key] for key in keys], partial(_mapping, value, keys))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Node(kind, [f".{name}" for name in value._fields], list(value), type(value)._make)  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return _Node(kind, [f"[{i}]" for i in range(len(value))], list(value), type(value))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        names = list(vars(value)) if isinstance(value, SimpleNamespace) else [field.name for field in fields(value)]
        values = [getattr(value, name) for name in names]
        return _Node(kind, [f".{name}" for name in names], values, partial(_record, value, names))
    return None


def _mapping(like: Mapping[Any, Any], keys: list[Any], children: list[Any]) -> Any:
    mapping = dict(zip(keys, children, strict=True))
    if type(like) is dict or not isinstance(like, dict | UserDict):
        return mapping  # of a file, for one, which a copy would write to
    twin = copy(like)
    twin.update(mapping)
    return twin


def _record(like: Any, names: list[str], children: list[Any]) -> Any:
    twin = copy(like)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(twin, name, child)  # also where it is frozen
    return twin


#: Types of arrays that need no further look.
_USUAL = frozenset(map(np.dtype, "?bBhHiIlLfd"))


def _samples(value: Any, path: str) -> Array:
    """Convert the leaf named ``path`` to a NumPy array with samples on its first axis, in this machine's byte order.

    Raises
    ------
    _Uncut
        If the leaf cannot be cut into samples.
    DataError
        If the leaf is an array that cannot be used (it is masked, or not on the host).
    """
    if type(value) is np.ndarray and value.ndim and value.dtype in _USUAL and value.dtype.byteorder in "=|":
        return value
    unmasked_samples(value, path)
    if not isinstance(value, np.ndarray) and (isinstance(value, type) or not hasattr(value, "__array__")):
        raise _Uncut(f"{path} is {_called(value)}")
    try:
        array = native(np.asarray(value))
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


_dtype_name = lru_cache(maxsize=256)(str)  # str(dtype) takes longer than all else that is done with a leaf


def _class(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _called(value: Any) -> str:
    """Return the description, for an error message, of a leaf that is no array; for a number it includes advice."""
    if isinstance(value, bool | int | float | complex):
        return f"a number ({_class(value)}), not an array: numpy.asarray makes one of lists of numbers"
    return f"a {_class(value)}, not an array"


def as_arrays(value: Any) -> Any:
    """Convert the leaves of a tree to NumPy arrays; return a tree that cannot be cut into samples unchanged."""
    return map_arrays(lambda array: array, value)


def map_arrays(function: Callable[[Array], Any], value: Any) -> Any:
    """Apply ``function`` to each array of a tree; return the tree of the results.

    If a leaf is no array of samples (a number, text, an array without axes), or if there are no arrays, the tree itself
    is returned, and ``function`` is not called at all.
    """
    if type(value) is np.ndarray and value.ndim and not value.dtype.hasobject:
        return function(native(value))
    tree = SampleTree.of(x=value)
    return value if tree.uncut else tree.build(map(function, tree.leaves))[0]


def join(trees: Sequence[Any]) -> Any:
    """Concatenate several trees with the same structure, array by array along the sample axis, into one tree.

    Raises
    ------
    DataError
        If there are several trees, and their structures, types or shapes of a sample differ or one cannot be cut into
        samples.
    """
    if len(trees) == 1:
        return trees[0]
    looked = [SampleTree.of(x=tree) for tree in trees]
    if odd := next((tree for tree in looked if tree.uncut or tree.form != looked[0].form), None):
        raise DataError(f"samples cannot be joined: {odd.uncut or f'{looked[0].form} and {odd.form}'}")
    return looked[0].build(map(np.concatenate, zip(*(tree.leaves for tree in looked), strict=True)))[0]


def leaves_of(value: Any) -> list[Any]:
    """Return all leaves of a tree (all but its containers) without conversion, arrays and other objects."""
    node = _node(value)
    return [value] if node is None else [leaf for child in node.children for leaf in leaves_of(child)]


def paths_of(**values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value, without conversion, of every leaf of the tree of each keyword, array or not."""
    for path, value in values.items():
        node = _node(value)
        if node is None:
            yield path, value
        else:
            yield from paths_of(**dict(zip([path + label for label in node.labels], node.children, strict=True)))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to every leaf of a tree, array or not; return the tree of the results."""
    node = _node(value)
    return function(value) if node is None else node.make([map_leaves(function, child) for child in node.children])


def combine_leaves(function: Callable[[list[Any]], Any], trees: Sequence[Any]) -> Any:
    """Apply ``function`` to the list of the trees' leaves at each position; return the tree of the results.

    All trees have the structure of the first one.
    """
    nodes = [_node(tree) for tree in trees]
    if nodes[0] is None:
        return function(list(trees))
    children = zip(*(node.children for node in nodes if node is not None), strict=True)
    return nodes[0].make([combine_leaves(function, list(siblings)) for siblings in children])


def count_samples(*values: Any) -> int:
    """Return the number of samples of one or two trees (``x``, ``y``); it is 1 if they cannot be cut into samples.

    Raises
    ------
    DataError
        If arrays of the trees have different lengths.
    """
    return SampleTree.of(**dict(zip("xy", values, strict=False))).count()


def outline(value: Any, path: str = "x") -> Any:
    """Return the structure of a tree, without its arrays, as a value for JSON.

    :func:`of_outline` builds a tree from that value.

    A leaf becomes ``"*"`` and None stays None. Any other node becomes ``{kind: children}``, where the kind is "dict",
    "list", "tuple", "named" (a named tuple) or "record". ``path`` is the name of the tree for messages.

    Raises
    ------
    DataError
        If a dictionary has a key that is neither a string nor an integer.
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


def of_outline(structure: Any, leaves: Iterator[Any], depth: int = 0) -> Any:
    """Build a tree from a structure that :func:`outline` has returned, with the given leaves.

    The structure does not name classes. So instances of subclasses of dict, list or tuple become plain dictionaries,
    lists or tuples. A named tuple becomes a new named tuple with the same fields, and a dataclass becomes a
    :class:`types.SimpleNamespace`. ``depth`` is the number of nodes that enclose ``structure``.

    Raises
    ------
    ValueError
        If ``structure`` is no value of :func:`outline`, or there are too few leaves.
    """
    if structure is None:
        return None
    if structure == "*":
        if (leaf := next(leaves, None)) is None:
            raise ValueError("the structure has more arrays than the file")
        return leaf
    if (
        depth == _DEPTH
        or not isinstance(structure, dict)
        or len(structure) != 1
        or not isinstance(next(iter(structure.values())), list)
    ):
        raise ValueError(f"not a structure: {structure!r:.80}")
    kind, inside = next(iter(structure.items()))
    if kind in ("list", "tuple"):
        children = [of_outline(child, leaves, depth + 1) for child in inside]
        return children if kind == "list" else tuple(children)
    if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in inside):
        raise ValueError(f"not a structure: {structure!r:.80}")
    mapping = {key: of_outline(child, leaves, depth + 1) for key, child in inside}
    if len(mapping) < len(inside):
        raise ValueError(f"a key occurs twice: {structure!r:.80}")
    if kind == "dict":
        return mapping
    if kind not in ("named", "record") or not all(isinstance(key, str) and key.isidentifier() for key in mapping):
        raise ValueError(f"not a structure: {structure!r:.80}")
    return namedtuple("Batch", mapping)(**mapping) if kind == "named" else SimpleNamespace(**mapping)

"""Name the arrays of a JAX pytree, and check that mpizero can train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mpizero._util.names import shown
from mpizero.errors import ConfigError, DataError
from mpizero.types import Array

#: Name of the parameter where the tree is a single array.
SINGLE = "value"


@dataclass(frozen=True)
class ParameterTree:
    """Hold the structure of a pytree and the dotted names of its leaves, in the order of JAX.

    Attributes
    ----------
    names : tuple of str
        The path of every leaf: ``dense.kernel``, ``layers.0.weight``; ``value`` where the tree is one array.
    """

    names: tuple[str, ...]
    _structure: Any

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the pytree with the given leaves, in the order of :attr:`names`."""
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def named_leaves(tree: Any, where: str) -> tuple[ParameterTree, list[Any]]:
    """Take a pytree of parameters apart; return its names with its structure, and its leaves.

    ``where`` says for messages what the tree is.

    Raises
    ------
    ConfigError
        If there are no leaves, a leaf is no array of float32, float64, complex64 or complex128, or two leaves have one
        name.
    """
    try:
        found, structure = jax.tree_util.tree_flatten_with_path(tree)
    except (TypeError, ValueError) as error:  # of keys that cannot be sorted
        raise ConfigError(f"{where} are no pytree: {error}; let the keys of a dictionary be strings") from error
    if not found:
        raise ConfigError(f"{where} hold no arrays: give a pytree of them, such as {{'dense': {{'kernel': array}}}}")
    names: dict[str, str] = {}
    for path, leaf in found:
        name, text = dotted(path), jax.tree_util.keystr(path)
        if name in names:
            raise ConfigError(f"{where}: {names[name]} and {text} would both be named {name!r}; rename one of the keys")
        names[name] = text
        _check_leaf(leaf, f"{where}: {name!r}")
    return ParameterTree(tuple(names), structure), [leaf for _, leaf in found]


def dotted(path: Sequence[Any]) -> str:
    """Return a path of JAX as a name: keys, indices and attributes, joined by dots."""
    steps = []
    for step in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(step, attribute):
                steps.append(str(getattr(step, attribute)))
                break
        else:
            steps.append(str(step).strip(".[]'\""))
    return ".".join(steps) or SINGLE


def _check_leaf(leaf: Any, what: str) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(f"{what} is a traced value: make the model outside of jit, grad and vmap")
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        way = "numpy.asarray(value, 'float32') makes an array; close over what is no parameter"
        raise ConfigError(f"{what} is {shown(leaf)} ({type(leaf).__name__}), not an array: {way}")
    if not isinstance(dtype, np.dtype) or dtype not in (np.float32, np.float64, np.complex64, np.complex128):
        way = "close over integers and other constants" if getattr(dtype, "kind", "") in "biu" else "convert it"
        raise ConfigError(f"{what} is of type {dtype}: parameters are float32, float64, complex64 or complex128; {way}")


def require_precision(dtypes: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` if a parameter has 64 bits, and JAX would round it to 32. Not collective."""
    wide = next((name for name, dtype in dtypes.items() if np.dtype(dtype).name in ("float64", "complex128")), None)
    if wide is not None and not jax.config.jax_enable_x64:
        raise ConfigError(
            f"{where}: {wide!r} is {dtypes[wide]}, but JAX would compute in 32 bits: call "
            'jax.config.update("jax_enable_x64", True) before JAX is used, or give parameters of 32 bits'
        )


def samples(tree: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Return a pytree of samples with arrays that JAX takes as they are. Not collective.

    Floating arrays wider than ``dtype``, the parameters', are converted to its precision, so that float32 stays float32
    whether or not JAX has 64 bits. Without 64 bits, integers of 64 bits are converted to 32.

    Raises
    ------
    DataError
        If a leaf is no array of numbers, or an integer has no place in 32 bits. ``what`` and the path name the leaf.
    """
    if type(tree) is np.ndarray:
        return _sample(tree, dtype, lambda: what)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sample(leaf, dtype, lambda: what + jax.tree_util.keystr(path)), tree
    )


def _sample(leaf: Any, dtype: np.dtype[Any], what: Any) -> Any:
    found = getattr(leaf, "dtype", None)
    kind = getattr(found, "kind", "")
    if found is None or kind not in "biufcV" or not hasattr(leaf, "shape"):
        told = f"an array of {found}" if found is not None else f"a {type(leaf).__name__}"
        raise DataError(
            f"{what()} is {told}, which JAX does not take: give arrays of numbers, alone or in tuples, lists, "
            "dictionaries and classes that jax.tree_util.register_dataclass knows"
        )
    size = dtype.itemsize * (2 if kind == "c" else 1)
    if kind in "fc" and found.itemsize > size:
        return np.asarray(leaf).astype(f"{kind}{size}")
    if kind in "iu" and found.itemsize == 8 and not jax.config.jax_enable_x64:
        narrow = np.dtype(f"{kind}4")
        bounds, array = np.iinfo(narrow), np.asarray(leaf)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise DataError(
                f"{what()} holds {int(array.max())} or {int(array.min())}, which JAX would cut to 32 bits: call "
                'jax.config.update("jax_enable_x64", True) before JAX is used'
            )
        return array.astype(narrow)
    return leaf


def count(*trees: Any) -> int:
    """Return the number of samples: the length of the first array that has an axis; 1 if there is none."""
    return next((len(leaf) for leaf in _leaves(*trees) if getattr(leaf, "ndim", 0)), 1)


def _leaves(*trees: Any) -> Iterator[Any]:
    return (leaf for tree in trees for leaf in jax.tree_util.tree_leaves(tree))


def to_numpy(tree: Any) -> Any:
    """Return a pytree with NumPy arrays of its own in the place of JAX's, which NumPy could not write to."""
    return jax.tree_util.tree_map(np.array, tree)


def descending(gradient: Any) -> Any:
    """Return a gradient such that ``w -= lr * gradient`` descends: of a complex parameter JAX's conjugate."""
    return jax.numpy.conj(gradient) if jax.numpy.iscomplexobj(gradient) else gradient


def real_type(dtype: Any) -> np.dtype[Any]:
    """Return the type of real and imaginary parts of a complex dtype, and a real dtype itself. Not collective."""
    return np.dtype(np.finfo(dtype).dtype)


def host_view(array: Any) -> Array:
    """Return the values of an array of JAX on the CPU as a read-only NumPy array, without a copy."""
    return np.asarray(array)

"""Read samples from arrays: in memory, in ``.npy`` files, or scikit-learn's digits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpizero.crc import crc32
from mpizero.data.source import Indices, Source, check_lengths, check_samples, native
from mpizero.errors import DataError
from mpizero.names import explains
from mpizero.sampletree import SampleTree, map_arrays
from mpizero.types import Array

#: Where scikit-learn keeps the digits in its package.
DIGITS = ("datasets", "data", "digits.csv.gz")


@explains
class ArraySource(Source):
    """Read samples from arrays in memory, the same on every rank.

    Parameters
    ----------
    x, y : array_like, or dictionary of such
        Inputs and targets, samples on the first axis; of dictionaries, nested or not, samples are dictionaries too.

    Raises
    ------
    DataError
        No samples, different numbers of them, or elements that are not numbers.
    """

    def __init__(self, x: ArrayLike | Mapping[Any, Any], y: ArrayLike | Mapping[Any, Any]) -> None:
        self.x, self.y = _taken(x, "x"), _taken(y, "y")
        if isinstance(self.x, np.ndarray) and isinstance(self.y, np.ndarray):
            check_lengths(self.x, "x", self.y, "y")
        self._length = SampleTree.of(x=self.x, y=self.y).count()

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples of valid indices, in that order. Not collective."""
        return map_arrays(lambda a: a[indices], self.x), map_arrays(lambda a: a[indices], self.y)

    def describe(self) -> dict[str, Any]:
        """Return shapes, types and checksums. Not collective."""
        found: dict[str, Any] = {"kind": "arrays"}
        for path, values in SampleTree.of(x=self.x, y=self.y).named:
            found[path] = (values.shape, values.dtype.str, crc32(values.data if values.size else b""))
        return found


@explains
class NpySource(Source):
    """Read samples from two ``.npy`` files, mapped into memory.

    Parameters
    ----------
    x_path, y_path : path
        Inputs and targets, samples on the first axis.

    Raises
    ------
    DataError
        A file that is missing, damaged, empty, not made of numbers, or of another length than the other.
    """

    def __init__(self, x_path: str | os.PathLike[str], y_path: str | os.PathLike[str]) -> None:
        self.paths = (os.fspath(x_path), os.fspath(y_path))
        self.x, self.y = (check_samples(_map(path), path) for path in self.paths)
        check_lengths(self.x, self.paths[0], self.y, self.paths[1])

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples of valid indices, in that order. Not collective."""
        return native(self.x[indices]), native(self.y[indices])

    def describe(self) -> dict[str, Any]:
        """Return names without folders, shapes and types. Not collective."""
        found: dict[str, Any] = {"kind": "npy"}
        for name, path, values in zip(("x", "y"), self.paths, (self.x, self.y), strict=True):
            found[name] = (os.path.basename(path), values.shape, values.dtype.str)
        return found


def digits() -> ArraySource:
    """Return scikit-learn's 1797 images of digits: x (samples, 64) float32 in [0, 1], y int64 from 0 to 9.

    Not collective. Importing scikit-learn takes longer than a second of every rank, so the file that it comes with is
    read instead.

    Raises
    ------
    DataError
        scikit-learn is not installed.
    """
    try:
        images, targets = _digits()
    except ImportError:
        raise DataError("digits: needs scikit-learn, which is not installed: pip install scikit-learn") from None
    return ArraySource(images.astype(np.float32) / np.float32(16), targets.astype(np.int64))


def _digits() -> tuple[Array, Array]:
    """Read images and labels from scikit-learn's file; ask scikit-learn itself only where that is not found."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = os.path.join(folder, *DIGITS)
        if os.path.isfile(path):
            rows = np.loadtxt(path, np.float32, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return images, targets


def _taken(values: ArrayLike | Mapping[Any, Any], name: str) -> Any:
    """Return samples, an array or dictionaries of arrays, ready to be given away."""
    if not isinstance(values, Mapping):
        return native(check_samples(_as_array(values, name), name))
    if not values:
        raise DataError(f"{name}: a dictionary without arrays")
    return {key: _taken(inside, f"{name}[{key!r}]") for key, inside in values.items()}


def _as_array(values: ArrayLike, name: str) -> Array:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"{name}: not an array: {error}") from None


def _map(path: str) -> Array:
    """Map a ``.npy`` file; pickled objects are refused."""
    if not os.path.isfile(path):
        raise DataError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'does not exist'}")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if not os.path.getsize(path):
            raise DataError(f"{path}: the file is empty") from None
        raise DataError(f"{path}: not a readable .npy file of numbers: {error}") from None
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path}: an archive of arrays; needed is a single array in a .npy file")
    return found

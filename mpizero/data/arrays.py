"""Read samples from arrays in memory, from ``.npy`` files, or from scikit-learn's digits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpizero._util.checks import unmasked_samples
from mpizero._util.names import explains
from mpizero._util.pytree import SampleTree, leaves_of, map_arrays, map_leaves, paths_of
from mpizero._util.text import crc32
from mpizero.data.mapped import MappedArray, MappedFile, file_states
from mpizero.data.source import Indices, Source, check_lengths, check_samples, check_shape, contiguous
from mpizero.errors import DataError
from mpizero.types import Array

#: Path of the file of digits inside the scikit-learn package.
DIGITS = ("datasets", "data", "digits.csv.gz")


@explains
class ArraySource(Source):
    """Read samples from arrays in memory; every rank must be given equal arrays.

    Parameters
    ----------
    x, y : array_like, or dictionary of array_like, or tuple or dataclass of arrays
        Inputs and targets, with samples on the first axis. If they are trees of arrays (nested or not), samples are
        trees too. A tuple of anything but NumPy arrays is one array, as a list is.

    Raises
    ------
    DataError
        If there are no samples, the arrays have different numbers of samples, or elements are not numbers; and if
        arrays that name their samples or axes, of pandas or xarray, do not have them in one order: samples are paired
        by their place.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(8.0).reshape(4, 2), {"label": [0, 1, 1, 0]})
    >>> len(source)
    4
    >>> x, y = source.samples([3, 1])
    >>> x.tolist(), y["label"].tolist()
    ([[6.0, 7.0], [2.0, 3.0]], [0, 1])
    >>> training, validation = source.split(0.25)
    >>> len(training), len(validation)
    (3, 1)
    """

    def __init__(self, x: Any, y: Any) -> None:
        _check_labels(x, y)
        self.x, self.y = _taken(x, "x"), _taken(y, "y")
        if isinstance(self.x, np.ndarray) and isinstance(self.y, np.ndarray):
            check_lengths(self.x, "x", self.y, "y")
        self._length = SampleTree.of(x=self.x, y=self.y).count()

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return map_arrays(lambda a: a[indices], self.x), map_arrays(lambda a: a[indices], self.y)

    def describe(self) -> dict[str, Any]:
        """Return the shape, dtype and CRC32 of each array, by its path such as ``x['mask']``."""
        found: dict[str, Any] = {"kind": "arrays"}
        for path, values in SampleTree.of(x=self.x, y=self.y).named:
            found[path] = (values.shape, values.dtype.str, crc32(values.data if values.size else b""))
        return found

    def contents(self) -> dict[str, Any]:
        """Return the checksums of the arrays."""
        return {"arrays": sorted(self.describe().items())}


@explains
class NpySource(Source):
    """Read samples from two ``.npy`` files, which are memory-mapped.

    Parameters
    ----------
    x_path, y_path : path
        Files of the inputs and of the targets, with samples on the first axis.

    Raises
    ------
    DataError
        If a file is missing, damaged or empty, its array does not hold numbers, or the files have different numbers of
        samples.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(Path(folder, "x.npy"), np.arange(6.0).reshape(3, 2))
    ...     np.save(Path(folder, "y.npy"), np.arange(3))
    ...     source = mz.data.NpySource(Path(folder, "x.npy"), Path(folder, "y.npy"))
    ...     x, y = source.samples([2, 0])
    >>> x.tolist(), y.tolist()
    ([[4.0, 5.0], [0.0, 1.0]], [2, 0])
    """

    def __init__(self, x_path: str | os.PathLike[str], y_path: str | os.PathLike[str]) -> None:
        self.paths = (os.path.abspath(x_path), os.path.abspath(y_path))
        self.x, self.y = (_map(path) for path in self.paths)
        check_lengths(self.x, self.paths[0], self.y, self.paths[1])

    def __len__(self) -> int:
        return len(self.x)

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return contiguous(self.x[indices]), contiguous(self.y[indices])

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders, and the shapes and dtypes of their arrays."""
        found: dict[str, Any] = {"kind": "npy"}
        for name, path, values in zip(("x", "y"), self.paths, (self.x, self.y), strict=True):
            found[name] = (os.path.basename(path), values.shape, values.dtype.str)
        return found

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.paths)}


def digits() -> ArraySource:
    """Return scikit-learn's 1797 images of digits: x is float32 of shape (1797, 64) in [0, 1], y is int64 from 0 to 9.

    This function reads the data file of the scikit-learn package, because importing the package takes more than a
    second on every rank.

    Raises
    ------
    DataError
        If scikit-learn is not installed.

    Examples
    --------
    >>> import mpizero as mz
    >>> source = mz.data.digits()
    >>> x, y = source.samples([0, 1])
    >>> len(source), x.shape, y.tolist()
    (1797, (2, 64), [0, 1])
    """
    try:
        images, targets = _digits()
    except ImportError:
        raise DataError("digits: needs scikit-learn, which is not installed: pip install scikit-learn") from None
    return ArraySource(images.astype(np.float32) / np.float32(16), targets.astype(np.int64))


def _digits() -> tuple[Array, Array]:
    """Return the images and labels of scikit-learn's data file; import scikit-learn only if the file is not found."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        path = os.path.join(folder, *DIGITS)
        if os.path.isfile(path):
            rows = np.loadtxt(path, np.float32, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return images, targets


def _check_labels(x: Any, y: Any) -> None:
    """Raise DataError if arrays that name their axes or label their samples have others, or another order, than others.

    Those of pandas have an ``index``, those of xarray ``dims`` and ``indexes``.
    """
    known: list[tuple[str, tuple[str, ...], Any]] = []
    for path, leaf in paths_of(x=x, y=y):
        axes = tuple(map(str, leaf.dims)) if isinstance(getattr(leaf, "dims", None), tuple) else ()
        labels: Any = leaf.indexes.get(leaf.dims[0]) if axes else leaf.index if hasattr(leaf, "iloc") else None
        for other, other_axes, other_labels in known:
            for one, two, ours, theirs in ((path, other, axes, other_axes), (other, path, other_axes, axes)):
                if ours and ours[0] in theirs[1:]:
                    raise DataError(
                        f"{one} has samples along {ours[0]!r}, which is axis {theirs.index(ours[0])} of {two}: samples "
                        f"are on the first axis: {two}.transpose({ours[0]!r}, ...)"
                    )
            comparable = labels is not None and other_labels is not None and axes[:1] == other_axes[:1]
            if comparable and len(labels) == len(other_labels) and not labels.equals(other_labels):
                raise DataError(
                    f"{path} labels its samples otherwise than {other}, and samples are paired by their place: bring "
                    "them into one order (reindex, align), or give the numbers alone (.to_numpy())"
                )
        known.append((path, axes, labels))


def _taken(values: Any, name: str) -> Any:
    """Check an array, or a tree of arrays; return it with contiguous arrays in this machine's byte order.

    ``name`` names the array in error messages.
    """
    if _is_record(values):
        checked = iter([_taken(leaf, path) for path, leaf in paths_of(**{name: values})])
        return map_leaves(lambda leaf: next(checked), values)
    if not isinstance(values, Mapping):
        return contiguous(check_samples(_as_array(values, name), name))
    if not values:
        raise DataError(f"{name}: a dictionary without arrays")
    return {key: _taken(inside, f"{name}[{key!r}]") for key, inside in values.items()}


def _is_record(values: Any) -> bool:
    """Tell whether ``values`` is a tuple or dataclass whose leaves are all arrays of samples."""
    if isinstance(values, Mapping | list | np.ndarray):
        return False
    leaves = leaves_of(values)
    arrays = all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves)
    return arrays and bool(leaves) and not any(leaf is values for leaf in leaves)


def _as_array(values: ArrayLike, name: str) -> Array:
    try:
        return np.asarray(unmasked_samples(values, name))
    except ValueError as error:
        raise DataError(f"{name}: not an array: {error}") from None


def _map(path: str) -> MappedArray:
    """Return the array of a ``.npy`` file, mapped into memory; raise DataError if it is no file of numbers."""
    from mpizero.checkpoint.tools.npz import UNSOUND, read_header  # with h5py's packages

    if not os.path.isfile(path):
        raise DataError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'does not exist'}")
    try:
        file = MappedFile(path)
        with open(path, "rb") as opened:
            if opened.read(2) == b"PK":
                raise DataError(f"{path}: an archive of arrays; needed is a single array in a .npy file")
            opened.seek(0)
            shape, by_columns, dtype = read_header(opened, os.path.basename(path), file.size)
            return MappedArray(file, dtype, opened.tell(), check_shape(shape, path), by_columns=by_columns)
    except (OSError, *UNSOUND) as error:
        if not os.path.getsize(path):
            raise DataError(f"{path}: the file is empty") from None
        raise DataError(f"{path}: not a readable .npy file of numbers: {error}") from None

"""Define the base class of sources that read named arrays of files."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mpizero._util.checks import flag, require, whole
from mpizero._util.pytree import leaves_of, map_leaves, paths_of
from mpizero.data.mapped import (
    FileState,
    check_named_once,
    check_unchanged,
    file_states,
    on_own_disk,
    room_in_memory,
    with_more_files,
)
from mpizero.data.source import Indices, Source, check_samples
from mpizero.data.stored import FileArray, JoinedArray
from mpizero.data.windows import Windows
from mpizero.errors import ConfigError, DataError
from mpizero.types import Array

#: Largest number of files that stay open at a time; the others are opened again when needed.
OPEN_FILES = 64

Path = str | os.PathLike[str]
#: One name gives an array, a sequence of names a dictionary by name, a mapping from keys a dictionary by key.
Names = str | Sequence[str] | Mapping[str, str]


class FileSource(Source):
    """Read samples from named arrays of one or several files; each sample is read when it is requested.

    Subclasses define :meth:`open_file`.

    Parameters
    ----------
    path : path, or sequence of paths
        A file or a glob pattern (whose matches are sorted), or several. The arrays of several files are joined along
        ``axis``, in this order, so a window may begin in one file and end in the next.
    x, y : str, sequence of str, or mapping of str to str
        Names of the arrays of inputs and of targets. A sequence gives samples that are dictionaries, with the names as
        keys; a mapping, from keys to names, gives other keys.
    axis : int
        The axis along which samples lie. Without ``window``, sample i is slice i along it, without this axis.
    window, stride : mapping of int to int, optional
        Length of a window by axis, and the distance between the starts of neighbouring windows (default: the length).
        A sample is then a window: ``window={0: 4, 1: 64, 2: 64}``. Axes without a length are whole, but along ``axis``
        a sample is one slice. Samples are numbered along ``axis`` slowest. An array without some axis of the window
        (labels, say) gives what belongs to the others.
    lead : int
        Number of indices along ``axis`` by which the targets start after the inputs, as in a forecast.
    allow_nan : bool
        Whether samples may contain NaN; otherwise reading one is an error.

    Raises
    ------
    DataError
        If a file or an array is missing, damaged or empty, does not hold numbers, or does not fit the others.
    ConfigError
        If another argument cannot be used.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import mpizero as mz
    >>> class NpzSource(mz.data.FileSource):
    ...     kind = "npz"
    ...     def open_file(self, path):
    ...         with np.load(path) as file:
    ...             return {name: (file[name], 1) for name in self.names}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "a.npz"), wind=np.arange(3.0), rain=np.arange(3))
    ...     np.savez(Path(folder, "b.npz"), wind=np.arange(3.0, 6.0), rain=np.arange(3, 6))
    ...     source = NpzSource(f"{folder}/*.npz", x="wind", y="rain")
    ...     print(len(source), source.samples([4]))
    6 (array([4.]), array([4]))
    """

    #: Kind of the source in :meth:`describe`, and the file format's word for an array.
    kind, array_word = "", "array"

    def __init__(
        self,
        path: Path | Sequence[Path],
        x: Names,
        y: Names,
        *,
        axis: int = 0,
        window: Mapping[int, int] | None = None,
        stride: Mapping[int, int] | None = None,
        lead: int = 0,
        allow_nan: bool = False,
    ) -> None:
        require("axis", axis, whole(0))
        self.allow_nan = require("allow_nan", allow_nan, flag)
        self.folder, self.paths = os.getcwd(), _expand(path)
        self.names = (_names("x", x), _names("y", y))
        self._states = {file: FileState.of(file) for file in self.paths}
        self._opened = lru_cache(maxsize=OPEN_FILES)(self._open)
        described = [self._stored(file) for file in self.paths]
        self._joined: tuple[Any, Any] = tuple(
            map_leaves(lambda name: JoinedArray([stored[name] for stored in described], axis), names)
            for names in self.names
        )
        first = max(leaves_of(self._joined), key=lambda array: len(array.shape))
        self.windows = Windows.of(first.shape, axis, window, stride, lead, first.label)
        self.lead = lead
        self._check_shapes(first)

    @abstractmethod
    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open a file; return the arrays of :attr:`names` by name, each with the ``chunk`` of a :class:`FileArray`.

        An array has a shape and a dtype, and reads its elements when it is indexed with slices.

        Raises
        ------
        DataError
            If the file or an array is missing, damaged or empty.
        """

    def _open(self, path: str) -> Mapping[str, tuple[Any, int]]:
        check_unchanged(path, self._states[path])
        return with_more_files(path, lambda: self.open_file(path))

    def _stored(self, path: str) -> dict[str, FileArray]:
        found = {}
        for name, (values, chunk) in self._opened(path).items():
            label = f"{path}: {self.array_word} {name!r}"
            check_samples(values, label)
            reopen = partial(self._values, path, name)
            dtype, mapped = values.dtype.newbyteorder("="), getattr(values, "path", "")
            meaning = (getattr(values, "axes", ()), getattr(values, "measured", {}))
            found[name] = FileArray(label, tuple(values.shape), dtype, chunk, reopen, mapped, *meaning)
        return found

    def _values(self, path: str, name: str) -> Any:
        return self._opened(path)[name][0]

    def _check_shapes(self, first: JoinedArray) -> None:
        """Raise DataError if an array differs from ``first`` along an axis by which samples are counted."""
        for array in leaves_of(self._joined):
            for axis in self.windows.counts:
                if axis < len(array.shape) and array.shape[axis] != first.shape[axis]:
                    raise DataError(
                        f"{first.label} has {first.shape[axis]} samples and {array.label} has {array.shape[axis]}: "
                        f"needed is the same number along axis {axis}"
                    )
                self._check_axis(axis, array, first)

    @staticmethod
    def _check_axis(axis: int, array: JoinedArray, first: JoinedArray) -> None:
        """Raise DataError if the axis of the samples in one array is another one of ``first``, by its name."""
        name = array.axes[axis] if axis < len(array.axes) else ""
        if name in first.axes and name != first.axes[axis]:
            place = first.axes.index(name)
            raise DataError(
                f"{array.label} has samples along {name!r}, which is axis {place} of {first.label}, not axis {axis}: "
                "write arrays whose axes have the same order"
            )

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def block_samples(self) -> int:
        """Number of neighbouring samples that the files store, and decompress, together."""
        return max(1, *(array.chunk for array in leaves_of(self._joined))) if self.windows.are_rows else 1

    @property
    def in_page_cache(self) -> bool:
        """Tell whether all arrays are mapped into memory, of files that are on a disk of this machine and fit."""
        parts = [part for array in leaves_of(self._joined) for part in array.parts]
        files = {part.file for part in parts}
        mapped = "" not in files and all(map(on_own_disk, files))
        return mapped and sum(map(os.path.getsize, files)) <= room_in_memory()

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        x, y = (
            map_leaves(partial(self._read, indices=indices, shift=shift), joined)
            for joined, shift in zip(self._joined, (0, self.lead), strict=True)
        )
        return x, y

    def _read(self, array: JoinedArray, *, indices: Indices, shift: int) -> Array:
        """Return the samples ``indices`` of one array."""
        if self.windows.are_rows:
            found = array.rows(indices + shift)
        else:
            blocks = [array.block(self.windows.block(i, array.shape, shift)) for i in indices.tolist()]
            shape = tuple(part.stop - part.start for part in self.windows.block(0, array.shape))
            found = np.empty((indices.size, *shape), array.dtype)
            for row, block in zip(found, blocks, strict=True):
                row[...] = block
            if self.windows.axis not in self.windows.lengths:
                found = found.reshape(indices.size, *np.delete(shape, self.windows.axis))
        if not self.allow_nan and found.size and found.dtype.kind in "fc" and np.isnan(found.min()):
            self._reject_nan(array, found, indices, shift)
        return found

    def _reject_nan(self, array: JoinedArray, found: Array, indices: Indices, shift: int) -> None:
        row, *inside = (int(number) for number in np.argwhere(np.isnan(found))[0])
        sample = int(indices[row])
        start = self.windows.starts(sample)[self.windows.axis] + shift
        if self.windows.axis in self.windows.lengths:
            start += inside[self.windows.axis]
        part, index = array.place(start)
        raise DataError(
            f"{part.label}, index {index} along axis {self.windows.axis}: NaN at {inside} of sample {sample}; correct "
            "the file, or give allow_nan=True for samples that may contain NaN"
        )

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders; names, shapes and dtypes of the arrays; the windows."""
        found: dict[str, Any] = {"kind": self.kind, "files": [os.path.basename(path) for path in self.paths]}
        for path, (_, array) in zip(
            (path for path, _ in paths_of(x=self.names[0], y=self.names[1])),
            paths_of(x=self._joined[0], y=self._joined[1]),
            strict=True,
        ):
            found[path] = ([part.label.rpartition(": ")[2] for part in array.parts[:1]], array.shape, array.dtype.str)
        windows = self.windows
        found["windows"] = (windows.axis, sorted(windows.lengths.items()), sorted(windows.strides.items()), self.lead)
        return found

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.paths)}

    def close(self) -> None:
        """Close the files, which are opened again if samples are read; a second call does nothing."""
        self._opened.cache_clear()


def _names(role: str, given: Any) -> Any:
    """Check names of arrays; return one name, or a dictionary from keys to names."""
    if isinstance(given, str):
        return given
    named = dict(given) if isinstance(given, Mapping) else None
    if named is None and isinstance(given, Sequence):
        named = {name: name for name in given}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(f"{role}={given!r}: expected a name, names, or a mapping from keys to names")
    return named


def _expand(given: Path | Sequence[Path]) -> tuple[str, ...]:
    """Return the paths that ``given`` stands for: paths as they are, and the sorted matches of patterns.

    They are absolute: files are opened later, when the program may be in another folder.
    """
    found: list[str] = []
    for path in [given] if isinstance(given, str | os.PathLike) else list(given):
        name = os.path.abspath(os.fspath(path))
        if os.path.lexists(name) or not glob.has_magic(name):
            found.append(name)
            continue
        if not (matches := sorted(glob.glob(name, recursive=True))):
            raise DataError(f"{name}: the pattern matches no file")
        found += matches
    if not found:
        raise DataError("no data: the list of files is empty")
    check_named_once(found)
    return tuple(found)

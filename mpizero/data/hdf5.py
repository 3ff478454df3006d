"""Read samples from two datasets of an HDF5 file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpizero.data.source import Indices, Source, check_lengths, check_samples, native
from mpizero.errors import DataError
from mpizero.names import explains
from mpizero.types import Array


@explains
class Hdf5Source(Source):
    """Read samples from two datasets of an HDF5 file; each sample is read when it is requested.

    Contiguous datasets are memory-mapped, so reading shuffled samples needs no HDF5 call. Of a chunked dataset, each
    call of :meth:`read` reads every chunk that contains a requested sample only once, in ascending order.

    Parameters
    ----------
    path : path
        Path of the file.
    x, y : str
        Names of the datasets of inputs and of targets, with samples on the first axis.

    Raises
    ------
    DataError
        If the file or a dataset is missing, damaged or empty, a dataset does not hold numbers, or the datasets have
        different numbers of samples.
    """

    def __init__(self, path: str | os.PathLike[str], x: str, y: str) -> None:
        import h5py

        self.path = os.fspath(path)
        self.names = (x, y)
        if not os.path.isfile(self.path):
            raise DataError(f"{self.path}: {'not a regular file' if os.path.lexists(self.path) else 'does not exist'}")
        try:
            self._file = h5py.File(self.path, "r", locking=False)
        except OSError as error:
            reason = "the file is empty" if not os.path.getsize(self.path) else f"not a readable HDF5 file: {error}"
            raise DataError(f"{self.path}: {reason}") from None
        self._x, self._y = (self._dataset(name) for name in self.names)
        x_name, y_name = (f"{self.path}: dataset {name!r}" for name in self.names)
        check_lengths(self._x, x_name, self._y, y_name)
        self._mapped_x, self._mapped_y = (_map(self.path, dataset) for dataset in (self._x, self._y))

    def _dataset(self, name: str) -> Any:
        import h5py

        try:
            found = self._file[name]
        except (KeyError, ValueError):
            names: list[str] = []
            self._file.visit(names.append)
            have = ", ".join(names[:10]) or "nothing"
            raise DataError(f"{self.path}: no dataset {name!r}; it has {have}") from None
        if not isinstance(found, h5py.Dataset):
            raise DataError(f"{self.path}: {name!r} is a group; needed is a dataset")
        if found.shape is None:
            raise DataError(f"{self.path}: dataset {name!r} is empty")
        check_samples(found, f"{self.path}: dataset {name!r}")
        return found

    def __len__(self) -> int:
        return len(self._x)

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        x, y = (
            native(mapped[indices]) if mapped is not None else _rows(dataset, indices, self.path)
            for mapped, dataset in ((self._mapped_x, self._x), (self._mapped_y, self._y))
        )
        return x, y

    def describe(self) -> dict[str, Any]:
        """Return the name of the file without its folder, and the names, shapes and dtypes of the datasets."""
        found: dict[str, Any] = {"kind": "hdf5", "file": os.path.basename(self.path)}
        for role, name, dataset in zip(("x", "y"), self.names, (self._x, self._y), strict=True):
            found[role] = (name, dataset.shape, dataset.dtype.str)
        return found

    def close(self) -> None:
        """Close the HDF5 file; a second call does nothing."""
        self._file.close()


def _map(path: str, dataset: Any) -> Array | None:
    """Return a dataset as a memory-mapped array; None if its bytes are not contiguous in the file."""
    if dataset.chunks is not None or dataset.is_virtual or dataset.external is not None or dataset.dtype.kind == "b":
        return None
    offset, size = dataset.id.get_offset(), os.path.getsize(path)
    if offset is None or dataset.size == 0 or offset + dataset.size * dataset.dtype.itemsize > size:
        return None
    mapped: Array = np.memmap(path, dataset.dtype, "r", offset=offset, shape=dataset.shape)
    return mapped


def _rows(dataset: Any, indices: Indices, path: str) -> Array:
    """Return the samples ``indices``, in that order, read through HDF5.

    The samples of each chunk are read with one call, from the first to the last one requested. ``path`` is the file's
    path for error messages.
    """
    out = np.empty((indices.size, *dataset.shape[1:]), dataset.dtype.newbyteorder("="))
    order = np.argsort(indices, kind="stable")
    wanted = indices[order]
    chunk = wanted // (dataset.chunks[0] if dataset.chunks else max(1, len(dataset)))
    borders = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist(), wanted.size] if wanted.size else []
    for start, stop in zip(borders, borders[1:], strict=False):
        low, high = int(wanted[start]), int(wanted[stop - 1]) + 1
        try:
            block = dataset[low:high]
        except OSError as error:
            raise DataError(f"{path}: dataset {dataset.name!r}, rows {low} to {high - 1}: {error}") from None
        out[order[start:stop]] = block[wanted[start:stop] - low]
    return out

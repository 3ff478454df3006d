"""Read datasets of HDF5 whose chunks are compressed by gzip, with a faster decompressor than HDF5's."""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, Self

import numpy as np
from isal.igzip_lib import IsalError
from isal.isal_zlib import decompress

from mpizero.types import Array

#: Bytes of decompressed chunks of a dataset that are kept; HDF5 keeps as many.
KEPT = 8 << 20


class DeflatedArray:
    """Read a dataset whose chunks hold whole rows, compressed by gzip, maybe after a shuffle of their bytes.

    HDF5 hands out the compressed chunk, and ISA-L decompresses it, in about half of zlib's time and without Python's
    global lock. Whatever cannot be read so (a chunk that is damaged, missing or stored without a filter, ranges over
    several chunks) HDF5 reads itself, which also tells the error. Of small chunks the last ones used are kept.

    Parameters
    ----------
    dataset : h5py.Dataset
        The dataset; see :meth:`of`.
    shuffled : bool
        Whether the bytes of the elements are shuffled before they are compressed.
    """

    def __init__(self, dataset: Any, shuffled: bool) -> None:
        self._dataset, self._rows = dataset, dataset.chunks[0]
        self.shape, self.ndim, self.dtype = dataset.shape, dataset.ndim, dataset.dtype
        size = prod(dataset.chunks) * self.dtype.itemsize
        self._chunk = lru_cache(maxsize=KEPT // size)(partial(_inflate, dataset, shuffled, size))

    @classmethod
    def of(cls, dataset: Any) -> Self | None:
        """Return the dataset so that it is read faster; None if its chunks or filters are others."""
        import h5py

        if dataset.chunks is None or not dataset.size or dataset.chunks[1:] != dataset.shape[1:]:
            return None
        plain = dataset.dtype.kind in "fiu" and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype)
        settings = dataset.id.get_create_plist()
        filters = [settings.get_filter(number) for number in range(settings.get_nfilters())]
        shuffled = bool(filters) and filters[0][0] == h5py.h5z.FILTER_SHUFFLE
        if shuffled:
            plain = plain and filters.pop(0)[2] == (dataset.dtype.itemsize,)
        known = [kind for kind, *_ in filters] == [h5py.h5z.FILTER_DEFLATE]
        return cls(dataset, shuffled) if plain and known else None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: tuple[slice, ...]) -> Array:
        """Return the elements of a tuple of slices."""
        number, first = divmod(where[0].start, self._rows)
        count = where[0].stop - where[0].start
        chunk = self._chunk(number) if 0 < count <= self._rows - first else None
        found: Array = self._dataset[where] if chunk is None else chunk[(slice(first, first + count), *where[1:])]
        return found

    def read_direct(self, out: Array, where: tuple[slice, ...], into: slice) -> None:
        """Read the elements of a tuple of slices into ``out[into]``."""
        out[into] = self[where]


def _inflate(dataset: Any, shuffled: bool, size: int, number: int) -> Array | None:
    """Return a chunk, of ``size`` bytes, without the right to change it; None if HDF5 must read it."""
    try:
        skipped, packed = dataset.id.read_direct_chunk((number * dataset.chunks[0], *(0 for _ in dataset.shape[1:])))
        found = decompress(packed, bufsize=size)
    except (OSError, ValueError, RuntimeError, IsalError):  # type: ignore[misc]  # isal types the class as an error
        return None
    if skipped or len(found) != size:
        return None
    elements = np.frombuffer(found, np.uint8)
    if shuffled:  # the first bytes of all elements, then the second ones
        elements = np.ascontiguousarray(elements.reshape(dataset.dtype.itemsize, -1).T)
        elements.flags.writeable = False
    values: Array = elements.reshape(-1).view(dataset.dtype).reshape(dataset.chunks)
    return values

"""Describe the arrays of a checkpoint, and which rank writes which elements of them; this module reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpizero._util.checks import is_whole
from mpizero._util.names import PATH_LIMIT, PATH_PARTS, fault_of, nested_in, shown
from mpizero.errors import CheckpointError
from mpizero.types import Array

#: Element types a checkpoint may hold, little-endian; bfloat16 is stored as its bits, in ``<u2``. HDF5 has no complex
#: numbers: they are compounds of the numbers ``r`` and ``i``, as h5py writes and reads them.
DTYPES = ("<f2", "<f4", "<f8", "<c8", "<c16", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")
#: The most arrays that one checkpoint may have.
ARRAY_LIMIT = 65_536
#: The most bytes that one array may have; so every sum of sizes stays far below 2**63.
SIZE_LIMIT = 2**56

#: Type of a table: shape and element type of every array, by path.
Table = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


@dataclass(frozen=True)
class LocalArray:
    """Describe one array of a checkpoint, and the ranges of its elements that one rank writes or reads.

    Parameters
    ----------
    path : str
        Path in the HDF5 file, for example ``"parameters/blocks.0.weight"`` or ``"optimizer/exp_avg/blocks.0.weight"``.
    shape : tuple of int
        Shape of the whole array.
    dtype : numpy.dtype
        Element type, one of :data:`DTYPES`.
    pieces : tuple of (int, numpy.ndarray)
        Ranges of elements of the array flattened in C order. Each piece is the index of its first element and a
        one-dimensional contiguous array of its values. For writing, the pieces of all ranks must be disjoint and make
        up the whole array. For reading, they may be any ranges, and their values are overwritten. A piece of an array
        of complex numbers may be an array of real ones: then its first index counts these, of which each element has
        two, so that ranks can share an element.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> half = checkpoint.LocalArray("parameters/weight", (2, 3), np.dtype("f4"), ((3, np.ones(3, "f4")),))
    >>> half.path, half.shape, half.pieces[0][0]  # this rank writes elements 3 to 5, another rank the others
    ('parameters/weight', (2, 3), 3)
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[int, Array], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return prod(self.shape)


def number_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of the real numbers that elements of type ``dtype`` consist of: itself unless it is complex."""
    return np.empty(0, dtype).real.dtype


def numbers_in(dtype: np.dtype[Any]) -> int:
    """Return how many real numbers an element of type ``dtype`` consists of: 2 if it is complex, else 1."""
    return dtype.itemsize // number_of(dtype).itemsize


def check_path(path: object) -> str:
    """Return ``path`` if it may be the name of an array; otherwise raise :class:`CheckpointError`."""
    if fault := fault_of(path, PATH_LIMIT, PATH_PARTS):
        raise CheckpointError(f"array name {shown(path)} is not allowed: it {fault}")
    return str(path)


def check_shape(path: str, shape: Sequence[object], dtype: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple of ints.

    Raises :class:`CheckpointError` if a checkpoint cannot store an array of this shape and element type.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"array {path!r}: element type {dtype!r:.40} is not one of {', '.join(DTYPES)}")
    if len(shape) > 32:
        raise CheckpointError(f"array {path!r}: {len(shape)} axes, at most 32 are allowed")
    sizes = tuple(int(n) for n in shape if is_whole(n))
    if len(sizes) != len(shape):
        raise CheckpointError(f"array {path!r}: shape {tuple(shape)!r:.80} is not a list of sizes >= 0")
    if prod(max(n, 1) for n in sizes) > SIZE_LIMIT // np.dtype(dtype).itemsize:
        raise CheckpointError(f"array {path!r}: shape {sizes!r:.80} of {dtype} is larger than {SIZE_LIMIT} bytes")
    return sizes


def check_paths(paths: Iterable[str]) -> None:
    """Raise :class:`CheckpointError` if one path would be the HDF5 group of another path, such as ``a`` of ``a/b``."""
    if found := nested_in(paths):
        raise CheckpointError(f"array {found[0]!r} cannot also be the group of array {found[1]!r}")


def check_array(array: LocalArray, writable: bool = False) -> LocalArray:
    """Check ``array``, and return a copy with the shape as a tuple of ints and the type as ``numpy.dtype``.

    The values of the pieces are not copied. With ``writable`` they must be writable. Raises a :class:`CheckpointError`
    that names the array and what is wrong.
    """
    path = check_path(array.path)
    dtype = np.dtype(array.dtype)
    shape = check_shape(path, array.shape, dtype.str)
    size = prod(shape)
    for start, values in array.pieces:
        where = f"array {path!r}, piece at element {start}"
        if not isinstance(values, np.ndarray) or values.ndim != 1 or not values.flags.c_contiguous:
            raise CheckpointError(f"{where}: values must be a one-dimensional contiguous NumPy array")
        if values.dtype not in (dtype, number_of(dtype)):
            raise CheckpointError(f"{where}: values are {values.dtype.str}, the array is {dtype.str}")
        if writable and not values.flags.writeable:
            raise CheckpointError(f"{where}: values to read into must be writable")
        if start < 0 or start + values.size > size * (dtype.itemsize // values.itemsize):
            raise CheckpointError(f"{where}: {values.size} elements do not fit an array of {size}")
    return LocalArray(path, shape, dtype, tuple((int(start), values) for start, values in array.pieces))


@dataclass(frozen=True)
class Claim:
    """Describe which ranges of elements of one array one rank writes, and the shape and type of the whole array.

    ``ranges`` holds (start, stop) indices of the real numbers of the array flattened in C order.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, array: LocalArray) -> Claim:
        """Return the claim for all pieces of ``array`` that have elements."""
        sizes = [(start, values.size, numbers_in(values.dtype)) for start, values in array.pieces if values.size]
        ranges = tuple((start * each, (start + size) * each) for start, size, each in sizes)
        return cls(array.path, array.shape, array.dtype.str, ranges)


def merge(claims: Sequence[Sequence[Claim]]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and element type of every array, sorted by path, from the claims of each rank.

    ``claims`` holds the claims by rank. Raises :class:`CheckpointError` unless each element is written by exactly one
    rank. Every rank calls this function with the same gathered claims, and gets the same table or the same error.
    """
    table: dict[str, tuple[tuple[int, ...], str, int]] = {}
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for rank, listed in enumerate(claims):
        for claim in listed:
            shape, dtype, first = table.setdefault(claim.path, (claim.shape, claim.dtype, rank))
            if (shape, dtype) != (claim.shape, claim.dtype):
                raise CheckpointError(
                    f"array {claim.path!r}: rank {first} has shape {shape} of {dtype}, "
                    f"rank {rank} has {claim.shape} of {claim.dtype}"
                )
            ranges.setdefault(claim.path, []).extend((*span, rank) for span in claim.ranges)
    if len(table) > ARRAY_LIMIT:
        raise CheckpointError(f"{len(table)} arrays are more than the {ARRAY_LIMIT} that one checkpoint may hold")
    check_paths(table)
    for path in sorted(table):
        shape, dtype, _ = table[path]
        _check_tiling(path, prod(shape) * numbers_in(np.dtype(dtype)), sorted(ranges[path]))
    return {path: (table[path][0], np.dtype(table[path][1])) for path in sorted(table)}


def _check_tiling(path: str, size: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    end, writer = 0, -1
    for start, stop, rank in ranges:
        if start < end:
            raise CheckpointError(f"array {path!r}: element {start} is written by rank {writer} and by rank {rank}")
        if start > end:
            raise CheckpointError(f"array {path!r}: elements {end} to {start - 1} are written by no rank")
        end, writer = stop, rank
    if end != size:
        raise CheckpointError(f"array {path!r}: elements {end} to {size - 1} are written by no rank")

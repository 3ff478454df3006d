"""Compare two checkpoints; arrays are read in blocks of 4 MiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero.checkpoint.format.table import number_of, numbers_in
from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.tools.elements import Report, blocks, element_types, flat, matches, widened
from mpizero.errors import ConfigError
from mpizero.types import Array, as_reals


@dataclass(frozen=True)
class ArrayDifference:
    """Describe how two arrays of the same name, shape and type differ in their values.

    A complex element counts as two: ``first`` then ends with 0 for its real part, with 1 for its imaginary one.

    Attributes
    ----------
    path : str
        Path of the array.
    size, differing : int
        Number of elements of the array, and number of elements that differ.
    largest_absolute, largest_relative : float
        Largest absolute and relative difference among the differing elements that are finite in both arrays. The
        relative difference is the absolute difference divided by the larger magnitude.
    not_finite : int
        Number of differing elements that are NaN or infinite in at least one of the arrays.
    first : tuple of int
        Index of the first element that differs.
    values : tuple of float
        Values of that element in the first and in the second array.
    """

    path: str
    size: int
    differing: int
    largest_absolute: float
    largest_relative: float
    not_finite: int
    first: tuple[int, ...]
    values: tuple[float, float]


@dataclass(frozen=True)
class CheckpointDifference:
    """Describe all differences between two checkpoints.

    Attributes
    ----------
    missing, extra : tuple of str
        Paths of the arrays that only the first checkpoint has, and of the arrays that only the second checkpoint has.
    reshaped : dict
        Arrays that differ in shape or element type: from the path to the type and shape, as text, in the first and in
        the second checkpoint.
    arrays : tuple of ArrayDifference
        Descriptions of the arrays that differ in values only.
    attributes : dict
        The attributes that differ: from the dotted name to the values in the first and in the second checkpoint. None
        stands for a missing attribute.
    compared, nbytes : int
        Number of arrays whose values were compared, and number of their bytes in one checkpoint.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: dict[str, tuple[str, str]]
    arrays: tuple[ArrayDifference, ...]
    attributes: dict[str, tuple[Any, Any]]
    compared: int
    nbytes: int

    @property
    def equal(self) -> bool:
        """True if the checkpoints do not differ."""
        return not (self.missing or self.extra or self.reshaped or self.arrays or self.attributes)


def compare(
    a: Reader, b: Reader, tolerance: float = 0.0, pattern: str | None = None, report: Report | None = None
) -> CheckpointDifference:
    """Compare two open checkpoints and return their differences.

    Collective over the communicators with which the checkpoints were opened.

    Parameters
    ----------
    a, b : Reader
        The checkpoints.
    tolerance : float
        Two elements count as equal if their difference is at most ``tolerance``, or at most ``tolerance`` times the
        larger magnitude. All NaNs then count as equal, too. With 0, elements count as equal only if all their bits are
        equal.
    pattern : str, optional
        Compare only the arrays whose names match this shell pattern.
    report : callable, optional
        Called with the number of bytes of each block after the block has been compared.
    """
    if not 0 <= tolerance < float("inf"):  # NaN fails both
        raise ConfigError(f"tolerance {tolerance}: must be a finite number >= 0")
    first, second = _described(a, pattern), _described(b, pattern)
    common = [path for path in first if path in second]
    alike = [path for path in common if first[path] == second[path]]
    elements = element_types(a)
    found = (_compare(a, b, (path, elements[path]), tolerance, report) for path in alike)
    return CheckpointDifference(
        missing=tuple(path for path in first if path not in second),
        extra=tuple(path for path in second if path not in first),
        reshaped={path: (first[path], second[path]) for path in common if first[path] != second[path]},
        arrays=tuple(difference for difference in found if difference is not None),
        attributes=dict(_attributes(a.attributes, b.attributes)),
        compared=len(alike),
        nbytes=sum(int(np.prod(a.arrays[path][0], dtype=np.int64)) * a.arrays[path][1].itemsize for path in alike),
    )


def _described(reader: Reader, pattern: str | None) -> dict[str, str]:
    elements = element_types(reader)
    return {path: f"{elements[path]} {list(reader.arrays[path][0])}" for path in elements if matches(path, pattern)}


def _attributes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    first, second = flat(a), flat(b)
    nothing = object()
    for name in sorted(first.keys() | second.keys()):
        if first.get(name, nothing) != second.get(name, nothing):
            yield name, (first.get(name), second.get(name))


def _compare(
    a: Reader, b: Reader, array: tuple[str, str], tolerance: float, report: Report | None
) -> ArrayDifference | None:
    """Compare one array, given by (path, element type), in both checkpoints; return None if its values are equal."""
    path, element = array
    shape, dtype = a.arrays[path]
    parts, number = numbers_in(dtype), number_of(dtype)
    shape, bits = (*shape, 2) if parts == 2 else shape, np.dtype(f"u{number.itemsize}")
    differing, lost, absolute, relative = 0, 0, 0.0, 0.0
    first: int | None = None
    shown = (0.0, 0.0)
    for (start, x), (_, y) in zip(blocks(a, path, report), blocks(b, path), strict=True):
        x, y = as_reals(x), as_reals(y)
        where = np.flatnonzero(x.view(bits) != y.view(bits))
        if not where.size:
            continue
        kind = element if parts == 1 else number.name
        pair = widened(x[where], kind), widened(y[where], kind)
        counts = _apart(*pair, tolerance) if tolerance else np.ones(where.size, bool)
        if not counts.any():
            continue
        u, v = pair[0][counts], pair[1][counts]
        if first is None:
            first, shown = start * parts + int(where[counts][0]), (float(u[0]), float(v[0]))
        differing += u.size
        both = np.isfinite(u) & np.isfinite(v)
        lost += int(np.count_nonzero(~both))
        worst = _largest(u[both], v[both])
        absolute, relative = max(absolute, worst[0]), max(relative, worst[1])
    if first is None:
        return None
    index = tuple(int(i) for i in np.unravel_index(first, shape)) if shape else ()
    size = int(np.prod(shape, dtype=np.int64))
    return ArrayDifference(path, size, differing, absolute, relative, lost, index, shown)


def _apart(u: Array, v: Array, tolerance: float) -> Array:
    """Return a boolean mask of the float64 values that differ by more than the tolerance of :func:`compare`."""
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.maximum(1.0, np.maximum(np.abs(u), np.abs(v)))
        near = np.isfinite(u) & np.isfinite(v) & (np.abs(u - v) <= tolerance * scale)
    apart: Array = ~(near | (u == v) | (np.isnan(u) & np.isnan(v)))
    return apart


def _largest(u: Array, v: Array) -> tuple[float, float]:
    """Return the largest absolute and the largest relative difference between two arrays of finite values."""
    if not u.size:
        return 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        absolute = np.abs(u - v)
        scale = np.maximum(np.abs(u), np.abs(v))
        relative = np.divide(absolute, scale, out=np.zeros_like(scale), where=scale > 0)
    return float(absolute.max()), float(relative.max())

"""Read parts of arrays that are stored in files, and of several files' arrays as if they were one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from mpizero.data.source import Indices, contiguous
from mpizero.errors import DataError
from mpizero.types import Array

#: A half-open range along each axis.
Block = tuple[slice, ...]


@dataclass(frozen=True)
class FileArray:
    """Describe an array in one file, and read blocks of it.

    Attributes
    ----------
    label : str
        File and name of the array, for error messages.
    shape : tuple of int
        The array's shape.
    dtype : numpy.dtype
        Type of the elements that are read, in this machine's byte order.
    chunk : int
        Number of neighbouring rows (indices of the first axis) that the file stores, and decompresses, together; 0 if
        the array is memory-mapped.
    values : callable
        Returns an object that reads the array when it is indexed with slices. It is called for every access, so that
        files can be closed in between.
    file : str
        Path of the file that the array is mapped from, "" if it is not.
    axes : tuple of str
        Names of the axes; () if the file has none.
    measured : mapping of str to str
        Attributes that say in what the numbers are measured, such as ``units``.
    """

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: int
    values: Callable[[], Any]
    file: str = ""
    axes: tuple[str, ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)

    def block(self, where: Block) -> Array:
        """Return the elements in ``where``; raise DataError, naming file and range, if they cannot be read."""
        with self._named(where):
            return np.asarray(self.values()[where])

    @contextmanager
    def _named(self, where: Block) -> Iterator[None]:
        """Raise errors of the block again as DataError that names file and range."""
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            ranges = ", ".join(f"{part.start}:{part.stop}" for part in where)
            raise DataError(f"{self.label}, elements [{ranges}]: {error}") from error

    def rows(self, indices: Indices, out: Array, places: Indices) -> None:
        """Read the rows ``indices`` into ``out[places]``.

        Of a chunked array, the rows of each chunk are read with one call, from the first to the last one requested;
        neighbouring rows for neighbouring places without a copy in between, where the array can.
        """
        if not self.chunk:
            out[places] = self.values()[indices]
            return
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        borders = np.flatnonzero(np.diff(wanted // self.chunk)) + 1
        for own in np.split(order, borders) if wanted.size else []:
            low, high = int(indices[own[0]]), int(indices[own[-1]]) + 1
            where, into = (slice(low, high),), slice(int(places[own[0]]), int(places[own[-1]]) + 1)
            values = self.values()
            if hasattr(values, "read_direct") and _is_run(indices[own]) and _is_run(places[own]):
                with self._named(where):
                    values.read_direct(out, where, into)
            else:
                out[places[own]] = self.block(where)[indices[own] - low]


def _is_run(numbers: Indices) -> bool:
    """Tell whether there are several numbers, each of which follows the one before it."""
    return numbers.size > 1 and bool((np.diff(numbers) == 1).all())


def _check_meaning(part: FileArray, first: FileArray) -> None:
    """Raise DataError if two arrays that are joined have axes in another order, or are measured otherwise."""
    if part.axes != first.axes and sorted(part.axes) == sorted(first.axes):
        raise DataError(f"{part.label} has axes {', '.join(part.axes)}, {first.label} {', '.join(first.axes)}")
    for name, value in part.measured.items():
        if value != first.measured.get(name, value):
            raise DataError(
                f"{part.label} has the {name} {value!r}, {first.label} {first.measured[name]!r}: numbers of other "
                "units are not joined; write both in one, or give them as two sources"
            )


class JoinedArray:
    """Present the arrays of several files, joined along one axis, as one array.

    Parameters
    ----------
    parts : sequence of FileArray
        The arrays of the files, in order; at least one.
    axis : int
        The axis along which they are joined.

    Raises
    ------
    DataError
        If an array lacks the axis, or differs from the first one in type or along another axis, in its unit, or in the
        order of axes that have the same names.
    """

    def __init__(self, parts: Sequence[FileArray], axis: int) -> None:
        first = parts[0]
        for part in parts:
            if len(part.shape) <= axis:
                raise DataError(f"{part.label} has shape {part.shape}: it has no axis {axis} along which samples lie")
            fits = [a == b for a, b in zip(part.shape, first.shape, strict=False)]
            fits[axis] = True
            if len(part.shape) != len(first.shape) or not all(fits) or part.dtype != first.dtype:
                raise DataError(
                    f"{part.label} has {part.dtype} of shape {part.shape}, {first.label} {first.dtype} of shape "
                    f"{first.shape}: files that are joined differ along axis {axis} only"
                )
            _check_meaning(part, first)
        self.parts, self.axis, self.dtype = tuple(parts), axis, first.dtype
        self.ends = tuple(accumulate(part.shape[axis] for part in parts))
        self.axes = first.axes
        self.shape = (*first.shape[:axis], self.ends[-1], *first.shape[axis + 1 :])
        self.chunk = max(part.chunk for part in parts)

    @property
    def label(self) -> str:
        """Name of the array in error messages: that in its first file, and how many more there are."""
        more = f" and {len(self.parts) - 1} more files" if len(self.parts) > 1 else ""
        return self.parts[0].label + more

    def place(self, index: int) -> tuple[FileArray, int]:
        """Return the part that holds ``index`` along the axis, and the index inside this part."""
        part = bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)

    def block(self, where: Block) -> Array:
        """Return the elements in ``where``, from as many files as needed."""
        done, stop, pieces = where[self.axis].start, where[self.axis].stop, []
        while done < stop:
            part, inside = self.place(done)
            count = min(stop - done, part.shape[self.axis] - inside)
            own = (*where[: self.axis], slice(inside, inside + count), *where[self.axis + 1 :])
            pieces.append(part.block(own))
            done += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)

    def rows(self, indices: Indices) -> Array:
        """Return the rows ``indices`` of an array that is joined along its first axis, in that order."""
        if len(self.parts) == 1 and not self.parts[0].chunk:  # without another copy
            return contiguous(self.parts[0].values()[indices])
        out = np.empty((indices.size, *self.shape[1:]), self.dtype)
        begin = 0
        for part, end in zip(self.parts, self.ends, strict=True):
            own = np.flatnonzero((indices >= begin) & (indices < end)) if len(self.parts) > 1 else np.arange(len(out))
            if own.size:
                part.rows(indices[own] - begin, out, own)
            begin = end
        return out

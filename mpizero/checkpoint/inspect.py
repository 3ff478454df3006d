"""Inspect checkpoints: find and list them, read their arrays in blocks, convert, summarize and compare elements.

No function holds a whole array in memory: :func:`blocks` reads and verifies 4 MiB at a time for :func:`statistics`,
:func:`compare` and the export of checkpoints. bfloat16, which NumPy does not have, is stored as its bits; which arrays
are bfloat16 is an attribute of the checkpoint (:func:`element_types`), and :func:`convert` converts from and to it. A
path that a user gives may be a checkpoint or a run: :func:`find_checkpoint` takes the newest undamaged one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero._util.names import fits
from mpizero._util.text import notice
from mpizero.checkpoint.format import (
    BLOCK,
    MANIFEST_NAME,
    OPTIMIZER,
    STATE_NAME,
    LocalArray,
    number_of,
    numbers_in,
    short_name,
)
from mpizero.checkpoint.manager import latest, step_folders, step_of
from mpizero.checkpoint.reader import Reader, open_checkpoint
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError
from mpizero.types import Array, as_reals

#: Name of the type, and of the checkpoint attribute that lists the bfloat16 arrays, which are stored as ``<u2``.
BFLOAT16 = "bfloat16"
FLOATING = (BFLOAT16, "float16", "float32", "float64")
#: The type of complex numbers whose parts have the given type.
_COMPLEX = {"float32": "complex64", "float64": "complex128"}
#: Folder of the moving averages of the parameters (``ShardingConfig(ema=...)``).
AVERAGES = f"{OPTIMIZER}ema/"

#: Type of a function that reports progress: it is called with the number of bytes of each finished block.
Report = Callable[[int], object]


def element_types(reader: Reader) -> dict[str, str]:
    """Return the name of the element type (NumPy's name, or ``bfloat16``) of every array, by path. Not collective."""
    listed = reader.attributes.get(BFLOAT16, ())
    tagged = {path for path in listed if isinstance(path, str)} if isinstance(listed, list) else set()
    bits = np.dtype("<u2")
    return {
        path: BFLOAT16 if path in tagged and dtype == bits else dtype.name for path, (_, dtype) in reader.arrays.items()
    }


def stored_type(element: str) -> np.dtype[Any]:
    """Return the NumPy type in which elements of the named type are stored: uint16 for bfloat16. Not collective."""
    return np.dtype("<u2") if element == BFLOAT16 else np.dtype(element).newbyteorder("<")


def nbytes_of(reader: Reader, path: str) -> int:
    """Return the size in bytes of the array ``path``. Not collective."""
    shape, dtype = reader.arrays[path]
    return prod(shape) * dtype.itemsize


def matches(path: str, pattern: str | None) -> bool:
    """Tell whether a path, with or without ``parameters/``, fits a shell pattern; None fits all. Not collective."""
    return pattern is None or fits(path, pattern) or fits(short_name(path), pattern)


def blocks(reader: Reader, path: str, report: Report | None = None) -> Iterator[tuple[int, Array]]:
    """Read and verify an array block by block; yield the index of the first element and the 1-D values of each block.

    The index refers to the array flattened in C order. The next block overwrites the memory of the values. ``report``
    is called with the number of bytes of each block after the caller has used it.

    Collective over the communicator with which the checkpoint was opened.
    """
    shape, dtype = reader.arrays[path]
    size, step = prod(shape), BLOCK // dtype.itemsize
    buffer = np.empty(min(size, step), dtype)
    for first in range(0, size, step):
        values = buffer[: min(step, size - first)]
        reader.read([LocalArray(path, shape, dtype, ((first, values),))])
        yield first, values
        if report is not None:
            report(values.nbytes)


def convert(values: Array, source: str, target: str) -> Array:
    """Return 1-D values converted from the element type ``source`` to ``target``. Not collective.

    Values are rounded to the nearest value of ``target``, ties to even; values that are too large become infinite.
    """
    if source == target:
        return values
    if source == BFLOAT16:
        from mpizero.kernels.cpu.layers import from_bfloat16

        wide = np.empty(values.size, np.float32)
        from_bfloat16(values, wide)
        return convert(wide, "float32", target)
    with np.errstate(over="ignore"):
        if target != BFLOAT16:
            return values.astype(stored_type(target))
        narrow = _rounded_to_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
    from mpizero.kernels.cpu.layers import to_bfloat16

    bits = np.empty(values.size, np.uint16)
    to_bfloat16(narrow, bits)
    return bits


def _rounded_to_odd(values: Array) -> Array:
    """Convert float64 to float32, rounded to odd, so that rounding the result to bfloat16 equals a single rounding."""
    narrow = values.astype(np.float32)
    wide, bits, finite = narrow.astype(np.float64), narrow.view(np.uint32), np.isfinite(narrow)
    bits -= (finite & (np.abs(wide) > np.abs(values))).astype(np.uint32)
    bits |= (finite & (wide != values)).astype(np.uint32)
    return narrow


def as_wanted(element: str, dtype: str | None) -> str:
    """Return the type that elements of type ``element`` get when floating-point numbers are converted to ``dtype``.

    Not collective. ``dtype=None`` converts nothing; integers are never converted. Complex numbers get real and
    imaginary parts of type ``dtype``.

    Raises
    ------
    ConfigError
        If ``element`` is complex, and there are no complex numbers with parts of type ``dtype``.
    """
    if dtype is None or element not in (*FLOATING, *_COMPLEX.values()):
        return element
    if element in FLOATING:
        return dtype
    if dtype not in _COMPLEX:
        raise ConfigError(f"type {dtype!r}: there are no complex numbers of it, only {', '.join(_COMPLEX)}")
    return _COMPLEX[dtype]


def overflows(values: Array, source: str, converted: Array, target: str) -> int:
    """Return the number of finite values that a conversion has made infinite. Not collective."""
    if target not in (*FLOATING, *_COMPLEX.values()) or source == target:
        return 0
    return int(np.count_nonzero(_infinite(converted, target) & ~_infinite(values, source)))


_EXPONENT_OF_BFLOAT16 = 0x7F80


def _infinite(values: Array, element: str) -> Array:
    return (values & 0x7FFF) == _EXPONENT_OF_BFLOAT16 if element == BFLOAT16 else np.isinf(values)


def widened(values: Array, element: str) -> Array:
    """Return 1-D values of the type ``element`` converted to float64. Not collective.

    Each complex value becomes two values, its real and its imaginary part.
    """
    reals = as_reals(values)
    return convert(reals, element if reals is values else reals.dtype.name, "float64")


def flat(attributes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested attributes as one dictionary with dotted names; lists are not flattened. Not collective.

    Each name begins with ``prefix``. A key that contains a dot is quoted, so that no two attributes get the same name.
    """
    flattened: dict[str, Any] = {}
    for key, value in attributes.items():
        name = prefix + (json.dumps(key) if "." in key or '"' in key else key)
        flattened.update(flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value})
    return flattened


@dataclass(frozen=True)
class ArrayStatistics:
    """Hold statistics of the finite values of an array, computed in float64; a complex element counts as two values.

    Attributes
    ----------
    minimum, maximum, mean, norm : float or None
        Statistics of the finite values; None if no value is finite. The norm is the square root of the sum of squares.
    not_finite : int
        Number of values that are NaN or infinite. The other statistics do not include them.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    not_finite: int


def statistics(reader: Reader, path: str, report: Report | None = None, element: str | None = None) -> ArrayStatistics:
    """Read and verify an array block by block, and return its statistics.

    Collective over the communicator with which the checkpoint was opened. ``report`` is called with the number of bytes
    of each block after it was read. ``element`` is the element type from :func:`element_types`. With None this function
    calls :func:`element_types` itself, which is slow for a caller that reads many arrays.
    """
    element = element or element_types(reader)[path]
    parts = [_block_sums(widened(values, element)) for _, values in blocks(reader, path, report)]
    lost = sum(size - count for size, count, *_ in parts)
    parts = [part for part in parts if part[1]]
    if not parts:
        return ArrayStatistics(None, None, None, None, lost)
    _, counts, lows, highs, sums, squares = zip(*parts, strict=True)
    mean, norm = math.fsum(sums) / sum(counts), math.sqrt(math.fsum(squares))
    return ArrayStatistics(min(lows), max(highs), mean, norm, lost)


def _block_sums(values: Array) -> tuple[int, int, float, float, float, float]:
    """Return the number of values, and number, minimum, maximum, sum and sum of squares of the finite ones."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return values.size, 0, 0.0, 0.0, 0.0, 0.0
    with np.errstate(over="ignore"):
        squares = float(np.square(finite).sum())
    return values.size, finite.size, float(finite.min()), float(finite.max()), float(finite.sum()), squares


@dataclass(frozen=True)
class ArrayDifference:
    """Describe how two arrays of the same name, shape and type differ in their values.

    A complex element counts as two: ``first`` then ends with 0 for the real part, or 1 for the imaginary part.

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
        larger magnitude. With a tolerance > 0 all NaNs count as equal, too. With 0, elements count as equal only if all
        their bits are equal.
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
    differences = (_compare_arrays(a, b, (path, elements[path]), tolerance, report) for path in alike)
    return CheckpointDifference(
        missing=tuple(path for path in first if path not in second),
        extra=tuple(path for path in second if path not in first),
        reshaped={path: (first[path], second[path]) for path in common if first[path] != second[path]},
        arrays=tuple(difference for difference in differences if difference is not None),
        attributes=dict(_compare_attributes(a.attributes, b.attributes)),
        compared=len(alike),
        nbytes=sum(nbytes_of(a, path) for path in alike),
    )


def _described(reader: Reader, pattern: str | None) -> dict[str, str]:
    elements = element_types(reader)
    return {path: f"{elements[path]} {list(reader.arrays[path][0])}" for path in elements if matches(path, pattern)}


def _compare_attributes(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    first, second = flat(a), flat(b)
    nothing = object()
    for name in sorted(first.keys() | second.keys()):
        if first.get(name, nothing) != second.get(name, nothing):
            yield name, (first.get(name), second.get(name))


def _compare_arrays(
    a: Reader, b: Reader, array: tuple[str, str], tolerance: float, report: Report | None
) -> ArrayDifference | None:
    """Compare one array, given by (path, element type), in both checkpoints; return None if its values are equal."""
    path, element = array
    shape, dtype = a.arrays[path]
    parts, number = numbers_in(dtype), number_of(dtype)
    shape, bits = (*shape, 2) if parts == 2 else shape, np.dtype(f"u{number.itemsize}")
    differing, lost, absolute, relative = 0, 0, 0.0, 0.0
    first: int | None = None
    values = (0.0, 0.0)
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
            first, values = start * parts + int(where[counts][0]), (float(u[0]), float(v[0]))
        differing += u.size
        both = np.isfinite(u) & np.isfinite(v)
        lost += int(np.count_nonzero(~both))
        worst = _largest(u[both], v[both])
        absolute, relative = max(absolute, worst[0]), max(relative, worst[1])
    if first is None:
        return None
    index = tuple(int(i) for i in np.unravel_index(first, shape)) if shape else ()
    size = int(np.prod(shape, dtype=np.int64))
    return ArrayDifference(path, size, differing, absolute, relative, lost, index, values)


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


@dataclass(frozen=True)
class ListedCheckpoint:
    """Describe the checkpoint in one step folder.

    Attributes
    ----------
    path : str
        Path of the folder.
    step : int
        The step number in the name of the folder.
    nbytes : int
        Number of bytes of the two files of the checkpoint together.
    written : float or None
        Time at which the manifest was written, in seconds since 1970; None if there is no manifest.
    problem : str or None
        What is wrong with the manifest, the file sizes or the HDF5 structure; None if nothing is wrong. The arrays are
        not checked.
    attributes : dict
        Attributes that were saved with the arrays; empty if there is a problem.
    damaged : bool
        Whether a wrong checksum or size proves that the checkpoint is damaged. A checkpoint with another problem may be
        undamaged.
    """

    path: str
    step: int
    nbytes: int
    written: float | None
    problem: str | None
    attributes: dict[str, Any]
    damaged: bool

    @property
    def state(self) -> str:
        """State of the checkpoint: "sound" (no problem), "damaged", or "unreadable" (another problem)."""
        return "sound" if self.problem is None else "damaged" if self.damaged else "unreadable"


def listing(folder: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """Return descriptions of all step folders in ``folder``, the lowest step number first. Not collective."""
    return [_listed(path) for path in reversed(step_folders(os.path.abspath(os.fspath(folder))))]


def _listed(path: str) -> ListedCheckpoint:
    problem: str | None = None
    attributes: dict[str, Any] = {}
    damaged = False
    try:
        with open_checkpoint(path, "self") as reader:
            attributes = reader.attributes
    except CheckpointError as error:
        problem, damaged = str(error), isinstance(error, CheckpointDamagedError)
    sizes = {name: _stat(os.path.join(path, name)) for name in (MANIFEST_NAME, STATE_NAME)}
    manifest = sizes[MANIFEST_NAME]
    return ListedCheckpoint(
        path,
        step_of(path) or 0,
        sum(status.st_size for status in sizes.values() if status is not None),
        None if manifest is None else manifest.st_mtime,
        problem,
        attributes,
        damaged,
    )


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except OSError:
        return None


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one checkpoint; otherwise it may be a run's folder or a folder of checkpoints.

    Raises
    ------
    CheckpointError
        If the path does not exist or is a file.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is a folder, as is a run")
    return step_of(path.absolute()) is not None or (path / MANIFEST_NAME).exists()


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest undamaged checkpoint of the run in that folder.

    If newer checkpoints are damaged, messages on standard error name them and the checkpoint that is used instead.

    Raises
    ------
    CheckpointError
        If the path does not exist, is a file, or has no undamaged checkpoint in it.
    """
    if is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        passed: list[str] = []
        latest_path = latest(folder, "self", report=passed.append)
        if latest_path is not None:
            for line in (*passed, f"taken instead: {latest_path}") if passed else ():
                notice(line)
            return Path(latest_path)
        if passed:
            raise CheckpointError(f"{folder}: no good checkpoint in it; {passed[0]}")
    raise _no_checkpoint(path)


def find_folder(path: Path) -> Path:
    """Return the folder with the checkpoints of a run: ``path/checkpoints`` or ``path``.

    Raises
    ------
    CheckpointError
        If neither folder contains a checkpoint, undamaged or damaged.
    """
    folder = next((home for home in (path / "checkpoints", path) if step_folders(str(home))), None)
    if folder is None:
        raise _no_checkpoint(path)
    return folder


def _no_checkpoint(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds no checkpoint; give a run's folder, its checkpoint folder, or one checkpoint"
    )

"""Read samples from named arrays of HDF5 and NetCDF files and of Zarr stores, each when it is requested.

A :class:`FileArray` is an array in one file, a :class:`JoinedArray` presents the arrays of several files as one.
:class:`Windows` computes which elements of an array are sample i: a slice along one axis, or a window along several.
:class:`FileSource` is the base class; its subclasses open the files of one format. HDF5 chunks that are compressed by
gzip are read with a faster decompressor than HDF5's (:class:`DeflatedArray`). :class:`Named` decodes arrays by the
attributes that NetCDF and xarray write: packing, signedness and fill values of missing elements.
"""

from __future__ import annotations

import base64
import fcntl
import glob
import os
import struct
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any, Self

import numpy as np
from isal.igzip_lib import IsalError
from isal.isal_zlib import decompress

from mpizero._util.checks import flag, require, whole
from mpizero._util.names import explains
from mpizero._util.pytree import leaves_of, map_leaves, paths_of
from mpizero.data.source import (
    OPEN_FILES,
    WHOLE,
    FileState,
    Indices,
    MappedArray,
    MappedFile,
    Path,
    Slab,
    Source,
    check_named_once,
    check_samples,
    check_unchanged,
    contiguous,
    file_states,
    on_local_disk,
    room_in_memory,
    with_more_files,
)
from mpizero.errors import ConfigError, DataError
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
        Function that returns an object that reads the array when it is indexed with slices. The function is called for
        every access, so that files can be closed in between.
    file : str
        Path of the file from which the array is memory-mapped; "" if it is not mapped.
    axes : tuple of str
        Names of the axes; () if the file has none.
    measured : mapping of str to str
        Attributes with the unit of the numbers, such as ``units`` and ``calendar``.
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
        """Convert errors in the ``with`` block to a DataError that names file and range."""
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            ranges = ", ".join(f"{part.start}:{part.stop}" for part in where)
            raise DataError(f"{self.label}, elements [{ranges}]: {error}") from error

    def rows(self, indices: Indices, out: Array, positions: Indices, inside: Block = ()) -> None:
        """Read the rows ``indices``, or of each the part ``inside``, into ``out[positions]``.

        Of a chunked array, the rows of each chunk are read with one call, from the first to the last one requested.
        Neighbouring rows with neighbouring positions are read into ``out`` without a copy in between, if the array has
        a method ``read_direct``.
        """
        if not self.chunk:
            out[positions] = self.values()[(indices, *inside) if inside else indices]
            return
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        borders = np.flatnonzero(np.diff(wanted // self.chunk)) + 1
        for group in np.split(order, borders) if wanted.size else []:
            low, high = int(indices[group[0]]), int(indices[group[-1]]) + 1
            where, into = (slice(low, high), *inside), slice(int(positions[group[0]]), int(positions[group[-1]]) + 1)
            values = self.values()
            if hasattr(values, "read_direct") and _is_contiguous(indices[group]) and _is_contiguous(positions[group]):
                with self._named(where):
                    values.read_direct(out, where, into)
            else:
                out[positions[group]] = self.block(where)[indices[group] - low]


def _is_contiguous(numbers: Indices) -> bool:
    """Tell whether there are at least two numbers, each larger by 1 than the one before it."""
    return numbers.size > 1 and bool((np.diff(numbers) == 1).all())


def _check_meaning(part: FileArray, first: FileArray) -> None:
    """Raise DataError if two arrays that are joined differ in the order of their axes, or in their unit."""
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
            besides = (one.shape[:axis] + one.shape[axis + 1 :] for one in (part, first))
            if len(set(besides)) > 1 or part.dtype != first.dtype:
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
        """Name of the array in error messages: its label in the first file, and the number of further files."""
        more = f" and {len(self.parts) - 1} more files" if len(self.parts) > 1 else ""
        return self.parts[0].label + more

    def locate(self, index: int) -> tuple[FileArray, int]:
        """Return the file's array that holds ``index`` along the joined axis, and the index in that array."""
        part = bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)

    def block(self, where: Block) -> Array:
        """Return the elements in ``where``, from as many files as needed."""
        done, stop, pieces = where[self.axis].start, where[self.axis].stop, []
        while done < stop:
            part, inside = self.locate(done)
            count = min(stop - done, part.shape[self.axis] - inside)
            inner = (*where[: self.axis], slice(inside, inside + count), *where[self.axis + 1 :])
            pieces.append(part.block(inner))
            done += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)

    def rows(self, indices: Indices, inside: Block = ()) -> Array:
        """Return the rows ``indices`` of an array that is joined along its first axis, in that order.

        ``inside`` is the part of each row that is returned, by default all.
        """
        if len(self.parts) == 1 and not self.parts[0].chunk:  # without another copy
            return contiguous(self.parts[0].values()[(indices, *inside) if inside else indices])
        lengths = (part.stop - part.start for part in inside)
        out = np.empty((indices.size, *lengths, *self.shape[1 + len(inside) :]), self.dtype)
        begin = 0
        for part, end in zip(self.parts, self.ends, strict=True):
            hits = np.flatnonzero((indices >= begin) & (indices < end)) if len(self.parts) > 1 else np.arange(len(out))
            if hits.size:
                part.rows(indices[hits] - begin, out, hits, inside)
            begin = end
        return out


@dataclass(frozen=True)
class Windows:
    """Describe the samples of an array, which are windows at regular distances, and their order.

    Samples are in row-major order, the index along ``axis`` varying slowest.

    Attributes
    ----------
    axis : int
        The axis along which samples lie.
    lengths, strides : mapping of int to int
        Length of a window, and distance between the starts of neighbouring ones, by axis. Other axes are read whole. If
        ``axis`` has no length, a sample is one slice along ``axis``, without this axis.
    counts : mapping of int to int
        Number of windows along ``axis`` and along each axis with a length, the axis that varies slowest first.
    """

    axis: int
    lengths: Mapping[int, int]
    strides: Mapping[int, int]
    counts: Mapping[int, int]

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        axis: int,
        lengths: Mapping[int, int] | None,
        strides: Mapping[int, int] | None,
        lead: int = 0,
        label: str = "the array",
    ) -> Self:
        """Return the windows of an array of ``shape``, all of which fit if moved by ``lead`` along ``axis``.

        ``label`` names the array in error messages.

        Raises
        ------
        ConfigError
            If an axis, length, stride or lead cannot be used.
        DataError
            If the array is too short for one window.
        """
        lengths, strides = _axes("window", lengths, len(shape)), _axes("stride", strides, len(shape))
        if odd := [number for number in strides if number not in lengths and number != axis]:
            raise ConfigError(f"stride={dict(strides)}: axis {odd[0]} has no length in window={dict(lengths)}")
        require("lead", lead, whole(0))
        order = [axis, *sorted(set(lengths) - {axis})]
        steps = {number: strides.get(number, lengths.get(number, 1)) for number in order}
        counts = {}
        for number in order:
            room = shape[number] - lengths.get(number, 1) - (lead if number == axis else 0)
            if room < 0:
                shift = f" and lead={lead}" if lead and number == axis else ""
                raise DataError(
                    f"{label} has shape {shape}: axis {number} is too short for a window of "
                    f"{lengths.get(number, 1)}{shift}"
                )
            counts[number] = room // steps[number] + 1
        return cls(axis, lengths, steps, counts)

    def __len__(self) -> int:
        return prod(self.counts.values())

    @property
    def are_rows(self) -> bool:
        """Tell whether sample i is index i along axis 0."""
        return self.axis == 0 and not self.lengths and self.strides[0] == 1

    def starts(self, sample: int) -> dict[int, int]:
        """Return the first index of window number ``sample`` along each axis, by axis."""
        starts = {}
        for number in reversed(self.counts):
            sample, inside = divmod(sample, self.counts[number])
            starts[number] = inside * self.strides[number]
        return starts

    def block(self, sample: int, shape: tuple[int, ...], shift: int = 0) -> tuple[slice, ...]:
        """Return the slices of window number ``sample`` in an array of ``shape``, moved by ``shift`` along ``axis``.

        Axes of the window that the array lacks are left out.
        """
        starts = self.starts(sample)
        starts[self.axis] += shift
        return tuple(
            slice(starts[number], starts[number] + self.lengths.get(number, 1)) if number in starts else slice(0, size)
            for number, size in enumerate(shape)
        )


def _axes(name: str, lengths: Any, axes: int) -> dict[int, int]:
    """Check a mapping from axes to whole numbers >= 1; return it sorted by axis."""
    if lengths is None:
        return {}
    if not isinstance(lengths, Mapping):
        raise ConfigError(f"{name}={lengths!r}: expected a mapping from axes to numbers of indices, such as {{0: 4}}")
    for number, length in lengths.items():
        require(f"{name}: axis", number, whole(0, axes - 1))
        require(f"{name}[{number}]", length, whole(1))
    return dict(sorted(lengths.items()))


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
        The axis along which samples lie. Without ``window``, sample i is slice i along ``axis``, without this axis.
    window, stride : mapping of int to int, optional
        Length of a window by axis, and the distance between the starts of neighbouring windows (default: the length). A
        sample is then a window: ``window={0: 4, 1: 64, 2: 64}``. Axes without a length are read whole, except ``axis``,
        along which a sample is then one slice. In the numbering of samples the index along ``axis`` varies slowest. An
        array that lacks some of these axes (an array of labels, say) is cut into windows along its own axes.
    lead : int
        Number of indices along ``axis`` by which the targets start after the inputs, as in a forecast.
    allow_nan : bool
        Whether samples may contain NaN; if not, reading a sample with NaN raises an error.

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
        """Open a file; return the requested arrays by name, each with the ``chunk`` of a :class:`FileArray`.

        An array has a shape and a dtype, and reads its elements when it is indexed with slices. The attribute ``names``
        holds the names that are requested for ``x`` and for ``y``.

        Raises
        ------
        DataError
            If the file or an array is missing, damaged or empty.
        """

    def _open(self, path: str) -> Mapping[str, tuple[Any, int]]:
        check_unchanged(path, self._states[path])
        return with_more_files(path, lambda: self.open_file(path))

    def _stored(self, path: str) -> dict[str, FileArray]:
        arrays = {}
        for name, (values, chunk) in self._opened(path).items():
            label = f"{path}: {self.array_word} {name!r}"
            check_samples(values, label)
            reopen = partial(self._values, path, name)
            dtype, mapped = values.dtype.newbyteorder("="), getattr(values, "path", "")
            meaning = (getattr(values, "axes", ()), getattr(values, "measured", {}))
            arrays[name] = FileArray(label, tuple(values.shape), dtype, chunk, reopen, mapped, *meaning)
        return arrays

    def _values(self, path: str, name: str) -> Any:
        return self._opened(path)[name][0]

    def _check_shapes(self, first: JoinedArray) -> None:
        """Raise DataError if an axis along which samples are numbered has another size or name than in ``first``."""
        for array in leaves_of(self._joined):
            for axis in self.windows.counts:
                if axis < len(array.shape) and array.shape[axis] != first.shape[axis]:
                    raise DataError(
                        f"{first.label} has {first.shape[axis]} samples and {array.label} has {array.shape[axis]}: "
                        f"needed is the same number along axis {axis}; what all samples share, such as a mask, is "
                        "added by the function of a TransformedSource"
                    )
                name = array.axes[axis] if axis < len(array.axes) else ""
                if name in first.axes and name != first.axes[axis]:
                    other = first.axes.index(name)
                    raise DataError(
                        f"{array.label} has samples along {name!r}, which is axis {other} of {first.label}, not axis "
                        f"{axis}: write arrays whose axes have the same order"
                    )

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def block_samples(self) -> int:
        """Number of neighbouring samples that the files store, and decompress, together."""
        return max(1, *(array.chunk for array in leaves_of(self._joined))) if self.windows.are_rows else 1

    @property
    def in_page_cache(self) -> bool:
        """Tell whether all arrays are memory-mapped, from files on a local disk that fit into memory."""
        parts = [part for array in leaves_of(self._joined) for part in array.parts]
        files = {part.file for part in parts}
        mapped = "" not in files and all(map(on_local_disk, files))
        return mapped and sum(map(os.path.getsize, files)) <= room_in_memory()

    def read(self, indices: Indices) -> tuple[Any, Any]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        return self.read_slab(indices, WHOLE)

    def read_slab(self, indices: Indices, slab: Slab, **_: Any) -> tuple[Any, Any]:
        """Return this rank's part of the samples ``indices``; chunks without an element of this part are not read."""
        x, y = (
            map_leaves(partial(self._read, indices=indices, shift=shift, slab=slab), joined)
            for joined, shift in zip(self._joined, (0, self.lead), strict=True)
        )
        return x, y

    def _read(self, array: JoinedArray, *, indices: Indices, shift: int, slab: Slab) -> Array:
        """Return the samples ``indices`` of one array, or the part ``slab`` of each."""
        windows = self.windows
        shape = _lengths(windows.block(0, array.shape))
        dropped = windows.axis if windows.axis not in windows.lengths else len(shape)  # an axis that samples lack
        of_sample = shape[:dropped] + shape[dropped + 1 :]
        inside = slab.where(of_sample)
        if windows.are_rows:
            samples = array.rows(indices + shift, inside)
        else:
            kept = (*inside, *(slice(0, size) for size in of_sample[len(inside) :]))
            part = (*kept[:dropped], *([slice(0, 1)] if dropped < len(shape) else []), *kept[dropped:])
            samples = np.empty((indices.size, *_lengths(part)), array.dtype)
            for row, sample in zip(samples, indices.tolist(), strict=True):
                block = zip(windows.block(sample, array.shape, shift), part, strict=True)
                row[...] = array.block(tuple(slice(at.start + p.start, at.start + p.stop) for at, p in block))
            samples = samples.reshape(indices.size, *_lengths(kept))
        if not self.allow_nan and samples.size and samples.dtype.kind in "fc" and np.isnan(samples.min()):
            self._reject_nan(array, samples, indices, shift, inside)
        return samples

    def _reject_nan(self, array: JoinedArray, samples: Array, indices: Indices, shift: int, slab: Block) -> None:
        row, *inside = (int(number) for number in np.argwhere(np.isnan(samples))[0])
        inside = [at + (slab[axis].start if axis < len(slab) else 0) for axis, at in enumerate(inside)]
        sample = int(indices[row])
        start = self.windows.starts(sample)[self.windows.axis] + shift
        if self.windows.axis in self.windows.lengths:
            start += inside[self.windows.axis]
        part, index = array.locate(start)
        raise DataError(
            f"{part.label}, index {index} along axis {self.windows.axis}: NaN at {inside} of sample {sample}; correct "
            "the file, or give allow_nan=True for samples that may contain NaN"
        )

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders; names, shapes and dtypes of the arrays; the windows."""
        content: dict[str, Any] = {"kind": self.kind, "files": [os.path.basename(path) for path in self.paths]}
        for path, array in paths_of(x=self._joined[0], y=self._joined[1]):
            content[path] = ([array.parts[0].label.rpartition(": ")[2]], array.shape, array.dtype.str)
        windows = self.windows
        content["windows"] = (windows.axis, sorted(windows.lengths.items()), sorted(windows.strides.items()), self.lead)
        return content

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.paths)}

    def close(self) -> None:
        """Close the files, which are opened again if samples are read; a second call does nothing."""
        self._opened.cache_clear()


def _lengths(block: Block) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in block)


def _names(role: str, names: Any) -> Any:
    """Check names of arrays; return one name, or a dictionary from keys to names."""
    if isinstance(names, str):
        return names
    named = dict(names) if isinstance(names, Mapping) else None
    if named is None and isinstance(names, Sequence):
        named = {name: name for name in names}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(f"{role}={names!r}: expected a name, names, or a mapping from keys to names")
    return named


def _expand(paths: Path | Sequence[Path]) -> tuple[str, ...]:
    """Return the paths that ``paths`` stands for: paths as they are, and the sorted matches of patterns.

    The paths are absolute, because files are opened later, when the program's working folder may be another.
    """
    files: list[str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else list(paths):
        name = os.path.abspath(os.fspath(path))
        if os.path.lexists(name) or not glob.has_magic(name):
            files.append(name)
            continue
        if not (matches := sorted(glob.glob(name, recursive=True))):
            raise DataError(f"{name}: the pattern matches no file")
        files += matches
    if not files:
        raise DataError("no data: the list of files is empty")
    check_named_once(files)
    return tuple(files)


@explains
class Hdf5Source(FileSource):
    """Read samples from datasets of one or several HDF5 files; each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`. Contiguous datasets of NumPy's types are
    memory-mapped, from the file that holds them, so reading shuffled samples needs no HDF5 call. Of a chunked dataset,
    each call of :meth:`read` reads every chunk that contains a requested sample only once, in ascending order. Chunks
    of whole rows that are compressed by gzip, with or without HDF5's shuffle filter, are decompressed by ISA-L in half
    of HDF5's time; HDF5 reads all other chunks.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import h5py
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5py.File(Path(folder, "2001.h5"), "w") as file:
    ...         file["wind"] = np.arange(24.0).reshape(6, 4)
    ...     days = mz.data.Hdf5Source(f"{folder}/*.h5", x="wind", y="wind", window={0: 2}, stride={0: 1}, lead=1)
    ...     x, y = days.samples([0])
    >>> len(days), x.shape  # windows of two days
    (4, (1, 2, 4))
    >>> (y - x)[0, :, 0]  # one day later
    array([4., 4.])
    """

    kind, array_word = "hdf5", "dataset"

    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open an HDF5 file; return the requested datasets by name, each with the number of rows of its chunks."""
        file, mapped_files = open_hdf5(path), dict[str, MappedFile]()
        arrays = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            dataset = dataset_of(file, path, name)
            if dataset.external:  # its bytes are in files that HDF5 would look for in the program's folder of the day
                dataset = _reopened(dataset, "set_efile_prefix", self.folder)
            if dataset.is_virtual:
                dataset = _with_parts_in(self.folder, dataset, f"{path}: dataset {name!r}")
            _unlock(dataset.file)  # where a link leads to another
            _check_conventions(file, path, name, dataset)
            mapped = _map_dataset(dataset, mapped_files)
            read = (DeflatedArray.of(dataset) or dataset, _rows_together(dataset))
            arrays[name] = read if mapped is None else (mapped, 0)
        if all(isinstance(array, MappedArray) for array, _ in arrays.values()):
            file.close()
        return arrays


def open_hdf5(path: str) -> Any:
    """Open an HDF5 file for reading, without a lock that would exclude writers: see :func:`unlocked`.

    Raises
    ------
    DataError
        If the file is missing, empty or no readable HDF5 file.
    """
    import h5py

    return unlocked(path, lambda **locking: h5py.File(path, "r", **locking))


def unlocked(path: str, opened: Callable[..., Any]) -> Any:
    """Open a file by ``opened``, a function that calls h5py, and return it without a lock on it.

    [Note: locks] A process can open a file twice only with the same setting of HDF5's file locking. So h5py's default
    setting is tried first, and its lock is released immediately: sources never write, and a lock would keep other jobs
    from writing the file. If the lock is not granted, because such a job holds it, or the process has opened the file
    without locking, the file is opened without locking.
    """
    if not os.path.isfile(path):
        raise DataError(f"{path}: {'not a regular file' if os.path.lexists(path) else 'does not exist'}")
    reason = ""
    for locking in ({}, {"locking": False}, {"locking": True}):
        try:
            file = opened(**locking)
        except Exception as error:  # h5netcdf raises errors of many kinds
            reason = reason if "flag values don't match" in str(error) else str(error)
            continue
        _unlock(getattr(file, "_h5file", file))
        return file
    raise DataError(f"{path}: {other_format(path) or f'not a readable HDF5 file: {reason}'}") from None


def _unlock(file: Any) -> None:
    with suppress(OSError):  # on file systems without locks
        fcntl.flock(file.id.get_vfd_handle(), fcntl.LOCK_UN)


def other_format(path: str) -> str:
    """Return the format of a file that is no HDF5 file, and how to convert the file; "" if the format is unknown."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:3] == b"CDF":
        return "a file of classic NetCDF; convert it: nccopy -k netCDF-4 OLD.nc NEW.nc, and use NetcdfSource"
    if start == b"\x0e\x03\x13\x01":
        return "a file of HDF4; convert it: h4toh5 OLD.hdf NEW.h5"
    return "" if start else "the file is empty"


def dataset_of(file: Any, path: str, name: str) -> Any:
    """Return the dataset ``name`` of an open HDF5 file; raise DataError if it is missing, empty or no dataset."""
    import h5py

    try:
        dataset = file[name]
    except (KeyError, ValueError):
        link = file.get(name, getlink=True) if name in _names_of(file, name) else None
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            where = f" of {link.filename}" if isinstance(link, h5py.ExternalLink) else ""
            raise DataError(f"{path}: {name!r} is a link to {link.path!r}{where}, which is not there") from None
        names: list[str] = []
        file.visit(names.append)
        have = ", ".join(names[:10]) or "nothing"
        raise DataError(f"{path}: no dataset {name!r}; it has {have}") from None
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: {name!r} is a group; needed is a dataset")
    if dataset.shape is None:
        raise DataError(f"{path}: dataset {name!r} is empty")
    try:
        dataset.dtype  # noqa: B018 - h5py translates the type when it is asked for
    except TypeError as error:
        raise DataError(f"{path}: dataset {name!r} has elements of a type that NumPy has not: {error}") from None
    return dataset


def _names_of(file: Any, name: str) -> list[str]:
    """Return the names of all members of the group that would contain ``name``, each with the group's name."""
    above, between, _ = name.rpartition("/")
    group = file.get(above) if above else file
    return [above + between + inside for inside in group] if hasattr(group, "keys") else []


def _check_conventions(file: Any, path: str, name: str, dataset: Any) -> None:
    """Raise DataError if attributes of a NetCDF file's dataset change the meaning of the stored numbers."""
    if "_NCProperties" not in file.attrs:  # HDF5 itself gives attributes no meaning
        return
    wrong = [one for one in (*PACKED, UNSIGNED, *FILLS) if one in dataset.attrs]
    if dataset.dtype.kind == "f":  # a fill value that is NaN needs no decoding
        wrong = [
            one for one in wrong if one not in FILLS or not np.all(np.asarray(dataset.attrs[one]) != dataset.attrs[one])
        ]
    if wrong:
        raise DataError(
            f"{path}: a NetCDF file whose {name!r} has the attribute {wrong[0]}, by which its numbers are others than "
            "the stored: use NetcdfSource, or [data] netcdf; for the stored numbers a FileSource of your own"
        )


def _reopened(dataset: Any, setting: str, folder: str) -> Any:
    """Open a dataset again, so that HDF5 looks in ``folder`` for other files that hold parts of its data.

    ``setting`` is the method of h5py's access property list that sets this folder.
    """
    import h5py

    file, name, access = dataset.file, dataset.name.encode(), h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    getattr(access, setting)(os.fsencode(folder))
    dataset.id.close()
    return h5py.Dataset(h5py.h5d.open(file.id, name, access))


def _with_parts_in(folder: str, dataset: Any, label: str) -> Any:
    """Return a virtual dataset that finds its source datasets; raise DataError if one of them is missing.

    HDF5 would silently read the fill value in place of a missing source. If the fill value is NaN, no error is raised
    here, because NaN itself shows that values are missing. HDF5 looks for source files in HDF5_VDS_PREFIX, beside the
    dataset's file, and then in the working folder; this function replaces the working folder by ``folder``.
    """
    beside, moved = os.path.dirname(os.path.abspath(dataset.file.filename)), False
    prefix = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())  # that of HDF5_VDS_PREFIX
    tells_missing = dataset.dtype.kind == "f" and np.isnan(dataset.fillvalue)
    for name, inside in sorted({(part.file_name, part.dset_name) for part in dataset.virtual_sources()}):
        if name == "." or "%" in name:
            continue
        candidates = [os.path.join(parent, name) for parent in (prefix, beside, folder) if parent]
        there = next((path for path in candidates if os.path.isfile(path)), "")
        moved |= there == candidates[-1] not in candidates[:-1]
        if not tells_missing and not _has(there, inside):
            raise DataError(
                f"{label} is virtual, and its part {name}: {inside!r} is not there: HDF5 would give "
                f"{dataset.fillvalue} in its place; mend the file, or let its fill value be NaN"
            )
    return _reopened(dataset, "set_virtual_prefix", folder) if moved else dataset


def _has(path: str, name: str) -> bool:
    if not path:
        return False
    with open_hdf5(path) as file:
        return name in file


def _map_dataset(dataset: Any, files: dict[str, MappedFile]) -> MappedArray | None:
    """Return a dataset mapped into memory; None if it is not contiguous in a file, or NumPy lacks its type.

    The mapped file is the one that contains the dataset: if an external link led to it, not the file that was opened.
    ``files`` holds the files that are mapped already, by path.
    """
    if dataset.chunks is not None or dataset.is_virtual or dataset.external is not None or not _is_numpys(dataset):
        return None
    file, offset = dataset.file, dataset.id.get_offset()
    status = os.fstat(file.id.get_vfd_handle())
    if offset is None or not dataset.size or offset + dataset.size * dataset.dtype.itemsize > status.st_size:
        return None
    path = os.path.abspath(file.filename)
    if not (dataset.ndim and os.path.exists(path) and os.path.samestat(os.stat(path), status)):
        return None
    if path not in files:
        files[path] = MappedFile(path)
    return MappedArray(files[path], dataset.dtype, offset, dataset.shape)


def _is_numpys(dataset: Any) -> bool:
    """Tell whether the file's element type equals the NumPy type that h5py reads, in size, exponent and bit offset."""
    import h5py

    same: bool = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return same


#: Bytes of neighbouring rows that HDF5 reads together from a contiguous dataset that is not mapped.
READ_TOGETHER_BYTES = 64 << 10


def _rows_together(dataset: Any) -> int:
    """Return how many rows to read together: those of a chunk, of 64 KiB if contiguous, all of a virtual dataset."""
    if dataset.chunks or dataset.is_virtual or not dataset.size:
        return int(dataset.chunks[0]) if dataset.chunks else max(1, *dataset.shape[:1])
    return max(1, READ_TOGETHER_BYTES * len(dataset) // (dataset.size * dataset.dtype.itemsize)) if dataset.ndim else 1


#: Bytes of decompressed chunks of a dataset that are kept; HDF5 keeps as many.
CACHED_BYTES = 8 << 20


class DeflatedArray:
    """Read a dataset whose chunks hold whole rows compressed by gzip, with or without HDF5's shuffle filter.

    HDF5 returns the compressed chunk, and ISA-L decompresses it, in about half of zlib's time and without Python's
    global lock. HDF5 itself reads all that cannot be read in this way (a chunk that is damaged, missing or stored
    without a filter, ranges over several chunks), and reports errors. The chunks that were used last are kept, up to 8
    MiB.

    Parameters
    ----------
    dataset : h5py.Dataset
        The dataset; see :meth:`of`.
    shuffled : bool
        Whether the bytes of the elements are shuffled before they are compressed.
    """

    def __init__(self, dataset: Any, shuffled: bool) -> None:
        self._dataset, self._rows = dataset, dataset.chunks[0]
        self.shape, self.dtype = dataset.shape, dataset.dtype
        size = prod(dataset.chunks) * self.dtype.itemsize
        self._chunk = lru_cache(maxsize=CACHED_BYTES // size)(partial(_inflate, dataset, shuffled, size))

    @classmethod
    def of(cls, dataset: Any) -> Self | None:
        """Return a reader of ``dataset``; None if its chunks hold no whole rows, or it has other filters."""
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

    def __getitem__(self, where: tuple[slice, ...]) -> Array:
        """Return the elements of a tuple of slices."""
        number, first = divmod(where[0].start, self._rows)
        count = where[0].stop - where[0].start
        chunk = self._chunk(number) if 0 < count <= self._rows - first else None
        elements: Array = self._dataset[where] if chunk is None else chunk[(slice(first, first + count), *where[1:])]
        return elements

    def read_direct(self, out: Array, where: tuple[slice, ...], into: slice) -> None:
        """Read the elements of a tuple of slices into ``out[into]``."""
        out[into] = self[where]


def _inflate(dataset: Any, shuffled: bool, size: int, number: int) -> Array | None:
    """Return chunk ``number``, decompressed to ``size`` bytes and read-only; None if HDF5 must read it."""
    try:
        skipped, packed = dataset.id.read_direct_chunk((number * dataset.chunks[0], *(0 for _ in dataset.shape[1:])))
        inflated = decompress(packed, bufsize=size)
    except (OSError, ValueError, RuntimeError, IsalError):  # type: ignore[misc]  # isal types the class as an error
        return None
    if skipped or len(inflated) != size:
        return None
    elements = np.frombuffer(inflated, np.uint8)
    if shuffled:  # the first bytes of all elements, then the second ones
        elements = np.ascontiguousarray(elements.reshape(dataset.dtype.itemsize, -1).T)
        elements.flags.writeable = False
    values: Array = elements.reshape(-1).view(dataset.dtype).reshape(dataset.chunks)
    return values


@explains
class NetcdfSource(FileSource):
    """Read samples from variables of one or several NetCDF-4 files; each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`; the source needs the extra ``netcdf``.
    Packed variables (``scale_factor``, ``add_offset``) are unpacked to the type of these attributes, at least float32;
    ``_Unsigned`` says how stored integers are read. Elements that are missing (``_FillValue``, one or several of
    ``missing_value``, never written) become NaN; a missing element of an integer variable that is not packed is an
    error. ``valid_range`` is ignored.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import h5netcdf
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with h5netcdf.File(Path(folder, "2001.nc"), "w") as file:
    ...         file.dimensions = {"day": 3, "place": 2}
    ...         variable = file.create_variable("wind", ("day", "place"), data=np.array([[1, 2], [3, 4], [5, 6]], "i2"))
    ...         variable.attrs["scale_factor"] = np.float32(0.5)
    ...     days = mz.data.NetcdfSource(f"{folder}/*.nc", x="wind", y="wind")
    ...     print(len(days), days.samples([2])[0])  # unpacked
    3 [[2.5 3. ]]
    """

    kind, array_word = "netcdf", "variable"

    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open a file; return the requested variables by name, each with the number of rows of its chunks."""
        try:
            import h5netcdf
        except ImportError:
            raise DataError(f"{path}: needs h5netcdf, which is not installed: pip install h5netcdf") from None
        file = unlocked(path, lambda **locking: h5netcdf.File(path, "r", **locking))
        variables = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            try:
                variable = file[name]
                shape = tuple(variable.shape)
            except KeyError:
                have = ", ".join(list(file.variables)[:10]) or "nothing"
                raise DataError(f"{path}: no variable {name!r}; it has {have}") from None
            except ValueError as error:  # it is HDF5, without dimensions
                reason = str(error).partition("\n")[0]
                raise DataError(f"{path}: {name!r} is no variable of NetCDF: {reason} Use Hdf5Source") from None
            chunk = variable.chunks[0] if variable.chunks else max(1, *shape[:1])
            known = {"axes": variable.dimensions, "keep": file}  # a variable does not hold its file open
            label = f"{path}: variable {name!r}"
            variables[name] = (Named(variable, dict(variable.attrs), label, _unwritten(variable), **known), chunk)
        return variables


#: Default fill values of netCDF for unwritten elements, by type; types of one byte have none.
DEFAULT_FILLS: Mapping[str, float] = {
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}


def _unwritten(variable: Any) -> Any:
    """Return netCDF's default fill value for unwritten elements; None if the file has another fill value or none."""
    default = DEFAULT_FILLS.get(np.dtype(variable.dtype).str[1:])
    stored = getattr(variable, "_h5ds", None)  # of files that other libraries have made, it is a number like others
    if default is None or getattr(stored, "fillvalue", None) != np.dtype(variable.dtype).type(default):
        return None
    return default


@explains
class ZarrSource(FileSource):
    """Read samples from arrays of one or several Zarr stores (folders); each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`; the source needs the extra ``zarr``. A
    chunk that is not in the store consists of the array's fill value, as Zarr defines. Arrays that xarray has packed
    are unpacked, and missing elements become NaN, as in :class:`~mpizero.data.NetcdfSource`.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import zarr
    >>> import numpy as np
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = zarr.open_group(Path(folder, "2001.zarr"), mode="w")
    ...     store["wind"] = np.arange(6.0).reshape(3, 2)
    ...     days = mz.data.ZarrSource(f"{folder}/*.zarr", x="wind", y="wind")
    ...     print(len(days), days.samples([2])[0])
    3 [[4. 5.]]
    """

    kind = "zarr"

    def open_file(self, path: str) -> Mapping[str, tuple[Any, int]]:
        """Open a store; return the requested arrays by name, each with the number of rows of its chunks."""
        try:
            import zarr
        except ImportError:
            raise DataError(f"{path}: needs zarr, which is not installed: pip install zarr") from None
        if not os.path.exists(path):
            raise DataError(f"{path}: does not exist")
        try:
            group = zarr.open_group(path, mode="r")
        except Exception as error:
            packed = "; it is an archive: unpack it" if os.path.isfile(path) and path.endswith((".zip", ".tar")) else ""
            raise DataError(f"{path}: not a readable Zarr group: {error}{packed}") from None
        arrays = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            try:
                array = group.get(name)
            except Exception as error:  # zarr raises errors of many kinds
                raise DataError(f"{path}: array {name!r} cannot be opened: {error}") from None
            if not isinstance(array, zarr.Array):
                what = f"no array {name!r}" if array is None else f"{name!r} is a group; needed is an array"
                raise DataError(f"{path}: {what}; it has {', '.join(sorted(group.keys())[:10]) or 'nothing'}")
            attributes = _zarr_attributes(array)
            axes = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS")
            known = Named(array, attributes, f"{path}: array {name!r}", axes=axes)
            arrays[name] = (known, array.chunks[0] if array.ndim else 1)
        return arrays


def _zarr_attributes(array: Any) -> dict[str, Any]:
    """Return an array's attributes. In stores of version 2, ``_FillValue`` is the fill value, as xarray writes it."""
    attributes = dict(array.attrs)
    if "_ARRAY_DIMENSIONS" in attributes and array.metadata.zarr_format == 2 and array.fill_value is not None:
        attributes.setdefault("_FillValue", array.fill_value)
    return attributes


#: Attributes that change what an array's elements mean.
FILLS, PACKED, UNSIGNED = ("_FillValue", "missing_value"), ("scale_factor", "add_offset"), "_Unsigned"


class Named:
    """Read an array of a file, decoded by its attributes (packing, fill values), and hold the names of its axes.

    Parameters
    ----------
    values : array of a file
        Object with a shape and a dtype that returns stored elements when it is indexed.
    attributes : mapping of str to object
        The array's attributes.
    label : str
        Name of file and array, for error messages.
    default : number, optional
        Value of elements that were never written, if the array has no ``_FillValue``.
    axes : sequence of str, optional
        Names of the array's axes.
    keep : object, optional
        Object that must exist as long as the array is read, such as its file.

    Attributes
    ----------
    axes : tuple of str
        The names; () if the file has none.
    measured : mapping of str to str
        The attributes ``units`` and ``calendar``, as far as the array has them.

    Raises
    ------
    DataError
        If the value of an attribute cannot be used; the message names the attribute.
    """

    def __init__(
        self,
        values: Any,
        attributes: Mapping[str, Any],
        label: str,
        default: Any = None,
        *,
        axes: Sequence[str | None] | None = None,
        keep: Any = None,
    ) -> None:
        meaning = {name: attributes[name] for name in (*FILLS, *PACKED, UNSIGNED) if name in attributes}
        if default is not None:
            meaning.setdefault("_FillValue", default)
        means_bool = attributes.get("dtype") == "bool" and values.dtype.kind in "iu"
        self._keep = keep
        self._values = _Decoded(values, meaning, label, means_bool) if meaning or means_bool else values
        self.shape, self.dtype = tuple(values.shape), self._values.dtype
        self.axes = tuple(axes) if axes and all(isinstance(axis, str) for axis in axes) else ()
        self.measured = {
            name: _attribute_text(attributes[name]) for name in ("units", "calendar") if name in attributes
        }

    def __getitem__(self, where: Any) -> Any:
        return self._values[where]


def _attribute_text(value: Any) -> str:
    """Return an attribute as text; some libraries write it as a string of fixed length, padded with NUL or spaces."""
    return (value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip("\0 ")


class _Decoded:
    """Unpack an array, and replace missing elements by NaN."""

    def __init__(self, values: Any, meaning: Mapping[str, Any], label: str, means_bool: bool) -> None:
        self._values = values
        stored = np.dtype(values.dtype)
        self._stored = _signed(stored, meaning.get(UNSIGNED), label)
        self._missing = [one for name in FILLS if name in meaning for one in _fills(meaning[name], stored, name, label)]
        self._scale, self._offset = (
            _attribute_number(meaning[name], name, label) if name in meaning else None for name in PACKED
        )
        types = [value.dtype for value in (self._scale, self._offset) if value is not None]
        self.dtype = np.result_type(np.float32, *types) if types else np.dtype(bool) if means_bool else self._stored

    def __getitem__(self, where: Any) -> Array:
        packed = np.asarray(self._values[where])
        missing = np.zeros(packed.shape, bool)
        for value in self._missing:
            missing |= packed == value
        decoded = packed.astype(packed.dtype.newbyteorder("="), copy=False).view(self._stored).astype(self.dtype)
        if self._scale is not None:
            decoded *= self.dtype.type(self._scale)
        if self._offset is not None:
            decoded += self.dtype.type(self._offset)
        if missing.any():
            if self.dtype.kind not in "fc":
                raise ValueError(f"an element is missing: it has the fill value {packed[missing][0]}")
            decoded[missing] = np.nan
        return decoded


def _signed(stored: np.dtype[Any], unsigned: Any, label: str) -> np.dtype[Any]:
    """Return an integer type in this machine's byte order, signed as NetCDF's attribute ``_Unsigned`` says."""
    native = stored.newbyteorder("=")
    if unsigned is None or stored.kind not in "iu":
        return native
    if str(unsigned).lower() not in ("true", "false"):
        raise _wrong(label, UNSIGNED, unsigned, 'expected "true" or "false"')
    return np.dtype(f"{'u' if str(unsigned).lower() == 'true' else 'i'}{stored.itemsize}")


def _attribute_number(value: Any, name: str, label: str) -> Array:
    number = np.asarray(value)
    if number.dtype.kind not in "fiu" or number.size != 1:
        raise _wrong(label, name, value, "expected one number")
    return number.reshape(()).astype(number.dtype.newbyteorder("="))


def _fills(value: Any, stored: np.dtype[Any], name: str, label: str) -> list[Any]:
    """Return the values that mark missing elements, in the stored type; leave out values that it cannot represent."""
    if isinstance(value, str | list) and name == "_FillValue" and stored.kind in "fc":
        value = _of_base64(value)
    values = np.atleast_1d(np.asarray(value))
    if values.dtype.kind not in "fiubc":
        raise _wrong(label, name, value, "expected numbers of the array's type")
    native = stored.newbyteorder("=")
    with np.errstate(invalid="ignore", over="ignore"):
        fills = values.astype(native)
    if native.kind == "b":  # which has no value to spare
        return []
    if native.kind not in "fc":  # no element has another value; of a wider float the nearest one is meant
        same_bits = values.dtype.kind in "iu" and values.dtype.itemsize == native.itemsize
        fills = fills if same_bits else fills[fills == values]
    return list(fills)


def _of_base64(value: Any) -> Any:
    """Return the number that xarray writes as base64 text into Zarr stores; ``value`` itself if it is no such text."""
    try:
        parts = [struct.unpack("<d", base64.b64decode(one, validate=True))[0] for one in np.atleast_1d(value).tolist()]
    except (TypeError, ValueError, struct.error):
        return value
    return complex(*parts) if isinstance(value, list) and len(parts) == 2 else parts[0]


def _wrong(label: str, name: str, value: Any, expected: str) -> DataError:
    return DataError(
        f"{label}: the attribute {name}={value!r:.80} cannot be followed: {expected}; correct it, or read the stored "
        "numbers by a FileSource of your own"
    )

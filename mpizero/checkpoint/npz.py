"""Write and read NumPy's ``.npz`` files: zip archives with one ``.npy`` file for each array.

[Note: why not numpy.savez and numpy.load] ``numpy.savez`` takes arrays as keyword arguments and has further parameters
of its own, so it cannot write an array called ``file``. ``numpy.load`` allocates the memory that the header of an array
declares before it looks at the data.
"""

from __future__ import annotations

import errno
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from math import prod
from typing import IO, Any

import numpy as np

from mpizero.checkpoint.atomic_folder import as_bytes
from mpizero.checkpoint.format import open_regular
from mpizero.errors import CheckpointError
from mpizero.types import Array


def write(
    path: str, items: Sequence[Any], values: Callable[[Any], Iterator[Array]], attributes: Mapping[str, Any]
) -> None:
    """Write arrays into a new file; ``attributes`` are not written, because the format cannot store them.

    The other arguments are as for :func:`mpizero.checkpoint.convert.write_tensorfile`.
    """
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for item in items:
            _write_entry(archive, item.name, item.shape, item.dtype, values(item))


_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the same arrays give the same bytes


def _write_entry(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], parts: Iterable[Array]
) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    with archive.open(zipfile.ZipInfo(f"{name}.npy", _NO_DATE), "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for part in parts:
            member.write(as_bytes(part))


def read_arrays(path: str | os.PathLike[str], limit: int | None = None) -> dict[str, Array]:
    """Read all arrays of an ``.npz`` file of numbers; return them by name, in native byte order.

    Nothing is unpickled. Memory for an array is allocated only after checking that the file is large enough for it.

    Parameters
    ----------
    path : path
        Path of the file. It must not be a link.
    limit : int, optional
        The largest number of bytes that all arrays may have together. The default is the size of the file, which
        suffices if the file is not compressed.

    Raises
    ------
    CheckpointError
        If the file is damaged, crafted or contains anything but arrays of numbers. The message says what is wrong.
    OSError
        If the file cannot be opened or read.
    """
    with NpzFile(path, limit) as file:
        return {name: file.values(name).reshape(shape) for name, (shape, _) in file.arrays.items()}


#: Errors that a damaged or crafted file raises in NumPy, Python's parser and the archive's reader.
UNSOUND = (
    ValueError,
    TypeError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,  # a RecursionError and a NotImplementedError, too
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class NpzFile(AbstractContextManager["NpzFile"]):
    """Read arrays of an ``.npz`` file of numbers one at a time; parameters and errors are as for :func:`read_arrays`.

    Attributes
    ----------
    arrays : dict
        Shape and element type of every array, in native byte order, by name.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int | None = None) -> None:
        self.path = os.fspath(path)
        self._file = os.fdopen(open_regular(self.path), "rb")
        try:
            room = os.fstat(self._file.fileno()).st_size if limit is None else limit
            with self._checked():
                self._archive = zipfile.ZipFile(self._file)
                entries = [info for info in self._archive.infolist() if info.filename.endswith(".npy")]
                if (size := sum(info.file_size for info in entries)) > room + 4096 * len(entries):
                    raise ValueError(f"declares {size} bytes of arrays, at most {room} are plausible")
                self._entries = {info.filename.removesuffix(".npy"): info for info in entries}
                self.arrays = {name: self._described(info) for name, info in self._entries.items()}
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()

    def values(self, name: str) -> Array:
        """Return all values of an array, flattened in C order."""
        with self._checked():
            return _read_entry(self._archive, self._entries[name]).reshape(-1)

    def _described(self, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with self._archive.open(info) as member:
            shape, _, dtype = read_header(member, info.filename, info.file_size)
        return shape, dtype.newbyteorder("=")

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except (OSError, *UNSOUND) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a place before the start raises
                raise
            raise CheckpointError(f"{self.path}: not a sound .npz file of numbers: {error!s:.300}") from None


_PIECE = 1 << 22


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        shape, by_columns, dtype = read_header(member, info.filename, info.file_size)
        where = f"{info.filename!r:.80}: {dtype!s:.80} of shape {shape!r:.80}"
        values = np.empty(prod(shape), dtype)
        view, done = as_bytes(values), 0
        while part := member.read(min(_PIECE, len(view) - done) or 1):  # the last read compares the checksum
            if done == len(view):
                raise ValueError(f"{where}: it has more bytes than that")
            view[done : done + len(part)] = part
            done += len(part)
        if done < len(view):
            raise ValueError(f"{where}: it has {done} bytes")
    native = values.astype(dtype.newbyteorder("="), copy=False)
    return native.reshape(shape, order="F" if by_columns else "C")


#: Kinds of elements that are numbers: booleans, integers, floating point, complex.
NUMBERS = "biufc"
Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
_HEADERS: Mapping[tuple[int, int], Callable[[IO[bytes]], Header]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _parsed(member: IO[bytes], parse: Callable[[IO[bytes]], Header], tries: int = 100) -> Header:
    """Return ``parse(member)``; try again when another thread has disturbed Python's parser.

    NumPy parses headers by ``ast.literal_eval``, which in Python 3.11.0 to 3.11.7 and 3.12.0 sometimes raises
    SystemError if several threads call it (cpython 106905).
    """
    start = member.tell()
    for _ in range(tries - 1):
        with suppress(SystemError):
            return parse(member)
        member.seek(start)
    return parse(member)


def read_header(member: IO[bytes], name: str, size: int) -> Header:
    """Read the header of an array; return its shape, whether it is stored by columns, and its element type.

    ``name`` is the array's name in messages, ``size`` the number of bytes of header and elements.

    Raises
    ------
    ValueError
        If the bytes are no header, the elements are no numbers, or the header does not fit ``size``. The modules with
        which NumPy parses a header raise other errors, too: see :data:`UNSOUND`.
    """
    version = np.lib.format.read_magic(member)
    if version not in _HEADERS:
        raise ValueError(f"{name!r:.80}: version {version} of .npy")
    shape, by_columns, dtype = _parsed(member, _HEADERS[version])
    where = f"{name!r:.80}: {dtype!s:.80} of shape {shape!r:.80}"
    if dtype.kind not in NUMBERS or any(size < 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"{where}: not an array of numbers")
    if prod(shape) * dtype.itemsize != size - member.tell():
        raise ValueError(f"{where}: it has {size - member.tell()} bytes")
    return shape, by_columns, dtype

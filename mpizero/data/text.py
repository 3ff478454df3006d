"""Read text from files, folders and globs as one long string of bytes, cut into sequences."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero.data.mapped import MappedFile, check_named_once, file_states
from mpizero.data.source import VALIDATION, Indices, Source
from mpizero.errors import DataError
from mpizero.types import Array

#: Largest number of files that stay mapped into memory at a time; the others are mapped again when needed.
OPEN_FILES = 64
#: Folders of the standard library that are left out: installed packages, and tests, which hold text in odd encodings.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

#: The first bytes of files that a program has compressed.
COMPRESSED = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

Path = str | os.PathLike[str]


@explains
class TextSource(Source):
    """Provide text for next-byte prediction: the target of each byte of an input sequence is the next byte of the text.

    Sample i consists of the bytes from ``i * sequence`` to ``(i + 1) * sequence`` of the text, both included. ``x``
    holds its first ``sequence`` bytes and ``y`` its last ``sequence`` bytes. Both are int64 of shape (samples,
    sequence), with values below 256. The text is the concatenation of all files, in the order given. A sample may begin
    in one file and end in the next. The text is not copied into memory: each file is memory-mapped when it is first
    read.

    Parameters
    ----------
    paths : path, sequence of paths, or "stdlib"
        A file; a folder (all files below it, sorted by path, without hidden ones); or a glob pattern (sorted; ``**``
        goes through folders). "stdlib" is this Python's own standard library: its ``.py`` files without tests, in the
        order of the SHA-256 of their paths. So the last files, which are taken for validation, are a random choice.
    sequence : int
        Number of bytes of each input and of each target.
    validation : float
        Share of the samples that :meth:`split` takes for validation by default. It takes the last samples.

    Raises
    ------
    DataError
        If a path matches nothing or cannot be read, a file given by its own name is empty, or the text has fewer than
        ``sequence + 1`` bytes.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import mpizero as mz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = Path(folder, "text.txt").write_text("to be, or not to be")
    ...     source = mz.data.TextSource(f"{folder}/*.txt", sequence=5)
    ...     x, y = source.samples([0])
    >>> len(source), bytes(x[0].tolist()), bytes(y[0].tolist())
    (3, b'to be', b'o be,')
    """

    in_order = True

    def __init__(self, paths: Path | Sequence[Path], sequence: int, validation: float = VALIDATION) -> None:
        self.sequence = require("sequence", sequence, whole(1, of=" of bytes"))
        self.default_validation = validation
        listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not listed:
            raise DataError("no text: the list of paths is empty")
        found = [file for path in listed for file in _expand(path if path == "stdlib" else os.path.abspath(path))]
        check_named_once(name for name, _ in found)
        self.files = tuple(name for name, size in found if size)
        self._ends = tuple(accumulate(size for _, size in found if size))
        self._map = lru_cache(maxsize=OPEN_FILES)(_map_file)
        names = ", ".join(str(path) for path in listed[:3]) + (", ..." if len(listed) > 3 else "")
        if not self.files:
            raise DataError(f"{names}: no text: {len(found)} files, all of them empty")
        if self.bytes <= sequence:
            raise DataError(
                f"{names}: {self.bytes} bytes of text; sequences of {sequence} need at least {sequence + 1} bytes"
            )

    @property
    def bytes(self) -> int:
        """Number of bytes of all files together."""
        return self._ends[-1]

    def __len__(self) -> int:
        return (self.bytes - 1) // self.sequence

    def read(self, indices: Indices) -> tuple[Array, Array]:
        """Return the samples ``(x, y)`` of ``indices``, in the order of ``indices``, which the caller has checked."""
        text = np.empty((indices.size, self.sequence + 1), np.uint8)
        for row, index in zip(text, indices.tolist(), strict=True):
            self._fill(row, index * self.sequence)
        return text[:, :-1].astype(np.int64), text[:, 1:].astype(np.int64)

    def _fill(self, row: Array, start: int) -> None:
        """Fill ``row`` with the bytes of the text from byte ``start`` on, from as many files as needed."""
        done, file = 0, bisect_right(self._ends, start)
        while done < row.size:
            begin = self._ends[file - 1] if file else 0
            inside = start + done - begin
            count = min(row.size - done, self._ends[file] - begin - inside)
            mapped = self._map(self.files[file], self._ends[file] - begin)
            row[done : done + count] = mapped.read(mapped.bytes, slice(inside, inside + count))
            done, file = done + count, file + 1

    def describe(self) -> dict[str, Any]:
        """Return the names of the files without their folders, and the byte of the text at which each file ends."""
        names = [os.path.basename(name) for name in self.files]
        return {"kind": "text", "sequence": self.sequence, "files": names, "ends": self._ends}

    def contents(self) -> dict[str, Any]:
        """Return names, sizes and times of the files."""
        return {"files": file_states(self.files)}


def _map_file(path: str, size: int) -> MappedFile:
    try:
        mapped = MappedFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read any more: {error}") from None
    if mapped.size != size:
        raise DataError(f"{path}: {mapped.size} bytes now, {size} when training started: it must not change")
    return mapped


def _expand(path: str) -> list[tuple[str, int]]:
    """Return the path and the size in bytes of each file that ``path`` stands for: a file, folder, glob or "stdlib"."""
    if path == "stdlib":
        return [(name, _size(name)) for name in _standard_library()]
    if os.path.isdir(path):
        files = [(name, _size(name)) for name in _below(path)]
        if not files:
            raise DataError(f"{path}: a folder without files")
        return files
    if os.path.lexists(path):
        if not (size := _size(path)):
            raise DataError(f"{path}: the file is empty")
        return [(path, size)]
    if not glob.has_magic(path):
        raise DataError(f"{path}: does not exist; needed is a text file, a folder, a pattern such as *.txt, or stdlib")
    matches = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    if not matches:
        raise DataError(f"{path}: the pattern matches no file")
    return [(name, _size(name)) for name in matches]


def _size(path: str) -> int:
    """Return the size of a file in bytes; raise DataError if it is compressed, no regular file or cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(file)
        start = os.read(file, 6) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(file)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: not a regular file")
    if program := next((name for first, name in COMPRESSED.items() if start.startswith(first)), ""):
        raise DataError(f"{path}: compressed by {program}: unpack it, since text is read as it is stored")
    return found.st_size


def _below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, sorted, without hidden files and folders."""
    with os.scandir(folder) as scanned:
        entries = sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path)
        elif entry.is_file():
            yield entry.path


def _standard_library() -> list[str]:
    root = sysconfig.get_paths()["stdlib"]
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found[os.path.relpath(path, root)] = path
    if not found:
        raise DataError(f"stdlib: no .py files below {root}; give text files instead")
    order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [found[name] for name in order]

"""Read samples from datasets of HDF5 files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from mpizero._util.names import explains
from mpizero._util.pytree import leaves_of
from mpizero.data.conventions import FILLS, PACKED, UNSIGNED
from mpizero.data.deflated import DeflatedArray
from mpizero.data.files import FileSource
from mpizero.data.mapped import MappedArray, MappedFile
from mpizero.errors import DataError

#: Bytes of neighbouring rows that HDF5 reads together from a contiguous dataset that is not mapped.
RUN_BYTES = 64 << 10


@explains
class Hdf5Source(FileSource):
    """Read samples from datasets of one or several HDF5 files; each sample is read when it is requested.

    The parameters and errors are those of :class:`~mpizero.data.FileSource`. Contiguous datasets of NumPy's types are
    memory-mapped, from the file that holds them, so reading shuffled samples needs no HDF5 call. Of a chunked dataset,
    each call of :meth:`read` reads every chunk that contains a requested sample only once, in ascending order. Chunks
    of whole rows that gzip has compressed, maybe after a shuffle of bytes, are decompressed by ISA-L, in half of HDF5's
    time; HDF5 reads all others.

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
        """Open an HDF5 file; return its datasets of :attr:`names` by name, and the rows of a chunk of each."""
        file, mapped_files = open_hdf5(path), dict[str, MappedFile]()
        found = {}
        for name in dict.fromkeys(leaves_of(self.names)):
            dataset = _with_raw_files_in(self.folder, dataset_of(file, path, name))
            if dataset.is_virtual:
                dataset = _with_parts_in(self.folder, dataset, f"{path}: dataset {name!r}")
            _unlock(dataset.file)  # where a link leads to another
            _check_conventions(file, path, name, dataset)
            mapped = _map(dataset, mapped_files)
            read = (DeflatedArray.of(dataset) or dataset, _rows_together(dataset))
            found[name] = read if mapped is None else (mapped, 0)
        if all(isinstance(array, MappedArray) for array, _ in found.values()):
            file.close()
        return found


def open_hdf5(path: str) -> Any:
    """Open an HDF5 file for reading, without keeping others from it: see :func:`unlocked`.

    Raises
    ------
    DataError
        If it is missing, empty or no readable HDF5 file.
    """
    import h5py

    return unlocked(path, lambda **locking: h5py.File(path, "r", **locking))


def unlocked(path: str, opened: Callable[..., Any]) -> Any:
    """Return the file that ``opened`` opens with h5py, without a lock on it.

    [Note: locks] A program can open a file twice only with the same setting of HDF5's locks. So h5py's own setting
    comes first, and the lock that it takes is given back at once: sources never write, and a lock would keep the jobs
    that do from their file. Where the lock cannot be had, because one of those has it, or the program has opened the
    file without locks, the file is opened without.
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
    """Return what a file is, and how it is converted, that is no HDF5 file; "" if it is not known."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start[:3] == b"CDF":
        return "a file of classic NetCDF; convert it: nccopy -k netCDF-4 OLD.nc NEW.nc, and use NetcdfSource"
    if start == b"\x0e\x03\x13\x01":
        return "a file of HDF4; convert it: h4toh5 OLD.hdf NEW.h5"
    return "" if start else "the file is empty"


def dataset_of(file: Any, path: str, name: str) -> Any:
    """Return the dataset ``name`` of an open HDF5 file; raise DataError if there is none, or it holds nothing."""
    import h5py

    try:
        found = file[name]
    except (KeyError, ValueError):
        link = file.get(name, getlink=True) if name in _names_of(file, name) else None
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            where = f" of {link.filename}" if isinstance(link, h5py.ExternalLink) else ""
            raise DataError(f"{path}: {name!r} is a link to {link.path!r}{where}, which is not there") from None
        names: list[str] = []
        file.visit(names.append)
        have = ", ".join(names[:10]) or "nothing"
        raise DataError(f"{path}: no dataset {name!r}; it has {have}") from None
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{path}: {name!r} is a group; needed is a dataset")
    if found.shape is None:
        raise DataError(f"{path}: dataset {name!r} is empty")
    try:
        found.dtype  # noqa: B018 - h5py translates the type when it is asked for
    except TypeError as error:
        raise DataError(f"{path}: dataset {name!r} has elements of a type that NumPy has not: {error}") from None
    return found


def _names_of(file: Any, name: str) -> list[str]:
    """Return the names that are in the group in which ``name`` would be, with the group's own."""
    above, between, _ = name.rpartition("/")
    group = file.get(above) if above else file
    return [above + between + inside for inside in group] if hasattr(group, "keys") else []


def _check_conventions(file: Any, path: str, name: str, dataset: Any) -> None:
    """Raise DataError if a dataset of a NetCDF file has attributes by which its numbers are others than the stored."""
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


def _with_raw_files_in(folder: str, dataset: Any) -> Any:
    """Return a dataset whose bytes are in other files, which HDF5 would look for in the program's folder of the day."""
    import h5py

    if not dataset.external:
        return dataset
    file, name, access = dataset.file, dataset.name.encode(), h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(os.fsencode(folder))
    dataset.id.close()
    return h5py.Dataset(h5py.h5d.open(file.id, name, access))


def _with_parts_in(folder: str, dataset: Any, label: str) -> Any:
    """Return a virtual dataset whose parts are there; raise DataError if one is not, for which HDF5 has the fill value.

    A fill value that is NaN tells it by itself. HDF5 looks for parts where HDF5_VDS_PREFIX says, beside the dataset's
    file, and then in the program's folder of the day, in whose place ``folder`` comes.
    """
    import h5py

    beside, moved = os.path.dirname(os.path.abspath(dataset.file.filename)), False
    prefix = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())  # that of HDF5_VDS_PREFIX
    told = dataset.dtype.kind == "f" and np.isnan(dataset.fillvalue)
    for name, inside in sorted({(part.file_name, part.dset_name) for part in dataset.virtual_sources()}):
        if name == "." or "%" in name:
            continue
        places = [os.path.join(place, name) for place in (prefix, beside, folder) if place]
        there = next((place for place in places if os.path.isfile(place)), "")
        moved |= there == places[-1] not in places[:-1]
        if not told and not _has(there, inside):
            raise DataError(
                f"{label} is virtual, and its part {name}: {inside!r} is not there: HDF5 would give "
                f"{dataset.fillvalue} in its place; mend the file, or let its fill value be NaN"
            )
    if not moved:
        return dataset
    file, path, access = dataset.file, dataset.name.encode(), h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_virtual_prefix(os.fsencode(folder))
    dataset.id.close()
    return h5py.Dataset(h5py.h5d.open(file.id, path, access))


def _has(path: str, name: str) -> bool:
    if not path:
        return False
    with open_hdf5(path) as file:
        return name in file


def _map(dataset: Any, files: dict[str, MappedFile]) -> MappedArray | None:
    """Return a dataset mapped into memory; None if its bytes are not contiguous in a file, or of a type of HDF5 alone.

    The file is the one that holds the dataset: where a link leads to another, offsets are places in that. ``files``
    are those that are mapped already.
    """
    if dataset.chunks is not None or dataset.is_virtual or dataset.external is not None or not _is_numpys(dataset):
        return None
    file, offset = dataset.file, dataset.id.get_offset()
    found = os.fstat(file.id.get_vfd_handle())
    if offset is None or not dataset.size or offset + dataset.size * dataset.dtype.itemsize > found.st_size:
        return None
    path = os.path.abspath(file.filename)
    if not (dataset.ndim and os.path.exists(path) and os.path.samestat(os.stat(path), found)):
        return None
    if path not in files:
        files[path] = MappedFile(path)
    return MappedArray(files[path], dataset.dtype, offset, dataset.shape)


def _is_numpys(dataset: Any) -> bool:
    """Tell whether elements have the very type in the file that NumPy reads: the same bits, exponent and offset."""
    import h5py

    same: bool = dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True)
    return same


def _rows_together(dataset: Any) -> int:
    """Return how many rows of a dataset that HDF5 reads are read together: a chunk; of a contiguous one few."""
    if dataset.chunks or dataset.is_virtual or not dataset.size:
        return int(dataset.chunks[0]) if dataset.chunks else max(1, *dataset.shape[:1])
    return max(1, RUN_BYTES * len(dataset) // (dataset.size * dataset.dtype.itemsize)) if dataset.ndim else 1

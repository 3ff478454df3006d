"""Write arrays of which each rank has a part, such as predictions of cut fields, into one HDF5 file, in parallel.

The file is laid out and written as a checkpoint's is: rank 0 makes it without values, beside its target, and every rank
writes into it by system calls, so any build of h5py will do. The ranks of a domain first exchange parts of their boxes,
so that each of them has one range of successive elements to write, not one range for every row of its box.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpizero._util.checks import home_path, is_whole, native, unmasked_samples
from mpizero._util.names import explains, shown
from mpizero.checkpoint.atomic_folder import (
    CapturedError,
    create_locked_folder,
    discard,
    fill_file,
    on_root,
    raise_first,
    store_directly,
    sync_folder,
)
from mpizero.checkpoint.format import LocalArray, Skeleton, build, check_path, check_paths, check_shape
from mpizero.comm.communicator import Communicator
from mpizero.data.batches import ranks_of, slab_of
from mpizero.data.source import Path, Slab
from mpizero.errors import ConfigError, DataError
from mpizero.layout.fields import Box
from mpizero.layout.flat import Partition
from mpizero.layout.mesh import Axes
from mpizero.types import Array

#: Bytes of an array that a rank exchanges and writes at a time, or those of one sample if they are more.
CHUNK = 64 * 1024 * 1024


@explains
def write_fields(
    path: Path,
    fields: Mapping[str, Any],
    ranks: Any,
    shape: Sequence[int] = (),
    *,
    attributes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write fields, of which each rank has a part, into one HDF5 file, as data sets of whole fields.

    Collective over the ranks. The file appears when it is complete: it is written in a hidden folder beside ``path``
    and then renamed, so if a rank fails, all ranks raise, and what was at ``path`` is still there. The data sets do
    not depend on the cut. Samples of replicas stand one after the other, as in a global batch: those of ranks whose
    coordinate on the axis ``data`` is 0, then those of ranks with coordinate 1, and so on; a replica may have no
    samples, ``part[:0]``. Of ranks with the same part (stages, tensor groups) the first writes.

    Parameters
    ----------
    path : path
        The file; that of rank 0 is used. Missing folders are made.
    fields : dict of str to array
        By name of the data set, this rank's part (samples, space, ...) of an array: floats of 16 to 64 bits, complex
        numbers of 64 or 128 bits, or integers of 8 to 64 bits. An array with fewer axes than samples and space, such as
        times (samples,), is not cut: the first rank of a domain writes it.
    ranks : sharded model or Mesh
        The ranks.
    shape : sequence of int
        Extents of the whole fields, which were given to ``mesh.slab``; () without a domain.
    attributes : dict, optional
        Attributes of the file, such as ``{"channels": ["u", "v"]}``; those given on rank 0 are used.
    overwrite : bool
        Whether an existing file is replaced; the value on rank 0 is used.

    Raises
    ------
    DataError
        On all ranks, if an array is not the rank's part of a field of ``shape``, or the ranks give other names, types,
        channels or, within a domain, other numbers of samples.
    ConfigError
        On all ranks, if ``path`` exists and may not be replaced, or ``shape`` does not fit the domain.
    CheckpointError
        On all ranks, if a name or type cannot be stored, the file cannot be written (then it is an ``OSError``, too,
        with ``errno``), or another job is writing it.

    Examples
    --------
    >>> import os, tempfile
    >>> import h5py
    >>> import numpy as np
    >>> import mpizero as mz
    >>> whole = np.arange(96.0).reshape(2, 8, 6, 1)
    >>> def write(comm):
    ...     with mz.Mesh(comm, domain=(2, 1)) as mesh:
    ...         part = whole[:, *mesh.slab((8, 6))]
    ...         mz.data.write_fields(f"{folder}/u.h5", {"u": part}, mesh, (8, 6), attributes={"units": "m/s"})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = mz.testing.run_in_threads(2, write)
    ...     with h5py.File(f"{folder}/u.h5") as file:
    ...         print(file["u"].shape, file.attrs["units"], np.array_equal(file["u"], whole))
    (2, 8, 6, 1) m/s True
    """
    comm, slab, mesh = ranks_of(ranks, None)[0], slab_of(ranks), getattr(ranks, "mesh", ranks)
    target, extents, arrays = str(path), tuple[int, ...](), dict[str, Array]()
    with CapturedError() as captured:
        target, extents = os.path.realpath(home_path(path)), tuple(shape)
        arrays = _arrays(fields, slab, extents)
    given = {name: (len(array), _sample(array, extents), array.dtype.str) for name, array in arrays.items()}
    gathered = comm.allgather_object((target, captured.portable, given), "fields")
    target, prefix = gathered[0][0], f"{gathered[0][0]} was not written"
    raise_first([error for _, error, _ in gathered], prefix, captured.error)
    counts = _samples_of_replicas([part for _, _, part in gathered], mesh.axes, prefix)
    table = {name: ((sum(counts[name]), *given[name][1]), arrays[name].dtype) for name in counts}
    group, here = mesh.grid.context_group if slab.cut else None, mesh.axes.coordinates(comm.rank)
    layout = partial(build, table, root_attributes=attributes or {})
    with _new_file(comm, target, layout, overwrite, prefix) as (state, offsets):
        for name, (whole, dtype) in table.items():
            size, before, box = prod(whole[1:]), sum(counts[name][: here.data]), slab.where(whole[1:])
            step = max(1, CHUNK * (slab.cut.size if slab.cut else 1) // max(1, size * dtype.itemsize))
            for start in range(0, max(counts[name]), step):
                part, pieces = arrays[name][start : start + step], list[tuple[int, Array]]()
                if not (here.pipeline or here.tensor or (here.context and not box)):
                    first, values = _successive(part, slab, extents, group) if box else (0, part.reshape(-1))
                    pieces.append(((before + start) * size + first, values))
                store_directly(comm, state, [LocalArray(name, whole, dtype, tuple(pieces))], offsets, prefix)


@contextmanager
def _new_file(
    comm: Communicator, target: str, layout: Callable[[], Skeleton], overwrite: bool, prefix: str
) -> Iterator[tuple[str, dict[str, int]]]:
    """Make a file without values beside ``target``; after the ``with`` statement, rename it to ``target``.

    Collective. Yields the path of the file and, for each data set, the offset of its first byte. If an error is raised
    in the statement, the file is removed, and what was at ``target`` stays.
    """
    with ExitStack() as stack:

        def make() -> tuple[str, dict[str, int]]:
            folder = create_locked_folder(target, overwrite, _check_target)
            stack.callback(discard, folder)
            skeleton = layout()
            fill_file(folder.state, skeleton)
            return folder.state, skeleton.offsets

        def publish() -> None:
            _check_target(target, overwrite)
            os.replace(state, target)
            sync_folder(os.path.dirname(target))

        state, offsets = on_root(comm, prefix, make)
        yield state, offsets
        on_root(comm, prefix, publish)


def _check_target(target: str, overwrite: bool) -> None:
    if os.path.isdir(target):
        raise ConfigError("is a folder: give the path of a file")
    if os.path.lexists(target) and not overwrite:
        raise ConfigError("exists already: choose another name, or give overwrite=True")


def _arrays(fields: Any, slab: Slab, extents: tuple[int, ...]) -> dict[str, Array]:
    """Return contiguous arrays; raise an error if one cannot be stored, or is not this rank's part."""
    axes = len(slab.cut.parts) if slab.cut else 0
    if len(extents) != axes or not all(is_whole(extent, 1) for extent in extents):
        raise ConfigError(f"shape={extents}: the domain has {axes} axes; give the extent of the whole fields on each")
    if not isinstance(fields, Mapping):
        raise DataError(f"fields={fields!r:.80}: expected a dictionary of arrays by name, {{'name': part}}")
    arrays = {}
    for name, value in fields.items():
        array = np.ascontiguousarray(native(np.asarray(unmasked_samples(value, shown(name)))))
        sample, space = _sample(array, extents), array.shape[1 : 1 + axes]
        check_shape(name, (len(array), *sample), array.dtype.str)
        if (box := slab.where(sample)) and space != _extents(box):
            raise DataError(
                f"{name!r} has {space} positions; this rank's part of {extents} has {_extents(box)}: give the part, "
                f"[:, *mesh.slab({extents})], and as shape the extents of the whole field"
            )
        arrays[check_path(name)] = array
    check_paths(arrays)
    return arrays


def _sample(array: Array, extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a sample of the whole array of which this rank has a part."""
    return (*extents, *array.shape[1 + len(extents) :]) if array.ndim > len(extents) else array.shape[1:]


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _samples_of_replicas(parts: Sequence[Mapping[str, Any]], axes: Axes, prefix: str) -> dict[str, list[int]]:
    """Return each replica's number of samples, by name of the array, of what the ranks give, ``parts``.

    Raise DataError if a rank gives other arrays than rank 0, or other samples than the first rank of its replica.
    """
    replicas = [axes.coordinates(rank).data for rank in range(len(parts))]
    firsts = [parts[replicas.index(replica)] for replica in range(axes.data)]
    _compare(parts, [firsts[replica] for replica in replicas], prefix)
    return {name: [first[name][0] for first in firsts] for name in sorted(parts[0])}


def _compare(parts: Sequence[Mapping[str, Any]], firsts: Sequence[Mapping[str, Any]], prefix: str) -> None:
    """Raise DataError if a rank gives other arrays than rank 0, or other samples than the first of its replica."""
    for rank, (given, first) in enumerate(zip(parts, firsts, strict=True)):
        expected = {name: (*first.get(name, array)[:1], *array[1:]) for name, array in parts[0].items()}
        if different := sorted(given.items() ^ expected.items()):
            name = different[0][0]
            one, others = (
                "{} samples of {}, {}".format(*found[name]) if name in found else "missing"
                for found in (given, expected)
            )
            raise DataError(
                f"{prefix}: {name!r} is {one} on rank {rank}, {others} on others: give the same arrays on all ranks, "
                "and in a domain parts of the same samples"
            )


def _successive(x: Array, slab: Slab, extents: tuple[int, ...], group: Any) -> tuple[int, Array]:
    """Return this rank's range of the elements of whole samples: the index of its first element, and its values.

    Collective over the domain group, whose ranks send one another the elements of their parts ``x``. A range consists
    of whole rows; a row is all elements of a sample at one position of the first axis of space.
    """
    boxes = [Slab(slab.cut, rank).where(extents) for rank in range(group.size)]
    rows = [np.add.outer(np.arange(len(x)) * extents[0], np.arange(extents[0])[box[0]]).reshape(-1) for box in boxes]
    shards = [Partition(len(x) * extents[0], group.size).shard(rank) for rank in range(group.size)]
    own, shard = rows[group.rank], shards[group.rank]
    flat = x.reshape(len(own), *x.shape[2:])
    sent = [flat[_between(own, other)].reshape(-1) for other in shards]
    wanted = [numbers[_between(numbers, shard)] - shard.start for numbers in rows]
    shapes = [(len(n), *_extents(box[1:]), *x.shape[1 + len(box) :]) for n, box in zip(wanted, boxes, strict=True)]
    out = np.empty((shard.stop - shard.start, *extents[1:], *x.shape[1 + len(extents) :]), x.dtype)
    counts = [[len(numbers[_between(numbers, other)]) for other in shards] for numbers in rows]
    of_row = [prod((*_extents(box[1:]), *x.shape[1 + len(box) :])) for box in boxes]
    received = group.all_to_all(sent, np.array(counts) * np.array(of_row)[:, None], "fields")
    for numbers, box, sizes, block in zip(wanted, boxes, shapes, received, strict=True):
        out[(numbers, *box[1:])] = block.reshape(sizes)
    return shard.start * prod(out.shape[1:]), out.reshape(-1)


def _between(rows: Array, shard: slice) -> slice:
    """Return the slice of the array ``rows`` (ascending numbers) whose elements are in the range ``shard``."""
    return slice(*np.searchsorted(rows, (shard.start, shard.stop)).tolist())

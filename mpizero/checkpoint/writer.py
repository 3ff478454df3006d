"""Saving: collective, checksummed from memory, and visible only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpizero.checkpoint import direct, mpio
from mpizero.checkpoint.checksum import crc32
from mpizero.checkpoint.direct import PieceSums
from mpizero.checkpoint.failures import agreed, borrowed, on_root
from mpizero.checkpoint.manifest import Manifest, StoredArray, canonical_json, encode
from mpizero.checkpoint.skeleton import Skeleton, build
from mpizero.checkpoint.stage import Stage, commit, discard, fill_stage, open_stage
from mpizero.checkpoint.table import Claim, LocalArray, Table, check_array, merge
from mpizero.checkpoint.verify import verify_checksums
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointError, ConfigError

_BACKENDS = {"direct": direct.store, "mpio": mpio.store}


def write(
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    comm: object = None,
    backend: str = "direct",
    replace: bool = False,
) -> None:
    """Save arrays and attributes in a folder that appears whole or not at all.

    Collective over ``comm``. Works in a hidden folder beside ``folder``, makes every file durable, renames. A failure
    on one rank (a full disk, an unwritable folder) raises the same error on every rank, removes what was written, and
    leaves older checkpoints as they are. Leftovers of killed saves are removed.

    Parameters
    ----------
    folder : path
        The checkpoint; rank 0's path counts. Folders above it are made.
    arrays : sequence of LocalArray
        This rank's pieces. All ranks together must write every element exactly once; a rank need not list arrays
        that it has no part of.
    attributes : dict
        JSON values, the same on every rank.
    comm : communicator or None
        mpi4py communicator, :class:`~mpizero.comm.communicator.Communicator`, or None for one process.
    backend : {"direct", "mpio"}
        Each rank writes its bytes by itself, or through parallel HDF5. The resulting files are the same.
    replace : bool
        Whether a checkpoint that stands at ``folder`` may be replaced (in one step, after the new one is complete).
        Without it only a damaged one is, after its checksums have been tried.

    Raises
    ------
    CheckpointError
        On every rank: arrays that do not fit together, a folder that exists, another run writing it. System errors are
        also ``OSError`` with ``errno``.
    ConfigError
        Unknown back end, or one that this installation does not have.
    """
    with borrowed(comm) as world:
        _write(world, os.fspath(folder), (arrays, attributes), backend, replace)


def _write(
    world: Communicator,
    folder: str,
    content: tuple[Sequence[LocalArray], Mapping[str, Any]],
    backend: str,
    replace: bool,
) -> None:
    arrays, attributes = content
    target = world.broadcast_object(os.path.realpath(folder) if world.rank == 0 else None, tag="checkpoint")
    prefix = f"checkpoint {target} was not written"
    local, table = agree_on_arrays(world, arrays, attributes, prefix)
    with agreed(world, prefix):
        if backend not in _BACKENDS:
            raise ConfigError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
        if backend == "mpio":
            mpio.check_available(world)
        skeleton = build(table) if world.rank == 0 else None
    with _staged(world, target, skeleton, replace) as (stage, state, offsets):
        sums = _BACKENDS[backend](world, state, local, offsets, prefix)
        gathered = world.allgather_object(sums, tag="checkpoint checksums")

        def finish() -> None:
            if stage is not None and skeleton is not None:
                structure = _structure(state, skeleton)
                commit(stage, encode(describe(table, skeleton, structure, gathered, attributes)))

        on_root(world, prefix, finish)


def agree_on_arrays(
    comm: Communicator, arrays: Sequence[LocalArray], attributes: Mapping[str, Any], prefix: str
) -> tuple[list[LocalArray], Table]:
    """Check what every rank wants to save, and return this rank's arrays and the table of all.

    Collective over ``comm``; all ranks raise the same error or none.
    """
    with agreed(comm, prefix):
        local = [check_array(array) for array in arrays]
        if not isinstance(attributes, dict):
            raise CheckpointError(f"attributes must be a dict, got {type(attributes).__name__}")
        text = canonical_json(attributes, "attributes")
    claims = comm.allgather_object(([Claim.of(array) for array in local], crc32(text.encode())), "checkpoint")
    with agreed(comm, prefix):
        for rank, (_, crc) in enumerate(claims):
            if crc != claims[0][1]:
                raise CheckpointError(f"attributes of rank {rank} differ from those of rank 0")
        table = merge([listed for listed, _ in claims])
    return local, table


@contextmanager
def _staged(
    comm: Communicator, target: str, skeleton: Skeleton | None, replace: bool
) -> Iterator[tuple[Stage | None, str, dict[str, int]]]:
    """Make the temporary folder on rank 0 and tell all ranks; whatever happens, it does not stay."""
    stage: Stage | None = None

    def start() -> tuple[str, dict[str, int]]:
        nonlocal stage
        if skeleton is None:
            raise CheckpointError("rank 0 has no layout")
        stage = open_stage(target, replace or _is_damaged(target))
        fill_stage(stage, skeleton)
        return stage.state, skeleton.offsets

    try:
        state, offsets = on_root(comm, f"checkpoint {target} was not written", start)
        yield stage, state, offsets
    finally:
        if stage is not None:
            discard(stage)


def _is_damaged(target: str) -> bool:
    """Tell whether a checkpoint stands at ``target`` that cannot be loaded: it makes room for a good one."""
    if not os.path.isdir(target):
        return False
    try:
        verify_checksums(target)
    except CheckpointError:
        return True
    return False


def _structure(state: str, skeleton: Skeleton) -> int:
    """Return the CRC32 of the file's structure, after checking that the back end left it as it was laid out."""
    crc = 0
    handle = os.open(state, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if (found := os.fstat(handle).st_size) != skeleton.nbytes:
            raise CheckpointError(f"{state}: has {found} bytes instead of {skeleton.nbytes}")
        for offset, data in skeleton.structure:
            if os.pread(handle, len(data), offset) != data:
                raise CheckpointError(f"{state}: bytes at offset {offset} are not those laid out")
            crc = crc32(data, crc)
    finally:
        os.close(handle)
    return crc


def describe(
    table: Table,
    skeleton: Skeleton,
    structure: int,
    gathered: Sequence[Sequence[PieceSums]],
    attributes: Mapping[str, Any],
) -> Manifest:
    """Put together the manifest from what all ranks wrote. Not collective."""
    checksums = direct.join(table, gathered)
    stored = {
        path: StoredArray(shape, dtype, skeleton.offsets[path], checksums[path])
        for path, (shape, dtype) in table.items()
    }
    return Manifest(dict(attributes), stored, skeleton.nbytes, structure)

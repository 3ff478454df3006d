"""From temporary folder to checkpoint: its life on rank 0, the manifest of what all ranks wrote, the commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mpizero.checkpoint import direct
from mpizero.checkpoint.direct import PieceSums
from mpizero.checkpoint.failures import on_root
from mpizero.checkpoint.manifest import Manifest, StoredArray, encode
from mpizero.checkpoint.plan import SavePlan
from mpizero.checkpoint.skeleton import Skeleton
from mpizero.checkpoint.stage import Stage, commit, discard, fill_file, open_stage
from mpizero.checkpoint.table import Table
from mpizero.checkpoint.verify import verify_checksums
from mpizero.comm.communicator import Communicator
from mpizero.crc import crc32
from mpizero.errors import CheckpointError


class Place(NamedTuple):
    """Where a save works: the state file. Rank 0 has the stage too."""

    state: str
    stage: Stage | None = None


@contextmanager
def staged(
    comm: Communicator, plan: SavePlan, replace: bool, beside: Callable[[], object] | None = None
) -> Iterator[Place]:
    """Make the temporary folder on rank 0 and tell all ranks; whatever happens, it does not stay.

    Entering is collective over ``comm``, leaving is not. Every rank calls ``beside`` before it learns of the folder.
    """
    stage: Stage | None = None
    process = os.getpid()

    def start() -> str:
        nonlocal stage
        if plan.skeleton is None:
            raise CheckpointError("rank 0 has no layout")
        stage = open_stage(plan.target, replace or _is_damaged(plan.target))
        fill_file(stage.state, plan.skeleton)
        return stage.state

    try:
        state = on_root(comm, plan.prefix, start, beside)
        yield Place(state, stage)
    finally:
        if stage is not None and os.getpid() == process:  # a forked child leaves it alone
            discard(stage)


def publish(comm: Communicator, plan: SavePlan, place: Place, sums: Sequence[PieceSums]) -> None:
    """Write the manifest over what all ranks have written durably, and give the folder its name.

    Collective over ``comm``; all ranks raise the same error or none.
    """
    gathered = comm.allgather_object(sums, tag="checkpoint checksums")

    def finish() -> None:
        if place.stage is not None and plan.skeleton is not None:
            structure = _structure(place.state, plan.skeleton)
            manifest = describe(plan.table, plan.skeleton, structure, gathered, plan.attributes)
            commit(place.stage, encode(manifest))

    on_root(comm, plan.prefix, finish)


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

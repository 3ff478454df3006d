"""From temporary folder to checkpoint: its life on rank 0, the manifest of what all ranks wrote, the commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

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


class TemporaryFolder:
    """The temporary folder that one save works in, opened by rank 0; whatever happens, it does not stay.

    A context manager: leaving it is not collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that save.
    replace : bool
        Whether a good checkpoint may be replaced.

    Attributes
    ----------
    state : str
        Path of the state file, once it is known to this rank.
    stage : Stage or None
        The open folder, on rank 0.
    """

    def __init__(self, comm: Communicator, replace: bool) -> None:
        self._comm, self._replace, self._process = comm, replace, os.getpid()
        self.state = ""
        self.stage: Stage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, target: str, skeleton: Skeleton | None) -> str:
        """Make the folder and the file without its values; return the file's path. Not collective: rank 0 only."""
        self.close()
        if skeleton is None:
            raise CheckpointError("rank 0 has no layout")
        self.stage = open_stage(target, self._replace or _is_damaged(target))
        fill_file(self.stage.state, skeleton)
        return self.stage.state

    def agree(self, plan: SavePlan, beside: Callable[[], object] | None = None) -> None:
        """Open the folder, unless that was done ahead, and tell all ranks where the state file is.

        Collective over the ranks that save. Each calls ``beside`` before it learns of the file; if the folder was made
        ahead, it is not called.
        """
        if plan.opened is None:
            self.state = on_root(self._comm, plan.prefix, lambda: self.open(plan.target, plan.skeleton), beside)
        else:
            self.state = plan.opened

    def close(self) -> None:
        """Remove the folder, unless it was given its name; a second call does nothing. Not collective."""
        stage, self.stage = self.stage, None
        if stage is not None and os.getpid() == self._process:  # a forked child leaves it alone
            discard(stage)


def publish(comm: Communicator, plan: SavePlan, folder: TemporaryFolder, sums: Sequence[PieceSums]) -> None:
    """Write the manifest over what all ranks have written durably, and give the folder its name.

    Collective over ``comm``; all ranks raise the same error or none.
    """
    gathered = comm.allgather_object(sums, tag="checkpoint checksums")

    def finish() -> None:
        if folder.stage is not None and plan.skeleton is not None:
            structure = _structure(folder.state, plan.skeleton)
            manifest = describe(plan.table, plan.skeleton, structure, gathered, plan.attributes)
            commit(folder.stage, encode(manifest))

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

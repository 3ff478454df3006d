"""Turn the temporary folder of a save into a checkpoint: rank 0 writes the manifest and renames the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from mpizero._util.text import crc32
from mpizero.checkpoint.atomic_folder import LockedFolder, commit, create_locked_folder, discard, fill_file
from mpizero.checkpoint.backends import direct
from mpizero.checkpoint.backends.direct import PieceSums
from mpizero.checkpoint.failures import on_root, portable_error
from mpizero.checkpoint.format.manifest import MANIFEST_NAME, STATE_NAME, Manifest, StoredArray, encode
from mpizero.checkpoint.format.skeleton import Skeleton
from mpizero.checkpoint.format.table import Table
from mpizero.checkpoint.full_check import verify_checksums
from mpizero.checkpoint.open_manifest import read_manifest
from mpizero.checkpoint.save_plan import SavePlan
from mpizero.comm.communicator import Communicator
from mpizero.errors import CheckpointDamagedError, CheckpointError


class TemporaryFolder:
    """Make the temporary folder of one save, on rank 0, and remove it on exit unless it has become the checkpoint.

    This is a context manager. Leaving its ``with`` block is not collective.

    Parameters
    ----------
    comm : Communicator
        The ranks that save.
    replace : bool
        Whether the save may replace an undamaged checkpoint. A damaged one may always be replaced.

    Attributes
    ----------
    state : str
        Path of the state file in the temporary folder; "" before :meth:`agree`.
    folder : LockedFolder or None
        The temporary folder, on rank 0 from :meth:`open` to :meth:`close`; otherwise None.
    """

    def __init__(self, comm: Communicator, replace: bool) -> None:
        self._comm, self._replace, self._process = comm, replace, os.getpid()
        self.state = ""
        self.folder: LockedFolder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, target: str, skeleton: Skeleton | None) -> str:
        """Make the temporary folder, and in it the state file without values of arrays; return the path of that file.

        Not collective: rank 0 only.
        """
        self.close()
        if skeleton is None:
            raise CheckpointError("rank 0 has no layout")
        self.folder = create_locked_folder(target, self.may_replace(target))
        fill_file(self.folder.state, skeleton)
        return self.folder.state

    def may_replace(self, target: str) -> bool:
        """Tell whether the save may replace ``target``: if ``replace`` was True, or ``target`` is a damaged checkpoint.

        Not collective.

        Raises
        ------
        CheckpointError
            If the checkpoint cannot be opened, and no checksum or size proves that it is damaged.
        """
        if not os.path.isdir(target) or not (names := set(os.listdir(target))) or names - {MANIFEST_NAME, STATE_NAME}:
            return self._replace  # nothing is there, or what is never replaced
        try:
            if self._replace:
                read_manifest(target)
            else:
                with self._comm.trace.transfer(f"checking {target}") as advance:
                    verify_checksums(target, advance)
        except CheckpointDamagedError:
            return True
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"exists already, and cannot be opened ({portable_error(error).message}): it may be whole, so it is "
                "not replaced; choose another name"
            ) from None
        return self._replace

    def agree(self, plan: SavePlan, before: Callable[[], object] | None = None) -> None:
        """Make the temporary folder on rank 0, and set :attr:`state`, the path of the state file, on all ranks.

        If ``plan.opened`` is a path, rank 0 has made the folder already, and only :attr:`state` is set. Otherwise each
        rank first calls ``before``. Collective over the ranks that save.
        """
        if plan.opened is None:
            self.state = on_root(self._comm, plan.prefix, lambda: self.open(plan.target, plan.skeleton), before)
        else:
            self.state = plan.opened

    def close(self) -> None:
        """Remove the temporary folder if it is still there; a second call does nothing. Not collective."""
        folder, self.folder = self.folder, None
        if folder is not None and os.getpid() == self._process:  # a forked child leaves it alone
            discard(folder)


def publish(comm: Communicator, plan: SavePlan, temporary: TemporaryFolder, sums: Sequence[PieceSums]) -> None:
    """Wait until all ranks have written their values, write the manifest, and rename the temporary folder.

    Collective over ``comm``; all ranks raise the same error or none. ``sums`` holds the checksums of the pieces that
    this rank has written.
    """
    gathered = comm.allgather_object(sums, tag="checkpoint checksums")

    def finish() -> None:
        if temporary.folder is None or plan.skeleton is None:
            return
        state = os.open(temporary.state, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            structure = _structure(state, temporary.state, plan.skeleton)
            manifest = describe(plan.table, plan.skeleton, structure, gathered, plan.attributes)
            if temporary.folder.replace and os.path.lexists(plan.target) and not temporary.may_replace(plan.target):
                raise CheckpointError("a sound checkpoint has taken the place of the damaged one: choose another name")
            commit(temporary.folder, encode(manifest), state)
        finally:
            os.close(state)

    on_root(comm, plan.prefix, finish)


def _structure(handle: int, state: str, skeleton: Skeleton) -> int:
    """Return the CRC32 of the HDF5 structure (all bytes outside the arrays) in the state file.

    ``handle`` is the open file, and ``state`` its path. Raises :class:`CheckpointError` if the structure differs from
    the skeleton, because writing the values has changed it.
    """
    crc = 0
    if (found := os.fstat(handle).st_size) != skeleton.nbytes:
        raise CheckpointError(f"{state}: has {found} bytes instead of {skeleton.nbytes}")
    for offset, data in skeleton.structure:
        if os.pread(handle, len(data), offset) != data:
            raise CheckpointError(f"{state}: bytes at offset {offset} are not those laid out")
        crc = crc32(data, crc)
    return crc


def describe(
    table: Table,
    skeleton: Skeleton,
    structure: int,
    gathered: Sequence[Sequence[PieceSums]],
    attributes: Mapping[str, Any],
) -> Manifest:
    """Build the manifest from shapes and types of arrays and the checksums gathered from all ranks. Not collective.

    ``structure`` is the CRC32 of the state file outside the arrays.
    """
    checksums = direct.join(table, gathered)
    stored = {
        path: StoredArray(shape, dtype, skeleton.offsets[path], checksums[path])
        for path, (shape, dtype) in table.items()
    }
    return Manifest(dict(attributes), stored, skeleton.nbytes, structure)

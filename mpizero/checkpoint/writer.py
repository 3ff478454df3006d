"""Save a checkpoint from all ranks: checksums are computed from memory, and the folder appears only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpizero.checkpoint.backends import direct, mpio
from mpizero.checkpoint.backends.direct import PieceSums
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.format.skeleton import ALIGNMENT
from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.publish import TemporaryFolder, publish
from mpizero.checkpoint.save_plan import make_plan
from mpizero.comm.communicator import Communicator
from mpizero.comm.startup.convert import communicator_of
from mpizero.errors import ConfigError

_BACKENDS: Mapping[str, Callable[..., list[PieceSums]]] = {
    "direct": direct.store,
    "mpio": mpio.store,
}


def write(
    folder: str | os.PathLike[str],
    arrays: Sequence[LocalArray],
    attributes: Mapping[str, Any],
    comm: object = None,
    backend: str = "direct",
    replace: bool = False,
    *,
    alignment: int = ALIGNMENT,
) -> None:
    """Save arrays and attributes as a checkpoint folder that appears whole or not at all.

    Collective over ``comm``. The ranks write into a hidden folder beside ``folder`` and make every file durable; then
    rank 0 renames the folder. A failure on one rank (a full disk, an unwritable folder) raises the same error on every
    rank, removes what was written, and leaves older checkpoints as they are. Leftovers of killed saves are removed.

    Parameters
    ----------
    folder : path
        The checkpoint; the path of rank 0 is used. Missing parent folders are made.
    arrays : sequence of LocalArray
        The pieces that this rank writes. All ranks together must write every element exactly once. A rank need not
        list arrays of which it writes nothing.
    attributes : dict
        JSON values, the same on every rank.
    comm : communicator, "self" or None
        mpi4py communicator, :class:`~mpizero.comm.communicator.Communicator`, "self" for this process alone, or None
        for all ranks that a launcher has started.
    backend : {"direct", "mpio"}
        "direct": each rank writes its bytes by system calls. "mpio": parallel HDF5. The resulting files are the same.
    replace : bool
        Whether an existing checkpoint at ``folder`` may be replaced (in one step, after the new one is complete).
        False: only a checkpoint whose checksums prove it damaged is replaced. A checkpoint that cannot be opened but
        may be whole is never replaced.
    alignment : int
        A power of two from 64 to 4096 (the size of a page). Arrays of at least ``alignment`` bytes start at a multiple
        of it in the file, all others at a multiple of 64.

    Raises
    ------
    CheckpointError
        On every rank, if the arrays of the ranks do not fit together, the folder exists, or another run is writing it.
        System errors are also ``OSError`` with ``errno``.
    ConfigError
        If the back end is unknown or not installed, or the alignment is not allowed.
    """
    with communicator_of(comm) as world:
        plan = make_plan(world, folder, arrays, attributes, alignment)
        with agreed(world, plan.prefix):
            check_backend(world, backend)
        with TemporaryFolder(world, replace) as temporary:
            temporary.agree(plan)
            sums = _BACKENDS[backend](world, temporary.state, plan.local, plan.offsets, plan.prefix)
            publish(world, plan, temporary, sums)


def check_backend(comm: Communicator, backend: str) -> None:
    """Raise :class:`ConfigError` unless this installation can write with ``backend``. Not collective."""
    if backend not in _BACKENDS:
        raise ConfigError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
    if backend == "mpio":
        mpio.check_available(comm)

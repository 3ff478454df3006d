"""Save a checkpoint from all ranks; its folder appears only when the checkpoint is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpizero.checkpoint.backends import direct, mpio
from mpizero.checkpoint.backends.direct import PieceSums
from mpizero.checkpoint.failures import agreed
from mpizero.checkpoint.format.alignment import ALIGNMENT
from mpizero.checkpoint.format.table import LocalArray
from mpizero.checkpoint.publish import TemporaryFolder, publish
from mpizero.checkpoint.save_plan import SavePlan, make_plan
from mpizero.comm.communicator import Communicator
from mpizero.comm.startup import communicator_of
from mpizero.errors import ConfigError

_BACKENDS: Mapping[str, Callable[..., list[PieceSums]]] = {"direct": direct.store, "mpio": mpio.store}


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
    """Save arrays and attributes as a checkpoint; its folder appears only when the checkpoint is complete.

    Collective over ``comm``. The ranks write into a hidden folder beside ``folder`` and sync its files to disk; rank 0
    then renames it to ``folder``. If one rank fails, for example because the disk is full, every rank raises the same
    error, the hidden folder is removed, and older checkpoints do not change. Leftovers of killed saves are removed.

    Parameters
    ----------
    folder : path
        The checkpoint's folder; the path of rank 0 is used. Missing parent folders are made.
    arrays : sequence of LocalArray
        The arrays of which this rank writes elements, with these elements as their pieces. All ranks together must
        write every element exactly once. A rank need not list arrays of which it writes no element.
    attributes : dict
        Dictionary of JSON values for the manifest, equal on every rank.
    comm : communicator, "self" or None
        mpi4py communicator, Communicator, "self" (this process alone), or None (all ranks that a launcher started).
    backend : {"direct", "mpio"}
        "direct": each rank writes its elements by system calls. "mpio": by parallel HDF5. The files are the same.
    replace : bool
        Whether an existing checkpoint at ``folder`` may be replaced, by one rename after the new one is complete. If
        False, only a checkpoint that is damaged, as its checksums or sizes prove, is replaced. A checkpoint that cannot
        be opened but may be undamaged is never replaced.
    alignment : int
        A power of two from 64 to 4096 (the size of a page). Arrays of at least ``alignment`` bytes start at a multiple
        of ``alignment`` in the file, and all other arrays at a multiple of 64.

    Raises
    ------
    CheckpointError
        On every rank, if the pieces of all ranks do not make up whole arrays, the folder exists and may not be
        replaced, or another run is writing it. A system error is raised as a :class:`CheckpointIOError`, which is also
        an ``OSError`` with ``errno``.
    ConfigError
        If the back end is unknown or not installed, or the alignment is not allowed.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpizero import checkpoint
    >>> whole = checkpoint.LocalArray("parameters/w", (3,), np.dtype("f8"), ((0, np.arange(3.0)),))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(f"{run}/start", [whole], {"loss": 0.5}, comm="self")
    ...     with checkpoint.open_checkpoint(f"{run}/start", comm="self") as reader:
    ...         print(reader.attributes, reader.read_whole("parameters/w"))
    {'loss': 0.5} [0. 1. 2.]
    """
    with communicator_of(comm) as world:
        _store(world, make_plan(world, folder, arrays, attributes, alignment), backend, replace)


def _store(world: Communicator, plan: SavePlan, backend: str, replace: bool) -> None:
    with agreed(world, plan.prefix):
        check_backend(world, backend)
    with TemporaryFolder(world, replace) as temporary:
        temporary.agree(plan)
        sums = _BACKENDS[backend](world, temporary.state, plan.local, plan.offsets, plan.prefix)
        publish(world, plan, temporary, sums)


def check_backend(comm: Communicator, backend: str) -> None:
    """Raise :class:`ConfigError` unless checkpoints can be written with ``backend`` over ``comm``. Not collective."""
    if backend not in _BACKENDS:
        raise ConfigError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
    if backend == "mpio":
        mpio.check_available(comm)

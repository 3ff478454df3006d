"""List the checkpoints of a folder, including damaged ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from mpizero.checkpoint.folders import step_folders, step_of
from mpizero.checkpoint.format.manifest import MANIFEST_NAME, STATE_NAME
from mpizero.checkpoint.reader import open_checkpoint
from mpizero.errors import CheckpointDamagedError, CheckpointError


@dataclass(frozen=True)
class ListedCheckpoint:
    """Describe the checkpoint in one step folder.

    Attributes
    ----------
    path : str
        Path of the folder.
    step : int
        The step number in the name of the folder.
    nbytes : int
        Number of bytes of the two files of the checkpoint together.
    written : float or None
        Time at which the manifest was written, in seconds since 1970; None if there is no manifest.
    problem : str or None
        What is wrong with the manifest, the file sizes or the HDF5 structure; None if nothing is wrong. The arrays are
        not checked.
    attributes : dict
        Attributes that were saved with the arrays; empty if there is a problem.
    damaged : bool
        Whether a wrong checksum or size proves that the checkpoint is damaged. With another problem it may be
        undamaged.
    """

    path: str
    step: int
    nbytes: int
    written: float | None
    problem: str | None
    attributes: dict[str, Any]
    damaged: bool

    @property
    def state(self) -> str:
        """State of the checkpoint: "sound" (no problem), "damaged", or "unreadable" (another problem)."""
        return "sound" if self.problem is None else "damaged" if self.damaged else "unreadable"


def listing(folder: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """Return descriptions of all step folders in ``folder``, the lowest step number first. Not collective."""
    return [_listed(path) for path in reversed(step_folders(os.path.abspath(os.fspath(folder))))]


def _listed(path: str) -> ListedCheckpoint:
    problem: str | None = None
    attributes: dict[str, Any] = {}
    damaged = False
    try:
        with open_checkpoint(path, "self") as reader:
            attributes = reader.attributes
    except CheckpointError as error:
        problem, damaged = str(error), isinstance(error, CheckpointDamagedError)
    sizes = {name: _stat(os.path.join(path, name)) for name in (MANIFEST_NAME, STATE_NAME)}
    manifest = sizes[MANIFEST_NAME]
    return ListedCheckpoint(
        path,
        step_of(path) or 0,
        sum(found.st_size for found in sizes.values() if found is not None),
        None if manifest is None else manifest.st_mtime,
        problem,
        attributes,
        damaged,
    )


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except OSError:
        return None

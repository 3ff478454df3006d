"""Find the checkpoints to which a path on the command line refers."""

from __future__ import annotations

from pathlib import Path

from mpizero import checkpoint
from mpizero.checkpoint.folders import step_folders
from mpizero.errors import CheckpointError
from mpizero.text import notice


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path is one checkpoint, not a folder of checkpoints.

    Raises
    ------
    CheckpointError
        If there is no such folder.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is a folder, as is a run")
    return checkpoint.step_of(path.absolute()) is not None or (path / "manifest.json").exists()


def find_checkpoint(path: Path) -> Path:
    """Return the path itself if it is a checkpoint, else the newest sound checkpoint of the run in it.

    Prints to standard error which damaged checkpoints are newer, and which checkpoint is used instead.
    """
    if is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        passed: list[str] = []
        found = checkpoint.newest(folder, "self", report=passed.append)
        if found is not None:
            for line in (*passed, f"taken instead: {found}") if passed else ():
                notice(line)
            return Path(found)
        if passed:
            raise CheckpointError(f"{folder}: no good checkpoint in it; {passed[0]}")
    raise _none(path)


def find_folder(path: Path) -> Path:
    """Return the folder that contains the checkpoints of a run, sound or damaged."""
    folder = next((home for home in (path / "checkpoints", path) if step_folders(str(home))), None)
    if folder is None:
        raise _none(path)
    return folder


def _none(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds no checkpoint; give a run's folder, its checkpoint folder, or one checkpoint"
    )

"""Find the checkpoint to which a path refers: itself, or the newest one of a run."""

from __future__ import annotations

from pathlib import Path

from mpizero._util.text import notice
from mpizero.checkpoint.folders import newest, step_folders, step_of
from mpizero.errors import CheckpointError


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one checkpoint; otherwise it may be a run's folder or a folder of checkpoints.

    Raises
    ------
    CheckpointError
        If the path does not exist or is a file.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is a folder, as is a run")
    return step_of(path.absolute()) is not None or (path / "manifest.json").exists()


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest undamaged checkpoint of the run in that folder.

    If newer checkpoints are damaged, messages on standard error name them and the checkpoint that is used instead.

    Raises
    ------
    CheckpointError
        If the path does not exist, is a file, or has no undamaged checkpoint in it.
    """
    if is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        passed: list[str] = []
        found = newest(folder, "self", report=passed.append)
        if found is not None:
            for line in (*passed, f"taken instead: {found}") if passed else ():
                notice(line)
            return Path(found)
        if passed:
            raise CheckpointError(f"{folder}: no good checkpoint in it; {passed[0]}")
    raise _none(path)


def find_folder(path: Path) -> Path:
    """Return the folder with the checkpoints of a run: ``path/checkpoints`` or ``path``.

    Raises
    ------
    CheckpointError
        If neither contains a checkpoint, sound or damaged.
    """
    folder = next((home for home in (path / "checkpoints", path) if step_folders(str(home))), None)
    if folder is None:
        raise _none(path)
    return folder


def _none(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: holds no checkpoint; give a run's folder, its checkpoint folder, or one checkpoint"
    )

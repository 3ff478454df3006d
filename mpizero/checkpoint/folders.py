"""The checkpoint folder of a run: one ``step_<number>`` folder per checkpoint."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable

from mpizero.checkpoint.failures import borrowed, on_root
from mpizero.checkpoint.reader import read_manifest
from mpizero.checkpoint.stage import remove_folder, remove_leftovers
from mpizero.errors import CheckpointError, ConfigError

_NAME = re.compile(r"step_(\d{8,18})")


def step_folder(folder: str | os.PathLike[str], step: int) -> str:
    """Return where the checkpoint of ``step`` lies in the checkpoint folder. Not collective."""
    if step < 0:
        raise ConfigError(f"a step is >= 0, got {step}")
    return os.path.join(os.fspath(folder), f"step_{step:08d}")


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step of a step folder's path, None if it has another name. Not collective."""
    match = _NAME.fullmatch(os.path.basename(os.fspath(path)))
    return int(match.group(1)) if match else None


def step_folders(folder: str) -> list[str]:
    """Return the step folders, newest (by number, never by date) first. Not collective."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(step, name) for name in names if (step := step_of(name)) is not None]
    return [os.path.join(folder, name) for _, name in sorted(found, reverse=True)]


def _sound(folder: str, limit: int | None, report: Callable[[str], object]) -> list[str]:
    sound: list[str] = []
    for path in step_folders(folder):
        try:
            read_manifest(path)
        except (CheckpointError, OSError) as error:
            report(f"checkpoint passed over: {error}")
        else:
            sound.append(path)
        if limit is not None and len(sound) >= limit:
            break
    return sound


def newest(
    folder: str | os.PathLike[str], comm: object = None, report: Callable[[str], object] = warnings.warn
) -> str | None:
    """Return the newest step folder whose manifest, sizes and HDF5 structure are sound; None if there is none.

    Collective over ``comm``; rank 0 looks, and calls ``report`` with a line for each damaged one that it passes over.
    The arrays themselves are verified when they are read.
    """
    found = _look(folder, 1, comm, report)
    return found[0] if found else None


def sound(
    folder: str | os.PathLike[str], comm: object = None, report: Callable[[str], object] = warnings.warn
) -> list[str]:
    """Return every sound step folder, newest first: what to try in turn when the newest one fails to load.

    Collective over ``comm``.
    """
    return _look(folder, None, comm, report)


def _look(
    folder: str | os.PathLike[str], limit: int | None, comm: object, report: Callable[[str], object]
) -> list[str]:
    with borrowed(comm) as world:
        where = os.path.abspath(os.fspath(folder))
        return on_root(world, f"cannot look for checkpoints in {where}", lambda: _sound(where, limit, report))


def prune(folder: str | os.PathLike[str], keep: int, comm: object = None, *, keep_every: int = 0) -> list[str]:
    """Remove the step folders older than the newest ``keep`` sound ones, and leftovers; return what was removed.

    Steps that are multiples of ``keep_every``, unless that is 0, are kept for ever.

    Collective over ``comm``; rank 0 removes, each folder by one rename out of sight first. Damaged folders count for
    nothing: they never push out a sound one.

    Raises
    ------
    ConfigError
        If ``keep < 1``: the last good checkpoint is never removed; or ``keep_every < 0``.
    """
    if keep < 1:
        raise ConfigError(f"keep must be >= 1, got {keep}")
    if keep_every < 0:
        raise ConfigError(f"keep_every must be >= 0, got {keep_every}")

    def remove() -> list[str]:
        where = os.path.abspath(os.fspath(folder))
        if not os.path.isdir(where):
            return []
        remove_leftovers(where)
        kept = _sound(where, keep, lambda _: None)
        if len(kept) < keep:
            return []
        steps = step_folders(where)
        if not set(kept) <= set(steps):  # somebody deletes folders at this moment: the older ones may be the last
            return []
        old = steps[steps.index(kept[-1]) + 1 :]
        if keep_every:
            old = [path for path in old if (step_of(path) or 0) % keep_every]
        for path in reversed(old):
            remove_folder(path)
        return old

    with borrowed(comm) as world:
        return on_root(world, f"cannot remove old checkpoints of {os.fspath(folder)}", remove)

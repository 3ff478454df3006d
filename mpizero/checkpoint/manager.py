"""List, check and remove the checkpoints of a run, and mark the best one; each is a folder named ``step_<number>``.

A step folder is valid if nothing is wrong with its manifest, file sizes and HDF5 structure. Only a wrong checksum or
size proves damage. A checkpoint that cannot be opened for another reason may be undamaged; it is neither skipped
silently nor removed. The best checkpoint is marked by a link beside the step folders.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from mpizero.checkpoint.atomic_folder import (
    STEP_NAME,
    on_root,
    portable_error,
    remove_folder,
    remove_leftovers,
    sync_folder,
)
from mpizero.checkpoint.reader import read_manifest
from mpizero.comm.startup import communicator_of
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError


def step_folder(folder: str | os.PathLike[str], step: int) -> str:
    """Return the path of the checkpoint of ``step`` in ``folder``, a folder of checkpoints. Not collective.

    Examples
    --------
    >>> from mpizero import checkpoint
    >>> checkpoint.step_folder("run", 20)
    'run/step_00000020'
    """
    if step < 0:
        raise ConfigError(f"a step is >= 0, got {step}")
    return os.path.join(os.fspath(folder), f"step_{step:08d}")


_NAME = re.compile(STEP_NAME)


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the number in the folder name ``step_<number>``; None if ``path`` has another name. Not collective.

    Examples
    --------
    >>> from mpizero import checkpoint
    >>> checkpoint.step_of("run/step_00000020"), checkpoint.step_of("run/best")
    (20, None)
    """
    name = os.path.basename(os.fspath(path))
    return int(name.removeprefix("step_")) if _NAME.fullmatch(name) else None


def step_folders(folder: str) -> list[str]:
    """Return the paths of the folders ``step_<number>`` in ``folder``, the highest number first. Not collective."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    steps = [(step, name) for name in names if (step := step_of(name)) is not None]
    return [os.path.join(folder, name) for _, name in sorted(steps, reverse=True)]


@dataclass(frozen=True)
class StepFolder:
    """Describe a step folder and what is wrong with its manifest, file sizes or HDF5 structure.

    The arrays are not checked.

    Attributes
    ----------
    path : str
        Path of the folder.
    step : int
        The step number in the name of the folder.
    problem : str
        What is wrong with the checkpoint; "" if nothing is wrong.
    damaged : bool
        Whether a wrong checksum or size proves that the checkpoint is damaged. A checkpoint with another problem (no
        permission, a failing disk, a missing file, a newer version of the format) may be undamaged. It is never treated
        as if it did not exist.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(checkpoint.step_folder(run, 1), [], {}, comm="self")
    ...     with open(checkpoint.step_folder(run, 1) + "/state.h5", "r+b") as file:
    ...         size = file.truncate(100)  # a disk has lost the rest
    ...     found, = checkpoint.list_steps(run, comm="self")
    >>> found.step, found.valid, found.damaged
    (1, False, True)
    """

    path: str
    step: int
    problem: str = ""
    damaged: bool = False

    @property
    def valid(self) -> bool:
        """True if the checkpoint can be opened."""
        return not self.problem

    @property
    def unreadable(self) -> bool:
        """True if the checkpoint could not be opened, for a reason other than damage."""
        return bool(self.problem) and not self.damaged


def _look_at(path: str) -> StepFolder:
    step = step_of(path) or 0
    try:
        read_manifest(path)
    except CheckpointDamagedError as error:
        return StepFolder(path, step, str(error), damaged=True)
    except (CheckpointError, OSError) as error:
        return StepFolder(path, step, portable_error(error).message)
    return StepFolder(path, step)


def list_steps(folder: str | os.PathLike[str], comm: object = None) -> list[StepFolder]:
    """Return a description of every step folder in ``folder``, newest first, including damaged ones.

    Collective over ``comm``; only rank 0 reads the folders.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2, 3):
    ...         checkpoint.write(checkpoint.step_folder(run, step), [], {}, comm="self")
    ...     print([(found.step, found.valid) for found in checkpoint.list_steps(run, comm="self")])
    [(3, True), (2, True), (1, True)]
    """
    where = os.path.abspath(os.fspath(folder))
    with communicator_of(comm) as world:
        return on_root(world, _cannot_look(where), lambda: [_look_at(path) for path in step_folders(where)])


def _cannot_look(where: str) -> str:
    return f"cannot look for checkpoints in {where}"


def latest(
    folder: str | os.PathLike[str], comm: object = None, report: Callable[[str], object] = warnings.warn
) -> str | None:
    """Return the path of the newest step folder in ``folder`` that is valid; None if there is none.

    A step folder is valid if nothing is wrong with its manifest, file sizes and HDF5 structure. Arrays are verified
    later, when they are read. Collective over ``comm``; only rank 0 reads the folders. It calls ``report`` with one
    line of text for each damaged checkpoint that is newer than the returned one.

    Raises
    ------
    CheckpointError
        If a checkpoint newer than the newest valid one cannot be opened, and no checksum or size proves that it is
        damaged.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2, 3):
    ...         checkpoint.write(checkpoint.step_folder(run, step), [], {}, comm="self")
    ...     print(checkpoint.step_of(checkpoint.latest(run, comm="self")))
    3
    >>> print(checkpoint.latest("no such folder", comm="self"))
    None
    """
    where = os.path.abspath(os.fspath(folder))

    def look() -> str | None:
        unreadable: list[str] = []
        best = None
        for entry in map(_look_at, step_folders(where)):
            if entry.valid:
                best = entry.path
                break
            if entry.damaged:
                report(_passed_over(entry))
            else:
                unreadable.append(entry.problem)
        if unreadable:
            raise CheckpointError(
                f"what is newest cannot be opened: {'; '.join(unreadable)}; mend that, or name the checkpoint to take"
                f"{f', as {best}' if best else ''}"
            )
        return best

    with communicator_of(comm) as world:
        return on_root(world, _cannot_look(where), look)


def _passed_over(entry: StepFolder) -> str:
    return f"checkpoint passed over: {entry.problem}"


@dataclass(frozen=True)
class RemovalFailure:
    """Describe an old checkpoint that :func:`prune` could not remove.

    Attributes
    ----------
    path : str
        Path of the folder.
    reason : str
        Why the folder was not removed; the text does not contain the path.

    Examples
    --------
    >>> import os
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(checkpoint.step_folder(run, 2), [], {}, comm="self")
    ...     os.symlink("archive", checkpoint.step_folder(run, 1))
    ...     removed = checkpoint.prune(run, 1, comm="self", report=lambda failure: print(failure.reason))
    it is a link; remove it by hand
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"old checkpoint not removed: {self.path}: {self.reason}"


def _warn(failure: RemovalFailure) -> None:
    warnings.warn(str(failure), stacklevel=2)


def list_valid(
    folder: str | os.PathLike[str], comm: object = None, report: Callable[[str], object] = warnings.warn
) -> list[str]:
    """Return the paths of all valid step folders in ``folder``, newest first.

    A step folder is valid if nothing is wrong with its manifest, file sizes and HDF5 structure. If the newest one fails
    to load, the caller can try the next one. Collective over ``comm``; rank 0 calls ``report`` with one line of text
    for each step folder that is not valid. If the list is empty, :func:`list_steps` tells whether there are step
    folders at all.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2, 3):
    ...         checkpoint.write(checkpoint.step_folder(run, step), [], {}, comm="self")
    ...     print([checkpoint.step_of(path) for path in checkpoint.list_valid(run, comm="self")])
    [3, 2, 1]
    """
    paths = []
    with communicator_of(comm) as world:
        for entry in list_steps(folder, world):
            if entry.valid:
                paths.append(entry.path)
            elif world.rank == 0:
                report(_passed_over(entry))
    return paths


def prune(
    folder: str | os.PathLike[str],
    keep: int,
    comm: object = None,
    *,
    keep_every: int = 0,
    spare: Collection[int] = (),
    report: Callable[[RemovalFailure], object] = _warn,
) -> list[str]:
    """Remove all step folders older than the newest ``keep`` valid ones; return the paths of the removed folders.

    A step folder is valid if nothing is wrong with its manifest, file sizes and HDF5 structure. If there are fewer than
    ``keep`` valid folders, none is removed. Steps that are multiples of ``keep_every`` are never removed; with 0 there
    are no such steps. The steps in ``spare`` are never removed either. Older damaged checkpoints are removed. A
    checkpoint that cannot be opened but may be undamaged is not removed, and neither is a link. Hidden folders that
    killed saves and removals have left are removed, too.

    Collective over ``comm``; only rank 0 removes. It renames each folder to a hidden name before it deletes the folder.
    If it cannot remove a folder, it calls ``report`` with a :class:`RemovalFailure` and continues with the next folder.

    Raises
    ------
    ConfigError
        If ``keep < 1``, because the last valid checkpoint is never removed, or if ``keep_every < 0``.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     for step in (1, 2, 3):
    ...         checkpoint.write(checkpoint.step_folder(run, step), [], {}, comm="self")
    ...     print([checkpoint.step_of(path) for path in checkpoint.prune(run, 1, comm="self", spare=[2])])
    [1]
    """
    if keep < 1:
        raise ConfigError(f"keep must be >= 1, got {keep}")
    if keep_every < 0:
        raise ConfigError(f"keep_every must be >= 0, got {keep_every}")
    where = os.path.abspath(os.fspath(folder))

    def remove() -> list[str]:
        removed: list[str] = []
        try:
            remove_leftovers(where)
            old = [path for path in _beyond(where, keep) if not keep_every or (step_of(path) or 0) % keep_every]
            old = [path for path in old if step_of(path) not in spare]
        except OSError as error:
            report(RemovalFailure(error.filename or where, error.strerror or str(error)))
            old = []
        for path in reversed(old):
            for failure in _remove(path, removed):
                report(failure)
        return removed

    with communicator_of(comm) as world:
        return on_root(world, f"cannot remove old checkpoints of {os.fspath(folder)}", remove)


def _beyond(where: str, keep: int) -> list[str]:
    """Return the step folders in ``where`` that are older than the newest ``keep`` valid ones, newest first.

    A step folder is valid if nothing is wrong with its manifest, file sizes and HDF5 structure. With fewer than
    ``keep`` valid folders, return an empty list.
    """
    valid: list[str] = []
    for entry in map(_look_at, step_folders(where)):
        if entry.valid:
            valid.append(entry.path)
        if len(valid) == keep:
            break
    else:
        return []
    steps = step_folders(where)
    if not set(valid) <= set(steps):  # another process deletes folders now: the older ones may be the last
        return []
    return steps[steps.index(valid[-1]) + 1 :]


def _remove(path: str, removed: list[str]) -> Iterator[RemovalFailure]:
    """Remove a step folder and append its path to ``removed``; yield a RemovalFailure if a part of it remains."""
    if os.path.islink(path):
        yield RemovalFailure(path, "it is a link; remove it by hand")
        return
    if (entry := _look_at(path)).unreadable:
        if os.path.lexists(path):  # else another process was faster
            yield RemovalFailure(path, f"it cannot be opened, and may be whole: {entry.problem}")
        return
    try:
        if remove_folder(path):
            removed.append(path)
    except OSError as error:
        if not os.path.lexists(path):
            removed.append(path)
        yield RemovalFailure(path, error.strerror or str(error))


#: Name of the link to a run's best checkpoint, beside the step folders.
BEST = "best"


def marked_best(folder: str | os.PathLike[str]) -> int | None:
    """Return the step to which the link ``best`` in ``folder`` points; None if there is no link. Not collective.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.mark_best(run, 2, comm="self")
    ...     print(checkpoint.marked_best(run))
    2
    """
    try:
        return step_of(os.readlink(os.path.join(os.fspath(folder), BEST)))
    except OSError:
        return None


def mark_best(folder: str | os.PathLike[str], step: int | None, comm: object = None) -> None:
    """Make the link ``best`` in ``folder`` point to the checkpoint of ``step``; None removes the link.

    An existing link is replaced atomically: a link to a whole checkpoint exists at every moment, even if the process is
    killed. Collective over ``comm``; only rank 0 changes the link.

    Raises
    ------
    CheckpointError
        If ``best`` exists and is no link, or the link cannot be made.

    Examples
    --------
    >>> import tempfile
    >>> from mpizero import checkpoint
    >>> with tempfile.TemporaryDirectory() as run:
    ...     checkpoint.write(checkpoint.step_folder(run, 2), [], {"loss": 0.5}, comm="self")
    ...     checkpoint.mark_best(run, 2, comm="self")
    ...     with checkpoint.open_checkpoint(f"{run}/best", comm="self") as reader:
    ...         print(reader.attributes)
    {'loss': 0.5}
    """
    where = os.path.abspath(os.fspath(folder))
    link, new = os.path.join(where, BEST), os.path.join(where, f".{BEST}.new")

    def point() -> None:
        if os.path.lexists(link) and not os.path.islink(link):
            raise CheckpointError(f"{link} is no link to a checkpoint: rename it")
        if step is None:
            if os.path.islink(link):
                os.unlink(link)
            return
        name = os.path.basename(step_folder(where, step))
        if os.path.islink(link) and os.readlink(link) == name:
            return
        if os.path.lexists(new):  # of a process that was killed
            os.unlink(new)
        os.symlink(name, new)
        os.replace(new, link)
        sync_folder(where)

    with communicator_of(comm) as world:
        on_root(world, f"cannot mark the best checkpoint of {os.fspath(folder)}", point)

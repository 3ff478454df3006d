"""Manage the files of one run: metrics, events, marker, lock, checkpoints. Files of earlier runs are kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from mpizero._util.checks import home_path
from mpizero.checkpoint.folders import BEST, step_folders
from mpizero.checkpoint.format import open_regular
from mpizero.errors import CheckpointError, ExitStatus, MpizeroError
from mpizero.train.record.events import EVENTS, METRICS, RESULT, SUPERSEDED

#: Key of the marker file with the reason for which a callback has ended the run.
DECISION = "decision"


class RunFolderError(MpizeroError):
    """Report that a run folder cannot be used: not writable, full, or in use by another job."""

    status = ExitStatus.INPUT_OUTPUT


class RunFolder:
    """Manage the folder that holds a run.

    With ``checkpoint.folder = "run/checkpoints"`` the run's folder is ``run``. A checkpoint folder with another name
    than ``checkpoints`` is itself the run's folder. All methods run on one rank only; callers tell the other ranks of
    errors.

    Parameters
    ----------
    checkpoints : path
        The folder of checkpoints.
    """

    def __init__(self, checkpoints: str | Path) -> None:
        self.checkpoints = home_path(checkpoints).absolute()
        self.root = self.checkpoints.parent if self.checkpoints.name == "checkpoints" else self.checkpoints
        # Without buffers: what a full disk did not take must not be tried again when files are closed.
        self._lock: FileIO | None = None
        self._appended: dict[str, FileIO] = {}
        self._taken: dict[Path, tuple[int, int]] = {}

    @property
    def metrics(self) -> Path:
        """Path of the metrics file, which has one line of JSON for each step."""
        return self.root / METRICS

    @property
    def events(self) -> Path:
        """Path of the file of events, which has one line of JSON for each (``train/record/events.py``)."""
        return self.root / EVENTS

    @property
    def marker(self) -> Path:
        """Path of a file that exists once the run has ended successfully; it holds the result as a line of JSON."""
        return self.root / RESULT

    @property
    def stop_file(self) -> Path:
        """Return the path of the file that a user creates to make the run save and stop."""
        return self.root / "STOP"

    @property
    def stopped(self) -> Path:
        """Return the path to which :attr:`stop_file` is renamed when the run has stopped; :meth:`open` removes it."""
        return self.root / "STOPPED"

    def obey_stop(self) -> None:
        """Rename :attr:`stop_file` to :attr:`stopped` if it exists, so that a resumed run does not stop again."""
        try:
            if os.path.lexists(self.stop_file):
                _remove(self.stopped)
                self.stop_file.rename(self.stopped)
        except OSError as error:
            raise self._failed("the file STOP cannot be renamed", error) from None

    def open(self) -> None:
        """Create the run's folder and the checkpoint folder, check that they are writable, and lock the run's folder.

        The lock keeps other jobs out.

        Raises
        ------
        RunFolderError
            If that fails. The message names the folder and the reason.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for folder in {self.root, self.checkpoints}:
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            self._lock = (self.root / ".lock").open("a+b", buffering=0)
            self._take_lock(self._lock)
            _remove(self.stopped)
            self._taken = {folder: _identity(folder) for folder in (self.root, self.checkpoints)}
        except OSError as error:
            self.close()
            raise self._failed("cannot be used", error) from None

    def check(self) -> None:
        """Raise :class:`RunFolderError` if the run's folder or the checkpoint folder was removed or replaced.

        Without this check, a run could save into a new folder that has no lock and no metrics, or on another disk.
        """
        for folder, identity in self._taken.items():
            try:
                same = _identity(folder) == identity
            except OSError as error:
                raise self._failed("has been removed since the run began", error) from None
            if not same:
                raise RunFolderError(f"run folder {self.root}: {folder} is another folder than when the run began")

    @property
    def bad_steps(self) -> Path:
        """Path of the folder with the samples of skipped steps."""
        return self.root / "bad_steps"

    def set_aside(self) -> Path | None:
        """Move all files of an earlier run into a new folder below ``earlier``.

        Return that folder, or None if there are no such files.
        """
        steps = [Path(path) for path in step_folders(str(self.checkpoints))]
        if (link := self.checkpoints / BEST).is_symlink():
            steps.append(link)
        written = (self.metrics, self.superseded, self.events, self.marker, self.bad_steps)
        return self._move_aside(steps, [path for path in written if path.exists()])

    def set_steps_aside(self, steps: Iterable[str]) -> Path | None:
        """Move the checkpoints at the paths ``steps``, given newest first, into a new folder below ``earlier``.

        Return that folder, or None if ``steps`` is empty.
        """
        moved, link = [Path(path) for path in steps], self.checkpoints / BEST
        if link.is_symlink() and any(path.name == os.readlink(link) for path in moved):
            moved.append(link)
        return self._move_aside(moved, [])

    def _move_aside(self, steps: Sequence[Path], files: Sequence[Path]) -> Path | None:
        """Move checkpoints, given newest first, and files into a new folder below ``earlier``; return that folder.

        After an error all are moved back. The oldest checkpoint is moved first, so that the newest is still in place
        if the process is killed meanwhile.
        """
        if not steps and not files:
            return None
        done: list[tuple[Path, Path]] = []
        made: list[Path] = []
        try:
            number = 1
            while any((top / "earlier" / f"{number:04d}").exists() for top in (self.root, self.checkpoints)):
                number += 1
            home = self.root / "earlier" / f"{number:04d}"
            # A checkpoint folder may be a link to another file system, which cannot be left by renaming.
            same = self.root.stat().st_dev == self.checkpoints.stat().st_dev
            place = (home if same else self.checkpoints / "earlier" / home.name) / "checkpoints"
            for folder in (home, place):
                folder.mkdir(parents=True, exist_ok=True)
                made.append(folder)
            for path in (*reversed(steps), *files):
                target = (place if path in steps else home) / path.name
                _move(path, target)
                done.append((path, target))
        except OSError as error:
            for path, target in reversed(done):
                with contextlib.suppress(OSError):
                    _move(target, path)
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise self._failed("what an earlier run left in it cannot be moved aside", error) from None
        return home if files else place

    @property
    def superseded(self) -> Path:
        """Path of the file with the metrics of steps that were repeated after a resume, as they were the first time."""
        return self.root / SUPERSEDED

    def continue_metrics(self, step: int) -> int:
        """Move metrics of steps after ``step``, which will be repeated, to :attr:`superseded`; remove the marker.

        Return how many lines of steps were moved; one that was cut when a job was killed is none.
        """
        try:
            lines = [line.removesuffix(b"\n") for line in self._lines(self.metrics)]
            kept = [line for line in lines if _number_in(line, "step", math.inf) <= step]
            rest = [line for line in lines if _number_in(line, "step", math.inf) > step]
            if rest:
                with self.superseded.open("ab") as file:
                    file.writelines(line + b"\n" for line in rest)
                self._replace(self.metrics, kept)
            self.marker.unlink(missing_ok=True)
            return sum(_number_in(line, "step", math.inf) < math.inf for line in rest)
        except OSError as error:
            raise self._failed("its metrics cannot be rewritten", error) from None
        except CheckpointError as error:
            raise RunFolderError(f"run folder {self.root}: its metrics cannot be rewritten: {error}") from None

    def continue_events(self) -> int:
        """Return the number of the visit that begins; remove a last event that was cut when a job was killed."""
        try:
            lines = self._lines(self.events)
            if lines and not lines[-1].endswith(b"\n"):  # another file, so that who follows it reads it anew
                self._replace(self.events, [line.removesuffix(b"\n") for line in lines[:-1]])
            return 1 + max((_number_in(line, "visit", -1) for line in lines), default=-1)
        except OSError as error:
            raise self._failed("its events cannot be continued", error) from None
        except CheckpointError as error:
            raise RunFolderError(f"run folder {self.root}: its events cannot be continued: {error}") from None

    @staticmethod
    def _lines(path: Path) -> list[bytes]:
        """Return the lines of a file as bytes, without parsing them; none if there is no such file."""
        if not path.exists():
            return []
        with os.fdopen(open_regular(os.path.realpath(path)), "rb") as file:
            return list(file)

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Append ``line`` to the metrics file, as one line of JSON."""
        self._append(METRICS, line, "metrics cannot be written")

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Append ``event`` to the file of events, as one line of JSON."""
        self._append(EVENTS, event, "events cannot be written")

    def _append(self, name: str, line: Mapping[str, Any], problem: str) -> None:
        try:
            file = self._appended.get(name)
            if file is None:
                file = self._appended[name] = (self.root / name).open("ab", buffering=0)
            _write(file, json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise self._failed(problem, error) from None

    def complete(self, result: Mapping[str, Any]) -> None:
        """Write the result into the marker file, whose existence says that the run has ended successfully."""
        try:
            self._replace(self.marker, [json.dumps(result, allow_nan=False).encode()])
        except OSError as error:
            raise self._failed("the marker cannot be written", error) from None
        self.obey_stop()

    def decision(self, step: int) -> str:
        """Return the reason for which a callback has ended the run after ``step``, as the marker has it, or ""."""
        try:
            found = json.loads(self.marker.read_bytes())
            return str(found[DECISION]) if found["steps"] == step else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def close(self) -> None:
        """Close the files, and release the lock, also where closing fails."""
        with contextlib.ExitStack() as closing:
            for file in (self._lock, *self._appended.values()):
                if file is not None:
                    closing.callback(file.close)
            self._appended, self._lock = {}, None

    def _take_lock(self, file: FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200).decode(errors="replace").strip() or "another process"
            self.close()
            raise RunFolderError(f"run folder {self.root}: in use by {owner}; choose another folder") from None
        except OSError:
            return  # a file system without locks: go on unprotected, as everywhere else on it
        file.seek(0)
        file.truncate()
        _write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    @staticmethod
    def _replace(path: Path, lines: Iterable[bytes]) -> None:
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _failed(self, what: str, error: OSError) -> RunFolderError:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(self.root) else ""
        rights = _rights(Path(error.filename or self.root), self.root) if isinstance(error, PermissionError) else ""
        return RunFolderError(f"run folder {self.root}: {what}: {error.strerror or error}{where}{rights}")


def _remove(path: Path) -> None:
    """Remove a file, or an empty folder that somebody made in its place; do nothing if there is none."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of ``data``; raise OSError if that is not possible."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _move(path: Path, target: Path) -> None:
    """Rename a file, folder or link; a relative link is changed so that it still points to its target.

    The link to the best checkpoint is not changed: its target is moved with it.
    """
    if path.is_symlink() and path.name != BEST and not (meant := path.readlink()).is_absolute():
        target.symlink_to(path.parent / meant)
        path.unlink()
    else:
        path.rename(target)


def _rights(path: Path, root: Path) -> str:
    """Return who owns a path that may not be used, or the folder where it was to be made, and what to do."""
    there = next((one for one in (path, *path.parents) if os.access(one, os.F_OK)), Path("/"))
    found = there.stat()
    try:
        owner = there.owner()
    except (KeyError, OSError):
        owner = f"user {found.st_uid}"
    owns = f"{there} belongs to {owner} with mode {stat.filemode(found.st_mode)}"
    opened = there if there in root.parents else root
    return f": {owns}; let the owner say chmod -R g+w {opened} (of a group that you share), or choose another folder"


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _number_in(line: bytes, name: str, default: float) -> Any:
    """Return the whole number ``name`` in a line of JSON; ``default`` if the line is incomplete or has none."""
    try:
        found = json.loads(line)[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return default
    return found if type(found) is int else default

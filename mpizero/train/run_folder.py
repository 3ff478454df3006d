"""Manage the folder of a run: metrics, events, result, lock and checkpoints; restore a run from a checkpoint.

:class:`RunFolder` manages the files, and moves those of an earlier run to a subfolder. :class:`RunState` is a run's
state other than arrays, and :func:`restore` loads the checkpoint from which a run continues. :class:`Saver` writes
checkpoints, either synchronously or in a thread during the next steps.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpizero import checkpoint
from mpizero._util.checks import home_path, whole
from mpizero._util.text import notice, write_atomic
from mpizero.checkpoint import RemovalFailure, StepFolder
from mpizero.checkpoint.atomic_folder import remove_leftovers
from mpizero.checkpoint.format import open_regular
from mpizero.checkpoint.manager import BEST, step_folders
from mpizero.checkpoint.writer import check_backend
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks, from_rank_0
from mpizero.comm.startup import versions
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError, ExitStatus, MpizeroError
from mpizero.sharding import state_dict
from mpizero.sharding.saved_attributes import read_attribute, recorded_tiles
from mpizero.train.config.schema import changes, described_change, overridable
from mpizero.train.data_identity import check_data, touched
from mpizero.train.events import EVENTS, METRICS, RESULT, SUPERSEDED, Progress
from mpizero.train.setup import RunSetup, finite
from mpizero.train.stopping import WallTime

if TYPE_CHECKING:
    from mpizero.checkpoint import PendingSave


#: Key, in the file ``run_complete``, of the reason for which a callback has ended the run.
DECISION = "decision"


class RunFolderError(MpizeroError):
    """Report that a run folder cannot be used: not writable, full, or in use by another job."""

    status = ExitStatus.INPUT_OUTPUT


class RunFolder:
    """Manage the files of a run in its folder.

    With ``checkpoint.folder = "run/checkpoints"`` the run's folder is ``run``. A checkpoint folder with another name
    than ``checkpoints`` is itself the run's folder. All methods are called on one rank only; the caller propagates
    errors to the other ranks.

    Parameters
    ----------
    checkpoints : path
        The folder of checkpoints.

    Attributes
    ----------
    checkpoints, root : Path
        The folder of checkpoints, and the folder of the run.
    metrics, events : Path
        Files with one line of JSON for each step, and for each event (``train/events.py``).
    superseded : Path
        File with the metrics that an earlier session wrote for steps that were repeated after a resume.
    marker : Path
        File that exists if the run is complete; it contains the result as a line of JSON.
    stop_file, stopped : Path
        File that a user creates to make the run save and stop; path to which that file is renamed when the run has
        stopped. :meth:`open` removes the renamed file.
    bad_steps : Path
        Folder with the samples of skipped steps.
    """

    def __init__(self, checkpoints: str | Path) -> None:
        self.checkpoints = home_path(checkpoints).absolute()
        self.root = self.checkpoints.parent if self.checkpoints.name == "checkpoints" else self.checkpoints
        self.metrics, self.events, self.superseded, self.marker = (
            self.root / name for name in (METRICS, EVENTS, SUPERSEDED, RESULT)
        )
        self.stop_file, self.stopped, self.bad_steps = (self.root / name for name in ("STOP", "STOPPED", "bad_steps"))
        # Without buffers: what a full disk did not take must not be tried again when files are closed.
        self._lock: FileIO | None = None
        self._appended: dict[str, FileIO] = {}
        self._taken: dict[Path, tuple[int, int]] = {}

    def obey_stop(self) -> None:
        """Rename :attr:`stop_file` to :attr:`stopped` if it exists, so that a resumed run does not stop again."""
        with self._errors_say("the file STOP cannot be renamed"):
            if os.path.lexists(self.stop_file):
                _remove(self.stopped)
                self.stop_file.rename(self.stopped)

    def open(self) -> None:
        """Create the run's folder and the checkpoint folder, check that they are writable, and lock the run's folder.

        While the folder is locked, another job that opens it gets an error. On a file system without locks, the folder
        is used without one.

        Raises
        ------
        RunFolderError
            If a folder cannot be created or written, or another job has locked it. The message names the folder and the
            reason.
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
            with self._errors_say("has been removed since the run began"):
                same = _identity(folder) == identity
            if not same:
                raise RunFolderError(f"run folder {self.root}: {folder} is another folder than when the run began")

    def set_aside(self) -> Path | None:
        """Move all files of an earlier run into a new subfolder of ``earlier``.

        Return that subfolder, or its folder ``checkpoints`` if there were only checkpoints; None if there was nothing.
        """
        steps = [Path(path) for path in step_folders(str(self.checkpoints))]
        if (link := self.checkpoints / BEST).is_symlink():
            steps.append(link)
        written = (self.metrics, self.superseded, self.events, self.marker, self.bad_steps)
        return self._move_aside(steps, [path for path in written if path.exists()])

    def set_steps_aside(self, steps: Iterable[str]) -> Path | None:
        """Move the checkpoints at the paths ``steps``, given newest first, into a new subfolder of ``earlier``.

        Return the folder ``checkpoints`` in that subfolder, or None if ``steps`` is empty.
        """
        moved, link = [Path(path) for path in steps], self.checkpoints / BEST
        if link.is_symlink() and any(path.name == os.readlink(link) for path in moved):
            moved.append(link)
        return self._move_aside(moved, [])

    def _move_aside(self, steps: Sequence[Path], files: Sequence[Path]) -> Path | None:
        """Move checkpoints, given newest first, and files into a new subfolder of ``earlier``.

        Return that subfolder, or its folder ``checkpoints`` if there are no ``files``; None if there is nothing to
        move. After an error everything is moved back. The oldest checkpoint is moved first, so that the newest is still
        in the checkpoint folder if the process is killed meanwhile.
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
            destination = (home if same else self.checkpoints / "earlier" / home.name) / "checkpoints"
            for folder in (home, destination):
                folder.mkdir(parents=True, exist_ok=True)
                made.append(folder)
            for path in (*reversed(steps), *files):
                target = (destination if path in steps else home) / path.name
                _move(path, target)
                done.append((path, target))
        except OSError as error:
            for path, target in reversed(done):
                with suppress(OSError):
                    _move(target, path)
            for folder in reversed(made):
                with suppress(OSError):
                    folder.rmdir()
            raise self._failed("what an earlier run left in it cannot be moved aside", error) from None
        return home if files else destination

    def continue_metrics(self, step: int) -> int:
        """Move the metrics of steps after ``step``, which will be repeated, to the file :attr:`superseded`.

        Remove :attr:`marker`, the file that says that the run is complete. Return the number of steps whose metrics
        were moved; a last line that is truncated because the job was killed is moved, too, but not counted.
        """
        with self._errors_say("its metrics cannot be rewritten"):
            lines = [line.removesuffix(b"\n") for line in self._lines(self.metrics)]
            retained = [line for line in lines if _number_in(line, "step", math.inf) <= step]
            repeated = [line for line in lines if _number_in(line, "step", math.inf) > step]
            if repeated:
                with self.superseded.open("ab") as file:
                    file.writelines(line + b"\n" for line in repeated)
                write_atomic(self.metrics, b"".join(line + b"\n" for line in retained))
            self.marker.unlink(missing_ok=True)
        return sum(_number_in(line, "step", math.inf) < math.inf for line in repeated)

    def continue_events(self) -> int:
        """Return the number of the new session: 0 for the start of the run, and one more for each resume.

        Remove a last line of :attr:`events` that is truncated because the job was killed.
        """
        with self._errors_say("its events cannot be continued"):
            lines = self._lines(self.events)
            if lines and not lines[-1].endswith(b"\n"):  # a new file, so that a reader that follows it starts again
                write_atomic(self.events, b"".join(lines[:-1]))
        return 1 + max((_number_in(line, "visit", -1) for line in lines), default=-1)

    @staticmethod
    def _lines(path: Path) -> list[bytes]:
        """Return the lines of a file as bytes, without parsing them; an empty list if there is no such file."""
        if not path.exists():
            return []
        with os.fdopen(open_regular(os.path.realpath(path)), "rb") as file:
            return list(file)

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Append ``line`` to the metrics file, as one line of JSON."""
        self._append(METRICS, line, "metrics cannot be written")

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Append ``event`` to the events file, as one line of JSON."""
        self._append(EVENTS, event, "events cannot be written")

    def _append(self, name: str, line: Mapping[str, Any], problem: str) -> None:
        with self._errors_say(problem):
            file = self._appended.get(name)
            if file is None:
                file = self._appended[name] = (self.root / name).open("ab", buffering=0)
            _write(file, json.dumps(line, allow_nan=False).encode() + b"\n")

    def complete(self, result: Mapping[str, Any]) -> None:
        """Write the result to :attr:`marker`, the file that says that the run is complete; call :meth:`obey_stop`."""
        with self._errors_say("the marker cannot be written"):
            write_atomic(self.marker, json.dumps(result, allow_nan=False).encode() + b"\n")
        self.obey_stop()

    def decision(self, step: int) -> str:
        """Return the reason, stored in :attr:`marker`, for which a callback has ended the run after ``step``, or ""."""
        try:
            result = json.loads(self.marker.read_bytes())
            return str(result[DECISION]) if result["steps"] == step else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def close(self) -> None:
        """Close the files, and release the lock even if closing a file fails."""
        with ExitStack() as closing:
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

    @contextmanager
    def _errors_say(self, problem: str) -> Iterator[None]:
        """Convert an OSError or CheckpointError of a ``with`` block to a :class:`RunFolderError` about ``problem``."""
        try:
            yield
        except OSError as error:
            raise self._failed(problem, error) from None
        except CheckpointError as error:  # about a file that is no regular one
            raise RunFolderError(f"run folder {self.root}: {problem}: {error}") from None

    def _failed(self, what: str, error: OSError) -> RunFolderError:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(self.root) else ""
        rights = _rights(Path(error.filename or self.root), self.root) if isinstance(error, PermissionError) else ""
        return RunFolderError(f"run folder {self.root}: {what}: {error.strerror or error}{where}{rights}")


def _remove(path: Path) -> None:
    """Remove the file or empty folder at ``path``; do nothing if there is none."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of ``data``, by several system calls if needed."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _move(path: Path, target: Path) -> None:
    """Rename a file, folder or symbolic link; a relative link is rewritten so that it still points to its target.

    The link ``best`` is not rewritten, because its target, the best checkpoint, is moved to the same folder.
    """
    if path.is_symlink() and path.name != BEST and not (meant := path.readlink()).is_absolute():
        target.symlink_to(path.parent / meant)
        path.unlink()
    else:
        path.rename(target)


def _rights(path: Path, root: Path) -> str:
    """Return advice for a path that this user may not write: who owns it (or its nearest existing parent)."""
    there = next((one for one in (path, *path.parents) if os.access(one, os.F_OK)), Path("/"))
    status = there.stat()
    try:
        owner = there.owner()
    except (KeyError, OSError):
        owner = f"user {status.st_uid}"
    owns = f"{there} belongs to {owner} with mode {stat.filemode(status.st_mode)}"
    opened = there if there in root.parents else root
    return f": {owns}; let the owner say chmod -R g+w {opened} (of a group that you share), or choose another folder"


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _number_in(line: bytes, name: str, default: float) -> Any:
    """Return the integer ``name`` in a line of JSON; ``default`` if the line is incomplete or has no such integer."""
    try:
        value = json.loads(line)[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return default
    return value if type(value) is int else default


#: Name of the checkpoint attribute with the state of a training run.
TRAINING = "training"


@dataclass(frozen=True)
class RunState:
    """Hold the part of a run's state that changes from step to step, other than arrays.

    Attributes
    ----------
    loss : float or None
        Loss of the last step; None if it was not finite.
    best : dict
        State of :class:`~mpizero.train.setup.Improvement`; empty if no metric is followed.
    numbers : dict
        State of :class:`~mpizero.train.loop.NumberWatch`.
    callbacks : dict
        States of the callbacks, by name.
    stopped : str
        The reason for which a callback has ended the run at this step; "" if none has.
    overrides : list of dict
        Settings that were changed when the run was resumed, each as a dict with "step", "key", "was" and "now".
    """

    loss: float | None = None
    best: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""
    overrides: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SavedRun:
    """Hold the state of a training run that a checkpoint stores beside the arrays.

    Attributes
    ----------
    step : int
        Number of steps done; times the global batch, this is the number of samples consumed.
    state : RunState
        The part of the state that changes from step to step.
    config : dict
        The whole configuration of the run.
    data : str
        Fingerprint of the training data.
    validation : str
        Fingerprint of the validation samples; "" if there were none.
    code : mapping of str to str
        SHA-256 of the files of the user's functions that made model and data, by file name.
    contents : mapping
        Result of :func:`~mpizero.train.data_identity.shared_contents`; empty in checkpoints of older versions.
    """

    step: int
    state: RunState
    config: dict[str, dict[str, Any]]
    data: str
    validation: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, attributes: Mapping[str, Any], path: str | Path) -> SavedRun:
        """Read and check a run's state in a checkpoint's attributes, which :func:`saved_attributes` has made.

        Not collective. ``path`` is the checkpoint's path for error messages.

        Raises
        ------
        CheckpointError
            If the checkpoint was not written by ``mpizero train`` or :class:`mpizero.Trainer`.
        """
        try:
            training = attributes[TRAINING]
            parts = {name: dict(training.get(name) or {}) for name in ("best", "numbers", "callbacks")}
            stopped, overridden = str(training.get("stopped") or ""), list(training.get("overrides") or ())
            state = RunState(training["loss"], **parts, stopped=stopped, overrides=overridden)
            config = {str(name): dict(section) for name, section in dict(training["config"]).items()}
            data, validation = str(training["data"]), str(training.get("validation") or "")
            code, contents = (dict(training.get(name) or {}) for name in ("code", "contents"))
            return cls(whole()(training["step"]), state, config, data, validation, code, contents)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: not written by `mpizero train` or mpizero.Trainer: it holds no training run's state"
            ) from None


def saved_attributes(setup: RunSetup, step: int, state: RunState, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the checkpoint attributes with the state of the run after ``step`` steps.

    Not collective. ``versions`` are the versions of Python and of libraries, by name.
    """
    loop, record = setup.loop, setup.record
    attributes = {
        "step": step,
        "samples": step * loop.global_batch,
        "seed": loop.seed,
        "loss": finite(state.loss),
        "config": record.settings,
        "data": record.fingerprint,
        **({"validation": validation} if (validation := record.validation_fingerprint) else {}),
        **({"contents": record.contents} if record.contents else {}),
        "versions": dict(versions),
        **({"code": dict(record.code)} if record.code else {}),
    }
    return {TRAINING: attributes | {name: part for name, part in vars(state).items() if part and name != "loss"}}


def restore(
    setup: RunSetup, folder: RunFolder, comm: Communicator, progress: Progress, step: int | None = None
) -> tuple[SavedRun | None, list[StepFolder]]:
    """Restore the newest undamaged checkpoint of a run, or the checkpoint of ``step``.

    Return the restored state, or None if the folder has no checkpoint, and a list of the checkpoints of later steps,
    newest first, which the caller moves to another folder. Collective over ``comm``. No file is changed. Without
    ``step``, damaged newer checkpoints are skipped. A newer checkpoint that cannot be opened for another reason is an
    error, because it may be undamaged.

    Raises
    ------
    ConfigError
        If the saved run has other data, or other settings that change the result. The message names the first
        difference.
    CheckpointError
        If there is no checkpoint of ``step``, or it cannot be loaded. If ``step`` is None: a newer checkpoint cannot be
        opened, or all checkpoints are damaged. The message names the checkpoints, and says what to do.
    """
    checkpoints = checkpoint.list_steps(folder.checkpoints, comm)
    if step is not None:
        saved, newer = _restore_step(setup, folder, comm, checkpoints, step)
        progress.say(f"resuming from step {step}, as asked for{_changed_code(setup, saved)}")
        return saved, newer
    passed: list[StepFolder] = []
    for one in checkpoints:
        if one.valid and any(newer.unreadable for newer in passed):
            raise _refusal(setup, folder, passed, one)
        looked, loaded = _try(setup, one, comm)
        if loaded is not None:
            progress.say(f"resuming from {one.path}{_changed_code(setup, loaded)}")
            return loaded, passed
        passed.append(looked)
    if passed:
        raise _refusal(setup, folder, passed, None)
    progress.say(f"no checkpoint in {folder.checkpoints}: starting from the beginning")
    return None, []


def tiles_of_checkpoint(checkpoints: Path, comm: Communicator, step: int | None = None) -> dict[str, int] | None:
    """Return the number of tiles by axis that is recorded in a run's newest undamaged checkpoint, or that of ``step``.

    Collective over ``comm``; only rank 0 reads. None is returned if there is no such checkpoint, or if it does not
    record the number; if that is an error, :func:`restore` raises it later.
    """

    def look() -> dict[str, int] | None:
        for path in step_folders(str(checkpoints)):
            if step in (None, checkpoint.step_of(path)):
                with suppress(CheckpointError, OSError), checkpoint.open_checkpoint(path, "self") as reader:
                    return recorded_tiles(read_attribute(reader))
        return None

    return from_rank_0(comm, look, "tiles")


def _changed_code(setup: RunSetup, saved: SavedRun) -> str:
    """Return a message that names the user's files that have changed since the checkpoint was saved, or ""."""
    code = setup.record.code
    changed = [name for name, digest in sorted(code.items()) if saved.code.get(name, digest) != digest]
    if not changed:
        return ""
    verb = "has" if len(changed) == 1 else "have"
    return f"; {', '.join(changed)} {verb} changed since it was saved: from here on the run is that of the new code"


def _try(setup: RunSetup, folder: StepFolder, comm: Communicator) -> tuple[StepFolder, SavedRun | None]:
    """Try to load a checkpoint; return its :class:`StepFolder` and the run's state in it.

    If loading fails, ``problem`` of the StepFolder is the error message, and the state is None.
    """
    if not folder.valid:
        return folder, None
    try:
        return folder, _load(setup, folder.path, comm)
    except CheckpointError as error:
        return replace(folder, problem=str(error), damaged=isinstance(error, CheckpointDamagedError)), None


def _restore_step(
    setup: RunSetup, folder: RunFolder, comm: Communicator, checkpoints: Sequence[StepFolder], step: int
) -> tuple[SavedRun, list[StepFolder]]:
    option = setup.record.wording.resume_from.format(step)
    chosen = next((one for one in checkpoints if one.step == step), None)
    if chosen is None:
        there = ", ".join(str(one.step) for one in reversed(checkpoints))
        raise CheckpointError(
            f"{option}: no checkpoint of step {step} in {folder.checkpoints}: "
            + (f"there are those of the steps {there}" if there else "it holds none")
        )
    looked, saved = _try(setup, chosen, comm)
    if saved is None:
        raise CheckpointError(f"{option}: {looked.problem}")
    return saved, [one for one in checkpoints if one.step > step]


def _refusal(
    setup: RunSetup, folder: RunFolder, passed: Sequence[StepFolder], good: StepFolder | None
) -> CheckpointError:
    """Return the error that names the checkpoints ``passed``, which cannot be loaded, and says what the user can do.

    ``good`` is an older checkpoint that can be loaded, or None.
    """
    problems = "; ".join(
        f"{os.path.basename(one.path)} {'is damaged' if one.damaged else 'cannot be used'}: {one.problem}"
        for one in passed
    )
    wording = setup.record.wording
    older = "" if good is None else f"go on from an older one with {wording.resume_from.format(good.step)}, or "
    return CheckpointError(
        f"cannot resume in {folder.checkpoints}, where nothing was changed: {problems}. Mend that, or {older}start "
        f"over {wording.afresh}: what is left behind then moves to earlier/ in the run's folder"
    )


def _overrides(setup: RunSetup, saved: SavedRun, path: str, elsewhere: str) -> list[dict[str, Any]]:
    """Return the settings that differ from the saved run's; raise ConfigError if one of them must not differ."""
    result, allowed, override = [], setup.record.overridden, setup.record.wording.override
    for key, (was, now) in changes(saved.config, setup.record.settings).items():
        if key not in allowed:
            section, _, name = key.partition(".")
            able = override and overridable(key, saved.config) and name in setup.record.settings.get(section, {})
            way = f"go on with the new one by {override.format(key)}, " if able else ""
            changed = described_change(key, (was, now))
            raise ConfigError(f"cannot resume from {path}: {changed}; give the saved value, {way}{elsewhere}")
        result.append({"step": saved.step, "key": key, "was": was, "now": now})
    return result


def _load(setup: RunSetup, path: str, comm: Communicator) -> SavedRun:
    elsewhere = f"or start in another {setup.record.wording.folder}"
    with checkpoint.open_checkpoint(path, comm) as reader:
        saved = SavedRun.of(reader.attributes, path)
        if checkpoint.step_of(path) != saved.step:
            raise CheckpointError(f"{path}: holds step {saved.step}: give it back the name of its own step")
        if ("model" in saved.config) != ("model" in setup.record.settings):
            writers = "mpizero.Trainer", "`mpizero train`"
            raise ConfigError(f"cannot resume from {path}: it is of a run of {writers['model' in saved.config]}")
        saved.state.overrides.extend(_overrides(setup, saved, path, elsewhere))
        record, compared = setup.record, {"training": (saved.data, setup.record.fingerprint)}
        if saved.validation and record.validation_fingerprint:  # a run may begin to validate, and may end it
            compared["validation"] = saved.validation, record.validation_fingerprint
        for what, (before, now) in compared.items():
            check_data(what, before == now, saved.contents, record.contents, f"cannot resume from {path}", elsewhere)
            if comm.rank == 0 and (note := touched(*(one.get(what, {}) for one in (saved.contents, record.contents)))):
                notice(f"the {what} data: {note}")
        state_dict.restore(setup.model._loadable_engine, reader)
    setup.model._cache = None
    return saved


class SavedCheckpoint(NamedTuple):
    """Describe a checkpoint that is complete.

    Attributes
    ----------
    step : int
        Number of the step after which the checkpoint was saved.
    path : str
        Folder of the checkpoint.
    seconds : float
        Duration of the save.
    beside : bool
        Whether the save was asynchronous: a thread wrote the checkpoint during the next steps.
    best : bool
        Whether the checkpoint is the best so far.
    """

    step: int
    path: str
    seconds: float
    beside: bool
    best: bool


class Saver:
    """Write the checkpoints of a run as the section ``[checkpoint]`` of its configuration says, and remove old ones.

    Construction is collective over ``comm``.

    Parameters
    ----------
    setup : RunSetup
        The run to save.
    folder : RunFolder
        Folder of the run.
    comm : Communicator
        The ranks of the job.
    clock : WallTime
        Records how long each save took.
    report : callable
        Called with a message if an old checkpoint cannot be removed, once for each reason.

    Attributes
    ----------
    step : int
        The step of the newest save, which may still be in progress; -1 if there is none.
    best : int or None
        The step of the best checkpoint so far, to which the link ``best`` points, and which is never removed.
    on_saved : callable or None
        Called on every rank with the :class:`SavedCheckpoint` of a complete save, before old checkpoints are removed.

    Raises
    ------
    ConfigError
        If the back end that the configuration names, such as parallel HDF5, is not installed.
    """

    def __init__(
        self, setup: RunSetup, folder: RunFolder, comm: Communicator, clock: WallTime, report: Callable[[str], object]
    ) -> None:
        self._setup, self._folder, self._comm, self._clock, self._report = setup, folder, comm, clock, report
        self._reported: set[str] = set()
        self._section = setup.checkpoints
        self._pending: PendingSave | None = None
        self._begun_save = (-1, False)
        self._begun = 0.0
        self.step = -1
        self.best: int | None = None
        self.on_saved: Callable[[SavedCheckpoint], object] | None = None
        with all_ranks(comm):
            check_backend(setup.comm, self._section.backend)
            if self._section.asynchronous:
                setup.model._reserve_snapshot()
            if comm.rank == 0:  # a run that was killed after its last save, and is complete, saves no more
                remove_leftovers(folder.checkpoints)
        # Those of rank 0: what a checkpoint holds is the same on all ranks.
        self._versions = comm.broadcast_object(versions())

    @property
    def busy(self) -> bool:
        """True if an asynchronous save is in progress: the thread of this rank is still writing a checkpoint."""
        return self._pending is not None and not self._pending.finished

    def start(self, step: int, best: int | None) -> None:
        """Set the state for a run that was resumed from the checkpoint of ``step``, or is new (``step`` is 0).

        Collective over the job's ranks. ``best`` is the step of the best checkpoint so far, or None. If that checkpoint
        does not exist any more, the link ``best`` is removed until there is a better one. If the setting
        ``checkpoint.best`` is None, ``best`` is ignored, and the link of an earlier session stays.
        """
        self.step, folder = step or -1, self._folder.checkpoints
        if self._section.best is None:
            self.best = checkpoint.marked_best(folder)  # of an earlier session of the run
            return
        valid = [one.step for one in checkpoint.list_steps(folder, self._comm) if one.valid]
        self.best = best if best in valid else None
        checkpoint.mark_best(folder, self.best, self._comm)

    def save(self, step: int, state: RunState, *, wait: bool, best: bool = False) -> None:
        """Commit a pending save, then save the checkpoint of step ``step``, with the run's ``state``.

        If the configuration asks for asynchronous saves and ``wait`` is false, a thread writes the checkpoint.
        Otherwise the checkpoint is complete on return. If ``best`` is true, the checkpoint is the best so far, and the
        link ``best`` points to it as soon as it is complete. Collective over the job's ranks.
        """
        self.finish()
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                self._folder.check()
        model, section = self._setup.model, self._section
        attributes = saved_attributes(self._setup, step, state, self._versions)
        path = checkpoint.step_folder(self._folder.checkpoints, step)
        self._begun = time.perf_counter()
        # replace=False: a checkpoint at this path would be of another program; the run's later ones were moved away.
        how: dict[str, Any] = {"attributes": attributes, "alignment": section.alignment, "replace": False}
        if section.asynchronous and not wait:
            self._pending, self._begun_save = model.begin_save(path, **how), (step, best)
        else:
            model.save_model(path, backend=section.backend, **how)
            self._written(step, best, beside=False)
        self.step = step

    def finish(self) -> None:
        """Commit the pending asynchronous save, if there is one.

        Collective over the job's ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.commit()
            self._written(*self._begun_save, beside=True)

    def discard(self) -> None:
        """Cancel the pending asynchronous save, if there is one, and remove its files. Not collective.

        Called when an error ends the run, because the model's next save, maybe of another run, would commit this one.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()

    def _written(self, step: int, best: bool, *, beside: bool) -> None:
        seconds, section = time.perf_counter() - self._begun, self._section
        self._clock.saved(seconds)
        if best:  # before the earlier one may be removed
            self.best = step
            checkpoint.mark_best(self._folder.checkpoints, step, self._comm)
        if self.on_saved is not None:
            path = checkpoint.step_folder(self._folder.checkpoints, step)
            self.on_saved(SavedCheckpoint(step, str(path), seconds, beside, best))
        checkpoint.prune(
            self._folder.checkpoints,
            section.keep,
            self._setup.comm,
            keep_every=section.keep_every,
            spare=() if self.best is None else (self.best,),
            report=self._not_removed,
        )

    def _not_removed(self, left: RemovalFailure) -> None:
        if left.reason not in self._reported:
            self._reported.add(left.reason)
            self._report(f"{left}; training goes on")

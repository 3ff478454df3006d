"""Stop a training early, so that it can save its state first, and let a job run again afterwards.

:class:`StopSignals` catches the signals by which schedulers ask a job to stop, :class:`WallTime` tracks how much time a
job has left and how much a save needs, and :class:`StopFile` looks for the file ``STOP`` in a run's folder, which a
user creates to make the run save its state and end. By :class:`StopRequests` all ranks decide together, once a step,
whether to stop because a rank has got one of these requests. :func:`requeue` puts a Slurm job into the queue again;
before that, callers ask :func:`why_not_again` for a reason not to.

The command line catches signals before it imports MPI, Numba and other libraries, which takes a second. So this module
does not import them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpizero.errors import ConfigError, ExitStatus

if TYPE_CHECKING:
    from mpizero.comm import Communicator
    from mpizero.comm.communicator import Request
    from mpizero.train.config.schema import LoopSection

#: SIGUSR1 and SIGUSR2 are a batch system's early warnings; with SIGTERM schedulers and launchers ask a job to end.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)
#: Signals that are not caught if the program has a handler of its own, as submitit has. SIGUSR1 is none of them,
#: because its handler may be that of an MPI library.
_LEFT_ALONE = (signal.SIGUSR2,)
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals(AbstractContextManager["StopSignals"]):
    """Record stop signals inside a ``with`` block; an inner ``with`` block of the same object has no effect.

    The handler only stores the name of the first signal; the program is not interrupted. Python allows signal handlers
    in the main thread only, so nothing is recorded if another thread enters the block. If the program has its own
    handler of SIGUSR2, or sets a handler of any signal inside of the block, that handler stays in place. In a forked
    child process, such as a worker of a pool that ends by SIGTERM, signals have the effect that they have without the
    block.

    Parameters
    ----------
    caught : sequence of signal
        The signals to record.

    Attributes
    ----------
    name : str
        Name of the first signal that was caught; "" if there was none.
    """

    def __init__(self, caught: Sequence[signal.Signals] = SIGNALS) -> None:
        self.name, self._depth, self._caught, self._process = "", 0, caught, os.getpid()
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in self._caught:
                if not _is_taken(number):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:  # else set by the program meanwhile
                _restore(number, handler)
        self._previous.clear()

    def reason(self, rank: int) -> str:
        """Return the reason to stop on this rank, ``rank``, such as "SIGTERM on rank 3"; "" if no signal was caught."""
        return f"{self.name} on rank {rank}" if self.name else ""

    def ignore(self) -> None:
        """Ignore stop signals from now on, also after the ``with`` block; called when the process is about to exit.

        Not collective.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.name = self.name or signal.Signals(number).name
        else:
            _restore(number, self._previous.get(number))
            signal.raise_signal(number)


def _restore(number: int, handler: Handler) -> None:
    signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _is_taken(number: signal.Signals) -> bool:
    """Return whether ``number`` is SIGUSR2, and the program handles it in Python, or in C as ``faulthandler`` does."""
    if number not in _LEFT_ALONE or signal.getsignal(number) is not signal.SIG_DFL:
        return number in _LEFT_ALONE
    try:
        with open("/proc/self/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


#: Seconds to wait for the output of ``squeue``.
_PATIENCE = 10.0
#: Least number of seconds that are reserved for saving, or this fraction of the job's time if that is less.
LEAST_RESERVE, RESERVE_FRACTION = 60.0, 0.1


@dataclass(frozen=True)
class JobContext:
    """Hold signals, start time and environment of the command that runs a training.

    Attributes
    ----------
    signals : StopSignals
        Object that catches stop signals.
    started : float
        Time at which the command started, by ``time.monotonic``.
    environment : mapping
        Environment variables; those of Slurm are used.
    """

    signals: StopSignals
    started: float = field(default_factory=time.monotonic)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """Describe a time limit of the job.

    Attributes
    ----------
    source : str
        Origin of the limit for messages: the name of a setting or of a variable of Slurm.
    left : float
        Seconds from now until the limit.
    """

    source: str
    left: float


def slurm_job(environment: Mapping[str, str]) -> str:
    """Return the name of this process's Slurm job for commands; "" outside of Slurm.

    In a job array it is like "7_2" (task 2 of array 7): the SLURM_JOB_ID of one of the tasks is the number of the
    array, and a command with that number would act on all tasks.
    """
    task = environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{environment.get('SLURM_ARRAY_JOB_ID')}_{task}" if task else environment.get("SLURM_JOB_ID", "")


def ask_squeue(job: str) -> str:
    """Ask ``squeue`` for the remaining time of the job ``job``, and return its output, such as "1-02:00:00".

    Not collective.

    Raises
    ------
    ConfigError
        If ``squeue`` cannot be run, fails or takes too long.
    """
    return _slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%L"], _PATIENCE).strip()


def slurm_limit(environment: Mapping[str, str], ask: Callable[[str], str] = ask_squeue) -> Limit | None:
    """Return the time limit of the Slurm job that this process is part of; None if there is no limit or no job.

    Not collective: called on one rank. Slurm 22.05 and older do not set SLURM_JOB_END_TIME. In that case ``ask`` is
    called with the name of the job, and must return the remaining time as ``squeue`` prints it.
    """
    from mpizero._util.settings import clock_seconds

    job, end = slurm_job(environment), environment.get("SLURM_JOB_END_TIME", "")
    if not job:
        return None
    if end.isdecimal() and int(end) > 0:
        return Limit("SLURM_JOB_END_TIME", int(end) - time.time())
    try:
        return Limit("Slurm's", clock_seconds(ask(job)))
    except ValueError:
        return None  # "UNLIMITED", or no answer


class WallTime:
    """Track the time that a job has left, and the part of it that must be reserved for saving.

    Parameters
    ----------
    limits : sequence of Limit
        Time limits; the earliest is used.
    reserve : float, optional
        Seconds reserved for saving. None means twice the sum of the longest step and the longest save so far, but at
        least a minute or, if that is less, a tenth of the job's time.
    clock : callable, optional
        Function that returns the seconds of a monotonic clock.
    """

    def __init__(
        self, limits: Sequence[Limit], reserve: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._reserve = clock, reserve
        first = min(limits, key=lambda limit: limit.left, default=Limit("", float("inf")))
        self._source, self._total, self._end = first.source, first.left, clock() + first.left
        self._step = self._save = 0.0

    @classmethod
    def of(cls, loop: LoopSection, context: JobContext) -> WallTime:
        """Make the tracker from ``train.time_limit`` and Slurm's limit.

        Not collective: called on one rank.
        """
        limits = [slurm_limit(context.environment)]
        if loop.time_limit is not None:
            limits.append(Limit("train.time_limit", context.started + loop.time_limit - time.monotonic()))
        return cls([limit for limit in limits if limit is not None], loop.time_reserve)

    @property
    def reserve(self) -> float:
        """Number of seconds reserved for saving."""
        if self._reserve is not None:
            return self._reserve
        return max(2.0 * (self._step + self._save), min(LEAST_RESERVE, RESERVE_FRACTION * self._total))

    def worked(self, seconds: float) -> None:
        """Record the duration of a step, not counting saving.

        Not collective.
        """
        self._step = max(self._step, seconds)

    def saved(self, seconds: float) -> None:
        """Record the duration of a save.

        Not collective.
        """
        self._save = max(self._save, seconds)

    def reason(self) -> str:
        """Return the reason to stop if not more than the reserved time is left, else "".

        Not collective.
        """
        left = self._end - self._clock()
        if left > self.reserve:
            return ""
        return f"the time limit ({self._source}: {max(left, 0.0):.0f} s left, {self.reserve:.0f} s kept for saving)"


#: Type of a function that may request a stop: it is called once a step, and returns the reason for a stop, or "".
StopSource = Callable[[], str]


class StopDecision(IntEnum):
    """List what ranks can request after a step; if requests differ, all ranks follow the one with the largest value."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


class StopRequests:
    """Let all ranks of ``comm`` stop after the same step if any of them requests a stop.

    :meth:`ask` starts one small reduction before a step, and :meth:`answer` reads its result after the step. The result
    is the same on every rank, so all ranks save the same step. A request that comes during a step takes effect after
    the next step. The same reduction tells whether any rank is still busy with background work.

    Parameters
    ----------
    comm : Communicator
        The ranks. The communicator must not be used for anything else between :meth:`ask` and :meth:`answer`.
    *sources : callable
        Functions that may request a stop on this rank; other ranks may have different functions, or none.

    Attributes
    ----------
    reason : str
        Reason of the stop, from the lowest rank that requested it; "" before the ranks have decided to stop.
    all_finished : bool
        True if no rank was busy with background work at the last :meth:`ask`, as read by :meth:`answer`; equal on all
        ranks.
    """

    def __init__(self, comm: Communicator, *sources: StopSource) -> None:
        self.comm, self._sources = comm, list(sources)
        self._request, self._local_reason, self.reason = StopDecision.GO_ON, "", ""
        self._buffer = np.zeros(2, dtype=np.int64)
        self._question: Request | None = None
        self.all_finished = True

    def listen(self, *sources: StopSource) -> None:
        """Add functions that may request a stop on this rank.

        Not collective.
        """
        self._sources += sources

    def fail(self) -> None:
        """Request that every rank stops with an error; the next :meth:`ask` sends the request.

        Not collective.
        """
        self._request = StopDecision.FAIL

    def ask(self, busy: bool = False) -> None:
        """Start the reduction of the requests of all ranks.

        Collective over the communicator.

        Parameters
        ----------
        busy : bool
            Whether this rank still has background work.
        """
        self._local_reason = self._local_reason or next(filter(None, (source() for source in self._sources)), "")
        request = max(self._request, StopDecision.STOP if self._local_reason else StopDecision.GO_ON)
        size, rank = self.comm.size, self.comm.rank
        self._buffer[:] = request * size + (size - 1 - rank), busy  # of equal requests the lowest rank's
        self._question = self.comm.iallreduce(self._buffer, op="max", tag="stop requests")

    def answer(self) -> StopDecision:
        """Wait for the reduction that :meth:`ask` has started; return the largest request of all ranks.

        Collective over the communicator.
        """
        if self._question is None:
            raise RuntimeError("answer() needs a question: call ask() first")
        self._question.wait()
        self._question = None
        self.all_finished = not self._buffer[1]
        request, index = divmod(int(self._buffer[0]), self.comm.size)
        if request == StopDecision.STOP:
            rank = self.comm.size - 1 - index
            self.reason = self.comm.broadcast_object(self._local_reason, rank, tag="stop requests")
        return StopDecision(request)


#: Least number of seconds between two checks, so that not every step accesses a shared file system.
INTERVAL = 1.0


class StopFile:
    """Check at most once a second whether a file exists; used on one rank, which tells the other ranks.

    Parameters
    ----------
    path : Path
        The file. Its content does not matter.
    clock : callable, optional
        Function that returns the seconds of a monotonic clock.
    report : callable, optional
        Function that is called with a message when the check fails for the first time; training continues.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, report: Callable[[str], object] = warnings.warn
    ) -> None:
        self._path, self._clock, self._report = path, clock, report
        self._next, self._warned = float("-inf"), False

    def reason(self) -> str:
        """Return a reason to stop, which names the file, if the file exists; else, or between checks, return ""."""
        now = self._clock()
        if now < self._next:
            return ""
        self._next = now + INTERVAL
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._report(f"the file {self._path} cannot be looked for: {error.strerror}; training goes on")
            return ""
        return f"the file {self._path}"


#: Name of the file in the run's folder with the :class:`Session` after which the job was last requeued.
NOTE = "requeue.json"
#: Number of hasty sessions in a row (see :class:`Session`) after which the job is not requeued.
HASTY = 3
#: A preempted session is hasty if it was shorter than so many seconds, or did not complete a second step.
_AT_ONCE = 120.0
#: Seconds to wait for Slurm's commands.
_SQUEUE_PATIENCE = 60.0


class JobState(NamedTuple):
    """Hold Slurm's state of a job, such as "RUNNING", the reason for the state, and the seconds that it has run."""

    state: str
    reason: str = ""
    used: float = math.inf


@dataclass(frozen=True)
class Session:
    """Describe a session that has ended: one execution of a job that may be requeued.

    Attributes
    ----------
    job : str
        Name of the job.
    status : int
        Exit status of the training.
    steps : dict
        For each folder of checkpoints, the step of its newest checkpoint; empty folders are left out.
    hasty : int
        Number of sessions in a row, up to this one, that were asked to stop soon after their start, or before they had
        completed a second step.
    restarts : int
        Number of sessions of the job before this one.
    """

    job: str
    status: int
    steps: Mapping[str, int] = field(default_factory=dict)
    hasty: int = 0
    restarts: int = 0

    @classmethod
    def after(cls, last: Session | None, job: str, status: int, folders: Iterable[Path], used: float) -> Session:
        """Describe a session that has ended after ``used`` seconds; ``last`` is the job's previous session, or None."""
        from mpizero.checkpoint.manager import step_folders, step_of

        steps = {str(path): step for path in folders for step in map(step_of, step_folders(str(path))[:1]) if step}
        before = last.steps if last else {}
        done = max((step - before.get(path, 0) for path, step in steps.items()), default=0)
        hasty = status == ExitStatus.PREEMPTED and (done <= 1 or used < _AT_ONCE)
        last = last or cls(job, status, restarts=-1)
        return cls(job, status, steps, 1 + last.hasty if hasty else 0, 1 + last.restarts)

    @classmethod
    def read(cls, root: Path, job: str) -> Session | None:
        """Read the last session of ``job`` from the run's folder ``root``; None if there is none or it is damaged."""
        try:
            session = cls(**json.loads((root / NOTE).read_bytes()))
            numbers = (*session.steps.values(), session.hasty, session.restarts)
            return session if session.job == job and {*map(type, numbers)} == {int} else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, root: Path) -> None:
        """Write this session to the run's folder ``root``."""
        root.mkdir(parents=True, exist_ok=True)
        (root / NOTE).write_text(json.dumps(asdict(self)) + "\n")

    @property
    def latest_checkpoint(self) -> str:
        """Text about the newest checkpoint, such as "step 100", or "no checkpoint"."""
        latest = max(self.steps.values(), default=0)
        return f"step {latest}" if latest else "no checkpoint"


def state_of_job(job: str) -> JobState:
    """Ask Slurm for the state of a job.

    Raises
    ------
    ConfigError
        If ``squeue`` fails.
    """
    from mpizero._util.settings import clock_seconds

    answer = _slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%T|%r|%M"]).strip()
    state, reason, used = [*answer.split("|"), "", ""][:3]
    try:
        return JobState(state or "gone", reason, clock_seconds(used))
    except ValueError:
        return JobState(state or "gone", reason)


def why_not_again(session: Session, last: Session | None, job: JobState) -> str:
    """Return why a job must not be requeued after ``session``, which followed the session ``last``; "" if it may be.

    ``job`` is Slurm's state of the job.
    """
    # A job that is ending was cancelled by a user, or by Slurm at its time limit; only the latter may run again.
    if job.state != "RUNNING" and job.reason != "TimeLimit":
        return f"the job is {job.state} for Slurm: it was cancelled, or Slurm itself puts it into the queue again"
    stuck = last is not None and all(step <= last.steps.get(path, 0) for path, step in session.steps.items())
    if stuck and last is not None and (session.status == ExitStatus.PREEMPTED or last.status != ExitStatus.PREEMPTED):
        return f"it has ended twice at the same checkpoint ({session.latest_checkpoint})"
    if session.hasty >= HASTY:
        return (
            f"{session.hasty} sessions in a row were asked to stop at once: the job's time (Slurm: --time) must be "
            "longer than the seconds before its end at which the signal comes (--signal), and than train.time_reserve"
        )
    return ""


def requeue(job: str) -> None:
    """Put a job into the queue again. Slurm then ends all processes of the job, including this one.

    Raises
    ------
    ConfigError
        If ``scontrol`` fails. The message contains the error of Slurm.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # scontrol, which inherits this, must live to say so
        signal.signal(number, signal.SIG_IGN)
    _slurm(["scontrol", "requeue", job])


def _slurm(command: list[str], patience: float = _SQUEUE_PATIENCE) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{command[0]}: {error}: submit the job again") from None
    if ended.returncode:
        raise ConfigError(f"{' '.join(command)}: {ended.stderr.strip()}: submit the job again")
    return ended.stdout

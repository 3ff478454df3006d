"""Decide whether a Slurm job that has trained shall run again, and put it into the queue."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from mpizero.checkpoint.folders import step_folders, step_of
from mpizero.errors import ConfigError, ExitStatus
from mpizero.train.config.setting_checks import clock_seconds

#: Name of the file in the run's folder with the last visit that was put into the queue again.
NOTE = "requeue.json"
#: Visits in a row that were asked to stop at once, after which the job is not put into the queue again.
HASTY = 3
#: At once is before a second step, or before so many seconds: Slurm's signal comes up to a minute after the start.
_AT_ONCE = 120.0
#: Seconds to wait for Slurm's commands.
_PATIENCE = 60.0


class JobState(NamedTuple):
    """Hold what Slurm says of a job: its state, such as "RUNNING", the reason for it, and the seconds of this visit."""

    state: str
    reason: str = ""
    used: float = math.inf


@dataclass(frozen=True)
class Visit:
    """Describe a visit to the queue that has ended.

    Attributes
    ----------
    job : str
        Number of the Slurm job.
    status : int
        Exit status of the training.
    steps : dict
        The newest step of each folder of checkpoints that has one.
    hasty : int
        How many visits in a row, this one included, were asked to stop at once.
    """

    job: str
    status: int
    steps: Mapping[str, int] = field(default_factory=dict)
    hasty: int = 0

    @classmethod
    def after(cls, last: Visit | None, job: str, status: int, folders: Iterable[Path], used: float) -> Visit:
        """Make the description of a visit of ``used`` seconds that has ended, after ``last`` of the same job."""
        steps = {str(path): step for path in folders for step in map(step_of, step_folders(str(path))[:1]) if step}
        before = last.steps if last else {}
        done = max((step - before.get(path, 0) for path, step in steps.items()), default=0)
        hasty = status == ExitStatus.PREEMPTED and (done <= 1 or used < _AT_ONCE)
        return cls(job, status, steps, 1 + (last.hasty if last else 0) if hasty else 0)

    @classmethod
    def read(cls, root: Path, job: str) -> Visit | None:
        """Read the last visit of the same job from a run's folder; None if there is none, or none that can be read."""
        try:
            found = cls(**json.loads((root / NOTE).read_bytes()))
            return found if found.job == job and {*map(type, found.steps.values())} <= {int} else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, root: Path) -> None:
        """Write this visit into a run's folder."""
        root.mkdir(parents=True, exist_ok=True)
        (root / NOTE).write_text(json.dumps(asdict(self)) + "\n")

    @property
    def place(self) -> str:
        """The newest checkpoint, or "no checkpoint"."""
        newest = max(self.steps.values(), default=0)
        return f"step {newest}" if newest else "no checkpoint"


def state_of_job(job: str) -> JobState:
    """Ask Slurm for the state of a job.

    Raises
    ------
    ConfigError
        If Slurm does not answer.
    """
    answer = _slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%T|%r|%M"]).strip()
    state, reason, used = [*answer.split("|"), "", ""][:3]
    try:
        return JobState(state or "gone", reason, clock_seconds(used))
    except ValueError:
        return JobState(state or "gone", reason)


def why_not_again(visit: Visit, last: Visit | None, job: JobState) -> str:
    """Return why a job shall not run again after ``visit``, which came after ``last``; "" if it shall."""
    # Slurm gives a cancelled job time to end. So it does to one that has used up its time, which nobody has cancelled.
    if job.state != "RUNNING" and job.reason != "TimeLimit":
        return f"the job is {job.state} for Slurm: it was cancelled, or Slurm itself puts it into the queue again"
    stuck = last is not None and all(step <= last.steps.get(path, 0) for path, step in visit.steps.items())
    if stuck and last is not None and (visit.status == ExitStatus.PREEMPTED or last.status != ExitStatus.PREEMPTED):
        return f"it has ended twice at the same checkpoint ({visit.place})"
    if visit.hasty >= HASTY:
        return (
            f"{visit.hasty} visits in a row were asked to stop at once: --time must be longer than the seconds before "
            "its end at which --signal comes, and than train.time_reserve"
        )
    return ""


def requeue(job: str) -> None:
    """Put a job into the queue again. Slurm then ends its processes, this one included.

    Raises
    ------
    ConfigError
        If Slurm refuses. The message has its reason.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # scontrol, which inherits this, must live to say so
        signal.signal(number, signal.SIG_IGN)
    _slurm(["scontrol", "requeue", job])


def _slurm(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{command[0]}: {error}: submit the job again") from None
    if ended.returncode:
        raise ConfigError(f"{' '.join(command)}: {ended.stderr.strip()}: submit the job again")
    return ended.stdout

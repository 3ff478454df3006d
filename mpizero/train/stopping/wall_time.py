"""Find out how much time a job has left, from its configuration and Slurm, and how much time saving needs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mpizero.train.config.loop_section import LoopSection
from mpizero.train.config.setting_checks import clock_seconds
from mpizero.train.stopping.signals import StopSignals

#: Seconds to wait for the output of ``squeue``.
_PATIENCE = 10.0
#: Least number of seconds that are reserved for saving; of a short job this share of its time, if that is less.
LEAST_RESERVE, SHARE = 60.0, 0.1


@dataclass(frozen=True)
class JobContext:
    """Hold signals, start time and environment of the command that runs a training.

    Attributes
    ----------
    signals : StopSignals
        Object that catches stop signals.
    started : float
        Start of the command by ``time.monotonic``.
    environment : mapping
        Environment variables, of which Slurm's are used.
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
        Origin of the limit for messages: the name of a setting or of Slurm's variable.
    left : float
        Seconds that are left until the limit.
    """

    source: str
    left: float


def ask_squeue(job: str) -> str:
    """Ask ``squeue`` for the remaining time of the job ``job``, and return its output, such as "1-02:00:00".

    Not collective.

    Raises
    ------
    OSError, subprocess.SubprocessError
        If ``squeue`` cannot be run, fails or takes too long.
    """
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    return found.stdout.strip()


def slurm_limit(environment: Mapping[str, str], ask: Callable[[str], str] = ask_squeue) -> Limit | None:
    """Return the time limit of the Slurm job that this process is part of; None if there is none or it is unknown.

    Not collective: called on one rank. Slurm 22.05 and older do not set SLURM_JOB_END_TIME. In that case ``ask`` is
    called with the number of the job, and must return the remaining time as ``squeue`` prints it.
    """
    job, end = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_END_TIME", "")
    if not job:
        return None
    if end.isdecimal() and int(end) > 0:
        return Limit("SLURM_JOB_END_TIME", int(end) - time.time())
    try:
        return Limit("Slurm's", clock_seconds(ask(job)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # "UNLIMITED", or no answer


class WallTime:
    """Track the time that a job has left, and the part of it that must be reserved for saving.

    Parameters
    ----------
    limits : sequence of Limit
        Time limits; the earliest is used.
    reserve : float, optional
        Seconds reserved for saving. None: twice the sum of the longest step and the longest save so far, but at least a
        minute or, if that is less, a tenth of the job's time.
    clock : callable, optional
        Returns the seconds of a monotonic clock.
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
        return max(2.0 * (self._step + self._save), min(LEAST_RESERVE, SHARE * self._total))

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
        """Return the reason to stop if only the reserved time is left, else "".

        Not collective.
        """
        left = self._end - self._clock()
        if left > self.reserve:
            return ""
        return f"the time limit ({self._source}: {max(left, 0.0):.0f} s left, {self.reserve:.0f} s kept for saving)"

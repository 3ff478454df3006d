"""Find out how much of a job's time is left, from its configuration and Slurm, and how much of it saving needs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mpizero.train.config.sections import TrainSection
from mpizero.train.config.setting_checks import clock_seconds
from mpizero.train.run.signals import StopSignals

#: Of what :func:`squeue` is asked, and for how many seconds its answer is awaited.
_PATIENCE = 10.0
#: Kept for saving at least, unless the whole time is so short that a tenth of it is less.
LEAST_RESERVE, SHARE = 60.0, 0.1


@dataclass(frozen=True)
class JobContext:
    """Hold what a command knows of the job that it is part of.

    Attributes
    ----------
    signals : StopSignals
        Those that it catches already.
    started : float
        When it began, on ``time.monotonic``'s clock.
    environment : mapping
        Its environment's variables, of which Slurm's count.
    """

    signals: StopSignals
    started: float = field(default_factory=time.monotonic)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """Hold when a job's time ends.

    Attributes
    ----------
    source : str
        Who says so.
    left : float
        Seconds from now.
    """

    source: str
    left: float


def ask_squeue(job: str) -> str:
    """Return what Slurm says is left of a job's time.

    Not collective.

    Raises
    ------
    OSError, subprocess.SubprocessError
        Slurm does not answer.
    """
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    return found.stdout.strip()


def slurm_limit(environment: Mapping[str, str], ask: Callable[[str], str] = ask_squeue) -> Limit | None:
    """Return the end of the Slurm job that this process is part of; None without one, or where Slurm does not say.

    Not collective: for one rank. Slurm 22.05 and older do not set SLURM_JOB_END_TIME: ``ask`` is called once there.
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
    """Track the time that is left to a job, and what saving needs of it.

    Parameters
    ----------
    limits : sequence of Limit
        The earliest counts.
    reserve : float, optional
        Seconds kept for saving. Without: twice the longest step and save so far, but at least a minute or, if that is
        less, a tenth of the time.
    clock : callable, optional
        Seconds of a clock that never goes back.
    """

    def __init__(
        self, limits: Sequence[Limit], reserve: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._reserve = clock, reserve
        first = min(limits, key=lambda limit: limit.left, default=Limit("", float("inf")))
        self._source, self._total, self._end = first.source, first.left, clock() + first.left
        self._step = self._save = 0.0

    @classmethod
    def of(cls, train: TrainSection, context: JobContext) -> WallTime:
        """Return the time that a configuration and Slurm leave.

        Not collective: for one rank.
        """
        limits = [slurm_limit(context.environment)]
        if train.time_limit is not None:
            limits.append(Limit("train.time_limit", context.started + train.time_limit - time.monotonic()))
        return cls([limit for limit in limits if limit is not None], train.time_reserve)

    @property
    def reserve(self) -> float:
        """Seconds kept for saving."""
        if self._reserve is not None:
            return self._reserve
        return max(2.0 * (self._step + self._save), min(LEAST_RESERVE, SHARE * self._total))

    def worked(self, seconds: float) -> None:
        """Learn how long a step took, with all that belongs to it but saving.

        Not collective.
        """
        self._step = max(self._step, seconds)

    def saved(self, seconds: float) -> None:
        """Learn how long a save took.

        Not collective.
        """
        self._save = max(self._save, seconds)

    def reason(self) -> str:
        """Return why the run has to stop, "" while there is time.

        Not collective.
        """
        left = self._end - self._clock()
        if left > self.reserve:
            return ""
        return f"the time limit ({self._source}: {left:.0f} s left, {self.reserve:.0f} s kept for saving)"

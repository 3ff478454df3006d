"""Run one visit of a training: from its first or resumed step to its last, or until it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpizero.comm.agreement import all_ranks
from mpizero.errors import ExitStatus, MpizeroError
from mpizero.train.config.setting_checks import rejected
from mpizero.train.run.improvement import check_metric
from mpizero.train.run.loop import TrainingLoop
from mpizero.train.run.progress import Progress
from mpizero.train.run.recorder import RunRecorder
from mpizero.train.run.result import TrainingResult
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup
from mpizero.train.stopping.stop_file import StopFile
from mpizero.train.stopping.stop_requests import StopRequests
from mpizero.train.stopping.wall_time import JobContext, WallTime


class Preempted(MpizeroError, SystemExit):  # noqa: N818 - it is the outcome of a request, not a mistake
    """Report that a run was asked to stop, and has saved its state: before its last step, or by a signal as it ended.

    It was asked by SIGUSR1, SIGUSR2 or SIGTERM on any rank, by a file ``STOP`` in the run's folder, or the time limit
    of the job is near. The message names the reason. A program that does not catch it ends with status 75, by which a
    batch system knows that the job is to be queued again, with or without a launcher: this is a ``SystemExit``, too.

    Examples
    --------
    >>> import mpizero as mz
    >>> try:
    ...     raise mz.Preempted("SIGUSR1 on rank 0")  # as trainer.fit() does, after it has saved
    ... except mz.Preempted as stop:
    ...     print(stop, stop.code)
    SIGUSR1 on rank 0 75
    """

    status = ExitStatus.PREEMPTED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = int(self.status)


def run_visit(
    setup: RunSetup,
    context: JobContext,
    *,
    resume: bool = False,
    resume_from: int | None = None,
    attach: Callable[[TrainingLoop], Any],
) -> TrainingResult | Preempted:
    """Train a run to its last step and return its result; return a :class:`Preempted` if it was asked to stop before.

    Collective over the run's ranks.

    Parameters
    ----------
    setup : RunSetup
        The run.
    context : JobContext
        The signals to catch, the start time of the job, and its environment.
    resume : bool
        Whether to continue from the newest undamaged checkpoint of the run, if there is one; see :func:`restore`.
    resume_from : int, optional
        Continue from the checkpoint of this step; checkpoints of later steps are moved to another folder.
    attach : callable
        Takes the loop before it starts, and returns the object with which callbacks are called.

    Raises
    ------
    NonFiniteError
        After too many skipped steps in a row, whose loss or gradient was not finite.
    """
    _check_best(setup)
    comm, resumes = setup.comm, resume or resume_from is not None
    folder = RunFolder(setup.checkpoints.folder)
    progress = Progress(setup.loop.steps, active=setup.shows_progress and comm.rank == 0)
    try:
        with comm.split(0, name="control") as control, context.signals:
            stop = StopRequests(control, lambda: context.signals.reason(comm.rank))
            with all_ranks(control):
                clock = WallTime.of(setup.loop, context) if comm.rank == 0 else WallTime([])
                if comm.rank == 0:
                    open_folder(folder, progress, setup.record.wording.resume, resume=resumes)
                    stop.listen(clock.reason, StopFile(folder.stop_file, report=progress.say).reason)
            recorder = RunRecorder(setup, folder, control, context.environment)
            loop = TrainingLoop(setup, folder, stop, clock, progress, recorder)
            loop.host = attach(loop)
            result = loop.run(resume=resume, resume_from=resume_from)
    finally:
        folder.close()
        progress.close()
        setup.model.count_skipped_steps(setup.model.config.bad_steps)
    return Preempted(loop.farewell) if result is None else result


def _check_best(setup: RunSetup) -> None:
    """Raise an error if ``best`` or ``patience`` has no validation to go by, or no validation has the metric."""
    best = setup.checkpoints.best
    for key, value in (("checkpoint.best", best), ("train.patience", setup.loop.patience)):
        if value is not None and not (setup.validation is not None and len(setup.validation)):
            raise rejected(key, value, "needs validation samples: set data.validation > 0 with it")
    if best is None:
        return
    try:
        check_metric(best, setup.metrics)
    except ValueError as error:
        raise rejected("checkpoint.best", best, str(error)) from None


def open_folder(folder: RunFolder, progress: Progress, way_on: str, *, resume: bool) -> None:
    """Open the run's folder; if the run is not resumed, move the files of an earlier run into a folder below it.

    Not collective. ``way_on`` is how the user would have resumed the earlier run.
    """
    folder.open()
    earlier = None if resume else folder.set_aside()
    if earlier is not None:
        progress.say(f"{folder.root} held an earlier run: moved to {earlier} ({way_on} would have continued it)")

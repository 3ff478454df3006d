"""Define ``Trainer``: training with resume, early stops, checkpoints, validation and metrics, in one object."""

from __future__ import annotations

from mpizero.comm.agreement import all_ranks
from mpizero.errors import ExitStatus, MpizeroError
from mpizero.train.run.loop import TrainingLoop
from mpizero.train.run.preemption import StopRequests
from mpizero.train.run.progress import Progress
from mpizero.train.run.result import TrainingResult
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup
from mpizero.train.run.signals import StopSignals
from mpizero.train.run.stop_file import StopFile
from mpizero.train.run.wall_time import JobContext, WallTime


class Preempted(MpizeroError):  # noqa: N818 - it is the outcome of a request, not a mistake
    """Report that a run was asked to stop before its last step, and has saved its state.

    It was asked by SIGUSR1 or SIGTERM on any rank, by a file ``STOP`` in the run's folder, or the time limit of the job
    is near. The message names the reason. A program that does not catch it ends with status 75.
    """

    status = ExitStatus.PREEMPTED


def run_training(
    setup: RunSetup, context: JobContext | None = None, *, resume: bool = False, resume_from: int | None = None
) -> TrainingResult | Preempted:
    """Train a run to its last step, and return its result; return a :class:`Preempted` if it was asked to stop before.

    Collective over the run's ranks.

    Parameters
    ----------
    setup : RunSetup
        The run.
    context : JobContext, optional
        Signals that the caller catches already, its start time and its environment.
    resume : bool
        Whether to continue from the newest undamaged checkpoint of the run, if there is one; see :func:`restore`.
    resume_from : int, optional
        Continue from the checkpoint of this step; checkpoints of later steps are moved to another folder.

    Raises
    ------
    NonFiniteError
        After too many skipped steps in a row, whose loss or gradient was not finite.
    """
    comm = setup.comm
    folder, progress = RunFolder(setup.checkpoints.folder), Progress(setup.loop.steps, active=comm.rank == 0)
    context = context or JobContext(StopSignals())
    resumes = resume or resume_from is not None
    try:
        with comm.split(0, name="control") as control, context.signals:
            stop = StopRequests(control, lambda: context.signals.reason(comm.rank))
            with all_ranks(control):
                clock = WallTime.of(setup.loop, context) if comm.rank == 0 else WallTime([])
                if comm.rank == 0:
                    open_folder(folder, progress, setup.record.wording.resume, resume=resumes)
                    stop.listen(clock.reason, StopFile(folder.stop_file, report=progress.say).reason)
            loop = TrainingLoop(setup, folder, stop, clock, progress)
            result = loop.run(resume=resume, resume_from=resume_from)
    finally:
        folder.close()
        progress.close()
    return Preempted(loop.farewell) if result is None else result


def open_folder(folder: RunFolder, progress: Progress, way_on: str, *, resume: bool) -> None:
    """Open the run's folder; if the run is not resumed, move the files of an earlier run into a folder below it.

    Not collective. ``way_on`` is how the user would have resumed the earlier run.
    """
    folder.open()
    earlier = None if resume else folder.set_aside()
    if earlier is not None:
        progress.say(f"{folder.root} held an earlier run: moved to {earlier} ({way_on} would have continued it)")

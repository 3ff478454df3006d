"""Write the checkpoints of a run, either at once or in a thread during the next steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mpizero import checkpoint
from mpizero.checkpoint import PendingSave, RemovalFailure
from mpizero.checkpoint.folder import remove_leftovers
from mpizero.checkpoint.writer import check_backend
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup import versions
from mpizero.train.run.resume import RunState, saved_attributes
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup
from mpizero.train.stopping.wall_time import WallTime


class SavedCheckpoint(NamedTuple):
    """Describe a checkpoint that is complete.

    Attributes
    ----------
    step : int
        Its step.
    path : str
        Its folder.
    seconds : float
        Seconds from its beginning until it was complete.
    beside : bool
        Whether a thread wrote it during the next steps.
    best : bool
        Whether it is the best one so far.
    """

    step: int
    path: str
    seconds: float
    beside: bool
    best: bool


class Saver:
    """Write the checkpoints of a run as the section ``[checkpoint]`` of the configuration says, and remove old ones.

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
        The step of the newest save, begun or done; -1 if there is none.
    best : int or None
        The step of the best checkpoint so far, which the link ``best`` names and no clean-up removes.
    on_saved : callable or None
        Called on every rank with each checkpoint that is complete, before old ones are removed.

    Raises
    ------
    ConfigError
        If this installation lacks the back end that the configuration names.
    """

    def __init__(
        self, setup: RunSetup, folder: RunFolder, comm: Communicator, clock: WallTime, report: Callable[[str], object]
    ) -> None:
        self._setup, self._folder, self._comm, self._clock, self._report = setup, folder, comm, clock, report
        self._told: set[str] = set()
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
                setup.model.reserve_snapshot()
            if comm.rank == 0:  # a run that was killed after its last save, and is complete, saves no more
                remove_leftovers(folder.checkpoints)
        # Those of rank 0: what a checkpoint holds is the same on all ranks.
        self._versions = comm.broadcast_object(versions())

    @property
    def busy(self) -> bool:
        """Tell whether the thread of this rank that saves asynchronously is still writing a checkpoint."""
        return self._pending is not None and not self._pending.finished

    def start(self, step: int, best: int | None) -> None:
        """Begin after ``step``, from whose checkpoint the run was resumed; 0 if it is new.

        Collective over the job's ranks. ``best`` is the step of the best checkpoint so far, or None. If that is no
        longer there, the link ``best`` is removed until there is a better one.
        """
        self.step, folder = step or -1, self._folder.checkpoints
        if self._section.best is None:
            self.best = checkpoint.marked_best(folder)  # of an earlier part of the run
            return
        sound = [one.step for one in checkpoint.survey(folder, self._comm) if one.sound]
        self.best = best if best in sound else None
        checkpoint.mark_best(folder, self.best, self._comm)

    def save(self, step: int, state: RunState, *, wait: bool, best: bool = False) -> None:
        """Commit a pending save, then save the checkpoint of step ``step``, with the run's ``state``.

        If the configuration asks for asynchronous saves and ``wait`` is false, a thread writes the checkpoint.
        Otherwise the checkpoint is complete on return. With ``best`` it is the best one so far, and the link ``best``
        points to it as soon as it is complete. Collective over the job's ranks.
        """
        self.finish()
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                self._folder.check()
        model, section = self._setup.model, self._section
        attributes = saved_attributes(self._setup, step, state, self._versions)
        path = checkpoint.step_folder(self._folder.checkpoints, step)
        self._begun = time.perf_counter()
        # Whatever stands there has come since the run began: its own of later steps were moved aside.
        how: dict[str, Any] = {"attributes": attributes, "alignment": section.alignment, "replace": False}
        if section.asynchronous and not wait:
            self._pending, self._begun_save = model.begin_save(path, **how), (step, best)
        else:
            model.save_model(path, backend=section.backend, **how)
            self._written(step, best, beside=False)
        self.step = step

    def finish(self) -> None:
        """Commit the asynchronous save, if there is one.

        Collective over the job's ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.commit()
            self._written(*self._begun_save, beside=True)

    def discard(self) -> None:
        """Cancel the asynchronous save, if there is one, and remove what it has written. Not collective.

        Called when an error ends the run: the model's next save would commit it, and that may be another run's.
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
        if left.reason not in self._told:
            self._told.add(left.reason)
            self._report(f"{left}; training goes on")

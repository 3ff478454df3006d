"""Write the checkpoints of a run, either at once or in a thread during the next steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpizero import checkpoint
from mpizero.checkpoint import PendingSave, RemovalFailure
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup.same_software import versions
from mpizero.train.run.resume import saved_attributes
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup
from mpizero.train.run.wall_time import WallTime


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
        self._begun = 0.0
        #: The step of the newest save, begun or done.
        self.step = -1
        with all_ranks(comm):
            checkpoint.check_backend(setup.comm, self._section.backend)
            if self._section.asynchronous:
                setup.model.reserve_snapshot()
            if comm.rank == 0:  # a run that was killed after its last save, and is complete, saves no more
                checkpoint.remove_leftovers(folder.checkpoints)
        # Those of rank 0: what a checkpoint holds is the same on all ranks.
        self._versions = comm.broadcast_object(versions())

    @property
    def busy(self) -> bool:
        """Tell whether the thread of this rank that saves asynchronously is still writing a checkpoint."""
        return self._pending is not None and not self._pending.finished

    def save(self, step: int, loss: float | None, *, wait: bool) -> None:
        """Commit a pending save, then save the checkpoint of step ``step``, whose loss is ``loss``.

        If the configuration asks for asynchronous saves and ``wait`` is false, a thread writes the checkpoint.
        Otherwise the checkpoint is complete on return. Collective over the job's ranks.
        """
        self.finish()
        with all_ranks(self._comm):
            if self._comm.rank == 0:
                self._folder.check()
        model, section = self._setup.model, self._section
        attributes = saved_attributes(self._setup, step, loss, self._versions)
        path = checkpoint.step_folder(self._folder.checkpoints, step)
        self._begun = time.perf_counter()
        # Whatever stands there has come since the run began: its own of later steps were moved aside.
        how: dict[str, Any] = {"attributes": attributes, "alignment": section.alignment, "replace": False}
        if section.asynchronous and not wait:
            self._pending = model.begin_save(path, **how)
        else:
            model.save_model(path, backend=section.backend, **how)
            self._written()
        self.step = step

    def finish(self) -> None:
        """Commit the asynchronous save, if there is one.

        Collective over the job's ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.commit()
            self._written()

    def _written(self) -> None:
        self._clock.saved(time.perf_counter() - self._begun)
        section = self._section
        checkpoint.prune(
            self._folder.checkpoints,
            section.keep,
            self._setup.comm,
            keep_every=section.keep_every,
            report=self._not_removed,
        )

    def _not_removed(self, left: RemovalFailure) -> None:
        if left.reason not in self._told:
            self._told.add(left.reason)
            self._report(f"{left}; training goes on")

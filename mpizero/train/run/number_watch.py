"""Check the loss and gradients of every step, and the parameters before every save.

The samples of skipped steps are kept for a replay. Jumps of the loss are reported, and a loss that has grown much.
Before a save, parameters are checked for damaged memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from mpizero.errors import DataError, RemoteError
from mpizero.layout import Grains
from mpizero.sharding import BadSteps, StepReport, dump_bad_step
from mpizero.sharding.step_report import SkippedSteps
from mpizero.train.run.progress import Progress
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup

#: The most bad steps of a run whose samples are kept.
MAX_DUMPS = 5
#: A loss is reported if it is SPIKE_FACTOR times the largest of the last SPIKE_STEPS steps, after SPIKE_LEAST steps.
SPIKE_FACTOR, SPIKE_STEPS, SPIKE_LEAST = 10.0, 100, 10
#: A run is told once that its loss has grown to so many times that of its first step, however slowly.
GROWTH = 1000.0


class LossSpikes:
    """Detect a loss that is far above the losses of the last steps, or has grown far above that of the first step."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SPIKE_STEPS)
        self._first, self._grown = 0.0, False

    def see(self, loss: float) -> str | None:
        """Record the loss of a step; return a message if it is far above earlier ones, else None. Not collective."""
        if not math.isfinite(loss):
            return None
        largest = max(self._last) if len(self._last) >= SPIKE_LEAST else math.inf
        told = []
        if loss > SPIKE_FACTOR * largest > 0:
            count = len(self._last)
            told.append(f"loss {loss:.4g} is {loss / largest:.3g} times the largest of the last {count} steps")
        if not self._grown and loss > GROWTH * self._first > 0:
            self._grown = True
            told.append(
                f"loss {loss:.4g} is {loss / self._first:.2g} times that of the first step, {self._first:.4g}: the "
                "training diverges; lower the learning rate, clip gradients, or see whether the gradient is that of "
                "the loss (mpizero.testing.check_model)"
            )
        self._first = self._first or loss
        self._last.append(loss)
        return "; ".join(told) or None

    def state(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint keeps."""
        return {"losses": list(self._last), "first": self._first, "grown": self._grown}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what :meth:`state` of an interrupted run has returned; an older version's has less. Not collective."""
        self._last.extend(saved.get("losses", ()))
        self._first, self._grown = float(saved.get("first", 0.0)), bool(saved.get("grown", False))


class NumberWatch:
    """Check loss and gradients of every step of a run.

    The model's own report of skipped steps is switched off; this object reports them as ``config.bad_steps`` says.

    Parameters
    ----------
    setup : RunSetup
        The run.
    folder : RunFolder
        Folder of the run, in which the samples of bad steps are kept.
    progress : Progress
        Where messages are written.
    """

    def __init__(self, setup: RunSetup, folder: RunFolder, progress: Progress) -> None:
        self.setup, self.folder, self.progress = setup, folder, progress
        self.spikes = LossSpikes()
        self._policy: BadSteps = setup.model.config.bad_steps
        self._skipped = SkippedSteps(self._policy)
        setup.model.count_skipped_steps(BadSteps(limit=None, warn=False))

    def state(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint keeps: the losses before, and the skipped steps in a row."""
        return self.spikes.state() | {"skipped": self._skipped.in_a_row}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint. Not collective."""
        self.spikes.restore(saved)
        self._skipped.in_a_row = int(saved.get("skipped", 0))

    def see(self, step: int, report: StepReport, batch: tuple[Any, Any]) -> dict[str, Any]:
        """Check a step; return entries for its line of metrics, empty if nothing is unusual.

        ``batch`` holds the samples of this rank. If the step was skipped, they are written to the run's folder, and the
        call is collective over the run's ranks; samples are not kept if only the loss scale was too high, or if every
        step has all of them.

        Raises
        ------
        NonFiniteError
            After too many skipped steps in a row, not counting steps after which the loss scale was lowered.
        """
        if skipped := self._skipped.told(report):
            kept = "" if report.backing_off or self.setup.takes_all else self._keep(step, batch)
            if self._policy.warn:
                self.progress.say("; ".join(filter(None, (skipped, kept))))
            if self._policy.callback is not None:
                self._policy.callback(report)
            way_on = "lower the learning rate, clip gradients, or look at the data"
            if self.setup.takes_all:
                way_on = "give other start values or bounds, or look at the data"
            advice = f"{way_on}; the checkpoints in {self.folder.checkpoints} are from before"
            self._skipped.enforce(report, "; ".join(filter(None, (advice, kept))))
            return {"skipped": report.skipped}
        told = None if self.setup.takes_all else self.spikes.see(report.loss)  # a trial may well be worse
        if told is None:
            return {}
        self.progress.say(f"step {step}: {told}")
        return {"loss_spike": told}

    def before_save(self) -> None:
        """Check parameters for damaged memory before a save, unless ``config.check_every`` is 0.

        Collective over the run's ranks.

        Raises
        ------
        IntegrityError
            If values are damaged. The message names the tensor and the rank.
        """
        if self.setup.model.config.check_every:
            self.setup.model.check_integrity()

    def _keep(self, step: int, batch: tuple[Any, Any]) -> str:
        """Write the samples of a skipped step into the run's folder; return a message about it.

        Collective over the run's ranks. If they cannot be written, the message says so, and the run continues.
        """
        setup, home = self.setup, self.folder.bad_steps
        full = len(list(home.glob("step_*"))) >= MAX_DUMPS if setup.comm.rank == 0 else False
        if setup.comm.broadcast_object(full, 0, "bad steps"):
            return f"{home} holds {MAX_DUMPS} bad steps already: this one is not kept"
        about = setup.record.about
        try:
            path = dump_bad_step(setup.model, batch, home, indices=self._indices(step), about=about)
        except (OSError, DataError, RemoteError) as error:
            return f"its samples cannot be kept: {error}"
        if "config" in about:
            return f"see: mpizero replay {path}"
        return f"see: mpizero.replay_bad_step({str(path)!r}, model)"

    def _indices(self, step: int) -> Any:
        """Return the positions in the training data of the samples that this rank was given in a step."""
        model, loop, source = self.setup.model, self.setup.loop, self.setup.source
        group = model.batch_group
        own = Grains(loop.global_batch, model.grain_size(loop.global_batch)).samples_of(group.rank, group.size)
        start = (step - 1) * loop.global_batch
        return source.origin(source.sample_order(start + own.start, start + own.stop, len(source), loop.seed))

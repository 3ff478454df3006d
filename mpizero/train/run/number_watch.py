"""Check the loss and gradients of every step, and the parameters before every save.

The samples of skipped steps are kept for a replay, and jumps of the loss are reported. Before a save, parameters are
checked for damaged memory.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from mpizero.data.batches import sample_order
from mpizero.errors import DataError, RemoteError
from mpizero.layout import Grains
from mpizero.parallel import BadSteps, StepReport, dump_bad_step
from mpizero.parallel.skipped_steps import SkippedSteps
from mpizero.train.config.builder import TrainingJob, widths_of
from mpizero.train.run.progress import Progress
from mpizero.train.run.run_folder import RunFolder

#: The most bad steps of a run whose samples are kept.
MAX_DUMPS = 5
#: A loss is reported if it is SPIKE_FACTOR times the largest of the last SPIKE_STEPS steps, after SPIKE_LEAST steps.
SPIKE_FACTOR, SPIKE_STEPS, SPIKE_LEAST = 10.0, 100, 10


class LossSpikes:
    """Detect a loss that is far above the losses of the last steps."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SPIKE_STEPS)

    def see(self, loss: float) -> str | None:
        """Record the loss of a step; return a message if it is far above the last losses, else None. Not collective."""
        if not math.isfinite(loss):
            return None
        largest = max(self._last) if len(self._last) >= SPIKE_LEAST else math.inf
        told = None
        if loss > SPIKE_FACTOR * largest > 0:
            told = f"loss {loss:.4g} is {loss / largest:.3g} times the largest of the last {len(self._last)} steps"
        self._last.append(loss)
        return told


class NumberWatch:
    """Check loss and gradients of every step of a run.

    Parameters
    ----------
    job : TrainingJob
        The training.
    folder : RunFolder
        Folder of the run, in which the samples of bad steps are kept.
    progress : Progress
        Where messages are written.
    """

    def __init__(self, job: TrainingJob, folder: RunFolder, progress: Progress) -> None:
        self.job, self.folder, self.progress = job, folder, progress
        self.spikes = LossSpikes()
        self._skipped = SkippedSteps(BadSteps())

    def see(self, step: int, report: StepReport, batch: tuple[Any, Any]) -> dict[str, Any]:
        """Check a step; return entries for its line of metrics, empty if nothing is unusual.

        ``batch`` holds the samples of this rank. If the step was skipped, they are written to the run's folder, and the
        call is collective over the job's ranks; samples are not kept if only the loss scale was too high.

        Raises
        ------
        NonFiniteError
            After five skipped steps in a row, not counting steps after which the loss scale was lowered.
        """
        if skipped := self._skipped.told(report):
            kept = "" if report.backing_off else self._keep(step, batch)
            self.progress.say("; ".join(filter(None, (skipped, kept))))
            self._skipped.enforce(
                report,
                "lower optimizer.lr, set train.clip, or look at the data; the checkpoints in "
                f"{self.folder.checkpoints} are from before; {kept}",
            )
            return {"skipped": report.skipped}
        told = self.spikes.see(report.loss)
        if told is None:
            return {}
        self.progress.say(f"step {step}: {told}")
        return {"loss_spike": told}

    def before_save(self) -> None:
        """Check parameters for damaged memory before a save, unless ``train.check_every`` is 0.

        Collective over the job's ranks.

        Raises
        ------
        IntegrityError
            If values are damaged. The message names the tensor and the rank.
        """
        if self.job.config.train.check_every:
            self.job.model.check_integrity()

    def _keep(self, step: int, batch: tuple[Any, Any]) -> str:
        """Write the samples of a skipped step into the run's folder; return a message about it.

        Collective over the job's ranks. If they cannot be written, the message says so, and the run continues.
        """
        job, home = self.job, self.folder.bad_steps
        full = len(list(home.glob("step_*"))) >= MAX_DUMPS if job.comm.rank == 0 else False
        if job.comm.broadcast_object(full, 0, "bad steps"):
            return f"{home} holds {MAX_DUMPS} bad steps already: this one is not kept"
        config = job.config
        about = {
            "config": config.to_dict(),
            "widths": widths_of(job.model.wrapped_model),
        }
        try:
            path = dump_bad_step(job.model, batch, home, indices=self._indices(step), about=about)
        except (OSError, DataError, RemoteError) as error:
            return f"its samples cannot be kept: {error}"
        return f"see: mpizero replay {path}"

    def _indices(self, step: int) -> Any:
        """Return the positions in the training data of the samples that this rank was given in a step."""
        job, train = self.job, self.job.config.train
        group = job.model.batch_group
        own = Grains(train.global_batch, job.model.grain_size(train.global_batch)).samples_of(group.rank, group.size)
        start = (step - 1) * train.global_batch
        order = sample_order(start + own.start, start + own.stop, len(job.source), train.seed)
        return job.source.origin(order)

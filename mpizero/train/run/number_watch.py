"""Watch the numbers of a run: keep skipped steps for a replay, report leaps of the loss and damaged memory."""

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

#: Bad steps of a run whose samples are kept.
MAX_DUMPS = 5
#: A loss so many times as large as the largest of so many steps before is told of, once there are enough of them.
SPIKE_FACTOR, SPIKE_STEPS, SPIKE_LEAST = 10.0, 100, 10


class LossSpikes:
    """Notice a loss far above those of the last steps."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SPIKE_STEPS)

    def see(self, loss: float) -> str | None:
        """Take the loss of a step; return what there is to say of it. Not collective."""
        if not math.isfinite(loss):
            return None
        largest = max(self._last) if len(self._last) >= SPIKE_LEAST else math.inf
        told = None
        if loss > SPIKE_FACTOR * largest > 0:
            told = f"loss {loss:.4g} is {loss / largest:.3g} times the largest of the last {len(self._last)} steps"
        self._last.append(loss)
        return told


class NumberWatch:
    """Look at the numbers of every step of a run.

    Parameters
    ----------
    job : TrainingJob
        What is trained.
    folder : RunFolder
        Where the samples of bad steps are kept.
    progress : Progress
        Where there is something to say.
    """

    def __init__(self, job: TrainingJob, folder: RunFolder, progress: Progress) -> None:
        self.job, self.folder, self.progress = job, folder, progress
        self.spikes = LossSpikes()
        self._skipped = SkippedSteps(BadSteps())

    def see(self, step: int, report: StepReport, batch: tuple[Any, Any]) -> dict[str, Any]:
        """Look at a step, and return what its line of metrics says more.

        Collective over the job's ranks where the step was skipped. ``batch`` is what this rank trained on.

        Raises
        ------
        NonFiniteError
            After five skipped steps in a row at which the loss scale was not the reason, or could not be lowered.
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
        """Make sure that damaged memory is not saved, unless checks are off. Collective over the job's ranks.

        Raises
        ------
        IntegrityError
            Naming tensor and rank.
        """
        if self.job.config.train.check_every:
            self.job.model.check_integrity()

    def _keep(self, step: int, batch: tuple[Any, Any]) -> str:
        """Keep the samples of a skipped step; return what to say of it. Collective over the job's ranks.

        A run does not end because they cannot be kept.
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
        """Return where in the data this rank's samples of a step are."""
        job, train = self.job, self.job.config.train
        group = job.model.batch_group
        own = Grains(train.global_batch, job.sharding.grain_size(train.global_batch)).samples_of(group.rank, group.size)
        start = (step - 1) * train.global_batch
        order = sample_order(start + own.start, start + own.stop, len(job.source), train.seed)
        return job.source.origin(order)

"""Run the training loop: batches, steps, metrics, validation, checkpoints, and early stops that lose no step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpizero.checkpoint import StepFolder
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup.same_software import agree_to_start
from mpizero.data import batches
from mpizero.errors import ExitStatus, MpizeroError
from mpizero.faults import inject
from mpizero.layout import Grains
from mpizero.parallel import StepReport
from mpizero.parallel.config import AUTO
from mpizero.train.config.builder import TrainingJob, build
from mpizero.train.config.sections import Config
from mpizero.train.config.setting_checks import rejected
from mpizero.train.run.metrics import Speed, Validation, finite, shortened
from mpizero.train.run.number_watch import NumberWatch
from mpizero.train.run.preemption import StopDecision, StopRequests
from mpizero.train.run.process_memory import peak_resident
from mpizero.train.run.progress import Progress
from mpizero.train.run.resume import restore
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.saver import Saver
from mpizero.train.run.signals import StopSignals
from mpizero.train.run.stop_file import StopFile
from mpizero.train.run.wall_time import JobContext, WallTime


class Preempted(MpizeroError):  # noqa: N818 - it is the outcome of a request, not a mistake
    """Report that the run was asked to stop and has saved its state."""

    status = ExitStatus.PREEMPTED


def train(
    config: Config,
    comm: Communicator,
    *,
    resume: bool = False,
    resume_from: int | None = None,
    context: JobContext | None = None,
) -> dict[str, Any]:
    """Run the training that a configuration describes, and return its result.

    Collective over ``comm``.

    Parameters
    ----------
    config : Config
        The configuration, the same on every rank.
    comm : Communicator
        The ranks that train; the communicator is not closed.
    resume : bool
        Whether to continue from the newest undamaged checkpoint of the run, if there is one; see :func:`restore`.
    resume_from : int, optional
        Continue from the checkpoint of this step; checkpoints of later steps are moved to another folder.
    context : JobContext, optional
        Signals that the caller catches already, and its start time. Without it, this function catches signals itself.

    Returns
    -------
    dict
        ``steps``, ``loss`` (of the last step), ``parameters_sha256``, ``ranks``, ``strategy``, ``tokens_per_second``
        (None if samples have no tokens; ``samples_per_second`` is then there too), ``parameter_count`` and ``layout``.

    Raises
    ------
    Preempted
        After SIGUSR1 or SIGTERM on any rank, if a file ``STOP`` exists in the run's folder, or shortly before the job's
        time limit. The state is saved, and the message names the reason.
    NonFiniteError
        After five skipped steps in a row, whose loss or gradient was not finite.
    """
    config.parallel.check_ranks(comm.size)
    agree_to_start(comm, lambda: {"the configuration": config.to_dict()})
    folder, progress = RunFolder(config.checkpoint.folder), Progress(config.train.steps, active=comm.rank == 0)
    context = context or JobContext(StopSignals())
    try:
        with comm.split(0, name="control") as control, context.signals:
            stop = StopRequests(control, lambda: context.signals.reason(comm.rank))
            with all_ranks(control):
                clock = WallTime.of(config.train, context) if comm.rank == 0 else WallTime([])
                if comm.rank == 0:
                    open_folder(folder, progress, resume=resume or resume_from is not None)
                    stop.listen(clock.reason, StopFile(folder.stop_file, report=progress.say).reason)
            with build(config, comm) as job:
                trainer = Trainer(job, folder, stop, clock, progress)
                result = trainer.run(resume=resume, resume_from=resume_from)
    finally:
        folder.close()
        progress.close()
    if result is None:
        raise Preempted(trainer.farewell)
    return result


def open_folder(folder: RunFolder, progress: Progress, *, resume: bool) -> None:
    """Open the run's folder; if the run is not resumed, move the files of an earlier run into a folder below it.

    Not collective.
    """
    folder.open()
    earlier = None if resume else folder.set_aside()
    if earlier is not None:
        progress.say(f"{folder.root} held an earlier run: moved to {earlier} (--resume would have continued it)")


class Trainer:
    """Train one run from its first or resumed step to its last; made by :func:`train`."""

    def __init__(
        self, job: TrainingJob, folder: RunFolder, stop: StopRequests, clock: WallTime, progress: Progress
    ) -> None:
        self.job, self.folder, self.stop, self.clock, self.progress = job, folder, stop, clock, progress
        self.control = stop.comm
        self.config = job.config
        self.speed = Speed("tokens" if job.task == "language" else "samples")
        self.step = 0
        self.loss: float | None = None
        self.saver = Saver(job, folder, self.control, clock, progress.say)
        self.numbers = NumberWatch(job, folder, progress)
        self._failure: MpizeroError | None = None

    def run(self, *, resume: bool, resume_from: int | None = None) -> dict[str, Any] | None:
        """Train to the last step, and return the result; None if the run was asked to stop before.

        Collective over the job's ranks.
        """
        self._start(resume or resume_from is not None, resume_from)
        stream = iter(self._batches())
        decision = StopDecision.GO_ON
        while self.step < self.config.train.steps and decision is StopDecision.GO_ON:
            inject("train.step")
            started = time.perf_counter()
            x, y = next(stream)
            self.stop.ask(self.saver.busy)
            self.job.model.train(x, y, epoch=stream.epoch)
            decision = self.stop.answer()
            self.step += 1
            seconds = time.perf_counter() - started
            more = self.numbers.see(self.step, self.job.model.last_step, (x, y))
            self._finish_step(self.job.model.last_step, seconds, more)
            self.clock.worked(time.perf_counter() - started)
            if self.stop.all_finished:
                self.saver.finish()
            if self._checkpoint_due(decision):
                self._save(wait=decision is StopDecision.STOP or self.step == self.config.train.steps)
        with all_ranks(self.control):
            if self._failure is not None:
                raise self._failure
            if decision is StopDecision.STOP and self.job.comm.rank == 0:
                self.folder.obey_stop()
        if self.step < self.config.train.steps:
            return None
        return self._result()

    def _start(self, resume: bool, step: int | None) -> None:
        job = self.job
        start = restore(job, self.folder, self.control, self.progress, step) if resume else None
        if start is not None:
            saved = start.saved
            self.step, self.loss, self.saver.step = saved.step, saved.loss, saved.step
            if self.step > self.config.train.steps:
                raise rejected(
                    "train.steps",
                    self.config.train.steps,
                    f"the run in {self.folder.root} has done {self.step} steps already; give more steps, or start in "
                    "another checkpoint.folder",
                )
        with all_ranks(self.control):
            if job.comm.rank == 0:
                self._move_aside([] if start is None else start.newer)
                self.folder.continue_metrics(self.step)
        self.progress.begin(self.step)
        self.progress.say(job.describe())

    def _move_aside(self, newer: Sequence[StepFolder]) -> None:
        """Move the checkpoints of later steps to another folder, and print a message about each."""
        place = self.folder.set_steps_aside(one.path for one in newer)
        for one in newer:
            why = "of a later step" if one.sound else f"{'damaged' if one.damaged else 'not readable'}: {one.problem}"
            self.progress.say(f"{one.path} moved to {place}; it is {why}")

    def _batches(self) -> Any:
        train = self.config.train
        return batches(
            self.job.source,
            self.job.model,
            train.global_batch,
            seed=train.seed,
            steps=train.steps - self.step,
            consumed=self.step * train.global_batch,
        )

    def _finish_step(self, report: StepReport, seconds: float, more: Mapping[str, Any]) -> None:
        self.loss = report.loss
        samples = self.config.train.global_batch
        rate = self.speed.step(samples * self.job.units_per_sample, seconds)
        line: dict[str, Any] = {
            "step": self.step,
            "loss": finite(report.loss),
            "learning_rate": report.learning_rate,
            "gradient_norm": finite(report.gradient_norm),
            f"{self.speed.unit}_per_second": rate,
            "bytes_sent": report.bytes_sent,
            "memory": peak_resident(),
            **more,
        }
        if self.config.parallel.bucket_mb == AUTO and report.bucket_mb:
            line["bucket_mb"] = report.bucket_mb
        if report.buckets_tried:
            tried = ", ".join(f"{size:g}" for size in report.buckets_tried)
            self.progress.say(f"bucket_mb = {report.bucket_mb:g} from now on (tried {tried})")
        if self._validation_due():
            line |= self._validate().figures()
            self.speed.disturb()
        if self.job.comm.rank == 0:
            self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self.folder.write_metrics(line)
        except MpizeroError as error:
            # The other ranks are in the next step already: they learn of it when that one is done.
            self._failure = error
            self.stop.fail()
        shown = [("loss", line["loss"]), (f"{self.speed.unit}/s", line[f"{self.speed.unit}_per_second"])]
        shown += [(key, line[key]) for key in ("validation_loss", "perplexity", "accuracy") if key in line]
        self.progress.step(self.step, shortened(shown))

    def _validation_due(self) -> bool:
        train = self.config.train
        if not train.validate_every or not len(self.job.validation):
            return False
        return self.step % train.validate_every == 0 or self.step == train.steps

    def _validate(self) -> Validation:
        """Evaluate the model on ``train.validate_samples`` validation samples, evenly spaced among all.

        Collective over the job's ranks.
        """
        job, train = self.job, self.config.train
        count = min(len(job.validation), train.validate_samples or len(job.validation))
        chosen = np.arange(count, dtype=np.int64) * len(job.validation) // count
        size, group = job.model.grain_size(train.global_batch), job.model.batch_group
        loss_sum, weight, correct = 0.0, 0.0, None
        for start in range(0, count, train.global_batch):
            part = chosen[start : start + train.global_batch]
            own = part[Grains(len(part), size).samples_of(group.rank, group.size)]
            loss, counted, right = job.model.evaluate(*job.validation.samples(own))
            loss_sum, weight = loss_sum + loss, weight + counted
            correct = None if right is None else (correct or 0.0) + right
        return Validation(loss_sum, weight, correct, job.task)

    def _checkpoint_due(self, decision: StopDecision) -> bool:
        every = self.config.checkpoint.every
        last = self.step == self.config.train.steps
        return last or decision is StopDecision.STOP or bool(every and self.step % every == 0)

    def _save(self, *, wait: bool) -> None:
        self.numbers.before_save()
        self.saver.save(self.step, self.loss, wait=wait)
        self.speed.disturb()

    @property
    def farewell(self) -> str:
        """Return the last message of a run that was stopped: the reason, the step, and where its state is saved."""
        where = self.folder.checkpoints
        return f"stopped by {self.stop.reason} after step {self.step}: saved in {where}; go on with --resume"

    def _result(self) -> dict[str, Any]:
        if self.saver.step != self.step:
            self._save(wait=True)
        rate = self.speed.median()
        result: dict[str, Any] = {
            "steps": self.step,
            "loss": finite(self.loss),
            "parameters_sha256": self.job.model.parameters_sha256(),
            "ranks": self.job.comm.size,
            "strategy": self.config.parallel.strategy,
            "tokens_per_second": rate if self.speed.unit == "tokens" else None,
            "parameter_count": self.job.model.parameter_count,
            "layout": self.config.parallel.figures(self.job.comm.size),
        }
        if self.speed.unit == "samples":
            result["samples_per_second"] = rate
        with all_ranks(self.control):
            if self.job.comm.rank == 0:
                self.folder.complete(result)
        return result

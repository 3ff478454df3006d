"""Train one run: batches, steps, metrics, validation, checkpoints, and early stops that lose no step.

:func:`run_session` runs one session of a training (one start or resume) to the last step, or until the run is asked to
stop; :class:`TrainingLoop` has the loop. :class:`NumberWatch` saves the samples of skipped steps for a replay, and
reports jumps and strong growth of the loss. :func:`validate` evaluates the model on validation samples. Two classes are
for full-batch methods such as L-BFGS: :class:`SameBatch` returns the same samples in every step, and
:class:`MethodWatch` sets the model's parameters to the method's last iterate while callbacks, validations and
checkpoints read them, and back to the next trial point before the next step.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.faults import inject
from mpizero._util.names import nearest
from mpizero._util.settings import rejected, shown
from mpizero.checkpoint import StepFolder
from mpizero.checkpoint.manager import BEST
from mpizero.comm.agreement import all_ranks
from mpizero.data import Source, batches
from mpizero.data.batches import choose_grains, full_batch, slab_of
from mpizero.errors import DataError, ExitStatus, MpizeroError, RemoteError, StateError
from mpizero.layout import Grains
from mpizero.sharding import BadSteps, StepReport
from mpizero.sharding.forward_backward import Evaluation
from mpizero.sharding.saved_attributes import learning_rate_record
from mpizero.sharding.step_report import SkippedSteps
from mpizero.train.callbacks import CallbackRounds, UserMetrics
from mpizero.train.events import Progress
from mpizero.train.machine import peak_resident
from mpizero.train.recorder import RunRecorder
from mpizero.train.run_folder import DECISION, RunFolder, RunState, SavedCheckpoint, SavedRun, Saver, restore
from mpizero.train.setup import (
    VALIDATION_METRICS,
    Improvement,
    RunSetup,
    Speed,
    TrainingResult,
    finite,
    perplexity,
    short,
    validation_count,
)
from mpizero.train.stopping import JobContext, StopDecision, StopFile, StopRequests, WallTime

if TYPE_CHECKING:
    from mpizero.optim.minimizers import MethodProgress


class Preempted(MpizeroError, SystemExit):  # noqa: N818 - it is the outcome of a request, not a mistake
    """Report that a run was asked to stop, and has saved its state.

    The reason, which the message names, is SIGUSR1, SIGUSR2 or SIGTERM on any rank, a file ``STOP`` in the run's
    folder, or the coming end of the job's time limit. The run has stopped before its last step, or is complete and got
    the signal at its end. A program that does not catch this exception ends with status 75, by which a batch script
    can see that the job has to be queued again. That works with and without a launcher, because the exception is also
    a ``SystemExit``.

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


def run_session(
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
        Model, data and settings of the run.
    context : JobContext
        The signals to catch, the start time of the job, and its environment variables.
    resume : bool
        Whether to continue from the newest undamaged checkpoint of the run, if there is one; see :func:`restore`.
    resume_from : int, optional
        Continue from the checkpoint of this step; checkpoints of later steps are moved to another folder.
    attach : callable
        Called with the :class:`TrainingLoop` before it starts; returns the ``trainer`` that callbacks get.

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
        setup.model._skipped = SkippedSteps(setup.model.config.bad_steps)
    return Preempted(loop.stop_message) if result is None else result


def _check_best(setup: RunSetup) -> None:
    """Raise SettingError if ``best`` or ``patience`` is set without validation samples, or ``best`` names no metric."""
    best = setup.checkpoints.best
    for key, value in (("checkpoint.best", best), ("train.patience", setup.loop.patience)):
        if value is not None and not (setup.validation is not None and len(setup.validation)):
            raise rejected(key, value, "needs validation samples: set data.validation > 0 with it")
    names = (*VALIDATION_METRICS, *setup.metrics)
    if best is not None and (name := best.removeprefix("-")) not in names:
        known = f"no validation metric of this name{nearest(name, names)}; there are {', '.join(names)}"
        raise rejected("checkpoint.best", best, f'{known}, and a "-" before it says that large values are good')


def open_folder(folder: RunFolder, progress: Progress, how_to_resume: str, *, resume: bool) -> None:
    """Open the run's folder; if the run is not resumed, move the files of an earlier run into a folder below it.

    Not collective. A message then says where the files are, and that ``how_to_resume``, an option or call, would have
    resumed the run.
    """
    folder.open()
    earlier = None if resume else folder.set_aside()
    if earlier is not None:
        progress.say(f"{folder.root} held an earlier run: moved to {earlier} ({how_to_resume} would have continued it)")


class TrainingLoop:
    """Train one run from its first or resumed step to its last, or until it is asked to stop.

    Construction is collective over the run's ranks.

    Parameters
    ----------
    setup : RunSetup
        Model, data and settings of the run.
    folder : RunFolder
        Folder of the run, open on rank 0.
    stop : StopRequests
        Requests to stop. The loop sends its own messages by the communicator of ``stop``, too.
    clock : WallTime
        Records how long steps and saves take.
    progress : Progress
        Shows the progress and messages.
    recorder : RunRecorder
        Records the events of the run.

    Attributes
    ----------
    host : Trainer
        First argument of all methods of callbacks.
    step : int
        Number of steps done.
    running : bool
        Whether :meth:`run` is being executed.
    metrics : dict
        The metrics of the last step; bytes sent and memory are those of this rank.
    """

    def __init__(
        self,
        setup: RunSetup,
        folder: RunFolder,
        stop: StopRequests,
        clock: WallTime,
        progress: Progress,
        recorder: RunRecorder,
    ) -> None:
        self.setup, self.folder, self.stop, self.clock, self.progress = setup, folder, stop, clock, progress
        self.control, self.recorder = stop.comm, recorder
        self.host: Any = None
        self.callbacks = CallbackRounds(setup.callbacks, setup.model)
        self.improvement = setup.improvement()
        self.metrics: dict[str, Any] = {}
        self._is_best = self.running = False
        self._not_finite: set[str] = set()
        self.speed = Speed("tokens" if setup.record.task == "language" else "samples")
        self.step = 0
        self.loss: float | None = None
        self.losses = array("d")
        self.validations: list[dict[str, Any]] = []
        self.saver = Saver(setup, folder, self.control, clock, progress.say)
        self.saver.on_saved = self._saved
        self.numbers = NumberWatch(setup, folder, progress)
        self.method = MethodWatch(setup.model)
        self.overrides: list[dict[str, Any]] = []
        self._failure: MpizeroError | None = None

    def run(self, *, resume: bool, resume_from: int | None = None) -> TrainingResult | None:
        """Train to the last step, and return the result; None if the run was asked to stop before.

        Collective over the run's ranks.
        """
        self.running = True
        try:
            return self._run(resume, resume_from)
        except BaseException as error:
            self.saver.discard()
            self.recorder.failed(self.step, self.loss, error)
            raise
        finally:
            self.running = False

    def _run(self, resume: bool, resume_from: int | None) -> TrainingResult | None:
        self._start(resume or resume_from is not None, resume_from)
        decision = StopDecision.GO_ON
        with self._batches() as stream:
            while not self._complete and decision is StopDecision.GO_ON:
                decision = self._advance(stream)
        with all_ranks(self.control):
            if self._failure is not None:
                raise self._failure
            if decision is StopDecision.STOP and self.control.rank == 0:
                self.folder.obey_stop()
                if not self._complete:
                    self.recorder.stopped(self.step, self.loss, self.stop.reason)
        self.method.show_iterate()
        if not self._complete:
            self.callbacks.call("on_end", self.host, None)
            return None
        return self._result()

    def _advance(self, stream: Any) -> StopDecision:
        """Train one step, call callbacks, validate and save as due; return whether the ranks stop after it."""
        model = self.setup.model
        inject("train.step")
        started = time.perf_counter()
        batch = next(stream, None)
        if batch is None:  # an OnlineSource has no more samples: None on all ranks
            self.callbacks.reason = "the producers have ended"
            return StopDecision.GO_ON
        read = time.perf_counter()
        x, y = batch
        self.method.go_on()
        self.stop.ask(self.saver.busy)
        with self.recorder.tracing(self.step + 1):
            model.train(x, y, epoch=stream.epoch)
        decision = self.stop.answer()
        self.step += 1
        seconds = time.perf_counter() - started
        self.recorder.stepped(self.step, model.last_step, read - started)
        more = self.numbers.see(self.step, model.last_step, (x, y)) | self.method.metrics()
        if self.setup.callbacks or self._validation_due() or self._checkpoint_due(decision):
            self.method.show_iterate()
        self._finish_step(model.last_step, seconds, more)
        self.clock.worked(time.perf_counter() - started)
        if self.stop.all_finished:
            self.saver.finish()
        if self._checkpoint_due(decision):
            self.saver.finish()  # first, because on_checkpoint may end the run: then the save below is the last one
            self._save(wait=decision is StopDecision.STOP or self._complete)
        return decision

    @property
    def _complete(self) -> bool:
        """True if the run is complete: its last step is done, or there is a :attr:`reason` to end earlier."""
        return self.step >= self.setup.loop.steps or bool(self.reason)

    @property
    def reason(self) -> str:
        """Why a full-batch method, ``patience`` or a callback ends the run early, or ""; equal on all ranks."""
        if self.method.reason:
            return self.method.reason
        if self.improvement is not None and self.improvement.exhausted:
            return self.improvement.reason
        return self.callbacks.reason

    def _start(self, resume: bool, step: int | None) -> None:
        setup = self.setup
        saved, newer = restore(setup, self.folder, self.control, self.progress, step) if resume else (None, [])
        if saved is not None:
            self._take(saved)
            if step is None:
                self.callbacks.reason = self._decision(saved)
            if self._complete:
                self.progress.say(self._nothing_left())
        elif setup.begin is not None and (message := setup.begin()):
            self.progress.say(message)
        superseded = 0
        with all_ranks(self.control):
            if self.control.rank == 0:
                self._move_aside(newer)
                superseded = self.folder.continue_metrics(self.step)
        if isinstance(setup.source, Source):
            with all_ranks(self.control):
                choose_grains(setup.model, setup.source, setup.loop.global_batch)
        self.recorder.begin(self.step, superseded)
        self.method.begin()
        self.saver.start(self.step, None if self.improvement is None else self.improvement.step)
        self.progress.begin(self.step)
        self.progress.say(setup.described())
        if message := self._rate_of_zero():
            self.progress.say(message)

    def _rate_of_zero(self) -> str:
        """Return a warning if the schedule of the learning rate reaches 0 before the run's last steps; else "".

        Not collective.
        """
        schedule, steps = learning_rate_record(self.setup.model._engine.updater)["schedule"], self.setup.loop.steps
        if schedule is None or schedule["shape"] == "constant" or schedule["end"] or schedule["steps"] >= steps:
            return ""
        return (
            f"the learning rate is 0 from step {schedule['steps'] + 1} to the last, {steps}, which change nothing: a "
            f"schedule counts steps, not epochs; give it the run's, {schedule['shape']}(..., steps={steps})"
        )

    def _take(self, saved: SavedRun) -> None:
        """Set the state of this loop to that of a checkpoint, so that the run continues after the checkpoint's step."""
        setup, self.step, self.loss = self.setup, saved.step, saved.state.loss
        if self.step > setup.loop.steps:
            raise rejected(
                "train.steps",
                setup.loop.steps,
                f"the run in {self.folder.root} has done {self.step} steps already; give more steps, or start in "
                f"another {setup.record.wording.folder}",
            )
        self.numbers.restore(saved.state.numbers)
        self.overrides = saved.state.overrides
        messages = [
            f"after step {one['step']}: {one['key']} = {shown(one['now'])}, it was {shown(one['was'])}"
            for one in self.overrides
        ]
        messages += [] if self.improvement is None else [self.improvement.restore(saved.state.best)]
        messages += self.callbacks.restore_state(saved.state.callbacks)
        for message in filter(None, messages):
            self.progress.say(message)

    def _decision(self, saved: SavedRun) -> str:
        """Return the reason for which a callback has ended the run after the step of a checkpoint; "" if none has.

        Collective. If ``on_checkpoint`` of a callback has ended the run, the checkpoint was already written without the
        reason, which is then in the file ``run_complete``.
        """
        reason = self.folder.decision(saved.step) if self.control.rank == 0 else ""
        return saved.state.stopped or str(self.control.broadcast_object(reason, tag="decision"))

    def _nothing_left(self) -> str:
        """Return a message that says that a resumed run is already complete, and how the user can train further."""
        how_to_continue = "more steps train on"
        if self.method.reason:
            how_to_continue = "another run may start from its parameters"
        elif self.callbacks.reason:
            how_to_continue = f"{self.setup.record.wording.resume_from.format(self.step)} trains on from there"
        elif self.reason:
            how_to_continue = "a larger patience trains on"
        why = f": {self.reason}" if self.reason else ""
        return f"the run in {self.folder.root} is complete, it has ended after step {self.step}{why}; {how_to_continue}"

    def _move_aside(self, newer: Sequence[StepFolder]) -> None:
        """Move ``newer``, the checkpoints of later steps, to another folder, and print a message about each."""
        folder = self.folder.set_steps_aside(one.path for one in newer)
        for one in newer:
            why = "of a later step" if one.valid else f"{'damaged' if one.damaged else 'not readable'}: {one.problem}"
            self.progress.say(f"{one.path} moved to {folder}; it is {why}")

    def _batches(self) -> Any:
        setup, loop = self.setup, self.setup.loop
        if setup.takes_all:
            return nullcontext(SameBatch(setup.source, setup.model))
        return batches(
            setup.source,
            setup.model,
            loop.global_batch,
            seed=loop.seed,
            steps=loop.steps - self.step,
            consumed=self.step * loop.global_batch,
            prefetch=loop.prefetch,
        )

    def _finish_step(self, report: StepReport, seconds: float, more: Mapping[str, Any]) -> None:
        self.loss = report.loss if self.method.loss is None else self.method.loss
        self.losses.append(report.loss)
        rate = self.speed.step(self.setup.loop.global_batch * self.setup.record.units_per_sample, seconds)
        line: dict[str, Any] = {
            "step": self.step,
            "loss": finite(report.loss),
            "learning_rate": finite(report.learning_rate),
            "gradient_norm": finite(report.gradient_norm),
            f"{self.speed.unit}_per_second": rate,
            "bytes_sent": report.bytes_sent,
            "memory": peak_resident(),
            **more,
        }
        if begun := [one for one in self.overrides if one["step"] == self.step - 1]:
            line["overrides"] = begun
        displayed = [*(self.method.metrics() or ["loss"]), f"{self.speed.unit}_per_second"]
        self.metrics = line
        self.callbacks.call("on_step", self.host, report)
        self._is_best = False
        if self._validation_due():
            metrics = validate(self.setup)
            for name in (name for name, value in metrics.items() if value is None and name not in self._not_finite):
                self._not_finite.add(name)
                self.progress.say(
                    f"step {self.step}: {name} is not finite, and so never the best: are all validation samples? "
                    "mpizero.data.statistics(validation, mesh) names the first that is not"
                )
            self.validations.append({"step": self.step, **metrics})
            line |= metrics
            displayed += metrics
            if self.improvement is not None:
                self._is_best = self.improvement.see(self.step, metrics) and self.setup.checkpoints.best is not None
            self.callbacks.call("on_validation", self.host, metrics)
            self.speed.disturb()
        if self.control.rank == 0:
            self._write(line, displayed)

    def _write(self, line: Mapping[str, Any], displayed: Sequence[str]) -> None:
        try:
            self.folder.write_metrics(line)
        except MpizeroError as error:
            # The other ranks have already begun the next step: they get the request to fail when it is done.
            self._failure = error
            self.stop.fail()
        self.progress.step(self.step, {name.replace("_per_second", "/s"): short(line[name]) for name in displayed})

    def _validation_due(self) -> bool:
        loop, source = self.setup.loop, self.setup.validation
        if not loop.validate_every or source is None or not len(source):
            return False
        return self.step % loop.validate_every == 0 or self._complete

    def _checkpoint_due(self, decision: StopDecision) -> bool:
        every = self.setup.checkpoints.every
        if self._complete or self._is_best or decision is StopDecision.STOP:
            return True
        return bool(every and self.step % every == 0)

    def _save(self, *, wait: bool) -> None:
        if self.setup.model.config.check_every:
            self.setup.model.check_integrity()  # memory that is damaged must not be saved
        states = self.callbacks.saved_state()
        best = {} if self.improvement is None else self.improvement.state()
        state = RunState(self.loss, best, self.numbers.state(), states, self.callbacks.reason, self.overrides)
        self.saver.save(self.step, state, wait=wait, best=self._is_best)
        self.speed.disturb()

    def _saved(self, checkpoint: SavedCheckpoint) -> None:
        self.recorder.saved(checkpoint)
        self.callbacks.call("on_checkpoint", self.host, checkpoint.path)

    @property
    def stop_message(self) -> str:
        """The message of :class:`Preempted`: the reason for the stop, the step, and where the state is saved."""
        where, how_to_resume = self.folder.checkpoints, self.setup.record.wording.resume
        return f"stopped by {self.stop.reason} after step {self.step}: saved in {where}; go on with {how_to_resume}"

    def _result(self) -> TrainingResult:
        if self.saver.step != self.step:
            self._save(wait=True)
        setup, best = self.setup, self.improvement
        if self.losses and (summary := self.method.summary()):
            self.progress.say(summary)
        result = TrainingResult(
            steps=self.step,
            loss=finite(self.loss),
            parameters_sha256=setup.model.parameters_sha256(),
            bits=setup.model._engine.bits,
            ranks=setup.comm.size,
            strategy=setup.strategy,
            unit=self.speed.unit,
            speed=self.speed.median(),
            parameter_count=setup.model.parameter_count,
            layout=setup.layout(),
            losses=self.losses,
            overrides=tuple(self.overrides),
            validations=tuple(self.validations),
            stopped=self.method.reason or (self.reason if self.step < setup.loop.steps else ""),
            method=self.method.result(),
            best=None if best is None or best.value is None else self._best(best),
        )
        decision = {DECISION: self.callbacks.reason} if self.callbacks.reason else {}
        self.callbacks.call("on_end", self.host, result)
        with all_ranks(self.control):
            if self.control.rank == 0:
                self.recorder.done(result)
                self.folder.complete(result.to_dict() | decision)
        return result

    def _best(self, best: Improvement) -> dict[str, Any]:
        """Return a dict with the best value so far, its step, and the path of its checkpoint, None if there is none."""
        exists = self.saver.best is not None and self.saver.best == best.step
        path = os.path.join(self.folder.checkpoints, BEST) if exists else None
        return {"metric": best.name, "value": best.value, "step": best.step, "checkpoint": path}


#: Largest number of skipped steps of a run whose samples are saved.
MAX_DUMPS = 5
#: A loss is reported if it is SPIKE_FACTOR times the largest of the last SPIKE_STEPS steps, after SPIKE_LEAST steps.
SPIKE_FACTOR, SPIKE_STEPS, SPIKE_LEAST = 10.0, 100, 10
#: A loss that is so many times that of the first step is reported once, however slowly it has grown.
GROWTH = 1000.0


class LossSpikes:
    """Detect a loss that is far above the losses of the last steps, or has grown far above that of the first step."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SPIKE_STEPS)
        self._first, self._grown = 0.0, False

    def see(self, loss: float) -> str | None:
        """Record the loss of a step; return a message if it is far above earlier losses, else None. Not collective."""
        if not math.isfinite(loss):
            return None
        largest = max(self._last) if len(self._last) >= SPIKE_LEAST else math.inf
        messages = []
        if loss > SPIKE_FACTOR * largest > 0:
            count = len(self._last)
            messages.append(f"loss {loss:.4g} is {loss / largest:.3g} times the largest of the last {count} steps")
        if not self._grown and loss > GROWTH * self._first > 0:
            self._grown = True
            messages.append(
                f"loss {loss:.4g} is {loss / self._first:.2g} times that of the first step, {self._first:.4g}: the "
                "training diverges; lower the learning rate, clip gradients, or see whether the gradient is that of "
                "the loss (mpizero.testing.check_model)"
            )
        self._first = self._first or loss
        self._last.append(loss)
        return "; ".join(messages) or None

    def state(self) -> dict[str, Any]:
        """Return the recorded losses as a dict of JSON values, which a checkpoint stores."""
        return {"losses": list(self._last), "first": self._first, "grown": self._grown}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the state to a result of :meth:`state`; keys that an older version did not save may be missing."""
        self._last.extend(saved.get("losses", ()))
        self._first, self._grown = float(saved.get("first", 0.0)), bool(saved.get("grown", False))


class NumberWatch:
    """Report skipped steps and jumps of the loss, save the samples of skipped steps, and raise after too many of them.

    This object reports skipped steps as ``config.bad_steps`` says, in place of the model, whose reports it disables.

    Parameters
    ----------
    setup : RunSetup
        Model, data and settings of the run.
    folder : RunFolder
        Folder of the run, into which the samples of skipped steps are written.
    progress : Progress
        Shows the messages.
    """

    def __init__(self, setup: RunSetup, folder: RunFolder, progress: Progress) -> None:
        self.setup, self.folder, self.progress = setup, folder, progress
        self.spikes = LossSpikes()
        self._policy: BadSteps = setup.model.config.bad_steps
        self._skipped = SkippedSteps(self._policy)
        setup.model._skipped = SkippedSteps(BadSteps(limit=None, warn=False))

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint: the last losses, and the number of skipped steps in a row."""
        return self.spikes.state() | {"skipped": self._skipped.in_a_row}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the state to a result of :meth:`state` from a checkpoint. Not collective."""
        self.spikes.restore(saved)
        self._skipped.in_a_row = int(saved.get("skipped", 0))

    def see(self, step: int, report: StepReport, batch: tuple[Any, Any]) -> dict[str, Any]:
        """Check a step; return a dict with the reason if it was skipped, or a message about a jump of the loss.

        ``batch`` holds the samples of this rank. If the step was skipped, these samples are written to the run's
        folder, and the call is collective over the run's ranks. Samples are not written if only the loss scale was too
        high, or if the run trains by a full-batch method, whose steps all have the same samples.

        Raises
        ------
        NonFiniteError
            After too many skipped steps in a row, not counting steps after which the loss scale was lowered.
        """
        if skipped := self._skipped.count(report):
            batch_message = "" if report.backing_off or self.setup.takes_all else self._keep(step, batch)
            if self._policy.warn:
                self.progress.say("; ".join(filter(None, (skipped, batch_message))))
            if self._policy.callback is not None:
                self._policy.callback(report)
            remedy = "lower the learning rate, clip gradients, or look at the data"
            if self.setup.takes_all:
                remedy = "give other start values or bounds, or look at the data"
            advice = f"{remedy}; the checkpoints in {self.folder.checkpoints} are from before"
            self._skipped.enforce(report, "; ".join(filter(None, (advice, batch_message))))
            return {"skipped": report.skipped}
        message = None if self.setup.takes_all else self.spikes.see(report.loss)  # a trial may well be worse
        if message is None:
            return {}
        self.progress.say(f"step {step}: {message}")
        return {"loss_spike": message}

    def _keep(self, step: int, batch: tuple[Any, Any]) -> str:
        """Write the samples of a skipped step into the run's folder; return a message for the user.

        Collective over the run's ranks. If the samples cannot be written, or the folder holds those of
        :data:`MAX_DUMPS` steps already, the message says so, and the run continues.
        """
        setup, home = self.setup, self.folder.bad_steps
        full = len(list(home.glob("step_*"))) >= MAX_DUMPS if setup.comm.rank == 0 else False
        if setup.comm.broadcast_object(full, 0, "bad steps"):
            return f"{home} holds {MAX_DUMPS} bad steps already: this one is not kept"
        about = setup.record.about
        from mpizero.sharding import dump_bad_step

        try:
            path = dump_bad_step(setup.model, batch, home, indices=self._indices(step), about=about)
        except (OSError, DataError, RemoteError) as error:
            return f"its samples cannot be kept: {error}"
        if "config" in about:
            return f"see: mpizero replay {path}"
        return f"see: mpizero.sharding.replay_bad_step({str(path)!r}, model)"

    def _indices(self, step: int) -> Any:
        """Return the indices in the training data of the samples that this rank has got in a step."""
        model, loop, source = self.setup.model, self.setup.loop, self.setup.source
        group = model.batch_group
        local = Grains(loop.global_batch, model.grain_size(loop.global_batch)).samples_of(group.rank, group.size)
        start = (step - 1) * loop.global_batch
        return source.origin(source.sample_order(start + local.start, start + local.stop, len(source), loop.seed))


def validation_metrics(evaluation: Evaluation, task: str) -> dict[str, Any]:
    """Return a dict of the mean loss and, depending on ``task``, of perplexity or accuracy.

    Not collective. ``evaluation`` has the sums over the validation samples of all ranks; ``task`` is "language",
    "classification", "regression", or "" if the model does not declare one.
    """
    metrics: dict[str, Any] = {"validation_loss": finite(evaluation.loss)}
    if task == "language":
        metrics["perplexity"] = finite(perplexity(evaluation.loss)) if math.isfinite(evaluation.loss) else None
    elif task != "regression" and evaluation.correct is not None:
        metrics["accuracy"] = evaluation.accuracy
    return metrics


def validate(setup: RunSetup) -> dict[str, Any]:
    """Evaluate the model on ``validate_samples`` validation samples, evenly spaced among all; return all metrics.

    With ``validate_ema`` all metrics, including the user's own, are computed with the moving average of parameters.

    Collective over the run's ranks.
    """
    model, loop, source = setup.model, setup.loop, setup.validation
    count = validation_count(loop, source)
    chosen = np.arange(count, dtype=np.int64) * len(source) // count
    size, group = model.grain_size(loop.global_batch), model.batch_group
    loss_sum, weight, correct, predictions = 0.0, 0.0, 0, 0
    scored, user_metrics = True, UserMetrics(setup.metrics, model)
    for start in range(0, count, loop.global_batch):
        part = chosen[start : start + loop.global_batch]
        local = Grains(len(part), size).samples_of(group.rank, group.size)
        samples = slab_of(model).samples(source, part[local])
        evaluation = model.evaluate(*samples, ema=loop.validate_ema)
        loss_sum, weight = loss_sum + evaluation.loss_sum, weight + evaluation.weight
        scored = scored and evaluation.correct is not None
        correct, predictions = correct + (evaluation.correct or 0), predictions + evaluation.predictions
        with _averaged(model, use=loop.validate_ema and bool(setup.metrics)):
            user_metrics.add(source, part, size, samples)
    sums = Evaluation(loss_sum, weight, correct if scored else None, predictions)
    return {**validation_metrics(sums, setup.record.task), **user_metrics.compute()}


@contextmanager
def _averaged(model: Any, *, use: bool) -> Iterator[None]:
    """Replace the model's parameters by their moving average in a ``with`` block if ``use`` is true. Collective.

    Errors in the block must be raised on all ranks together, as :class:`UserMetrics` does.
    """
    with model._engine.with_average(use=use, agreed=True):
        try:
            if use:
                model._cache = None
            yield
        finally:
            if use:
                model._cache = None


class SameBatch:
    """Iterate over the batches of a full-batch method: return this rank's samples, read once, in every step.

    The first call of ``next`` is collective over the ranks of ``model``.
    """

    #: Number of the epoch, from which random numbers are computed: the same in every step.
    epoch = 0

    def __init__(self, source: Source, model: Any) -> None:
        self._source, self._model = source, model
        self._samples: tuple[Any, Any] | None = None

    def __next__(self) -> tuple[Any, Any]:
        if self._samples is None:
            self._samples = full_batch(self._source, self._model)
        return self._samples


class MethodWatch:
    """Report the progress of a full-batch method such as L-BFGS, and switch between its last iterate and next trial.

    Between steps the model's parameters are the next trial point of the line search, but callbacks, validations and
    checkpoints must see the last iterate. With any other optimizer all methods do nothing.

    Parameters
    ----------
    model : Model
        The model that the method trains.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._iterate_version: int | None = None  # the version of the parameters while they are the iterate's

    @property
    def progress(self) -> MethodProgress | None:
        """The progress of the full-batch method; None with any other optimizer. Not collective."""
        updater = self._model._engine.updater
        return None if updater is None or updater.method is None else updater.method.progress

    @property
    def loss(self) -> float | None:
        """The loss of the last iterate; None before the first iterate. Not collective."""
        progress = self.progress
        return None if progress is None or progress.stage == "first" else finite(progress.loss)

    @property
    def reason(self) -> str:
        """Why the full-batch method has ended, such as "converged: ..."; "" if it has not. Not collective."""
        progress = self.progress
        if progress is None or progress.stage != "done":
            return ""
        return f"converged: {progress.message}" if progress.converged else progress.message

    def metrics(self) -> dict[str, Any]:
        """Return, for a line of metrics, the number, loss and largest gradient element of the last iterate.

        Not collective. The result is empty with any other optimizer.
        """
        progress = self.progress
        if progress is None:
            return {}
        largest = None if progress.stage == "first" else finite(progress.norm)
        return {"iteration": progress.iterations, "iterate_loss": self.loss, "largest_gradient": largest}

    def result(self) -> dict[str, Any] | None:
        """Return :attr:`TrainingResult.method`, the outcome of the method; None with any other optimizer."""
        progress = self.progress
        if progress is None:
            return None
        values = {"converged": progress.converged, "message": progress.message, "iterations": progress.iterations}
        return {**values, "largest_gradient": self.metrics()["largest_gradient"]}

    def summary(self) -> str:
        """Return a message about the end of the method for the user; "" with any other optimizer. Not collective."""
        progress = self.progress
        if progress is None:
            return ""
        state = (
            f"loss {progress.loss:.6g}, largest gradient {progress.norm:.3g}" if self.loss is not None else "no iterate"
        )
        counts = f"after {progress.iterations} iterations, {progress.evaluations} evaluations"
        return f"{self.reason or 'not converged'} ({state} {counts})"

    def begin(self) -> None:
        """Set the parameters to the point that the method evaluates next, after a start or a resume. Collective."""
        self._iterate_version = None
        if self.progress is not None:
            self._model._engine.place(iterate=False)
            self._model._cache = None

    def show_iterate(self) -> None:
        """Set the parameters to the last iterate, until :meth:`go_on` is called. Collective."""
        if self.progress is not None and self._iterate_version is None:
            self._model._engine.place(iterate=True)
            self._model._cache = None
            self._iterate_version = self._model._engine.store.version

    def go_on(self) -> None:
        """Set the parameters to the next trial point again, if :meth:`show_iterate` was called. Collective.

        Raises
        ------
        StateError
            If a callback has changed the parameters since :meth:`show_iterate`.
        """
        if self._iterate_version is None:
            return
        if self._iterate_version != self._model._engine.store.version:
            name = type(self._model.optimizer.wrapped_optimizer).__name__
            raise StateError(
                f"a callback has changed the parameters, which only {name} may change: they are its iterate"
            )
        self.begin()

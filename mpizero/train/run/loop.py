"""Run the training loop: batches, steps, metrics, validation, checkpoints, and early stops that lose no step."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from mpizero._util.faults import inject
from mpizero.checkpoint import StepFolder
from mpizero.checkpoint.folders import BEST
from mpizero.comm.agreement import all_ranks
from mpizero.data import Source, batches
from mpizero.data.batches import choose_grains
from mpizero.errors import MpizeroError
from mpizero.sharding import StepReport
from mpizero.sharding.config import AUTO
from mpizero.train.callbacks.callback_rounds import CallbackRounds
from mpizero.train.config.setting_checks import rejected, shown
from mpizero.train.process_memory import peak_resident
from mpizero.train.run.improvement import Improvement
from mpizero.train.run.metrics import Speed, finite, shortened
from mpizero.train.run.number_watch import NumberWatch
from mpizero.train.run.progress import Progress
from mpizero.train.run.recorder import RunRecorder
from mpizero.train.run.result import TrainingResult
from mpizero.train.run.resume import RunState, SavedRun, restore
from mpizero.train.run.run_folder import DECISION, RunFolder
from mpizero.train.run.saver import SavedCheckpoint, Saver
from mpizero.train.run.setup import RunSetup
from mpizero.train.run.validation import validate
from mpizero.train.run.vector_run import MethodWatch, SameBatch
from mpizero.train.stopping.stop_requests import StopDecision, StopRequests
from mpizero.train.stopping.wall_time import WallTime


class TrainingLoop:
    """Train one run from its first or resumed step to its last, or until it is asked to stop.

    Construction is collective over the run's ranks.

    Parameters
    ----------
    setup : RunSetup
        The run.
    folder : RunFolder
        Folder of the run, open on rank 0.
    stop : StopRequests
        Requests to stop. Its communicator is used for the messages of this loop, too.
    clock : WallTime
        Records how long steps and saves take.
    progress : Progress
        Where progress and messages are shown.
    recorder : RunRecorder
        Records the events of the run.

    Attributes
    ----------
    host : Trainer
        What callbacks are called with.
    step : int
        Number of steps done.
    running : bool
        Whether :meth:`run` runs now.
    figures : dict
        The line of metrics of the last step; bytes and memory are those of this rank.
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
        self.figures: dict[str, Any] = {}
        self._is_best = self.running = False
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
        """Train one step, with all that follows it; return what the ranks decided meanwhile."""
        model = self.setup.model
        inject("train.step")
        started = time.perf_counter()
        batch = next(stream, None)
        if batch is None:  # on all ranks
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
        more = self.numbers.see(self.step, model.last_step, (x, y)) | self.method.figures()
        if self.setup.callbacks or self._validation_due() or self._checkpoint_due(decision):
            self.method.show_iterate()
        self._finish_step(model.last_step, seconds, more)
        self.clock.worked(time.perf_counter() - started)
        if self.stop.all_finished:
            self.saver.finish()
        if self._checkpoint_due(decision):
            self.saver.finish()  # whose callbacks may end the run: then the save below is the last one
            self._save(wait=decision is StopDecision.STOP or self._complete)
        return decision

    @property
    def _complete(self) -> bool:
        """True if the run has reached its end: its last step, or an earlier one by its own decision."""
        return self.step >= self.setup.loop.steps or bool(self.reason)

    @property
    def reason(self) -> str:
        """The reason for which the run ends before its last step; "" if it does not. The same on every rank."""
        if self.method.reason:
            return self.method.reason
        if self.improvement is not None and self.improvement.exhausted:
            return self.improvement.reason
        return self.callbacks.reason

    def _start(self, resume: bool, step: int | None) -> None:
        setup = self.setup
        start = restore(setup, self.folder, self.control, self.progress, step) if resume else None
        if start is not None:
            self._take(start.saved)
            if step is None:
                self.callbacks.reason = self._decision(start.saved)
            if self._complete:
                self.progress.say(self._nothing_left())
        elif setup.begin is not None and (told := setup.begin()):
            self.progress.say(told)
        superseded = 0
        with all_ranks(self.control):
            if self.control.rank == 0:
                self._move_aside([] if start is None else start.newer)
                superseded = self.folder.continue_metrics(self.step)
        if isinstance(setup.source, Source):
            with all_ranks(self.control):
                choose_grains(setup.model, setup.source, setup.loop.global_batch)
        self.recorder.begin(self.step, superseded)
        self.method.begin()
        self.saver.start(self.step, None if self.improvement is None else self.improvement.step)
        self.progress.begin(self.step)
        self.progress.say(setup.described())

    def _take(self, saved: SavedRun) -> None:
        """Go on from the state of a checkpoint."""
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
        told = [
            f"after step {one['step']}: {one['key']} = {shown(one['now'])}, it was {shown(one['was'])}"
            for one in self.overrides
        ]
        told += [] if self.improvement is None else [self.improvement.restore(saved.state.best)]
        told += self.callbacks.restore_state(saved.state.callbacks)
        for message in filter(None, told):
            self.progress.say(message)

    def _decision(self, saved: SavedRun) -> str:
        """Return the reason for which a callback has ended the run after the step of a checkpoint; "" if none has.

        Collective. That of a callback of a synchronous save came when the checkpoint was written: the marker has it.
        """
        told = self.folder.decision(saved.step) if self.control.rank == 0 else ""
        return saved.state.stopped or str(self.control.broadcast_object(told, tag="decision"))

    def _nothing_left(self) -> str:
        """Return a message about a resumed run that has reached its end already, with the way on."""
        way_on = "more steps train on"
        if self.method.reason:
            way_on = "another run may start from its parameters"
        elif self.callbacks.reason:
            way_on = f"{self.setup.record.wording.resume_from.format(self.step)} trains on from there"
        elif self.reason:
            way_on = "a larger patience trains on"
        why = f": {self.reason}" if self.reason else ""
        return f"the run in {self.folder.root} is complete, it has ended after step {self.step}{why}; {way_on}"

    def _move_aside(self, newer: Sequence[StepFolder]) -> None:
        """Move the checkpoints of later steps to another folder, and print a message about each."""
        place = self.folder.set_steps_aside(one.path for one in newer)
        for one in newer:
            why = "of a later step" if one.sound else f"{'damaged' if one.damaged else 'not readable'}: {one.problem}"
            self.progress.say(f"{one.path} moved to {place}; it is {why}")

    def _batches(self) -> Any:
        setup, loop = self.setup, self.setup.loop
        if setup.takes_all:
            return SameBatch(setup.source, setup.model)
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
        if self.setup.model.config.bucket_mb == AUTO and report.bucket_mb:
            line["bucket_mb"] = report.bucket_mb
        if report.buckets_tried:
            tried = ", ".join(f"{size:g}" for size in report.buckets_tried)
            self.progress.say(f"bucket_mb = {report.bucket_mb:g} from now on (tried {tried})")
        shown = [*(self.method.figures() or ["loss"]), f"{self.speed.unit}_per_second"]
        self.figures = line
        self.callbacks.call("on_step", self.host, report)
        self._is_best = False
        if self._validation_due():
            figures = validate(self.setup)
            self.validations.append({"step": self.step, **figures})
            line |= figures
            shown += figures
            if self.improvement is not None:
                self._is_best = self.improvement.see(self.step, figures) and self.setup.checkpoints.best is not None
            self.callbacks.call("on_validation", self.host, figures)
            self.speed.disturb()
        if self.control.rank == 0:
            self._write(line, shown)

    def _write(self, line: Mapping[str, Any], shown: Sequence[str]) -> None:
        try:
            self.folder.write_metrics(line)
        except MpizeroError as error:
            # The other ranks are in the next step already: they learn of it when that one is done.
            self._failure = error
            self.stop.fail()
        self.progress.step(self.step, shortened([(name.replace("_per_second", "/s"), line[name]) for name in shown]))

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
        self.numbers.before_save()
        states = self.callbacks.saved_state()
        best = {} if self.improvement is None else self.improvement.state()
        state = RunState(self.loss, best, self.numbers.state(), states, self.callbacks.reason, self.overrides)
        self.saver.save(self.step, state, wait=wait, best=self._is_best)
        self.speed.disturb()

    def _saved(self, checkpoint: SavedCheckpoint) -> None:
        self.recorder.saved(checkpoint)
        self.callbacks.call("on_checkpoint", self.host, checkpoint.path)

    @property
    def farewell(self) -> str:
        """The last message of a run that was stopped: the reason, the step, and where its state is saved."""
        where, way_on = self.folder.checkpoints, self.setup.record.wording.resume
        return f"stopped by {self.stop.reason} after step {self.step}: saved in {where}; go on with {way_on}"

    def _result(self) -> TrainingResult:
        if self.saver.step != self.step:
            self._save(wait=True)
        setup, best = self.setup, self.improvement
        if self.losses and (told := self.method.told()):
            self.progress.say(told)
        result = TrainingResult(
            steps=self.step,
            loss=finite(self.loss),
            parameters_sha256=setup.model.parameters_sha256(),
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
        """Return the best value so far, its step, and its checkpoint if that is kept."""
        kept = self.saver.best is not None and self.saver.best == best.step
        path = os.path.join(self.folder.checkpoints, BEST) if kept else None
        return {"metric": best.name, "value": best.value, "step": best.step, "checkpoint": path}

"""Run the micro-batches of a step one after the other, without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mpizero._util.pytree import as_arrays, map_leaves
from mpizero.comm import ProcessGrid
from mpizero.comm.communicator import Timeline
from mpizero.errors import DataError
from mpizero.kernels import all_finite, to_host
from mpizero.layout.flat import Unit
from mpizero.parallel.batch.step_scalars import GrainScalars
from mpizero.parallel.device.compute_device import ComputeDevice
from mpizero.parallel.execution.evaluators import Evaluator
from mpizero.parallel.gradients.gradient_views import apart
from mpizero.parallel.gradients.reducer import Job
from mpizero.parallel.gradients.unwritten_gradients import WriteCheck
from mpizero.parallel.parameters.store import flat_names
from mpizero.parallel.partition.local_model import PartitionedModel
from mpizero.types import EVALUATE, Run

#: Returns the ``Run`` of a forward pass, from the index of its first sample and the number of samples.
RunOf = Callable[[int, int], Run]


def agreeable_errors(grid: ProcessGrid) -> tuple[type[Exception], ...]:
    """Return the types of layer errors that are recorded and raised at the end of the step, on all ranks together.

    Not collective. After such an error a rank still joins the collectives of the step. Other errors are raised at once.
    If layers are split over a tensor or context group, all errors are: the other ranks of the group wait inside the
    layer that has raised on this one. One exception is ``DataError`` in a tensor group without a context group: all
    ranks of the group have the same samples, so all of them raise it.
    """
    if grid.tensor.size * grid.context.size == 1:
        return (Exception,)
    return (DataError,) if grid.context.size == 1 else ()


class Runner(Protocol):
    """Run the forward and backward passes of a training step, and the forward passes of evaluation and prediction."""

    #: The types of layer errors that are raised later, when all ranks agree.
    agreeable: tuple[type[Exception], ...]

    def run(self, jobs: Iterable[Job], run_of: RunOf) -> None:
        """Run the forward and backward passes of all jobs, and record losses, weights and errors in the scalars.

        ``run_of`` takes the index of a micro-batch's first sample and its number of samples, and returns its ``Run``.
        """

    def ready(self) -> None:
        """Wait until all updated parameters that other ranks send have arrived. Collective over the data group."""

    def predict(self, x: Any) -> Any:
        """Return the whole prediction for this rank's ``x``; if ``x`` is None, only join collectives; return None."""

    def loss(self, x: Any, y: Any, run: Run = EVALUATE) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction of a micro-batch, without computing gradients.

        A rank that does not compute them, because another stage does or ``x`` is None, returns 0.0, 0.0 and None.
        """

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` in place of the model's own loss inside the context; None keeps the own one."""


class WatchedJob:
    """Check the gradients of a job when they are complete, and record the first that is not finite.

    The job's samples, and the views that layers write its gradients to, are on the device where the layers compute.
    """

    def __init__(
        self,
        job: Job,
        scalars: GrainScalars,
        timeline: Timeline,
        compute_device: ComputeDevice,
        marks: WriteCheck | None,
    ) -> None:
        self.job, self.scalars, self.timeline = compute_device.put_job(job), scalars, timeline
        self.compute_device = compute_device
        self._marks = marks if marks is not None and marks.on else None
        self._written: dict[int, Any] = {}
        self._ended: set[str] = set()

    def target(self, unit: Unit) -> Any:
        """Return the views that layers write a unit's gradients to."""
        self._written[unit.index] = self.job.target(unit)
        views = self.compute_device.target(unit, self._written[unit.index])
        if self._marks is not None:
            self._marks.mark(views)
        self.scalars.integers.prepare(unit.blocks)
        return views

    def ended(self, unit: Unit, block: str, dx: Any) -> Any:
        """Check a block's gradients, which are complete, and report the block to the job.

        The other blocks of the unit may not be complete yet. Return ``dx``, the gradient of the block's input, or a
        copy of it if it shares memory with the block's gradients, which the next block may overwrite.
        """
        begun = self.timeline.begin()
        if self.job.grain is not None:
            dx = apart(dx, self.job.parts(unit, block))
        self._end(unit, block, self._written[unit.index][block])
        self.timeline.end("local sums", block, begun)
        return dx

    def done(self, unit: Unit) -> None:
        """Check the gradients of a unit, all complete now, and report the unit to the job.

        Blocks that have been reported before are left out. Nothing is checked if :meth:`target` was not called for the
        unit, because a layer has raised before.
        """
        begun = self.timeline.begin()
        written = self._written.pop(unit.index, {})
        if written:
            self.compute_device.done(unit, written)
        for block, views in reversed(written.items()):  # the last one came first
            if block not in self._ended:
                self._end(unit, block, views)
        self.job.done(unit)
        self.timeline.end("local sums", unit, begun)

    def _end(self, unit: Unit, block: str, views: Any) -> None:
        self._check(unit, block, views)
        self._weight_averages(block, views)
        if self.job.grain is not None and (
            unlike := self.scalars.integers.take(block, *self.job.grain.place(self.job.number))
        ):
            self.scalars.fail_later(unlike)
        self._ended.add(block)
        if self.job.ended is not None:
            self.job.ended(unit, block)
        if self._marks is not None and self.job.in_scratch:
            self._marks.mark({block: views})  # the next block is written here, too

    def _weight_averages(self, block: str, views: Any) -> None:
        """Multiply the new values of a block's averaged parameters by the number of samples of the micro-batch."""
        grain, names = self.job.grain, self.scalars.averages.get(block)
        if grain is None or names is None:
            return
        values = dict(flat_names(views))
        for view in (values[name] for name in names):
            view *= view.dtype.type(grain.place(self.job.number)[1])
        self.scalars.check(grain.number, block, {name: values[name] for name in names})  # the product may be infinite

    def _check(self, unit: Unit, block: str, views: Any) -> None:
        """Check that a block's gradients are finite; if one is not, record it in the scalars.

        If it is not finite because the layer has not written it, an error that says so is recorded.
        """
        if self.job.grain is None:
            return
        if not all(all_finite(part) for part in self.job.parts(unit, block)):
            missed = None if self._marks is None else self._marks.missed(block, views)
            if missed is not None:
                self.scalars.fail_later(missed)
            else:
                self.scalars.check(self.job.grain.number, block, views)
        if self.scalars.watch is not None:
            self.scalars.watch(self.job.grain.number, self.job.number, block, views)


class SequentialRunner:
    """Run one micro-batch after the other through all blocks of the model, without a pipeline.

    Parameters
    ----------
    evaluator : Evaluator
        Runs the model forward and backward for one micro-batch.
    scalars : GrainScalars
        Collects losses, weights and failures.
    partitioned : PartitionedModel
        Joins the parts of a prediction that the ranks of a tensor or context group have computed.
    counts : bool
        Whether this rank records its losses in ``scalars``. The ranks of a tensor group compute equal losses, and only
        one of them records them.
    agreeable : tuple of type
        The types of layer errors that are raised later, on all ranks together; see :func:`agreeable_errors`.
    compute_device : ComputeDevice, optional
        The device where the evaluator computes; the host if not given.
    marks : WriteCheck, optional
        Checks that layers write all of their gradients; not checked if not given.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        scalars: GrainScalars,
        partitioned: PartitionedModel,
        *,
        counts: bool = True,
        agreeable: tuple[type[Exception], ...] = (Exception,),
        compute_device: ComputeDevice | None = None,
        marks: WriteCheck | None = None,
    ) -> None:
        self.evaluator, self.scalars, self.partitioned = evaluator, scalars, partitioned
        self.counts, self.agreeable, self.compute_device = counts, agreeable, compute_device or ComputeDevice()
        self.marks = marks

    def run(self, jobs: Iterable[Job], run_of: RunOf) -> None:
        """Run the forward and backward pass of every job, one after the other; each job is one micro-batch.

        Collective over the data group if gradients or parameters are sharded. Losses, weights and errors are recorded
        in the scalars. ``run_of`` takes the index of a micro-batch's first sample and its number of samples, and
        returns the ``Run`` of its pass.
        """
        for job in jobs:
            if job.grain is None or self.scalars.error is not None:
                self.evaluator.absent(job.done)
            else:
                timeline = self.evaluator.store.timeline
                self._compute(WatchedJob(job, self.scalars, timeline, self.compute_device, self.marks), run_of)
        if self.marks is not None:
            self.marks.end(failed=self.scalars.error is not None)
        self.ready()  # also for parameters that no job has read: other ranks of the node may wait for this one

    def _compute(self, watched: WatchedJob, run_of: RunOf) -> None:
        grain, number = watched.job.grain, watched.job.number
        assert grain is not None
        x, y, _ = grain.micro_batches[number]
        try:
            ended = watched.ended if self.compute_device.tells_blocks else None
            run = run_of(*grain.place(number))
            loss, weight = self.evaluator.gradients(x, y, run, watched.target, watched.done, ended)
            if self.counts:
                self.scalars.add(grain.number, loss, weight)
        except Exception as error:  # the evaluator went on to take part in everything: all ranks come to agree
            if not isinstance(error, self.agreeable):
                raise
            self.scalars.fail(error)

    def ready(self) -> None:
        """Wait until all updated parameters that other ranks send have arrived. Collective over the data group."""
        self.evaluator.store.wait()

    def predict(self, x: Any) -> Any:
        """Return the whole prediction for this rank's ``x``, on the host; if ``x`` is None, only join the gathers.

        Collective over the data group if parameters are sharded, and over the tensor and context group.
        """
        own = None if x is None else self.compute_device.put(self.partitioned.own_places(as_arrays(x)))
        prediction = self.evaluator.predict(own)
        return None if x is None else map_leaves(to_host, self.partitioned.whole_prediction(prediction))

    def loss(self, x: Any, y: Any, run: Run = EVALUATE) -> tuple[float, float, Any]:
        """Return the sum of losses, the weight and the prediction of a micro-batch, without computing gradients.

        Collective over the data group if parameters are sharded, and over the tensor and context group. The prediction
        is on the host; in a context group it has this rank's positions of the sequences only.
        """
        loss, weight, prediction = self.evaluator.loss(self.compute_device.put(x), self.compute_device.put(y), run)
        if prediction is None:
            return loss, weight, None
        return loss, weight, map_leaves(to_host, self.partitioned.whole_scores(prediction))

    def using_loss(self, loss: Any) -> AbstractContextManager[None]:
        """Use ``loss`` in place of the model's own loss inside the context; None keeps the own one. Not collective."""
        return self.evaluator.using_loss(self.partitioned.own_loss(loss))

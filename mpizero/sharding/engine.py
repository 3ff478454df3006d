"""Train a model whose parameters are placed on ranks: one engine executes every strategy (``sharding/config.py``).

[Note: a step] Samples are sent to the ranks that compute their grains or, with dynamic scheduling, put into the shared
memory of the node that computes them (``sharding/batch.py``). Each rank computes the gradients of its grains
(``sharding/forward_backward.py``). One small allgather makes all ranks agree on the loss, on its weight, and on whether
all values are finite. For the ranges of the parameters that it owns, each rank sums the gradients
(``sharding/grad_reduce.py``), divides the sum by the weight, and updates the parameters (``sharding/update.py``). Then
the new parameters are all-gathered (``sharding/params.py``): by a barrier within each node, and by an all-gather
between nodes if the optimizer state is sharded (otherwise every node updates a whole copy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mpizero import kernels, optim
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice
from mpizero.comm.agreement import agree_equal
from mpizero.errors import (
    ArgumentError,
    CollectiveError,
    DataError,
    PeerFailure,
    RemoteError,
    StateError,
    UnsupportedError,
)
from mpizero.guard.guard import set_context
from mpizero.layout.batch import GrainRule
from mpizero.layout.mesh import groups_of
from mpizero.optim.elementwise import clip_factor
from mpizero.sharding.batch import (
    DEFAULT_ARGUMENTS,
    Divisors,
    DynamicScheduler,
    GlobalBatch,
    Totals,
    check_slabs,
    check_weight,
    in_contexts,
    redistribute,
)
from mpizero.sharding.config import fuses_update, needs_norm
from mpizero.sharding.forward_backward import Evaluation, evaluate
from mpizero.sharding.grad_reduce import GradientReducer
from mpizero.sharding.params import COMPUTING, UpdatePiece, needing
from mpizero.sharding.placed_model import PlacedModel
from mpizero.sharding.step_report import GrainNotices, Outcome, StepReport
from mpizero.sharding.update import Updater
from mpizero.types import Array, Run


class Engine(PlacedModel):
    """Train and evaluate a model whose parameters are placed on ranks.

    Construction and every public method are collective over the ranks of ``mesh``. The constructor takes the parameters
    of :class:`PlacedModel`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.step_number, self.step_arguments = 0, DEFAULT_ARGUMENTS
        self._uses_average = self._warned_average = self._begun = False
        self._agreed_rule: GrainRule | None = None
        self._grain_notices = GrainNotices(self.grid.axes.data, self.grid.pipeline.size)

    # ------------------------------------------------------------------ one step

    def train(self, x: Any, y: Any) -> StepReport:
        """Run one training step on the global batch: forward, backward, sum of gradients over ranks, update.

        ``x`` and ``y`` are this rank's samples and targets. The report has the loss and the gradient norm. If a loss or
        gradient is not finite, the update is skipped.
        """
        self._bound()
        sent = self.store.bytes_sent
        batch, totals = self._compute(x, y, self.reducer, summed=True)
        report = self._finish(totals, sent, lambda: self._update(totals))
        if self.prints_notices:
            self._grain_notices.after_step(self.grain_rule, batch.samples, self.model, self.step_number)
        return report

    def _compute(self, x: Any, y: Any, reducer: GradientReducer, *, summed: bool) -> tuple[GlobalBatch, Totals]:
        """Redistribute samples, compute gradients into ``reducer``, and agree on losses and weights.

        Return the grains of this rank, and loss and weight of the whole global batch. ``summed=True`` says that the
        caller sums the gradients over the ranks next, so that the reduction may begin during the backward pass.
        """
        set_context(step=self.step_number)
        with self.scalars.world.trace.joint_task("training step"):
            with self.timeline.span("agreement", "samples"):
                batch = self._redistribute(x, y, reducer, self.scheduler if summed else None)
            self.exchange.begin(batch.samples, self.current_loss_scale())
            micro_batches = reducer.micro_batches(batch, summed=summed)
            # Every value is looked at afterwards, with its rank, tensor and samples: NumPy's warnings would say less.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), needing(*COMPUTING):
                self.runner.run(micro_batches, self._context)
            with self.timeline.span("reduction", "rest"):
                reducer.finish()
            with self.timeline.span("agreement", "losses"):
                totals = self.scalars.agree(None if self.updater is None else self.updater.learning_rate)
                check_weight(totals.weight)
                self.exchange.weigh(totals.weight, sent=reducer.in_rounds)
                if self.integers.specs:
                    self.integers.agree()
                return batch, totals

    def _redistribute(
        self, x: Any, y: Any, reducer: GradientReducer, scheduler: DynamicScheduler | None = None
    ) -> GlobalBatch:
        """Send samples to the ranks that compute their grains, and prepare to record the losses and weights of a step.

        Return the grains that this rank may compute, with their samples. ``reducer`` determines which rank computes
        which grain; with ``scheduler``, only which node does.
        """
        micro, first, cut = self.config.accumulate, not self._begun, self.partitioned.cut
        batch = redistribute(
            self.grid,
            x,
            y,
            self._grain_size,
            reducer.owners,
            micro,
            arguments=self.step_arguments,
            scheduler=scheduler,
            first=first,
            check_parts=None if cut is None else self.agree_on_space,
            axes=0 if cut is None else len(cut.parts),
        )
        self._begun = True
        self.store.begin_sending()
        self.compute_device.check_batch(x, y)
        if self.partitioned.cuts_sequences or cut is not None:
            batch = in_contexts(batch, self.grid, self.partitioned.cut_batch)
        self.scalars.begin(batch, self.step_number + 1)
        return batch

    def agree_on_space(self, tree: SampleTree, *, alone: bool = False) -> None:
        """Check that each rank of a domain gives its part of the same fields, and record the extents of the fields.

        Collective over all ranks, whose fields must have the same extents. With ``alone``, it is collective over the
        ranks of this rank's domain only, and the fields of other domains may have other extents.
        """
        grid, cut = self.grid, self.partitioned.cut
        assert cut is not None, "only the ranks of a domain give parts of fields"
        comm, domains = (grid.context, [range(cut.size)]) if alone else (grid.world, groups_of(grid.axes, "context"))
        extents = check_slabs(comm, domains, tree, cut, getattr(self.model, "sample_shape", ()))
        self.partitioned.split.domain.begin_batch(extents)

    def _grain_size(self, samples: int, tree: SampleTree) -> int:
        """Return the number of samples in a grain of a global batch of ``samples`` samples like those of ``tree``.

        Collective over all ranks if the rule that cuts batches into grains is new and depends on a count of operations:
        the ranks then check that they have the same count.
        """
        if self.grain_rule.coarse:
            self.complete_grain_rule(*tree.cut(slice(0, 0)))
            if self.grain_rule is not self._agreed_rule:
                name = "the samples of a default grain (micro_batch sets it)"
                agree_equal(self.grid.world, lambda: {name: self.grain_rule.efficient}, "agree grains")
                self._agreed_rule = self.grain_rule
        return self.grain_rule.grain_size(samples)

    def _context(self, first_sample: int, count: int) -> Run:
        seed, epoch = getattr(self.model, "seed", 0), self.step_arguments.epoch
        return Run(True, seed, self.step_number, first_sample, count=count, epoch=epoch)

    def _finish(self, totals: Totals, sent: int, update: Callable[[], Outcome]) -> StepReport:
        """End the step: call ``update`` if all losses and gradients are finite, and return the report of the step.

        ``sent`` is the value of ``store.bytes_sent`` before the step.
        """
        updater = self._bound()
        rate, scale = updater.rate, self.current_loss_scale()
        norm, problems = None, totals.problems
        if self.config.check_every:
            self.integrity.verify()
        if not problems:
            norm, problems = update()
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=not problems)
        self.exchange.finish(updated=not problems)
        if not problems and self.integers.specs:
            self.integers.commit()
        if problems and updater.method is not None and updater.method.retry():
            self.store.all_gather(exchange=self.placement.shard_optimizer, later=True)
        elif problems:
            self.memory.barrier("skipped")
        self.step_number += 1
        if self.config.check_every:
            self.integrity.after_step(self.step_number)
        return StepReport(
            updater.step_count,
            totals.mean,
            totals.weight,
            rate,
            norm,
            str(problems[0]) if problems else None,
            self.store.bytes_sent - sent,
            problems,
            scale,
            self.current_loss_scale(),
            self.exchange.bucket_mb,
        )

    def _bound(self) -> Updater:
        """Return the updater; if the model has no optimizer yet, bind plain SGD first."""
        if self.updater is None:
            self.bind(optim.SGD(lr=self.config.learning_rate), self.config.loss_scale(None))
        return self.bound_updater

    def recordings(self) -> dict[str, str]:
        """Say whether kernels were repeated from recordings in the last step: of each block's passes, and the update.

        See ``ModelMetadata.recordings``.
        """
        update = {} if self.updater is None else {"update": self.updater.computed_by}
        return self.runner.blocks.status() | update

    # ------------------------------------------------------------------ sum and update

    def _update(self, totals: Totals) -> Outcome:
        """Sum gradients, update and all-gather parameters; return the gradient norm (or None) and non-finite values.

        The sum and the update are one pass over memory if :func:`fuses_update` is true.
        """
        updater, divisors = self._bound(), self._divisors(totals)
        ties, nodes, in_rounds = self.ties is not None, self.grid.inter_node.size, self.reducer.in_rounds
        if not fuses_update(updater.optimizer, norm=self._needs_norm, ties=ties, nodes=nodes, in_rounds=in_rounds):
            with self.timeline.span("reduction"):
                reduced = self._reduced(self.reducer, divisors)
            return self.apply(reduced, totals.mean)
        rows, programs, out = self.reducer.operands()
        with self.timeline.span("optimizer"):
            updater.update_fused(rows, programs, divisors, out, self.config.threads)
        self.store.all_gather(exchange=self.placement.shard_optimizer, later=True)
        return None, ()

    def _divisors(self, totals: Totals) -> Divisors:
        return totals.divisors(self.current_loss_scale(), self.dtype)

    @property
    def _needs_norm(self) -> bool:
        """Tell whether a step needs the norm of the summed gradient, to clip the gradient or to detect an overflow."""
        return needs_norm(self.config, self.exchange.codec, loss_scale=self.loss_scale is not None)

    def _reduced(self, reducer: GradientReducer, divisors: Divisors) -> Array:
        """Sum the gradients in ``reducer`` over the ranks, divide by ``divisors``, and return the averaged gradient.

        The gradients of all uses of a tied parameter are added. The array is on the device where the updater runs; only
        the ranges that this rank updates are complete.
        """
        updater = self._bound()
        reduced = updater.to_device(reducer.sum(divisors))
        updater.exchange_ties(reduced)
        reducer.replicate()
        updater.add_uses(reduced)
        return reduced

    def apply(self, reduced: Array, loss: float) -> Outcome:
        """Clip the averaged gradient, update the parameters from it and all-gather them.

        ``loss`` is the mean loss, of which ``reduced`` is the gradient. Return the norm (None if no norm is needed) and
        the non-finite values. If the norm is infinite or NaN, the parameters do not change.
        """
        updater, norm = self._bound(), None
        with self.timeline.span("optimizer"):
            if self._needs_norm:
                norm, tensor = updater.norm(reduced)
                if tensor is not None:
                    return norm, (self.scalars.in_the_sum(tensor, updater.parts_of(tensor, reduced), norm),)
            if norm is not None and self.config.clip is not None:
                factor = clip_factor(norm, self.config.clip)
                if factor != 1.0:
                    updater.scale(reduced, factor)
            updater.update(reduced, self.config.threads, loss)
        self.store.all_gather(exchange=self.placement.shard_optimizer, later=True)
        return norm, ()

    # ------------------------------------------------------------------ gradients by hand

    def gradients(self, x: Any, y: Any) -> tuple[Totals, Array]:
        """Compute gradients without an update; return loss and weight of the global batch, and the averaged gradient.

        The gradient is an array on the host; only the ranges that this rank updates are complete. :meth:`step` can
        update the parameters from this gradient.
        """
        self._bound()
        totals = self._compute(x, y, self.reducer, summed=True)[1]
        return totals, self._on_host(self.reducer, totals)

    def local_gradients(self, x: Any, y: Any) -> Totals:
        """Compute the gradients of this rank's grains, and keep them on this rank, not yet summed over ranks.

        Return loss and weight of the whole global batch.
        """
        return self._compute(x, y, self.all_reduce, summed=False)[1]

    def local_sum(self) -> Array:
        """Return the sum of the gradients of this rank's grains, as a flat array on the host. Not collective.

        Call :meth:`local_gradients` before. The sum is divided by the loss scale, but not by the weight.
        """
        total: Array = kernels.to_host(self.all_reduce.local_sum())
        total /= self.dtype.type(self.current_loss_scale())
        return total

    def reduce_local(self, totals: Totals) -> Array:
        """Sum, over the ranks, the gradients that :meth:`local_gradients` has computed, and divide by the weight.

        ``totals`` is the result of :meth:`local_gradients`. Return the averaged gradient as an array on the host, of
        which only the ranges that this rank updates are complete.
        """
        return self._on_host(self.all_reduce, totals)

    def _on_host(self, reducer: GradientReducer, totals: Totals) -> Array:
        reduced: Array = kernels.to_host(self._reduced(reducer, self._divisors(totals)))
        self.memory.barrier("reduced")
        return reduced

    def step(self, totals: Totals, reduce: Callable[[], Array], sent: int) -> StepReport:
        """Call ``reduce``, which is collective, and update parameters from the averaged gradient that it returns.

        ``totals`` are loss and weight of the gradient's global batch. ``sent`` is the value of ``store.bytes_sent``
        before the gradient was computed. If the gradient is not finite, the update is skipped.
        """
        self.scalars.agree_on_rate(self._bound().learning_rate)  # it may have changed since the gradient was agreed on
        reduced = reduce()
        self.memory.barrier("step")  # ranks that still read parameters read the old ones
        return self._finish(totals, sent, lambda: self.apply(self._bound().to_device(reduced), totals.mean))

    def pieces(self) -> tuple[UpdatePiece, ...]:
        """Return the contiguous ranges, in this rank's shard, of the parameters that the optimizer updates."""
        return tuple(self._bound().trees.pieces)

    def place(self, *, iterate: bool) -> None:
        """Set the parameters to a minimization method's last iterate, or to the point that it evaluates next."""
        self.store.wait()
        self.memory.barrier("place")  # ranks that still read parameters read the old ones
        method = self._bound().method
        assert method is not None, "only methods of whole vectors have iterates"
        method.place(iterate=iterate)
        self.store.all_gather(exchange=self.placement.shard_optimizer)

    # ------------------------------------------------------------------ evaluation

    @contextmanager
    def with_average(self, *, use: bool, agreed: bool = False) -> Iterator[None]:
        """Replace the parameters by their moving average inside the context; without ``use``, change nothing.

        All ranks enter and leave the context together.

        After the context the parameters have the same bits as before, also after an error that all ranks raise. An
        error inside a layer that is split over ranks ends the job without restoring the parameters, unless ``agreed``
        tells that an error of one rank is raised on all. A context inside another one, or before the first step, has no
        effect.

        Raises
        ------
        StateError
            If no average is kept.
        """
        if not use:
            yield
            return
        updater = self.updater
        if updater is None or not updater.averages_parameters:
            raise StateError(
                "ema=True: this model keeps no average of its parameters: make it with ShardingConfig(ema=0.999)"
                + ("" if self.config.ema is None else " and give it an optimizer")
            )
        if self._uses_average or not updater.step_count:  # the average begins with the parameters
            yield
            return
        self._swap_average(updater)
        try:
            yield
        except BaseException as error:
            if self.grid.world.size == 1 or self._is_raised_by_all(error, agreed=agreed):
                self._swap_average(updater)
            raise
        self._swap_average(updater)

    def _is_raised_by_all(self, error: BaseException, *, agreed: bool) -> bool:
        if isinstance(error, CollectiveError | PeerFailure) or not isinstance(error, Exception):
            return False
        return agreed or not self.partitioned.splits_layers or isinstance(error, DataError | RemoteError)

    def begin_copies(self) -> None:
        """Restart moving average and master weights from the present parameters, because the user has set them.

        Not collective. Rank 0 prints a notice of the average the first time.
        """
        updater = self.updater
        if updater is None or not updater.copies or not updater.step_count:
            return
        state = updater.host_state()
        updater.begin_copies(state)
        updater.take_state(state)
        if updater.averages_parameters and self.prints_notices and not self._warned_average:
            self._warned_average = True
            notice(
                "parameters were set after a step: their moving average (ema) begins anew with them; to evaluate with "
                "the average, give ema=True to evaluate and predict"
            )

    def _swap_average(self, updater: Updater) -> None:
        self.store.wait()
        self.memory.barrier("average")  # ranks that still read parameters read the old ones
        updater.swap_average()
        self.store.all_gather(exchange=self.placement.shard_optimizer)
        self._uses_average = not self._uses_average

    def evaluate(self, x: Any, y: Any, loss: Any = None, *, weightless: bool = False) -> Evaluation:
        """Evaluate all ranks' samples without training: return loss sum, weight and number of correct predictions.

        ``loss`` replaces the model's own loss, unless it is None. With ``weightless`` a total weight of 0 is no error.
        """
        batch = self._redistribute(x, y, self.all_reduce)
        with self.scalars.world.trace.joint_task("evaluation"):
            scores = self.partitioned.is_last and self.grid.coordinates.tensor == 0  # losses are found here, and count
            rounds = self.all_reduce.rounds(batch.count)
            used = getattr(self.model, "loss", None) if loss is None else loss
            with ExitStack() as contexts:
                try:
                    contexts.enter_context(self.runner.using_loss(loss))
                except (ArgumentError, UnsupportedError) as error:
                    self.scalars.fail(error)  # all ranks raise it when they agree
                contexts.enter_context(needing(*COMPUTING))
                result = evaluate(batch, self.runner, self.scalars, rounds, self._context, scores=scores, loss=used)
        if not weightless:
            check_weight(result.weight)
        return result

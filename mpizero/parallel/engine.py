"""The one engine that executes every row of the placement table.

[Note: a step] Samples go to the owners of their grains; each rank computes its grains; one small allgather agrees on
loss, weight and finiteness; owners sum, divide and update their ranges; a barrier (or a gather between groups)
publishes the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpizero import kernels, optim
from mpizero.comm.agreement import all_ranks
from mpizero.comm.recording.timeline import Timeline
from mpizero.comm.reduce.segments import program_array
from mpizero.comm.supervision.guard import set_context
from mpizero.errors import ConfigError, SharedMemoryError
from mpizero.layout import FlatLayout, Grains
from mpizero.nn.freed_memory import keep_freed_memory
from mpizero.parallel.batch.grain_owners import contiguous_owners, wave_owners
from mpizero.parallel.batch.redistribute import NOTHING_MORE, GlobalBatch, deal, in_contexts
from mpizero.parallel.batch.step_scalars import GrainScalars, Totals
from mpizero.parallel.blas_threads import settle_blas
from mpizero.parallel.checkpointing.restore import HalfLoaded
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.device.compute_device import open_compute_device
from mpizero.parallel.execution.evaluation import evaluate
from mpizero.parallel.execution.factory import make_runner
from mpizero.parallel.gradients.accumulation import GradientRows
from mpizero.parallel.gradients.bucket_tuner import make_tuner
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.parallel.gradients.gradient_store import GradientStore
from mpizero.parallel.integrity import Integrity
from mpizero.parallel.memory_check import fits_shared_memory, tell_private
from mpizero.parallel.optimizer.global_norm import Across
from mpizero.parallel.optimizer.sharded_update import Updater, reduce_rows
from mpizero.parallel.optimizer.tied_parameters import TieExchange
from mpizero.parallel.parameters.allocator import Memory
from mpizero.parallel.parameters.global_view import GlobalView
from mpizero.parallel.parameters.shards import UpdatePiece
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.parallel.partition.blocks import blocks_of
from mpizero.parallel.partition.local_model import build_stage, trainable_names
from mpizero.parallel.partition.parallel_layout import Spread
from mpizero.parallel.placement import Placement
from mpizero.parallel.step_report import Outcome, StepReport
from mpizero.parallel.step_rules import assigns_waves, fuses_update, needs_norm, overlaps_reduction
from mpizero.types import Array, BlockModel, Run


class Engine:
    """Parameters, gradients and optimizer state of one model, placed by one row of the table.

    Construction and every public method are collective over ``config.comm``. ``device`` says which GPU of the node to
    compute on; without it its ranks take them in turn.
    """

    def __init__(
        self,
        model: Any,
        config: ShardingConfig,
        placement: Placement,
        spread: Spread | None = None,
        *,
        device: int | None = None,
        private: bool = False,
    ) -> None:
        self.model, self.config, self.placement = model, config, placement
        self._blas_threads = settle_blas(config.communicator, config.threads)
        self.block_model = isinstance(model, BlockModel)
        self.compute_device = open_compute_device(config, self.block_model, device)
        if self.block_model and not config.is_guest:
            keep_freed_memory()
        self.dtype = np.dtype(model.dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(f"parameters of type {self.dtype} are not supported: use float32 or float64")
        self._settle(spread, private=private)
        if not fits_shared_memory(self.grid, self.layout, self.dtype.itemsize, placement, config):
            self._settle(spread, private=True)
        try:
            self._take_memory()
        except SharedMemoryError as error:  # on all ranks: somebody has taken it meanwhile
            self.memory.close()
            tell_private(self.grid.world, str(error))
            self._settle(spread, private=True)
            self._take_memory()
        self.whole = GlobalView(blocks_of(model), self.store, self.grid)
        self.exchange = GradientExchange(self.store, self.memory, placement, config.gradient_compression)
        self.exchange.elements = config.bucket_elements(self.dtype.itemsize)
        self.scalars = GrainScalars(self.grid, self.layout, tuple(blocks_of(model)))
        self.across = Across(self.grid, self.layout, trainable_names(model)) if self.grid.model.size > 1 else None
        self.runner = make_runner(self)
        self.tuner = make_tuner(self)
        self.updater: Updater | None = None
        self.integrity = Integrity(self.grid, self.store, config.check_every)
        self.loss_scale: optim.LossScaleState | None = None
        self.step_number, self.asked = 0, NOTHING_MORE
        #: What a load has left amid two states; the model refuses to be used then.
        self.half_loaded: HalfLoaded | None = None
        self.store.begin(model)

    # ------------------------------------------------------------------ construction

    def _settle(self, spread: Spread | None, *, private: bool = False) -> None:
        """Find the groups of ranks and this rank's part of the model."""
        axes = None if spread is None else spread.axes(self.config.communicator.size)
        self.grid = self.config.grid_of(axes, private=private)
        if self.grid.context.size > 1 and self.grid.order != tuple(range(self.grid.data.size)):
            self.grid = self.config.grid_of(axes, private=True)  # the parts of a grain must be neighbours in a wave
        self.stage = build_stage(self.model, self.grid, spread or Spread(), self.compute_device.group)
        self.layout = self._layout_of(self.stage.number)

    def _take_memory(self) -> None:
        """Make the stores of parameters and gradients."""
        self.memory = Memory(self.grid.node)
        self.timeline, sharded = Timeline(), self.placement.shard_parameters
        self.store = ParameterStore(self.layout, self.grid, self.memory, sharded, self.dtype, timeline=self.timeline)
        self.compute_device.share_gradients(ranks := self.grid.data.size)
        allocator, waves = self.compute_device.allocator(self.memory), assigns_waves(self.placement, self.config, ranks)
        self._gradients = GradientStore(self.store, allocator, self.config.accumulate, waves=waves)
        self._ring = self._gradients.ring

    def reserve(self, samples: int) -> None:
        """Take the shared memory that a step on ``samples`` samples of all ranks needs."""
        if self._ring is None:
            self.rows.reserve(Grains(samples, self.config.grain_size(samples)).count * self.grid.context.size)

    def _layout_of(self, stage: int) -> FlatLayout:
        return self.stage.layout(
            stage, one_unit=self.placement.one_unit, minimum_unit=self.config.minimum_parameter_group_size
        )

    @property
    def pristine(self) -> bool:
        """Whether parameters and optimizer state are still those of the start. Not collective."""
        fresh = self.updater is None or self.updater.fresh
        return self.store.version == 1 and fresh and self.half_loaded is None

    def start_over(self) -> None:
        """Take the start values and forget the optimizer's state."""
        self.store.begin(self.model)
        self.store.version = 1
        self.exchange.forget()
        if self.updater is not None:
            self.updater.reset()
            self.integrity.forget()

    def bind(self, optimizer: Any, loss_scale: optim.DynamicLossScale | None = None) -> None:
        """Give the model an optimizer with fresh state, in place of an earlier one.

        Raises
        ------
        ConfigError
            If a loss scale is asked for a black box, whose backward pass is its own.
        """
        if loss_scale is not None and not self.block_model:
            raise ConfigError("a loss scale needs a model of blocks: a black box computes its own gradient")
        self.loss_scale = None if loss_scale is None else loss_scale.start()
        if self.updater is not None:
            self.updater.release()
        with all_ranks(self.grid.world, first=True):
            self.exchange.compress(self.config.gradient_compression)
            self.updater = self.compute_device.updater(
                optimizer, self.store, self.memory, replicated=self.exchange.replicated, in_rows=self._ring is None
            )
        self.updater.across = self.across
        if self.stage.has_shared_parameters:
            layouts = {use.stage: self._layout_of(use.stage) for uses in self.stage.uses.values() for use in uses}
            self.updater.ties = TieExchange(self.grid, self.stage, layouts, self.updater.trees.own)
        self.integrity.watch(self.updater)

    def exchange_model(self, model: Any) -> None:
        """Evaluate ``model``, which has the same parameters, from now on."""
        self.model = model
        self.stage = build_stage(model, self.grid, self.stage.spread, self.compute_device.group)
        self.runner = make_runner(self)

    @property
    def rows(self) -> GradientRows:
        """The rows that hold whole gradients; made when they are first needed."""
        return self._gradients.rows

    def current_loss_scale(self) -> float:
        """Return what losses are multiplied by before their backward pass. Not collective."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    # ------------------------------------------------------------------ one step

    def train(self, x: Any, y: Any) -> StepReport:
        """Forward, backward, exact reduction, update."""
        updater, sent = self._bound(), self.grid.bytes_sent
        self.tuner.begin()
        batch, totals, stack_row = self._forward_backward(x, y, self._ring is not None, summed=True)
        report = self._finish(totals, sent, lambda: self._update(updater, totals, stack_row))
        if report.skipped is None and (tried := self.tuner.end(batch.samples)):
            sent = self.grid.bytes_sent - sent  # what the choice took is of this step, too
            report = replace(report, bucket_mb=self.exchange.bucket_mb, buckets_tried=tried, bytes_sent=sent)
        return report

    def step(self, totals: Totals, reduce: Callable[[], Array], sent: int) -> StepReport:
        """Update from the gradient that ``reduce``, which is collective, returns, unless it is not finite.

        ``sent`` is what ``grid.bytes_sent`` was before the gradient was computed.
        """
        self.scalars.agree_on_rate(self._bound().ask_rate)  # it may have changed since the gradient was agreed on
        reduced = reduce()
        self.memory.barrier("step")  # who still reads parameters reads the old ones
        return self._finish(totals, sent, lambda: self.apply(self._bound().where_used(reduced)))

    def _finish(self, totals: Totals, sent: int, update: Callable[[], Outcome]) -> StepReport:
        """Update, unless something is not finite, and end the step."""
        updater = self._bound()
        rate, scale = updater.rate, self.current_loss_scale()
        norm, problems = None, totals.problems
        self.integrity.verify()
        if not problems:
            norm, problems = update()
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=not problems)
        self.exchange.finish(self.current_loss_scale() / scale, updated=not problems)
        if problems:
            self.memory.barrier("skipped")
        self.step_number += 1
        self.integrity.after_step(self.step_number)
        return StepReport(
            updater.step_count,
            totals.mean,
            totals.weight,
            rate,
            norm,
            str(problems[0]) if problems else None,
            self.grid.bytes_sent - sent,
            problems,
            scale,
            self.current_loss_scale(),
            self.exchange.bucket_mb,
        )

    def _bound(self) -> Updater:
        if self.updater is None:
            self.bind(optim.SGD(lr=self.config.learning_rate), self.config.loss_scale(None))
        assert self.updater is not None
        return self.updater

    def _forward_backward(self, x: Any, y: Any, ring: bool, *, summed: bool = False) -> tuple[GlobalBatch, Totals, int]:
        """Leave this rank's gradients in the rows, or the owners' sums in the ring's stack.

        ``summed`` says that rows are summed next, which may then begin.
        """
        set_context(step=self.step_number)
        with self.scalars.everyone.trace.common_duty("training step"):
            return self._computed(x, y, ring, summed and self.sums_behind)

    @property
    def sums_behind(self) -> bool:
        """Whether a step sums rows behind its backward pass. Not collective."""
        peers, stages = self.grid.peers.size, self.grid.pipeline.size
        return self.block_model and overlaps_reduction(self.placement, peers, stages, self.exchange.codec)

    def _computed(self, x: Any, y: Any, ring: bool, behind: bool) -> tuple[GlobalBatch, Totals, int]:
        self.exchange.begin()
        with self.timeline.span("agreement", "samples"):
            batch = self._deal(x, y, waves=ring)
        stack_row = 0
        if ring and self._ring is not None:
            jobs = self._ring.jobs(batch, self.exchange)
            stack_row = self._ring.planned(batch.count).root
        else:
            jobs = self.rows.jobs(batch, self._rounds(batch), (self.exchange, self.store) if behind else None)
        # Every value is looked at afterwards, with its rank, tensor and samples: NumPy's warnings would say less.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.runner.run(jobs, self._run)
        with self.timeline.span("reduction", "rest"):
            (self._ring if ring and self._ring is not None else self.rows).finish()
        with self.timeline.span("agreement", "losses"):
            totals = self.scalars.agree(None if self.updater is None else self.updater.ask_rate)
        if not (ring or behind):
            with self.timeline.span("reduction", "rows"):
                self.memory.barrier("rows")
        return batch, totals, stack_row

    def _rounds(self, batch: GlobalBatch) -> int:
        """Return how many micro-batches every rank must take part in; 0 where nothing is gathered."""
        per_rank = -(-batch.count // self.grid.data.size) if self.store.sharded else 0
        return per_rank * self.config.accumulate

    def _deal(self, x: Any, y: Any, *, waves: bool) -> GlobalBatch:
        """Bring samples to the ranks that compute their grains, and begin to count."""
        owners = partial(wave_owners if waves and self._ring is not None else contiguous_owners, self.grid)
        batch = deal(self.grid, x, y, self.config.grain_size, owners, self.config.accumulate, asked=self.asked)
        self.compute_device.check_batch(x, y)
        if self.grid.context.size > 1:
            batch = in_contexts(batch, self.grid.context_group, waves=waves)
        self.scalars.begin(batch, self.step_number + 1)
        return batch

    def _run(self, first_sample: int, count: int) -> Run:
        seed, epoch = getattr(self.model, "seed", 0), self.asked.epoch
        return Run(True, seed, self.step_number, first_sample, count=count, epoch=epoch)

    def _update(self, updater: Updater, totals: Totals, stack_row: int) -> Outcome:
        """Update and publish, unless the sum is not finite."""
        threads, divisor = self.config.threads, self._divisor(totals)
        norm, ties, peers = self._needs_norm, updater.ties is not None, self.grid.peers.size
        if fuses_update(updater.optimizer, norm=norm, ties=ties, peers=peers, waves=self._ring is not None):
            with self.timeline.span("optimizer"):
                if self._ring is not None:
                    stack = self._ring.stack
                    updater.update_fused(stack, program_array((stack_row,)), divisor, stack[stack_row], threads)
                else:
                    root, out = program_array(self.rows.planned(self.scalars.count).root), self.rows.row(0)
                    updater.update_fused(self.rows.window, root, divisor, out, threads)
            self.store.publish(exchange=self.placement.shard_optimizer, later=True)
            return None, ()
        with self.timeline.span("reduction"):
            reduced = self._reduced(updater, divisor, stack_row)
        return self.apply(reduced)

    def _divisor(self, totals: Totals) -> Array:
        return totals.divisor(self.current_loss_scale(), self.dtype)

    @property
    def _needs_norm(self) -> bool:
        """Whether the sum must be seen before the update: to clip it, or since finite parts may overflow in it."""
        return needs_norm(self.config, self.exchange.codec, loss_scale=self.loss_scale is not None)

    def _reduced(self, updater: Updater, divisor: Array, stack_row: int) -> Array:
        """Return the averaged gradient, tied uses added, where the updater's pieces look for it."""
        if self._ring is None:
            return reduce_rows(self.rows, self.exchange, updater, divisor, None)
        reduced: Array = np.divide(self._ring.stack[stack_row], divisor, out=self._ring.stack[stack_row])
        updater.exchange_ties(reduced)
        updater.add_uses(reduced)
        return reduced

    # ------------------------------------------------------------------ gradients by hand

    def gradients(self, x: Any, y: Any) -> tuple[Totals, Array]:
        """Return the sums over the global batch and the averaged gradient, where :meth:`apply` takes it."""
        updater = self._bound()
        _, totals, row = self._forward_backward(x, y, self._ring is not None, summed=True)
        reduced = self._reduced(updater, self._divisor(totals), row)
        self.memory.barrier("reduced")
        return totals, kernels.to_host(reduced)

    def local_gradients(self, x: Any, y: Any) -> Totals:
        """Compute this rank's gradients and leave them in the rows, not yet summed over ranks."""
        return self._forward_backward(x, y, ring=False)[1]

    def local_sum(self) -> Array:
        """Return this rank's own part of the gradient sum, as :meth:`local_gradients` left it. Not collective."""
        total: Array = kernels.to_host(self.rows.local_sum())
        total /= self.dtype.type(self.current_loss_scale())
        return total

    def reduce_local(self, totals: Totals) -> Array:
        """Sum pending local gradients over the ranks and divide by the weight."""
        divisor, out = self._divisor(totals), None if self._ring is None else self._ring.stack[0]
        reduced: Array = kernels.to_host(reduce_rows(self.rows, self.exchange, self._bound(), divisor, out))
        self.memory.barrier("reduced")
        return reduced

    def apply(self, reduced: Array) -> Outcome:
        """Clip and update from a reduced gradient, then publish, unless it is not finite."""
        updater, norm = self._bound(), None
        with self.timeline.span("optimizer"):
            if self._needs_norm:
                norm, tensor = updater.norm(reduced)
                if tensor is not None:
                    return norm, (self.scalars.in_the_sum(tensor, updater.parts_of(tensor, reduced), norm),)
            if norm is not None and self.config.clip is not None:
                factor = optim.clip_factor(norm, self.config.clip)
                if factor != 1.0:
                    updater.scale(reduced, factor)
            updater.update(reduced, self.config.threads)
        self.store.publish(exchange=self.placement.shard_optimizer, later=True)
        return norm, ()

    # ------------------------------------------------------------------ questions and copies

    def pieces(self) -> tuple[UpdatePiece, ...]:
        """Return the pieces of this rank's own share."""
        return tuple(self._bound().trees.own)

    def evaluate(self, x: Any, y: Any) -> tuple[float, float, int | None]:
        """Return loss sum, weight and right answers of all ranks' samples, grain by grain, without training."""
        batch = self._deal(x, y, waves=False)
        with self.scalars.everyone.trace.common_duty("evaluation"):
            scores = self.stage.is_last and self.grid.here.tensor == 0  # losses are found here, and count
            return evaluate(batch, self.runner, self.scalars, self._rounds(batch), self._run, scores=scores)

    def close(self) -> None:
        """Free the windows, and give BLAS its own number of threads back."""
        self._blas_threads.restore_original_limits()
        self.memory.close()

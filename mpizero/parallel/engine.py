"""The one engine that executes every row of the placement table.

[Note: a step] Samples go to the owners of their grains; each rank computes its grains; one small allgather agrees on
loss, weight and finiteness; owners sum, divide and update their ranges; a barrier (or a gather between groups)
publishes the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpizero import optim
from mpizero.comm.exact import ExactExchange, program_array
from mpizero.errors import ConfigError
from mpizero.layout import FlatLayout, Unit
from mpizero.nn.memory import keep_freed_memory
from mpizero.parallel.blas import settle_blas
from mpizero.parallel.compute import BlackBoxEvaluator, BlockEvaluator, Evaluator, blocks_of
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.dealing import GlobalBatch, Grain, deal
from mpizero.parallel.gradients import GradientRing, GradientRows, GradientViews, contiguous_owners
from mpizero.parallel.memory import Memory, fits_shared_memory
from mpizero.parallel.ownership import UpdatePiece
from mpizero.parallel.placement import Placement
from mpizero.parallel.scalars import GrainScalars, Totals
from mpizero.parallel.storage import ParameterStore
from mpizero.parallel.update import Updater, reduce_rows
from mpizero.types import Array, BlockModel, Run


@dataclass(frozen=True)
class StepReport:
    """What one training step did.

    Attributes
    ----------
    step : int
        Optimizer steps done, this one included.
    loss : float
        Mean loss over the global batch.
    weight : float
        What it was divided by.
    learning_rate : float
        Of this step.
    gradient_norm : float or None
        Global norm of the averaged gradient before clipping; None when nothing asked for it.
    skipped : str or None
        Why the update was skipped: which rank, tensor and samples were not finite.
    bytes_sent : int
        Bytes this rank sent to other ranks.
    """

    step: int
    loss: float
    weight: float
    learning_rate: float
    gradient_norm: float | None
    skipped: str | None
    bytes_sent: int


class Engine:
    """Parameters, gradients and optimizer state of one model, placed by one row of the table.

    Construction and every public method are collective over ``config.comm``.
    """

    def __init__(self, model: Any, config: ShardingConfig, placement: Placement) -> None:
        self.model, self.config, self.placement = model, config, placement
        self.grid = config.grid
        self._blas_threads = settle_blas(self.grid.data, config.threads)
        self.block_model = isinstance(model, BlockModel)
        if self.block_model:
            keep_freed_memory()
        self.dtype = np.dtype(model.dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(f"parameters of type {self.dtype} are not supported: use float32 or float64")
        self.layout = FlatLayout.build(
            blocks_of(model), one_unit=placement.one_unit, minimum_unit=config.minimum_parameter_group_size
        )
        if not fits_shared_memory(self.grid, self.layout, self.dtype, waves=placement.waves):
            self.grid = config.private_grid
        self.memory = Memory(self.grid.node)
        self.store = ParameterStore(self.layout, self.grid, self.memory, placement.shard_parameters, self.dtype)
        self.exchange = ExactExchange(self.grid.peers, config.gradient_compression, self.memory.scratch)
        self.exchange_model(model)
        self._named = GradientViews(self.layout, self.memory, self.dtype)
        self._rows: GradientRows | None = None
        self._ring: GradientRing | None = None
        if placement.waves:
            self._ring = GradientRing(self.layout, self.grid, self.memory, self.dtype, config.accumulate, self._named)
        self.scalars = GrainScalars(self.grid, self.layout)
        self.updater: Updater | None = None
        self.loss_scale: optim.LossScaleState | None = None
        self.step_number = 0
        self._initialize()

    # ------------------------------------------------------------------ construction

    def _initialize(self) -> None:
        """Give every owned range its start values; nobody ever holds more than one tensor besides."""
        for unit, span in zip(self.layout.units, self.store.share.spans, strict=True):
            out = self.store.owned(unit.index)
            for entry, part in self.layout.pieces(span):
                target = out[part.start - span.start : part.stop - span.start]
                first, last = part.start - entry.offset, part.stop - entry.offset
                if self.block_model:
                    from mpizero.nn.initialize import initial_values

                    initial_values(entry.spec, self.model.seed, first, last, target)
                else:
                    target[:] = np.asarray(self.model.parameters[entry.spec.name]).reshape(-1)[first:last]
        self.store.publish()

    @property
    def pristine(self) -> bool:
        """Whether parameters and optimizer state are still those of the start. Not collective."""
        updater = self.updater
        fresh = updater is None or (not updater.step_count and not any(a.any() for a in updater.state.values()))
        return self.store.version == 1 and fresh

    def start_over(self) -> None:
        """Take the start values and forget the optimizer's state."""
        self._initialize()
        self.store.version = 1
        if self.updater is not None:
            self.updater.reset()

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
            for array in self.updater.state.values():
                self.memory.release("optimizer state", array)
        self.updater = Updater(
            optimizer,
            self.store,
            self.memory,
            replicated=not self.placement.shard_optimizer,
            in_rows=self._ring is None,
        )

    def exchange_model(self, model: Any) -> None:
        """Evaluate ``model``, which has the same parameters, from now on."""
        self.model = model
        self.evaluator: Evaluator = (
            BlockEvaluator(model, self.store, self._loss_scale)
            if self.block_model
            else BlackBoxEvaluator(model, self.store)
        )

    @property
    def rows(self) -> GradientRows:
        """The rows that hold whole gradients; made when they are first needed."""
        if self._rows is None:
            self._rows = GradientRows(
                self.layout, self.grid, self.memory, self.dtype, self.config.accumulate, self._named
            )
        return self._rows

    def _loss_scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    # ------------------------------------------------------------------ one step

    def train(self, x: Any, y: Any) -> StepReport:
        """Forward, backward, exact reduction, update."""
        updater = self._bound()
        sent = self.grid.bytes_sent
        batch, totals, stack_row = self._forward_backward(x, y, self._ring is not None)
        rate = optim.learning_rate(updater.optimizer, updater.step_count)
        norm, problem = None, totals.problem
        if problem is None:
            norm, problem = self._update(updater, totals, stack_row)
        return self._report(totals, rate, (norm, problem), sent)

    def step(self, totals: Totals, reduced: Array, sent: int) -> StepReport:
        """Update from a gradient that :meth:`gradients` or :meth:`reduce_local` gave, unless it is not finite.

        ``sent`` is what ``grid.bytes_sent`` was before the gradient was computed.
        """
        updater = self._bound()
        rate = optim.learning_rate(updater.optimizer, updater.step_count)
        self.memory.barrier("step")  # who still reads parameters reads the old ones
        norm, problem = None, totals.problem
        if problem is None:
            norm, problem = self.apply(reduced)
        return self._report(totals, rate, (norm, problem), sent)

    def _report(self, totals: Totals, rate: float, outcome: tuple[float | None, str | None], sent: int) -> StepReport:
        """End a step: ``outcome`` is the gradient norm, and why the update was skipped."""
        norm, problem = outcome
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=problem is None)
        if problem is not None:
            self.memory.barrier("skipped")
        self.step_number += 1
        updater = self._bound()
        return StepReport(
            updater.step_count,
            totals.loss / totals.weight,
            totals.weight,
            rate,
            norm,
            problem,
            self.grid.bytes_sent - sent,
        )

    def _bound(self) -> Updater:
        if self.updater is None:
            self.bind(optim.SGD(lr=self.config.learning_rate))
        assert self.updater is not None
        return self.updater

    def _forward_backward(self, x: Any, y: Any, ring: bool) -> tuple[GlobalBatch, Totals, int]:
        """Leave this rank's gradients in the rows, or the owners' sums in the ring's stack."""
        owners = self._ring.owners if ring and self._ring is not None else self.rows.owners
        batch = deal(self.grid.data, x, y, self.config.grain_size, owners, self.config.accumulate)
        self.scalars.begin(batch)
        stack_row = 0
        # Every value is looked at afterwards, with its rank, tensor and samples: NumPy's warnings would say less.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if ring and self._ring is not None:
                self._ring.compute(batch, self._evaluate, self.exchange)
                stack_row = self._ring.planned(batch.count).root
            else:
                self.rows.compute(batch, self._evaluate, self._rounds(batch))
        totals = self.scalars.agree()
        if not ring:
            self.memory.barrier("rows")
        return batch, totals, stack_row

    def _rounds(self, batch: GlobalBatch) -> int:
        """Return how many micro-batches every rank must take part in; 0 where nothing is gathered."""
        if not self.store.sharded:
            return 0
        per_rank = -(-batch.count // self.grid.data.size)
        return per_rank * self.config.accumulate

    def _evaluate(self, grain: Grain | None, number: int, target: Any, done: Any) -> None:
        if grain is None or self.scalars.error is not None:
            self.evaluator.absent(done)
            return
        x, y, first = grain.micro_batches[number]
        run = Run(training=True, seed=getattr(self.model, "seed", 0), step=self.step_number, first_sample=first)

        def checked(unit: Unit) -> None:
            for block, views in written.pop(unit.index, {}).items():
                self.scalars.check(grain.number, block, views)
            done(unit)

        written: dict[int, Any] = {}

        def noted(unit: Unit) -> Any:
            written[unit.index] = target(unit)
            return written[unit.index]

        try:
            loss, weight = self.evaluator.gradients(x, y, run, noted, checked)
            self.scalars.add(grain.number, loss, weight)
        except Exception as error:  # the evaluator went on to take part in everything: all ranks come to agree
            self.scalars.fail(error)

    def _update(self, updater: Updater, totals: Totals, stack_row: int) -> tuple[float | None, str | None]:
        """Update and publish; return the gradient norm where it was needed, and why a step was skipped."""
        threads = self.config.threads
        divisor = self._divisor(totals)
        single = self.grid.peers.size == 1
        if self._can_fuse(updater) and (single or self._ring is not None):
            if self._ring is not None:
                stack = self._ring.stack
                updater.update_fused(stack, program_array((stack_row,)), divisor, stack[stack_row], threads)
            else:
                plan = self.rows.planned(self.scalars.count)
                updater.update_fused(self.rows.window, program_array(plan.root), divisor, self.rows.row(0), threads)
            self.store.publish(exchange=self.placement.shard_optimizer)
            return None, None
        return self.apply(self._reduced(updater, divisor, stack_row))

    def _divisor(self, totals: Totals) -> Array:
        return np.array([totals.weight * self._loss_scale()], self.dtype)

    def _can_fuse(self, updater: Updater) -> bool:
        return not self._needs_norm and updater.fusible

    @property
    def _needs_norm(self) -> bool:
        """Whether the sum must be seen before the update: to clip it, or since finite parts may overflow in it."""
        config = self.config
        return config.clip is not None or self.loss_scale is not None or config.gradient_compression == "fp16"

    def _reduced(self, updater: Updater, divisor: Array, stack_row: int) -> Array:
        """Return the averaged gradient, tied uses added, where the updater's pieces look for it."""
        if self._ring is None:
            return reduce_rows(self.rows, self.exchange, updater, divisor, None)
        reduced: Array = self._ring.stack[stack_row]
        np.divide(reduced, divisor, out=reduced)
        updater.add_uses(reduced)
        return reduced

    # ------------------------------------------------------------------ gradients by hand

    def gradients(self, x: Any, y: Any) -> tuple[Totals, Array]:
        """Return the sums over the global batch and the averaged gradient, where :meth:`apply` takes it."""
        updater = self._bound()
        batch, totals, row = self._forward_backward(x, y, self._ring is not None)
        reduced = self._reduced(updater, self._divisor(totals), row)
        self.memory.barrier("reduced")
        return totals, reduced

    def local_gradients(self, x: Any, y: Any) -> Totals:
        """Compute this rank's gradients and leave them in the rows, not yet summed over ranks."""
        return self._forward_backward(x, y, ring=False)[1]

    def local_sum(self) -> Array:
        """Return this rank's own part of the gradient sum, as :meth:`local_gradients` left it. Not collective."""
        total = self.rows.local_sum()
        if self.loss_scale is not None:
            total /= self.dtype.type(self.loss_scale.scale)
        return total

    def reduce_local(self, totals: Totals) -> Array:
        """Sum pending local gradients over the ranks and divide by the weight."""
        out = None if self._ring is None else self._ring.stack[0]
        reduced = reduce_rows(self.rows, self.exchange, self._bound(), self._divisor(totals), out)
        self.memory.barrier("reduced")
        return reduced

    def apply(self, reduced: Array) -> tuple[float | None, str | None]:
        """Clip and update from a reduced gradient, then publish; return its norm, and why the update was skipped."""
        updater, norm = self._bound(), None
        if self._needs_norm:
            norm, problem = updater.norm(reduced)
            if problem is not None:
                return norm, problem
        if norm is not None and self.config.clip is not None:
            factor = optim.clip_factor(norm, self.config.clip)
            if factor != 1.0:
                updater.scale(reduced, factor)
        updater.update(reduced, self.config.threads)
        self.store.publish(exchange=self.placement.shard_optimizer)
        return norm, None

    # ------------------------------------------------------------------ questions and copies

    def pieces(self) -> tuple[UpdatePiece, ...]:
        """Return the pieces of this rank's own share."""
        return tuple(self._bound().trees.own)

    def evaluate(self, x: Any, y: Any) -> tuple[float, float, int | None]:
        """Return loss sum, weight and right answers of all ranks' samples, grain by grain, without training."""
        owners = partial(contiguous_owners, self.grid)
        batch = deal(self.grid.data, x, y, self.config.grain_size, owners, self.config.accumulate)
        self.scalars.begin(batch)
        right, scored, rounds = 0, True, 0
        try:
            for grain in batch.grains.values():
                for gx, gy, _ in grain.micro_batches:
                    rounds += 1
                    loss, weight, prediction = self.evaluator.loss(gx, gy)
                    self.scalars.add(grain.number, loss, weight)
                    scored = scored and prediction is not None and prediction.ndim == np.ndim(gy) + 1
                    if scored:
                        right += int((prediction.argmax(-1) == gy).sum())
        except Exception as error:  # every forward pass that began has taken part in all its gathers
            self.scalars.fail(error)
        for _ in range(rounds, self._rounds(batch)):
            self.evaluator.loss(None, None)
        totals = self.scalars.agree()
        counts = np.array([right, not scored], np.int64)
        self.grid.data.allreduce(counts, "sum", "right answers")
        return totals.loss, totals.weight, None if counts[1] else int(counts[0])

    def copy_state(self, other: Engine) -> None:
        """Take optimizer, state and step of an engine of the same layout and grid."""
        if other.updater is not None:
            self.bind(other.updater.optimizer)
            assert self.updater is not None
            for slot, values in other.updater.state.items():
                self.updater.state[slot][:] = values
            self.updater.step_count = other.updater.step_count
        self.loss_scale, self.step_number = other.loss_scale, other.step_number

    def close(self) -> None:
        """Free the windows, and give BLAS its own number of threads back."""
        self._blas_threads.restore_original_limits()
        self.memory.close()

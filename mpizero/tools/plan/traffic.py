"""Compute the bytes that one rank sends in a training step, by purpose, with a formula for each collective.

:data:`PURPOSES` names the purposes, and :class:`RankTraffic` has a formula for each. Peers are the ranks of an
inter-node group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from mpizero.comm.reduce import Codec
from mpizero.layout import Instruction, Span, build_schedule
from mpizero.layout.flat import Unit
from mpizero.nn.layer import integers_of
from mpizero.sharding import params
from mpizero.sharding.config import gathers_units, overlaps_reduction, sent_exactly, updated_by
from mpizero.sharding.grad_reduce import bucket_forms, compressed_sizes, cut_buckets
from mpizero.sharding.update import tiles_of
from mpizero.sharding.whole_tensors import TensorPlan, TieExchange
from mpizero.tools.plan.counts import (
    ExchangeCost,
    GroupCall,
    PlannedGrid,
    PlannedGroup,
    PlannedTraining,
    Sent,
    direct_gather_cost,
    exchange_cost,
    gather_cost,
    one_call,
    total_sent,
)
from mpizero.tools.plan.memory import ModelPart

if TYPE_CHECKING:
    from mpizero.comm import ProcessGrid


#: The purposes of messages, in the order in which they are shown. "control" messages are those by which ranks agree on
#: the sizes of the batch, losses and weights, the learning rate, and whether replicas have the same samples. "whole
#: tensors" are gradients, and updated values, of tensors that an optimizer updates as a whole.
PURPOSES = (
    "gradients",
    "parameters",
    "whole tensors",
    "tensor",
    "activations",
    "context",
    "ties",
    "samples",
    "norms",
    "control",
)


@dataclass(frozen=True)
class RankTraffic:
    """Compute the messages of one rank.

    Attributes
    ----------
    training : PlannedTraining
        The parts of the plan that are equal for all ranks.
    part : ModelPart
        The rank's part of the model.
    grid : PlannedGrid
        The rank's groups.
    tensors : TensorPlan
        The owners of the tensors that the optimizer updates as a whole.
    """

    training: PlannedTraining
    part: ModelPart
    grid: PlannedGrid
    tensors: TensorPlan

    @cached_property
    def sent(self) -> dict[str, Sent]:
        """The bytes and messages that the rank sends in a step, by purpose; purposes without messages are left out."""
        sent_by = {purpose: getattr(self, f"_{purpose.replace(' ', '_')}")() for purpose in PURPOSES}
        return {purpose: sent for purpose, sent in sent_by.items() if sent.bytes}

    @cached_property
    def sharded(self) -> bool:
        """Tell whether parameters are sharded over several nodes, so that units are gathered before use."""
        return gathers_units(self.training.row, self.grid.shard_group.size)

    @cached_property
    def updated(self) -> int:
        """Number of parameter elements that this rank updates in a step."""
        return sum(self.part.shards.trained[rank] for rank in updated_by(self.training.row, self.grid))

    @cached_property
    def updated_in_tensors(self) -> int:
        """Number of elements counted in :attr:`updated` that belong to tensors which one rank updates as a whole."""
        rank = self.grid.data.rank
        return sum(move.span.size for move in self.tensors.returns[rank] if move.target == rank)

    @cached_property
    def jobs(self) -> tuple[int, ...]:
        """The number of samples in each micro-batch of this rank; 0 if only other ranks have this micro-batch."""
        return self.training.step.jobs(self.grid)

    @cached_property
    def program(self) -> tuple[Instruction, ...]:
        """The instructions of this rank's stage in a step, in order: forward and backward passes of its micro-batches.

        A schedule may have more micro-batches than the step. Instructions for additional micro-batches are left out.
        """
        axes, jobs = self.part.partitioned.parallel_layout, len(self.jobs)
        if self.grid.pipeline.size == 1 or not jobs:
            every = range(jobs)
            return tuple(Instruction(kind, 0, micro) for micro in every for kind in ("forward", "backward"))
        schedule = build_schedule(axes.schedule, axes.pipeline, jobs, axes.virtual_stages)
        return tuple(i for i in schedule.programs[self.part.partitioned.stage] if i.micro < jobs)

    # ------------------------------------------------------------------ gradients and parameters

    @cached_property
    def reductions(self) -> list[ExchangeCost]:
        """The cost of each exchange of partial sums of gradients between peers in a step."""
        if self.grid.inter_node.size == 1:
            return []
        units = [unit.index for unit in self.part.layout.units]
        if self._overlaps and self.training.row.shard_optimizer:
            return [each for unit in reversed(units) for each in self._exchanges([unit], self._row_counts)]
        if self._overlaps:
            counts, item, peer = self._row_counts, self.training.itemsize, self.grid.inter_node.rank
            widths = [(form, [sum(span.size for span in part) for part in parts]) for form, parts in self._buckets]
            return [exchange_cost(width, peer, counts, item, form, self.training.bucket) for form, width in widths]
        if not self.training.step.in_rounds:
            return self._exchanges(units, self._row_counts)
        rounds = self.training.step.round_plan(self.grid).rounds
        sums = [tuple(map(len, this_round.group_programs)) for this_round in rounds]
        alike = {(count, unit): self._exchanges([unit], count) for count in set(sums) for unit in units}
        return [each for number, unit in self._reduced for each in alike[sums[number], unit]]

    @property
    def _reduced(self) -> Iterator[tuple[int, int]]:
        """For each exchange of gradients in rounds, in order, the number of the round and the index of the unit."""
        accumulate = self.training.config.accumulate
        of_chunk = {c: self.part.layout.units_of(self.part.blocks(c)) for c in self.part.partitioned.chunks}
        for kind, chunk, micro in self.program:
            if kind in ("backward", "backward_weights") and micro % accumulate == accumulate - 1:
                yield from ((micro // accumulate, unit.index) for unit in reversed(of_chunk[chunk]))

    def _exchanges(self, units: Sequence[int], counts: Sequence[int]) -> list[ExchangeCost]:
        """Return the costs of exchanging the partial sums of ``units``: of uncompressed, then of compressed elements.

        ``counts`` has, for each peer, the number of partial sums that its node sends.
        """
        training, costs = self.training, []
        for codec, owned in self._forms:
            totals = [sum(of_units[unit] for unit in units) for of_units in owned]
            if any(totals):
                peer = self.grid.inter_node.rank
                costs.append(exchange_cost(totals, peer, counts, training.itemsize, codec, training.bucket))
        return costs

    @cached_property
    def _forms(self) -> tuple[tuple[Codec | None, list[list[int]]], ...]:
        """For each codec (None: uncompressed), the number of gradient elements that it encodes, by peer and unit."""
        codec, every = self.training.codec, [list(self.part.shards.gradients[r]) for r in self.grid.inter_node_ranks]
        if codec is None:
            return ((None, every),)
        packed = self.compressed
        plain = [[a - b for a, b in zip(*units, strict=True)] for units in zip(every, packed, strict=True)]
        return (None, plain), (codec, packed)

    @property
    def compressed(self) -> list[list[int]]:
        """For each peer and unit, the number of gradient elements that a codec, if there is one, compresses."""
        return [compressed_sizes(self.part.shards.shards[rank], self._exact) for rank in self.grid.inter_node_ranks]

    @cached_property
    def _exact(self) -> tuple[Span, ...]:
        """The ranges of the gradient vector that are not compressed."""
        return sent_exactly(self.training.row, self.part.partitioned, self.part.layout, self.training.config.wire)

    @property
    def _row_counts(self) -> list[int]:
        """For each peer, the number of partial sums that its node sends."""
        return [len(sums) for sums in self.training.step.rows_plan(self.grid).group_programs]

    @property
    def _overlaps(self) -> bool:
        """Tell whether gradients are summed over peers during the backward pass."""
        training, stages = self.training, self.grid.pipeline.size
        able = training.by_block and not training.step.dynamic
        return able and overlaps_reduction(
            training.row, self.grid.inter_node.size, stages, training.config.gradient_compression
        )

    @cached_property
    def _buckets(self) -> list[tuple[Codec | None, Sequence[Sequence[Span]]]]:
        """For each bucket that is summed during the backward pass (DDP), its codec and the ranges that each peer sums.

        If a codec compresses only some ranges of the gradients, each bucket has two entries: one with None for its
        uncompressed ranges, and one with the codec.
        """
        layout, shards = self.part.layout, self.part.shards.shards
        spans = [
            [span for unit in layout.units for span in shards[rank].flat_spans(unit.index)]
            for rank in self.grid.inter_node_ranks
        ]
        buckets = cut_buckets(spans, layout.gradient_size, self._row_counts, self.training.bucket)
        return [form for _, parts in buckets for form in bucket_forms(parts, self.training.codec, self._exact)]

    def replications(self) -> list[ExchangeCost]:
        """Return the costs of the all-gathers of summed gradients, if every node keeps all optimizer state.

        Not collective.
        """
        if self.training.row.shard_optimizer:
            return []
        if self._overlaps:
            columns = [
                (form, [[s.size for s in spans] for spans in zip(*parts, strict=True)]) for form, parts in self._buckets
            ]
            item, peer = self.training.itemsize, self.grid.inter_node.rank
            return [direct_gather_cost(column, peer, item if form is None else 2) for form, column in columns]
        training, peer = self.training, self.grid.inter_node.rank
        forms = [(codec, [sum(of_units) for of_units in owned]) for codec, owned in self._forms]
        if training.config.wire is not None and self.part.partitioned.has_shared_parameters:
            forms = [(None, [sum(sizes) for sizes in zip(*(totals for _, totals in forms), strict=True)])]
        return [gather_cost(totals, peer, training.itemsize, codec, training.bucket) for codec, totals in forms]

    def parameter_gathers(self) -> list[ExchangeCost]:
        """Return the costs of the all-gathers that send updated parameters to peers with copies. Not collective."""
        grid = self.grid
        group, ranks = (grid.replicas, grid.replica_ranks) if self.sharded else (grid.inter_node, grid.inter_node_ranks)
        spans = [self.part.shards.shards[rank].spans for rank in ranks]
        regions = self.part.layout.regions(params.REGION)
        columns = ([owned[unit].intersect(region).size for owned in spans] for unit, region in regions)
        return [direct_gather_cost([sizes], group.rank, self.training.gathered_bytes) for sizes in columns]

    def gathers(self) -> list[ExchangeCost]:
        """Return the costs of the all-gathers of units in all passes of a step. Not collective."""
        if not self.sharded:
            return []
        units = {chunk: self.part.layout.units_of(self.part.blocks(chunk)) for chunk in self.part.partitioned.chunks}
        of_unit = {unit.index: self._gather(unit) for unit in self.part.layout.units}
        passes = self.program if self.training.by_block else self.program[::2]  # a functional model has one pass
        return [of_unit[unit.index] for instruction in passes for unit in units[instruction.chunk]]

    def _gather(self, unit: Unit) -> ExchangeCost:
        sizes, kept = self.part.shards.gathered, map(self.grid.replicas_of, self.grid.shard_group_ranks)
        columns = zip(*([size for other in ranks for size in sizes(other, unit)] for ranks in kept), strict=True)
        return direct_gather_cost(columns, self.grid.shard_group.rank, self.training.gathered_bytes)

    def _gradients(self) -> Sent:
        return total_sent(e.sent for e in (*self.reductions, *self.replications()))

    def _parameters(self) -> Sent:
        total = total_sent(e.sent for e in self.parameter_gathers()) if self.training.row.shard_optimizer else Sent()
        return total + total_sent(gather_cost.sent for gather_cost in self.gathers())

    def _whole_tensors(self) -> Sent:
        """Return the messages for tensors that one rank updates as a whole.

        They carry gradients, and sharded parameters, to that rank, updated values back, and a flag that is reduced over
        all ranks: whether any has failed.
        """
        if not self.training.optimizer.needs_whole_tensors:
            return Sent()
        rank, size, item = self.grid.data.rank, self.grid.world.size, self.training.itemsize
        gathered, returned = (
            total_sent(one_call(m.span.size * item) for m in moves if m.source == rank != m.target)
            for moves in (self.tensors.gathers[rank], self.tensors.returns[rank])
        )
        return gathered.times(2 if self.sharded else 1) + returned + one_call(2 * (size - 1) // size)

    # ------------------------------------------------------------------ inside the model

    def _tensor(self) -> Sent:
        return self._sent_in("tensor")

    def _context(self) -> Sent:
        return self._sent_in("context")

    def _sent_in(self, axis: str) -> Sent:
        return total_sent(
            call.sent(group.rank, group.size, in_window=group.shares_memory).times(count)
            for group, calls in self.calls
            for call, count in calls.items()
            if call.axis == axis
        )

    @cached_property
    def calls(self) -> tuple[tuple[PlannedGroup, Counter[GroupCall]], ...]:
        """Tensor and context group, if they have several ranks, with their calls in a step and the calls' counts."""
        split = [axis for axis in ("tensor", "context") if getattr(self.grid, axis).size > 1]
        counts = {axis: Counter[GroupCall]() for axis in split if self.part.trials is not None}
        for samples, micro_batches in sorted(Counter(job for job in self.jobs if job).items()) if counts else ():
            for chunk in self.part.partitioned.chunks:
                for call in self.part.calls(chunk, samples):
                    counts[call.axis][call] += micro_batches
        return tuple((getattr(self.grid, axis), calls) for axis, calls in counts.items())

    def _activations(self) -> Sent:
        stages, stage, total = self.part.partitioned.parallel_layout.chunks, self.part.partitioned.stage, Sent()
        if self.grid.pipeline.size == 1:
            return total
        for samples in sorted(set(self.jobs) - {0}):
            once = Sent()
            for chunk in self.part.partitioned.chunks:
                if chunk < len(stages) - 1 and stages[chunk + 1] != stage:
                    once += total_sent(one_call(a.nbytes) for a in self.part.output(chunk, samples).shapes)
                if chunk > 0 and stages[chunk - 1] != stage:
                    once += total_sent(one_call(a.nbytes) for a in self.part.gradient(chunk, samples).shapes)
            total += once.times(self.jobs.count(samples))
        return total

    def _ties(self) -> Sent:
        if not self.part.partitioned.has_shared_parameters:
            return Sent()
        ties = TieExchange(cast("ProcessGrid", self.grid), self.part.partitioned, self.part.layouts, ())
        return total_sent(
            one_call(holder.span.intersect(tie.local_span).size * self.training.itemsize)
            for tie in ties.ties
            for holder in tie.holders
            for use in tie.uses
            if holder.stage != self.part.partitioned.stage and use.stage == self.part.partitioned.stage
        )

    # ------------------------------------------------------------------ small messages

    def _samples(self) -> Sent:
        moved = self.training.step.samples_moved(self.grid)
        return total_sent(one_call(moved * nbytes) for nbytes in self.training.sample_bytes)

    def _norms(self) -> Sent:
        grid, optimizer = self.grid, self.training.optimizer
        times = int(self.training.needs_norm) + 2 * bool(optimizer.needs_tensor_norms)
        if not times:
            return Sent()
        squares = one_call(8 * self.part.shards.squares(grid.data.rank) * (grid.data.size - 1))
        if grid.model.size > 1:
            squares += one_call(8 * self._counted() * (grid.model.size - 1))
        return squares.times(times)

    def _counted(self) -> int:
        """Return how many sums of squares, each of a parameter or tile, this rank sends to the rest of its replica."""
        if self.grid.coordinates.context:
            return 0
        specs = [e.spec for e in self.part.layout.parameters if e.spec.optimized and e.spec.guest is None]
        return sum(tiles_of(spec) for spec in specs if self.grid.coordinates.tensor == 0 or spec.part is not None)

    def _control(self) -> Sent:
        others = self.grid.world.size - 1
        first = one_call(32 * others)
        losses = one_call((32 * max(1, self.training.step.most_grains(self.grid)) + 8) * others)
        return first + losses + one_call(self.training.slab_bytes * others) + self._integers()

    def _integers(self) -> Sent:
        """Return the messages by which ranks agree on new values of integer arrays, which are assumed to change.

        The values are sent to ranks without a grain.
        """
        partitioned, grid = self.part.partitioned, self.grid
        integers = integers_of(partitioned.split)
        if not integers:
            return Sent()
        total, owners = one_call(16 * (grid.world.size - 1)), set(self.training.step.owners(grid))
        if len(owners) < grid.batch.size and grid.batch.rank == min(owners):
            blocks = (block for chunk in partitioned.chunks for block in partitioned.cuts[chunk])
            for spec in (spec for block in blocks for spec in integers.get(block, ())):
                total += one_call(prod(spec.shape) * np.dtype(spec.dtype).itemsize * (grid.data.size - 1))
        return total

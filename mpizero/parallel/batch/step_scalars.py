"""Exchange the loss, weight and finiteness of every grain, and compare the learning rates, in one small allgather."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import agree_on_call, all_ranks
from mpizero.errors import CollectiveError, ConfigError, DataError, PeerFailure
from mpizero.guard.call_trace import MODULUS
from mpizero.guard.reports import by_ranks
from mpizero.layout.flat import FlatLayout, joined
from mpizero.parallel.batch.redistribute import GlobalBatch
from mpizero.parallel.parameters.allocator import COMPUTING_ADVICE, refused
from mpizero.parallel.parameters.integer_state import IntegerState
from mpizero.parallel.parameters.store import flat_names
from mpizero.parallel.step_report import NonFinite
from mpizero.types import Array, as_reals

#: Flags of a rank in the message, in the low bits of the fourth number: a value was not finite; a grain raised.
#: The bits above them hold the rank's mismatch term, see guard/call_trace.py's [Note: one sum].
_BAD, _FAILED = 1, 2
_MARK_BITS = 2

#: The most non-finite grains that are reported.
MAX_TOLD = 16


#: By bytes of an element: the smallest and the largest normal floating-point number.
_LIMITS = {size: (float(np.finfo(f"f{size}").tiny), float(np.finfo(f"f{size}").max)) for size in (4, 8)}


class Divisors(NamedTuple):
    """Hold what a step's sums are divided by, each an array of one element of the gradients' type.

    Attributes
    ----------
    gradients : Array
        The divisor of summed gradients: the total weight times the loss scale.
    averages : Array
        The divisor of the summed values of averaged parameters (``ParameterSpec.averaged``): the number of samples.
    """

    gradients: Array
    averages: Array

    def of(self, *, averaged: bool) -> Array:
        """Return the divisor of averaged parameters, or else the one of gradients. Not collective."""
        return self.averages if averaged else self.gradients


class Totals(NamedTuple):
    """Hold the loss, the weight and the number of samples, summed over the global batch.

    ``problems`` describes the grains with a loss, weight or gradient that is not finite, in the order of their samples.
    """

    loss: float
    weight: float
    problems: tuple[NonFinite, ...]
    samples: int

    @property
    def mean(self) -> float:
        """The mean loss; NaN if the weight is infinite or NaN."""
        return self.loss / self.weight if math.isfinite(self.weight) else math.nan

    def divisors(self, scale: float, dtype: np.dtype[Any]) -> Divisors:
        """Return the divisors of the sums of a step; ``scale`` is the loss scale, ``dtype`` the gradients' type.

        Not collective; the same on every rank.

        Raises
        ------
        DataError
            If the divisor of gradients is below the smallest or above the largest normal number of ``dtype``: the
            divided gradient would become zero or infinite.
        """
        divisor, (least, most) = self.weight * scale, _LIMITS[dtype.itemsize]
        if not least <= divisor <= most and math.isfinite(self.weight):
            scaled = f", times the loss scale {scale:g}," if scale != 1.0 else ""
            raise DataError(
                f"the global batch has weight {self.weight:g}, which{scaled} is beyond {dtype} ({least:g} to "
                f"{most:g}), in which the gradient is divided by it: only the ratios of weights count, so divide or "
                "multiply all of them by one number"
            )
        return Divisors(np.array([divisor], dtype), np.array([self.samples], dtype))


class _Bad(NamedTuple):
    """Describe the first value of a grain that is not finite.

    Objects are ordered as their values are computed: loss, weight, then gradients from the last block to the first.
    ``kind`` is 0 for a loss, 1 for a weight and 2 for a gradient; ``place`` is minus the index of the gradient's block.
    """

    kind: int
    place: int
    tensor: str
    message: str


_NOTHING = _Bad(9, 0, "", "")


def tree_total(values: Array) -> Array:
    """Return the sum of the rows of a (rows, n) array, added in the order of the binary tree over the row numbers."""
    while len(values) > 1:
        pairs = values[: len(values) // 2 * 2]
        summed = pairs[0::2] + pairs[1::2]
        values = np.concatenate([summed, values[len(pairs) :]])
    total: Array = values[0]
    return total


def check_weight(weight: float) -> None:
    """Raise DataError if the total weight of a global batch is not above 0: then there is nothing to average."""
    if weight <= 0:
        raise DataError(f"the global batch has weight {weight:g}: every target in it is ignored; expected more than 0")


def rates_differ(step: int, rates: Array) -> ConfigError:
    """Return the error to raise if ``rates``, the learning rates of all ranks, are not equal. Not collective."""
    return ConfigError(
        f"the learning rate of step {step} differs between ranks: {by_ranks([repr(float(rate)) for rate in rates])}; "
        "lr must be a function of the step alone, the same on every rank: not of time, random numbers or the rank"
    )


def everyone_of(grid: ProcessGrid) -> Communicator:
    """Return a communicator of all ranks: the data group if it has all ranks, else the world. Not collective."""
    return grid.data if grid.data.size == grid.world.size else grid.world


class GrainScalars:
    """Collect losses, weights and errors of this rank's grains; :meth:`agree` exchanges them with all ranks.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks. All ranks of the world take part, since each may hold another part of the model.
    layout : FlatLayout
        The parameters that this rank holds.
    blocks : sequence of str
        The blocks of the whole model, in order of use.
    integers : IntegerState
        The integer arrays, which blocks write new values of.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, blocks: Sequence[str], integers: IntegerState) -> None:
        self.grid, self.layout, self.integers = grid, layout, integers
        self._order = {name: place for place, name in enumerate(blocks)}
        self.everyone = everyone_of(grid)
        self.count = 0
        self.samples = 0
        self.error: Exception | None = None
        self._late: Exception | None = None
        #: If set, called with every micro-batch's gradients before they are added: grain, micro-batch, block, views.
        self.watch: Callable[[int, int, str, Any], None] | None = None
        #: For each block that has averaged parameters, their names in the block.
        self.averages: dict[str, tuple[str, ...]] = {}
        for entry in layout.parameters:
            if entry.spec.averaged and entry.spec.trainable:
                self.averages[entry.block] = (*self.averages.get(entry.block, ()), entry.local_name)
        self.frozen = frozenset(e.spec.name for e in layout.entries if e.gradient < 0)
        self._mine: dict[int, list[float]] = {}
        self._bad: dict[int, _Bad] = {}
        self._step = 0
        self._per_rank = 0
        self._spans: dict[int, Any] = {}

    def begin(self, batch: GlobalBatch, step: int = 0) -> None:
        """Begin the global batch of step number ``step``: drop the records of the batch before. Not collective."""
        self.count, self.samples, self._step = batch.count, batch.samples, step
        self._per_rank = batch.claimed or -(-batch.count // self.grid.data.size)
        self._mine, self._bad, self.error, self._late = {}, {}, None, None
        self.integers.forget()
        self._spans = {g: (grain.micro_batches[0][2], grain.stop) for g, grain in batch.grains.items()}

    def add(self, grain: int, loss: float, weight: float) -> None:
        """Add the sum of losses and the total weight of one micro-batch to the record of its grain. Not collective."""
        record = self._mine.setdefault(grain, [0.0, 0.0])
        record[0] += loss
        record[1] += weight
        for kind, (what, value) in enumerate((("loss", loss), ("weight", weight))):
            if not np.isfinite(value) and kind < self._bad.get(grain, _NOTHING).kind:
                self._bad[grain] = _Bad(kind, 0, what, f"the {what} is not finite")

    def fail(self, error: Exception) -> None:
        """Record an error after which this rank computes no more grains of the step. Not collective.

        :meth:`agree` raises it. Errors of communication are raised at once, because the ranks can no longer agree.
        """
        if isinstance(error, CollectiveError | PeerFailure):
            raise error  # the other ranks would not come to an agreement
        if isinstance(error, MemoryError):
            error = refused(error, "computing a micro-batch", COMPUTING_ADVICE)
        self.error = self.error if self.error is not None else error

    def fail_later(self, error: Exception) -> None:
        """Record an error after which this rank goes on computing. Not collective.

        The other ranks of its tensor group may not have the error, and their collectives need this rank. :meth:`agree`
        raises the error; if this rank has also recorded one by :meth:`fail`, that one is raised instead.
        """
        self._late = self._late if self._late is not None else error

    def check(self, grain: int, block: str, views: Any) -> None:
        """Check that the gradients of ``block``, computed from ``grain``, are finite; record the first that is not.

        Not collective. ``views`` are the nested views of the block's gradients. Nothing is checked if a value of the
        grain has already been recorded. Gradients of frozen parameters are not checked.
        """
        if grain in self._bad:
            return
        for name, view in flat_names(views):
            if view.dtype.kind in "iub":
                continue
            flat, tensor = as_reals(view), joined(block, name)
            if tensor not in self.frozen and not kernels.all_finite(flat):
                what = "new value" if name in self.averages.get(block, ()) else "gradient"
                self._bad[grain] = _Bad(2, -self._order[block], tensor, f"the {what} of {tensor!r} is not finite")
                return

    def losses(self) -> dict[int, float]:
        """Return the sum of losses of each of this rank's grains, by the grain's number. Not collective."""
        return {grain: record[0] for grain, record in self._mine.items()}

    def agree(self, ask_rate: Callable[[], float] | None = None) -> Totals:
        """Exchange the records of all ranks, and return loss and weight summed over all grains.

        Collective over all ranks. It also compares the learning rates of the ranks. ``ask_rate`` returns this rank's
        learning rate; an error that it raises is recorded by :meth:`fail`. If it is None, the rate counts as 0.

        Raises
        ------
        CollectiveMismatch
            If the ranks have called different operations.
        ConfigError
            If the learning rates differ between ranks in any bit; the error names ranks and rates.
        Exception
            The error that this rank has recorded; the other ranks raise a ``RemoteError`` that quotes it.
        """
        size, rate = self.everyone.size, self._asked(ask_rate)
        self.error, self._late = self.error if self.error is not None else self._late, None
        number = self.everyone.mismatch_term()
        local = np.full(4 * max(1, self._per_rank) + 1, -1.0)
        for place, (grain, (loss, weight)) in enumerate(self._mine.items()):
            local[4 * place : 4 * place + 3] = grain, loss, weight
        mark = _FAILED if self.error is not None else _BAD if self._bad else 0
        local.view(np.int64)[3] = number << _MARK_BITS | mark
        local[-1] = rate
        told = np.empty((size, local.size))
        self.everyone.allgather(local, told.reshape(-1), "losses")
        marks = told.view(np.int64)[:, 3]
        if int((marks >> _MARK_BITS).sum()) % MODULUS:
            raise self.everyone.mismatch()
        marks &= (1 << _MARK_BITS) - 1
        if (marks == _FAILED).any():
            self._fail_together()
        self._same_rate(told[:, -1])
        problems = self._named() if (marks == _BAD).any() else ()
        table = told[:, :-1].reshape(-1, 4)
        rows = table[table[:, 0] >= 0]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        loss, weight = tree_total(rows[:, 1:3])
        return Totals(float(loss), float(weight), problems, self.samples)

    def agree_on_rate(self, ask_rate: Callable[[], float]) -> None:
        """Compare the ranks' learning rates in the first message of a separate optimizer step.

        Collective over all ranks. Such a step follows ``compute_gradients``, which has exchanged the other records.
        ``ask_rate`` returns this rank's learning rate. Raises what :meth:`agree` raises.
        """
        rate = np.array(self._asked(ask_rate), np.float64)
        told = agree_on_call(self.grid.world, (int(rate.view(np.int64)), self.error is not None))
        if told[:, 1].any():
            self._fail_together()
        self._same_rate(np.ascontiguousarray(told[:, 0]).view(np.float64))

    def _asked(self, ask_rate: Callable[[], float] | None) -> float:
        try:
            return 0.0 if ask_rate is None else ask_rate()
        except Exception as error:
            self.fail(error)
            return 0.0

    def _fail_together(self) -> None:
        error, self.error = self.error, None
        with all_ranks(self.everyone, "failed grains"):
            if error is not None:
                raise error

    def _same_rate(self, rates: Array) -> None:
        bits = np.ascontiguousarray(rates).view(np.int64)  # NaN, the rate of a user's optimizer, equals itself
        if (bits != bits[0]).any():
            raise rates_differ(self._step, rates)

    def _named(self) -> tuple[NonFinite, ...]:
        """Return the non-finite grains of all ranks, each described by its first non-finite value.

        Collective over all ranks. The grains are in the order of their samples, and at most :data:`MAX_TOLD`.
        """
        mine = sorted((self._spans[g][0], bad, self._told(g, bad)) for g, bad in self._bad.items())[:MAX_TOLD]
        everyone = self.everyone.allgather_object(mine, "not finite")
        found: dict[int, NonFinite] = {}
        for first, _, told in sorted((item for items in everyone for item in items), key=lambda item: item[:2]):
            found.setdefault(first, told)
        return tuple(found.values())[:MAX_TOLD]

    def _told(self, grain: int, bad: _Bad) -> NonFinite:
        first, stop = self._spans[grain]
        return NonFinite(self._step, self.everyone.rank, bad.tensor, first, stop, bad.message)

    def in_the_sum(self, tensor: str, parts: Sequence[Array], norm: float) -> NonFinite:
        """Describe an averaged gradient that is not finite, or whose squares overflow, though each grain's was finite.

        Collective over all ranks. ``parts`` are this rank's elements of the averaged gradient of the parameter
        ``tensor``; ``norm`` is the sum of squares of all elements, which is not finite. The description names the rank
        with the largest element.
        """
        finite = all(np.isfinite(part).all() for part in parts)
        largest = max((float(np.abs(part).max()) for part in parts if part.size), default=-1.0) if finite else np.inf
        told = np.empty(self.everyone.size)
        self.everyone.allgather(np.array([largest]), told, "sum not finite")
        rank, first = int(told.argmax()), f"the averaged gradient of {tensor!r} is not finite"
        message = (
            first if np.isinf(told[rank]) else f"the squares of the averaged gradient of {tensor!r} add up to {norm}"
        )
        return NonFinite(self._step, rank, tensor, 0, self.samples, message)

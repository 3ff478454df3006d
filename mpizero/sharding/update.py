"""Update parameters: run an optimizer on the ranges that a rank updates; results do not depend on the layout.

An :class:`Updater` takes the reduced gradient, or sums it in the same pass over memory, and calls the optimizer's
kernels for contiguous ranges of elements (:class:`UpdateScope` says which ranges). A norm or a dot product needs all
elements of a parameter. :class:`TensorTree` computes such sums over the data group, in the order of a binary tree over
the elements of a tile. :class:`GlobalSums` adds them over the ranks that hold other stages and tensor slices, in the
order of a binary tree over the tiles. No layout changes these orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero._util.numbers import ordered_sum
from mpizero.comm import ProcessGrid
from mpizero.kernels.recording import RecordedCall, recording_is_on
from mpizero.layout.flat import FlatLayout
from mpizero.layout.sum_tree import Program, TreeNode, cover, evaluate, leaves_program, merge
from mpizero.layout.tensor_parts import PartRows, elements_within, row_runs, take_rows, tile_rows
from mpizero.nn.arrays import add_to
from mpizero.optim import elementwise
from mpizero.optim.elementwise import EMA, MASTER_WEIGHTS, optimizer_name, tensor_slots
from mpizero.sharding.batch import Divisors
from mpizero.sharding.params import (
    ParameterStore,
    Shard,
    StatePiece,
    UpdatePiece,
    UpdateRun,
    runs_of,
    tensors_last,
    update_pieces,
)
from mpizero.sharding.whole_tensors import TensorPlan, TensorUpdater, TieExchange, home_of
from mpizero.types import Array, ParameterSpec

if TYPE_CHECKING:
    from mpizero.optim.minimizers import VectorSolver

#: Elements up to which a rank's updates are recorded: a trial copies them, and Python matters less for more.
_MOST_RECORDED = 1 << 22


@dataclass(frozen=True)
class UpdateScope:
    """Describe which ranges a rank updates, and what it exchanges with other ranks before the update.

    Attributes
    ----------
    replicated : bool
        Whether every node keeps the whole optimizer state (DDP); otherwise each rank keeps the state of its own shard.
    flat : bool
        Whether the reduced gradient holds the gradients of all parameters (a flat gradient), or only those that this
        rank owns.
    global_sums : GlobalSums or None
        Adds sums of squares over the ranks that hold other parts of the model; None if the model is not split.
    ties : callable or None
        Takes the pieces of this rank's own shard and returns their :class:`TieExchange`; None if this pipeline stage
        shares no parameters with other stages.
    """

    replicated: bool
    flat: bool
    global_sums: GlobalSums | None = None
    ties: Callable[[Sequence[UpdatePiece]], TieExchange] | None = None


class Updater:
    """Run an optimizer on the ranges of the parameters that this rank updates.

    The *reduced gradient* is the gradient summed over the whole global batch, and divided by the total weight of its
    samples and by the loss scale. For averaged parameters, such as running means, the reduced gradient holds new
    values, averaged over the samples, in place of gradients.

    Parameters
    ----------
    optimizer : optimizer
        The optimizer, as returned by :func:`mpizero.optim.elementwise.with_copies`.
    store : ParameterStore
        Holds the parameters.
    scope : UpdateScope
        Says which ranges this rank updates, and in which form the reduced gradient is.
    """

    def __init__(self, optimizer: Any, store: ParameterStore, scope: UpdateScope) -> None:
        self.optimizer = optimizer
        self.store, self.memory, self.grid, layout = store, store.memory, store.grid, store.layout
        self.shards = store.group_shards if scope.replicated else (store.shard,)
        # A copy of another stage's parameter is in the optimizer group of that parameter, which may depend on its name.
        specs = [e.spec for e in layout.parameters if not e.spec.averaged]
        groups = {spec: self.optimizer.group_of(replace(spec, name=home_of(spec))) for spec in specs}
        bases = [store.base] if store.sharded else None
        pieces = update_pieces(self.shards, groups, bases, scope.flat)
        plan = TensorPlan.of(optimizer, layout, self.grid.nodes, replicated=scope.replicated)
        self.pieces = tensors_last([piece for piece in pieces if not piece.entry.spec.averaged], plan.names)
        self.averages = tuple(piece for piece in pieces if piece.entry.spec.averaged)
        self.plain_runs = runs_of([p for p in self.pieces if not p.uses])
        self.runs = runs_of(self.pieces)
        self.elementwise = runs_of([p for p in self.pieces if p.entry.spec.name not in plan.names])
        self.tied = tuple(p for p in self.pieces if p.uses)
        self.groups = sorted(set(groups.values()))
        self.size = sum(piece.size for piece in self.pieces)
        self.trees = TensorTree(self.grid, layout, self.pieces)
        self._global_sums, self._ties = scope.global_sums, None if scope.ties is None else scope.ties(self.trees.pieces)
        #: If set, called with every reduced gradient, clipped and unscaled, before the update; not in fused updates.
        self.watch: Callable[[Array], None] | None = None
        self.method: VectorSolver | None = None  # the solver of a full-batch method
        self.step_count = 0
        self.last_rate: float | None = None  # of the last step; None if it is not known
        self._records = recording_is_on() and _computes_by_kernels(optimizer) and self.size <= _MOST_RECORDED
        self._updates, self._fused_updates = RecordedCall(), RecordedCall()
        self._last = self._updates
        self._known_rate = -1, 0.0  # the step whose rate is known, and the rate
        self.dtype = store.dtype
        #: Exchanges and updates whole tensors; None if the optimizer needs none.
        self.tensors = TensorUpdater(optimizer, store, plan, self.pieces) if optimizer.needs_whole_tensors else None
        sizes = state_sizes(optimizer, self.size, self.elementwise, self.tensors)
        self.state: dict[str, Array] = {slot: self._new_state(size) for slot, size in sizes.items()}

    def _new_state(self, size: int) -> Array:
        """Return a new array of zeros for one slot (such as a momentum) of this rank's optimizer state."""
        return self.memory.private("optimizer state", size, self.dtype)

    def state_pieces(self, slot: str, *, local_only: bool = False) -> list[StatePiece]:
        """Return the ranges of ``slot``'s arrays that this rank keeps: of its shards, or of whole tensors it owns.

        Not collective. ``slot`` names a kind of optimizer state, such as "exp_avg", with an array for each parameter.
        With ``local_only``, only ranges of this rank's own shard, not its copies of the state of other shards.
        """
        if slot not in self.optimizer.slots:
            return self.tensors.owned_state[slot] if self.tensors else []
        # Pieces of whole tensors, which only the average has, begin after all others: see tensors_last.
        pieces, size = self.trees.pieces if local_only else self.pieces, self.state[slot].size
        stored = (piece for piece in pieces if piece.state + piece.size <= size)
        return [StatePiece(p.entry.spec, p.span.start - p.entry.offset, p.state, p.size) for p in stored]

    def release(self) -> None:
        """Stop counting the bytes of the optimizer state; the caller then drops the updater. Not collective."""
        for array in self.state.values():
            self.memory.release("optimizer state", array)

    def host_state(self, *, fetch: bool = True) -> dict[str, Array]:
        """Return the optimizer state as arrays on the host, by slot, such as "exp_avg". Not collective.

        The arrays are the state itself, or copies if the state is on a GPU. With ``fetch=False`` the contents of copies
        are undefined, for callers that overwrite all of them.
        """
        return self.state

    def take_state(self, host: Mapping[str, Array]) -> None:
        """Set the optimizer state from arrays of :meth:`host_state` that the caller has filled. Not collective.

        In this class nothing is left to do, because these arrays are the state itself.
        """

    def reset(self) -> None:
        """Set the optimizer state and the step count to zero, as before the first step. Not collective."""
        for array in self.state.values():
            array[:] = 0
        self.step_count, self.last_rate = 0, None

    @property
    def fresh(self) -> bool:
        """Tell whether this rank's optimizer state and step count are 0, as before the first step. Not collective."""
        return not self.step_count and not any(array.any() for array in self.state.values())

    def learning_rate(self) -> float:
        """Ask the optimizer for the learning rate of the next step and keep it for that step. Not collective."""
        self._known_rate = self.step_count, elementwise.learning_rate(self.optimizer, self.step_count)
        return self._known_rate[1]

    @property
    def rate(self) -> float:
        """The learning rate of the next step, as :meth:`learning_rate` last returned it for that step.

        The optimizer is asked only once for each step, because a user's function may return another rate at each call.
        """
        step, rate = self._known_rate
        return rate if step == self.step_count else self.learning_rate()

    def _made(self) -> None:
        """Count one step of the optimizer, and record the learning rate of the step."""
        self.last_rate = self.rate
        self.step_count += 1

    def hypers(self) -> dict[int, Array]:
        """Return the hyperparameters of the next step, an array for each optimizer group, by the group's number."""
        step, rate = self.step_count + 1, self.rate
        return {g: self.optimizer.hyper(step, g, self.dtype, rate) for g in self.groups}

    def update_fused(
        self, rows: Array, programs: tuple[Array, Array], divisors: Divisors, out: Array, threads: int
    ) -> None:
        """Sum the partial sums of gradients in ``rows``, and update the parameters from the divided sum.

        This takes one pass over memory.
        Collective over all ranks for optimizers that need norms, else not collective.

        Parameters
        ----------
        rows, programs, out
            As in :class:`~mpizero.sharding.grad_reduce.Operands`.
        divisors : Divisors
            Divisors of the sums of gradients, and of the sums of averaged parameters.
        threads : int
            Number of threads that this rank uses.
        """
        hypers, divisor, (exact, program) = self.hypers(), divisors.gradients, programs
        self._average(self._parameters(), rows, exact, divisors)
        if self.optimizer.needs_tensor_norms:
            self._fused_directions(rows, program, divisor, out, hypers)
        else:

            def apply(scalars: Sequence[Array]) -> None:
                divisor, placed = scalars[0], dict(zip(self.groups, scalars[1:], strict=True))
                for piece in self.tied:
                    total = self._tied_sum(piece, rows, program, divisor)
                    w, state = self._run_arrays(piece.store, piece.state, piece.size)
                    self.optimizer.apply(w, total, state, placed[piece.group], threads)
                for run in self._in_order(self.plain_runs):
                    w, state = self._run_arrays(run.store, run.state, run.size)
                    summed = elementwise.RowSum(rows, run.gradient, program, divisor)
                    self.optimizer.apply_tree(summed, w, state, placed[run.group], threads)

            scalars = divisor, *(self._placed(hypers[group]) for group in self.groups)
            self._recorded(self._fused_updates, apply, (rows, program.tobytes(), threads), scalars)
        self._made()

    def _in_order(self, runs: Iterable[UpdateRun]) -> Iterator[UpdateRun]:
        """Yield ``runs`` (ranges that are updated together), and begin to send updated parameters between them.

        The runs are yielded in the order of the parameters.
        The region of parameters that the next forward pass needs first is sent as soon as the caller has updated this
        rank's part of it; its messages progress between the updates of the other runs. All averaged and tied parameters
        must have been updated before. Nothing is sent here with DDP, whose ranks update all shards of their inter-node
        group, nor with a user's optimizer, which may raise, nor if the update may be repeated from a recording of its
        kernels (:meth:`_recorded`), which knows nothing of messages.
        """
        able = len(self.shards) == 1 and self.size > _MOST_RECORDED and _computes_by_kernels(self.optimizer)
        first = self.store.first_region if able and type(self._parameters()) is np.ndarray else None
        for run in runs:
            if first is not None and run.store >= first.stop:
                self.store.begin_all_gather()
                first = None
            self.store.poll()
            yield run

    def _fused_directions(
        self, rows: Array, program: Array, divisor: Array, out: Array, hypers: dict[int, Array]
    ) -> None:
        """Do :meth:`update_fused` for an optimizer that scales the direction of each tensor by norms."""
        placed = {group: self._placed(hyper) for group, hyper in hypers.items()}
        for run in self.plain_runs:
            w, state = self._run_arrays(run.store, run.state, run.size)
            u = out[run.gradient : run.gradient + run.size]
            summed = elementwise.RowSum(rows, run.gradient, program, divisor)
            self.optimizer.direction_tree(summed, w, u, state, placed[run.group])
        for piece in self.tied:
            total = self._tied_sum(piece, rows, program, divisor)
            w, state = self._run_arrays(piece.store, piece.state, piece.size)
            self.optimizer.direction(w, total, state, placed[piece.group])
            out[piece.gradient : piece.gradient + piece.size] = total
        self._apply_directions(out, hypers)

    def _recorded(
        self,
        calls: RecordedCall,
        apply: Callable[[Sequence[Array]], None],
        operands: tuple[Any, ...],
        scalars: tuple[Array, ...],
    ) -> None:
        """Call ``apply(scalars)``, which updates parameters and state in place, or repeat its recorded kernel calls.

        ``calls`` keeps the recordings of earlier steps. ``operands`` are values other than parameters and state on
        which the calls of kernels depend: a recording is repeated only if they are equal.
        """
        self._last, values = calls, self._parameters()
        if not self._records or type(values) is not np.ndarray:
            apply(scalars)
            return

        def written() -> list[Array]:
            return [*(values[piece.store : piece.store + piece.size] for piece in self.pieces), *self.state.values()]

        # In the first step, and after a reset, copies of the parameters begin: that is another recording.
        calls.run(apply, (*operands, not self.step_count, values, *self.state.values()), scalars, written)

    @property
    def computed_by(self) -> str:
        """Say how the last update was computed: "repeated", or "called" and why it is not recorded."""
        if self._last.refused:
            return f"called: {optimizer_name(self.optimizer)} differs when its kernels are repeated"
        return "repeated" if self._last.repeated else "called"

    def _average(self, values: Array, rows: Array, program: Array, divisors: Divisors) -> None:
        """Set this rank's averaged parameters, in ``values``, to the means of their new values. Not collective.

        ``rows`` holds partial sums of the new values over samples. :meth:`update_fused` describes the other arguments.
        """
        tree_sum = kernels.backend(rows).update.tree_sum
        for piece in self.averages:
            w = values[piece.store : piece.store + piece.size]
            tree_sum(rows, piece.gradient, rows[:0], 0, program, divisors.averages, w, 0, piece.size)

    def _take_averages(self, values: Array, reduced: Array) -> None:
        """Set this rank's averaged parameters, in ``values``, to the values in the reduced gradient. Not collective."""
        for piece in self.averages:
            values[piece.store : piece.store + piece.size] = reduced[piece.gradient : piece.gradient + piece.size]

    def _tied_sum(self, piece: UpdatePiece, rows: Array, program: Array, divisor: Array) -> Array:
        """Return the reduced gradient of a piece (range of a parameter) with tied uses: the sum over all uses.

        The gradients of the uses are added in declared order.
        :meth:`update_fused` describes ``rows`` and ``program``; ``divisor`` is the divisor of sums of gradients.
        """
        tree_sum, like = kernels.backend(rows).update.tree_sum, rows[0, : piece.size]
        total: Array = kernels.namespace(rows).empty_like(like)
        other = kernels.namespace(rows).empty_like(like)
        tree_sum(rows, piece.gradient, rows[:0], 0, program, divisor, total, 0, piece.size)
        for use in piece.uses:
            tree_sum(rows, use, rows[:0], 0, program, divisor, other, 0, piece.size)
            add_to(total, other)
        return total

    def to_device(self, reduced: Array) -> Array:
        """Return the reduced gradient, copied to where the optimizer runs: the host in this class. Not collective."""
        host: Array = kernels.to_host(reduced)
        return host

    def exchange_ties(self, reduced: Array) -> None:
        """Add up, in ``reduced``, all gradients of each tied parameter that belongs to several stages.

        Collective over the data groups of these stages; see :class:`TieExchange`.
        """
        if self._ties is not None:
            self._ties.add(reduced)

    def add_uses(self, reduced: Array) -> None:
        """Add, in ``reduced``, the gradients of a parameter's tied uses to its own, in declared order. Not collective.

        Parameters that :meth:`exchange_ties` has added up are left out.
        """
        added = frozenset[str]() if self._ties is None else self._ties.names
        for piece in self.tied:
            if home_of(piece.entry.spec) in added:
                continue
            target = reduced[piece.gradient : piece.gradient + piece.size]
            for use in piece.uses:
                target += reduced[use : use + piece.size]

    def norm(self, reduced: Array) -> tuple[float, str | None]:
        """Return the global norm of the reduced gradient, and None or the name of a parameter whose norm overflows.

        Collective over all ranks. If the sum of all squares is not finite, the first value is that sum. The second
        value is then the first parameter whose own sum is not finite or, if there is none, the parameter with the
        largest sum.
        """
        sums = self._square_sums(reduced, [piece.gradient for piece in self.trees.pieces])
        total = float(ordered_sum(sums.values()))
        if np.isfinite(total):
            return math.sqrt(total), None
        return total, next(
            (name for name, value in sums.items() if not np.isfinite(value)), max(sums, key=sums.__getitem__)
        )

    def parts_of(self, name: str, reduced: Array) -> list[Array]:
        """Return this rank's elements of the reduced gradient of parameter ``name``, on the host. Not collective."""
        pieces = [p for p in self.trees.pieces if home_of(p.entry.spec) == name]
        return [kernels.to_host(reduced[p.gradient : p.gradient + p.size]) for p in pieces]

    def _square_sums(self, values: Array, starts: Sequence[int]) -> dict[str, float]:
        """Return, for every optimized parameter of the model, by name, the sum of squares of its elements.

        Collective over all ranks. ``values`` and ``starts`` are those of :meth:`TensorTree.sums`.
        """
        return self.over_ranks(self.trees.sums((values,), starts))

    def over_ranks(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return, for every optimized parameter of the model, the sum of the values of its tiles.

        Collective over the ranks of a replica. ``sums`` has, for each parameter of this rank, by name, a value for each
        tile that the rank holds.
        """
        if self._global_sums is not None:
            return self._global_sums.merge(sums)
        return {name: over_tiles(values) for name, values in sums.items()}

    def scale(self, reduced: Array, factor: float) -> None:
        """Multiply ``reduced`` by ``factor``, in the ranges that this rank updates. Not collective."""
        for run in self.runs:
            part = reduced[run.gradient : run.gradient + run.size]
            np.multiply(part, self.dtype.type(factor), out=part)

    def update(self, reduced: Array, threads: int, loss: float) -> None:
        """Update this rank's ranges of the parameters from the reduced gradient.

        Collective over all ranks for optimizers that need norms or update whole tensors, else not collective. ``loss``
        is the mean loss, which full-batch methods need.
        """
        if self.watch is not None:
            self.watch(kernels.to_host(reduced))
        hypers = self.hypers()
        self._take_averages(self._parameters(), reduced)
        placed = {group: self._placed(hyper) for group, hyper in hypers.items()}
        if self.optimizer.needs_tensor_norms:
            for run in self.runs:
                w, state = self._run_arrays(run.store, run.state, run.size)
                gradient = reduced[run.gradient : run.gradient + run.size]
                self.optimizer.direction(w, gradient, state, placed[run.group])
            self._apply_directions(reduced, hypers)
        else:
            if self.tensors is not None:
                self._update_tensors(self.tensors, reduced, hypers)

            def apply(scalars: Sequence[Array]) -> None:
                placed = dict(zip(self.groups, scalars, strict=True))
                for run in self._in_order(self.elementwise):
                    w, state = self._run_arrays(run.store, run.state, run.size)
                    gradient = reduced[run.gradient : run.gradient + run.size]
                    self.optimizer.apply(w, gradient, state, placed[run.group], threads)

            scalars = tuple(placed[group] for group in self.groups)
            self._recorded(self._updates, apply, (reduced, threads), scalars)
        self._made()

    def _apply_directions(self, directions: Array, hypers: dict[int, Array]) -> None:
        """Apply LAMB's update directions, each scaled by a ratio of two norms (You et al. 2020, algorithm 2).

        Collective over all ranks. The norms are those of a parameter's values and of its direction.
        """
        local = self.trees.pieces
        values = self._parameters()
        weights = self._square_sums(values, [piece.store for piece in local])
        steps = self._square_sums(directions, [piece.gradient for piece in local])
        for piece in self.pieces:
            name = home_of(piece.entry.spec)
            w = values[piece.store : piece.store + piece.size]
            direction = directions[piece.gradient : piece.gradient + piece.size]
            ratio = self.optimizer.trust_ratio(math.sqrt(weights[name]), math.sqrt(steps[name]))
            self.optimizer.apply_direction(w, direction, hypers[piece.group], ratio)
            self._follow(w, piece.state)

    def _update_tensors(self, tensors: TensorUpdater, reduced: Array, hypers: dict[int, Array]) -> None:
        """Update whole tensors, and their moving average if the optimizer keeps one. Collective over all ranks."""
        if self.averages_parameters and not self.step_count:
            self.begin_copies(self.state)
        tensors.update(reduced, hypers, self.state)
        for piece in tensors.pieces:
            self._follow(self.store.values[piece.store : piece.store + piece.size], piece.state)

    def _follow(self, w: Array, state: int) -> None:
        """Update the moving average of the parameters ``w``, if averages are kept.

        ``state`` is the index of the average of the first element of ``w`` in the array of averages.
        """
        if EMA in self.state:
            self.optimizer.follow(w, self.state[EMA][state : state + w.size])

    @property
    def averages_parameters(self) -> bool:
        """Tell whether the optimizer keeps an exponential moving average of the parameters."""
        return EMA in self.state

    @property
    def copies(self) -> tuple[str, ...]:
        """The kinds of optimizer state that start as copies of the parameters: moving average and master weights."""
        return tuple(slot for slot in (EMA, MASTER_WEIGHTS) if slot in self.state)

    def begin_copies(self, state: Mapping[str, Array]) -> None:
        """Set the :attr:`copies` of parameters in ``state`` (from :meth:`host_state`) to the parameters on the host."""
        for piece in self.pieces:
            values = self.store.values[piece.store : piece.store + piece.size]
            for slot in self.copies:
                state[slot][piece.state : piece.state + piece.size] = values

    def swap_average(self) -> None:
        """Swap this rank's parameters and their moving average; a second call restores both. Not collective.

        Raises
        ------
        UnsupportedError
            If the optimizer's state is on a GPU (:class:`.DeviceUpdater`).
        """
        average = self.state[EMA]
        for run in self.runs:
            w, there = self.store.values[run.store : run.store + run.size], average[run.state : run.state + run.size]
            saved = w.copy()
            w[:] = there
            there[:] = saved

    def state_of(self, slot: str, piece: UpdatePiece | StatePiece) -> Array:
        """Return the optimizer state ``slot``, such as "exp_avg", of the elements of ``piece``; on the host, to read.

        Not collective.
        """
        values: Array = kernels.to_host(self.state[slot][piece.state : piece.state + piece.size])
        return values

    def _run_arrays(self, store: int, state: int, size: int) -> tuple[Array, dict[str, Array]]:
        arrays = {slot: self.state[slot][state : state + size] for slot in self.optimizer.slots}
        return self._parameters()[store : store + size], arrays

    def _placed(self, scalars: Array) -> Array:
        """Copy a small array to the device where the optimizer's kernels run, and return it."""
        return scalars

    def _parameters(self) -> Array:
        """Return the array of the store's parameters on the device where the optimizer's kernels run."""
        return self.store.values


def _computes_by_kernels(optimizer: Any) -> bool:
    """Tell whether an optimizer, or the one that it wraps, is one of this package, not a user's class."""
    used = elementwise.plain(optimizer)
    return isinstance(used, elementwise.FlatOptimizer) and type(used).__module__.startswith("mpizero.optim.")


def state_sizes(
    optimizer: Any, size: int, elementwise: Iterable[UpdateRun], tensors: TensorUpdater | None
) -> dict[str, int]:
    """Return the number of elements that a rank keeps of each slot (kind of optimizer state, such as "exp_avg").

    Not collective.
    A whole tensor (of a matrix optimizer) has slots of its own; of the elementwise slots it uses only the moving
    average.

    Parameters
    ----------
    optimizer : optimizer
        The optimizer, as returned by :func:`mpizero.optim.elementwise.with_copies`.
    size : int
        Number of parameter elements that the rank updates.
    elementwise : iterable of UpdateRun
        Runs of the elements that are not updated as parts of whole tensors.
    tensors : TensorUpdater or None
        The whole tensors; None if the optimizer needs none.
    """
    short = sum(run.size for run in elementwise)
    sizes = {slot: size if slot == EMA else short for slot in optimizer.slots}
    return sizes | {slot: tensors.size(slot) if tensors else 0 for slot in tensor_slots(optimizer)}


class TensorTree:
    """Sum the squares of each parameter's elements in float64, in the order of a binary tree over the elements.

    A parameter of which a rank holds several tiles (:class:`~mpizero.types.Part`) has one sum for each tile, over the
    tile's elements in C order: the sum that a rank with this tile alone computes.

    [Note: scalar sums] A rank computes the sums of the largest subtrees that lie inside its ranges. These few sums are
    gathered from all ranks, and every rank adds them in the same order. So norms have the same bits on every layout.

    Parameters
    ----------
    grid : ProcessGrid
        The process groups of this rank.
    layout : FlatLayout
        The layout of the parameters.
    pieces : sequence of UpdatePiece
        The ranges of parameters that this rank updates. The rank sums only those in its own shard, which the attribute
        ``pieces`` holds.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, pieces: Sequence[UpdatePiece]) -> None:
        self.grid, self._layout = grid, layout
        shard = Shard(layout, grid.data.rank, grid.data.size)
        self.pieces = [p for p in pieces if p.span.intersect(shard.spans[p.entry.unit]) == p.span]

    @cached_property
    def _tiles(self) -> dict[str, tuple[PartRows, ...]]:
        """The tiles that this rank holds of each optimized parameter, by the parameter's name."""
        return {e.spec.name: tile_rows(e.spec) for e in self._layout.parameters if e.spec.optimized}

    @cached_property
    def _all_sums(self) -> tuple[list[int], dict[str, tuple[Program, ...]]]:
        """The number of sums of each rank, and the order in which the sums of all ranks are added up for each tile.

        Computed when first needed, because the time for it grows with the number of ranks, and many trainings need no
        norm.
        """
        counts = [0] * self.grid.data.size
        arrivals: dict[tuple[str, int], list[tuple[TreeNode, Program]]] = {
            (name, tile): [] for name, rows in self._tiles.items() for tile in range(len(rows))
        }
        offset = 0
        for rank in range(self.grid.data.size):
            for name, tile, nodes in _trees(Shard(self._layout, rank, self.grid.data.size), self._tiles):
                arrivals[name, tile] += [(node, (offset + i,)) for i, node in enumerate(nodes)]
                offset += len(nodes)
                counts[rank] += len(nodes)
        programs = {
            name: tuple(next((p for _, p in merge(arrivals[name, t], r.size)), ()) for t, r in enumerate(tiles))
            for name, tiles in self._tiles.items()
        }
        return counts, programs

    @cached_property
    def _local_sums(self) -> tuple[Array, list[tuple[int, int, StridedTile]]]:
        """The sums that this rank computes: of contiguous elements, which are read where they lie, and of strided ones.

        The first value has a column for each sum of contiguous elements: the index of their piece in ``pieces``, that
        of the sum among this rank's sums, and where the elements begin and end in the piece. The second has a
        :class:`StridedTile`, which copies its elements, for each piece and tile with strided elements, after the
        piece's index and the index of its first sum.
        """
        cuts: list[tuple[int, int, int, int]] = []
        strided: list[tuple[int, int, StridedTile]] = []
        offset = 0
        for number, piece in enumerate(self.pieces):
            origin = piece.span.start - piece.entry.offset
            for rows in self._tiles[piece.entry.spec.name]:
                inside = elements_within(rows, origin, origin + piece.size)
                nodes = cover(inside.start, inside.stop, rows.size)
                ranges = list(islice(row_runs(rows, inside.start, inside.stop), 2))
                if len(ranges) > 1:
                    strided.append((number, offset, StridedTile(rows, origin, nodes)))
                else:
                    leaves = [node.leaves(rows.size) for node in nodes]
                    first = ranges[0].full - ranges[0].local - origin if ranges else 0
                    cuts += [(number, offset + i, first + r.start, first + r.stop) for i, r in enumerate(leaves)]
                offset += len(nodes)
        return np.array(cuts, np.int64).reshape(-1, 4).T, strided

    def sums(self, arrays: tuple[Array, ...], starts: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return, for every optimized parameter of the layout, by name, the sum of squares of each tile's elements.

        With two arrays the sums are dot products. A parameter without tiles has one sum. Collective over the data
        group. An array holds this rank's elements; those of piece ``pieces[i]`` begin at index ``starts[i]``.
        """
        (counts, programs), ((piece, position, first, stop), strided) = self._all_sums, self._local_sums
        local = np.empty(counts[self.grid.data.rank], np.float64)
        begin, values = np.array(starts, np.int64)[piece], np.empty(piece.size, np.float64)
        _tree_sums(arrays, first + begin, stop + begin, values)
        local[position] = values
        for number, at, tile in strided:
            parts = [array[starts[number] : starts[number] + self.pieces[number].size] for array in arrays]
            local[at : at + len(tile.nodes)] = tile.sums(parts)
        gathered = np.empty(sum(counts), np.float64)
        self.grid.data.allgatherv(local, gathered, counts, "tensor sums")
        return {name: tuple(evaluate(tile, gathered) for tile in parts) for name, parts in programs.items()}


def _tree_sums(arrays: tuple[Array, ...], starts: Array, stops: Array, out: Array) -> None:
    """Write the sums of squares of ranges of one array, or the dot products of two, to ``out``. Not collective."""
    reduction = kernels.backend(arrays[0]).reduction
    (reduction.tree_square_sums if len(arrays) == 1 else reduction.tree_dots)(*arrays, starts, stops, out)


def _trees(shard: Shard, tiles: Mapping[str, Sequence[PartRows]]) -> Iterator[tuple[str, int, tuple[TreeNode, ...]]]:
    """Yield the sums that the rank of ``shard`` computes and sends: for each tile, the subtrees that it sums.

    Each item is a parameter's name, the index of one of its tiles, and the largest subtrees of the tree over the tile's
    elements that lie in the shard. ``tiles`` holds the tiles of each parameter, by name.
    """
    for entry, part, _ in shard.pieces():
        for tile, rows in enumerate(tiles.get(entry.spec.name, ())):
            inside = elements_within(rows, part.start - entry.offset, part.stop - entry.offset)
            yield entry.spec.name, tile, cover(inside.start, inside.stop, rows.size)


#: Elements of a tile that is not contiguous which are copied at once, a power of two: so many stay in a CPU's cache.
HOST_BLOCK = 1 << 17
#: The same on a GPU, where each block costs a few launches.
DEVICE_BLOCK = 1 << 24


class _Block(NamedTuple):
    """Describe elements of a tile that are copied together, and the ranges of the copy that are summed.

    ``start`` is the first element, as an index into the tile, and ``size`` the number of elements. ``starts`` and
    ``stops`` are where the ranges begin and end, relative to ``start``.
    """

    start: int
    size: int
    starts: Array
    stops: Array


class StridedTile:
    """Sum squares or products of a tile's elements, which are not contiguous in the values that a rank holds.

    The elements are copied block by block into a small array, which stays in the cache until it is summed.

    Parameters
    ----------
    rows : PartRows
        The elements of the tile in the rows of the local array, from :func:`~mpizero.layout.tensor_parts.tile_rows`.
    origin : int
        Index in the local array of the first element that :meth:`sums` receives.
    nodes : sequence of TreeNode
        Consecutive subtrees of the tree over the tile's elements, whose sums are computed.
    """

    def __init__(self, rows: PartRows, origin: int, nodes: Sequence[TreeNode]) -> None:
        self.rows, self.origin, self.nodes = rows, origin, nodes
        self._blocks = cache(self._cut)

    def sums(self, arrays: Sequence[Array]) -> list[float]:
        """Return, for each subtree in ``nodes`` (consecutive elements of the tile), the sum of squares of its elements.

        With two arrays the results are dot products of their elements in the subtree. Not collective. The arrays begin
        with element ``origin`` of the local array, and are on the host or on a GPU.
        """
        step = HOST_BLOCK if isinstance(arrays[0], np.ndarray) else DEVICE_BLOCK
        blocks, ends = self._blocks(step)
        size = max(block.size for block in blocks)
        copies = [kernels.namespace(array).empty(size, array.dtype) for array in arrays]
        sums, offset = np.empty(ends[-1], np.float64), 0
        for block in blocks:
            taken = tuple(copied[: block.size] for copied in copies)
            for array, copied in zip(arrays, taken, strict=True):
                take_rows(self.rows, array, block.start, copied, self.origin)
            _tree_sums(taken, block.starts, block.stops, sums[offset : offset + block.starts.size])
            offset += block.starts.size
        return [evaluate(leaves_program(stop - start), sums[start:stop]) for start, stop in pairwise(ends)]

    def _cut(self, step: int) -> tuple[list[_Block], list[int]]:
        """Cut the subtrees (``nodes``) into ranges of at most ``step`` elements, a power of two.

        The elements of each range are those of a smaller subtree. Return the blocks (ranges that are copied together),
        and a list that begins with 0 and has the cumulative number of ranges after each subtree.
        """
        leaves = [node.leaves(self.rows.size) for node in self.nodes]
        cuts = [[range(i, min(i + step, r.stop)) for i in range(r.start, r.stop, step)] for r in leaves]
        blocks = []
        for _, ranges in groupby((part for parts in cuts for part in parts), lambda part: part.start // step):
            ends = np.array([(part.start, part.stop) for part in ranges], np.int64)
            first = int(ends[0, 0])
            blocks.append(_Block(first, int(ends[-1, 1]) - first, *np.ascontiguousarray((ends - first).T)))
        return blocks, list(accumulate((len(parts) for parts in cuts), initial=0))


class GlobalSums:
    """Add values of each parameter over the ranks of a replica, counting each element of the model once.

    The values of a split parameter, one for each of its tiles, are added in the order of the binary tree over the
    numbers of the tiles. So the sum does not depend on how many ranks hold the tiles.

    Construction and :meth:`merge` are collective over the model group, the ranks of a replica.

    Parameters
    ----------
    grid : ProcessGrid
        The process groups of this rank.
    layout : FlatLayout
        The parameters that this rank holds. Values of a parameter that several stages use count only on the stage whose
        block declares it. Values of a parameter that all tensor ranks hold whole count only on tensor rank 0. Context
        ranks hold equal parameters; only the values on context rank 0 count.
    order : sequence of str
        The names of all optimized parameters of the model, in declared order.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, order: Sequence[str]) -> None:
        self.comm = grid.model
        first = grid.coordinates.tensor == 0
        specs = [e.spec for e in layout.parameters if e.spec.optimized and e.spec.guest is None]
        counted = [s for s in specs if (first or s.part is not None)] if grid.coordinates.context == 0 else []
        self.counted = tuple(s.name for s in counted)
        local_names = [s.name for s in counted for _ in range(tiles_of(s))]
        gathered: list[list[str]] = self.comm.allgather_object(local_names, "parameters that count")
        self.counts = [len(names) for names in gathered]
        positions: dict[str, list[int]] = {name: [] for name in order}
        for position, name in enumerate(name for names in gathered for name in names):
            # Ranks are in the order of their tensor ranks: tiles in the order of their numbers.
            positions[name].append(position)
        self.positions = positions

    def merge(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return, for every optimized parameter of the model, the sum of the values that the ranks pass for it.

        Collective over the model group. ``sums`` holds, by parameter name, this rank's value for each tile that it
        holds. The result is in declared order.
        """
        local = np.array([value for name in self.counted for value in sums[name]], np.float64)
        every = np.empty(sum(self.counts), np.float64)
        self.comm.allgatherv(local, every, self.counts, "sums of parameters")
        return {name: over_tiles(every[positions]) for name, positions in self.positions.items()}


def tiles_of(spec: ParameterSpec) -> int:
    """Return how many tiles of a parameter a rank holds; 1 for an uncut parameter."""
    return len(spec.part.tiles) or 1 if spec.part is not None else 1


def over_tiles(values: Sequence[float] | Array) -> float:
    """Return the sum of ``values``, one for each tile of a parameter, in the order of a binary tree over the tiles."""
    return evaluate(leaves_program(len(values)), values)

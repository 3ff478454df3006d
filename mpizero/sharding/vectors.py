"""Run a full-batch method, such as L-BFGS, on vectors that are sharded over ranks like the optimizer state.

:class:`VectorUpdater` is the :class:`~mpizero.sharding.update.Updater` of such a method. :class:`ShardedVectors`
computes with the vectors, and :class:`RegularizedGradient` adds regularization terms to the loss and its gradient: each
term is computed once, on the rank that owns the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpizero import kernels
from mpizero._util.checks import unmasked
from mpizero._util.numbers import ordered_sum
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ArgumentError, ConfigError, NonFiniteError
from mpizero.kernels import jit
from mpizero.layout.flat import ParameterUse, owners_by_cost
from mpizero.nn.models import unfrozen
from mpizero.optim.minimizers import POINT, MethodProgress, VectorSolver
from mpizero.optim.regularization import TRIAL, Bounds, Diagonal, Limit, Regularization, Term
from mpizero.sharding.config import Config
from mpizero.sharding.full_params import take
from mpizero.sharding.params import ParameterStore, UpdatePiece
from mpizero.sharding.update import Updater
from mpizero.sharding.whole_tensors import TensorExchange, TensorPlan, home_of
from mpizero.types import Array, ParameterSpec, as_reals


class VectorUpdater(Updater):
    """Run a full-batch method: a step takes one evaluation, and sets the parameters to the next point to evaluate.

    The constructor takes the arguments of :class:`Updater`.
    """

    method: VectorSolver

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.vectors = ShardedVectors(self, self.optimizer.bounds, self.optimizer.preconditioner)
        self.method = VectorSolver(self.optimizer, self.vectors)
        terms = self.optimizer.regularization
        _, store, scope = args
        self._regularized = (
            None if terms is None else RegularizedGradient(terms, store, self.pieces, replicated=scope.replicated)
        )

    def update(self, reduced: Array, threads: int, loss: float) -> None:
        """Take the loss and reduced gradient at the parameters; set the parameters to the next point to evaluate.

        Collective over all ranks.

        Raises
        ------
        NonFiniteError
            If the regularization of the start values is infinite or NaN.
        """
        self.vectors.threads = threads
        for run in self.runs:
            np.copyto(self.state[TRIAL][run.state : run.state + run.size], reduced[run.gradient :][: run.size])
        loss = self._with_terms(loss)
        if math.isfinite(loss):
            self.method.advance(loss)
        elif not self.method.retry() and self.method.progress.stage == "first":
            raise NonFiniteError("the regularization of the start values, or its gradient, is not finite")
        self._take_averages(self._parameters(), reduced)
        self._made()

    def _with_terms(self, loss: float) -> float:
        """Add the regularization to the gradient or Hessian product in the vector ``TRIAL``, and to the loss.

        Collective.
        """
        if self._regularized is None:
            return loss
        progress = self.method.progress
        if progress.stage == "product" and self.optimizer.exact:
            self._regularized.add_products(self.state[progress.along], self.state[TRIAL])
            return loss
        return loss + self._regularized.add(self.state[TRIAL])

    def reset(self) -> None:
        """Reset state, step count and progress to their values before the first step. Not collective."""
        super().reset()
        self.method.progress = MethodProgress()


def check_vector_method(optimizer: Any, config: Config, model: Any, *, scaled: bool) -> None:
    """Check that a training can use a full-batch method, whose line searches need the exact loss and gradient.

    ``model`` is the user's model. ``scaled`` tells whether there is a loss scale.

    Raises
    ------
    ConfigError
        If a setting is incompatible with the method. The message names the setting.
    """
    name, dropout = type(optimizer).__name__, getattr(unfrozen(model), "dropout", 0.0)
    clash = {
        f"clip={config.clip}": config.clip is not None,
        f"ema={config.ema}": config.ema is not None,
        f"gradient_compression={config.gradient_compression!r}": config.gradient_compression is not None,
        f"wire={config.wire!r}": config.wire is not None,
        f"device={config.device!r}": config.device != "cpu",
        "a loss scale": scaled,
        f"the model's dropout={dropout}": isinstance(dropout, float) and dropout > 0.0,
    }
    for setting, is_set in clash.items():
        if is_set:
            raise ConfigError(
                f"{name} needs the loss and its exact gradient, in the memory of the host: leave out {setting}"
            )


#: Number of elements for which temporary arrays are made at a time.
_BLOCK = 1 << 15


class _Limited(NamedTuple):
    """Hold the bounds of a piece (range of a parameter): each a number, an array of its length, or None (no bound)."""

    piece: UpdatePiece
    lower: Any
    upper: Any


class ShardedVectors:
    """Compute with vectors in an updater's state; implements :class:`~mpizero.optim.regularization.VectorSpace`.

    A rank holds its own ranges of a vector, and those of its inter-node group where the state is replicated; sums count
    each element once.

    Parameters
    ----------
    updater : Updater
        Holds the arrays and the parameters.
    bounds : Bounds or None
        The bounds of the parameters.
    preconditioner : Diagonal or None
        Factors by which :meth:`precondition` multiplies, one for each parameter element.
    """

    def __init__(self, updater: Updater, bounds: Bounds | None, preconditioner: Diagonal | None = None) -> None:
        self._updater, self._bounds = updater, bounds
        self.bounded = bounds is not None
        self.precision = float(np.finfo(updater.dtype).eps)
        #: Number of threads that this rank uses.
        self.threads = 1
        self._starts = [piece.state for piece in updater.trees.pieces]
        self._limited = tuple(self._limits())
        self._factors = () if preconditioner is None else tuple(self._scaled(preconditioner))

    def _scaled(self, preconditioner: Diagonal) -> Iterator[tuple[UpdatePiece, Any]]:
        """Yield the pieces (ranges of parameters) whose preconditioner is not 1, with its factors. Not collective."""
        for piece in self._updater.pieces:
            spec = piece.entry.spec
            factors = self._side(piece, preconditioner.of(spec, home_of(spec)))
            if isinstance(factors, np.ndarray) or factors != 1.0:
                yield piece, factors

    def _limits(self) -> Iterator[_Limited]:
        """Yield the pieces (ranges of parameters) that have bounds. Not collective."""
        for piece in self._updater.pieces:
            if self._bounds is not None:
                spec = piece.entry.spec
                sides = [self._side(piece, limit) for limit in self._bounds.of(spec, home_of(spec))]
                if any(limit is not None for limit in sides):
                    yield _Limited(piece, *sides)

    def _side(self, piece: UpdatePiece, limit: Limit) -> Limit:
        """Return the elements of a bound, or of a preconditioner, for a piece (range of parameters). Not collective."""
        if not isinstance(limit, np.ndarray):
            return limit
        part = np.empty(piece.size, self._updater.dtype)
        take(piece.entry.spec, as_reals(limit.astype(part.dtype)), piece.span.start - piece.entry.offset, part)
        return part

    def dot(self, a: str, b: str) -> float:
        """Return the dot product of two vectors. Collective over all ranks."""
        arrays = tuple(self._updater.state[slot] for slot in dict.fromkeys((a, b)))
        return float(ordered_sum(self._updater.over_ranks(self._updater.trees.sums(arrays, self._starts)).values()))

    def copy(self, source: str, target: str) -> None:
        """Copy one vector to another. Not collective."""
        np.copyto(self._updater.state[target], self._updater.state[source])

    def scale(self, factor: float, target: str) -> None:
        """Multiply a vector by a number. Not collective."""
        array = self._updater.state[target]
        np.multiply(array, array.dtype.type(factor), out=array)

    def add(self, factor: float, source: str, target: str) -> None:
        """Add ``factor`` times one vector to another. Not collective."""
        self._add(factor, self._updater.state[source], self._updater.state[target])

    def _add(self, factor: float, x: Array, y: Array) -> None:
        jit.run_range(kernels.cpu.update.add_scaled, (y, x, np.array([factor], y.dtype)), 0, y.size, self.threads)

    def precondition(self, target: str) -> None:
        """Multiply a vector by the preconditioner, if there is one. Not collective."""
        for piece, factors in self._factors:
            values = self._of(target, piece)
            np.multiply(values, values.dtype.type(factors) if np.isscalar(factors) else factors, out=values)

    def fill(self, value: float, target: str) -> None:
        """Set all elements of a vector to a number. Not collective."""
        self._updater.state[target].fill(value)

    def multiply(self, factors: str, target: str) -> None:
        """Multiply one vector by another, element by element. Not collective."""
        array = self._updater.state[target]
        np.multiply(array, self._updater.state[factors], out=array)

    def divide(self, divisors: str, target: str) -> None:
        """Divide one vector by another, element by element. Not collective."""
        array = self._updater.state[target]
        np.divide(array, self._updater.state[divisors], out=array)

    def update_diagonal(self, target: str, y: str, curvature: float, bs: str, square: float) -> None:
        """Add ``y**2 / curvature - bs**2 / square`` elementwise to ``target``, kept positive. Not collective."""
        values, ys, products = (self._updater.state[slot] for slot in (target, y, bs))
        kind = values.dtype.type
        for start in range(0, values.size, _BLOCK):  # so that temporary arrays stay in the cache
            there = slice(start, start + _BLOCK)
            grown = ys[there] * kind(1.0 / math.sqrt(curvature))
            lost, old = products[there] * kind(1.0 / math.sqrt(square)), values[there]
            values[there] = np.maximum(old + grown * grown - lost * lost, old * kind(self.precision))

    def parameters(self, target: str) -> None:
        """Copy the parameters to a vector. Not collective."""
        values, array = self._updater.store.values, self._updater.state[target]
        for run in self._updater.runs:
            np.copyto(array[run.state : run.state + run.size], values[run.store : run.store + run.size])

    def move(self, origin: str, step: float, direction: str) -> None:
        """Set the parameters to ``origin + step * direction``, within their bounds. Not collective."""
        values = self._updater.store.values
        for run in self._updater.runs:
            w, there = values[run.store : run.store + run.size], slice(run.state, run.state + run.size)
            np.copyto(w, self._updater.state[origin][there])
            if step:
                self._add(step, self._updater.state[direction][there], w)
        for piece, lower, upper in self._limited:
            w = values[piece.store : piece.store + piece.size]
            np.clip(w, lower, upper, out=w)

    def enter_bounds(self) -> bool:
        """Clip the parameters to their bounds; tell whether any parameter changed. Collective over all ranks."""
        if not self.bounded:
            return False
        values, changed = self._updater.store.values, False
        for piece, lower, upper in self._limited:
            w = values[piece.store : piece.store + piece.size]
            inside = np.clip(w, lower, upper)
            changed |= not np.array_equal(w, inside)
            w[:] = inside
        return bool(self._over_world(float(changed), "max"))

    def largest_projected(self, gradient: str) -> float:
        """Return the largest magnitude of ``point - P(point - gradient)``, where P clips to bounds. Collective.

        ``point`` is the vector :data:`POINT`, the last iterate.
        """
        limited = {piece.state for piece, _, _ in self._limited}
        parts = [self._of(gradient, piece) for piece in self._updater.pieces if piece.state not in limited]
        for piece, lower, upper in self._limited:
            point = self._of(POINT, piece)
            parts.append(np.clip(point - self._of(gradient, piece), lower, upper) - point)
        largest = max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)
        return self._over_world(largest, "max")

    def drop_fixed(self, gradient: str, reach: float, target: str) -> None:
        """Set to 0 the elements of vector ``target`` where ``point - reach * gradient`` is at or beyond a bound.

        Not collective. ``point`` is the vector :data:`POINT`, the last iterate. Only a bound towards which minus the
        gradient points counts.
        """
        for piece, _, fixed in self._fixed(gradient, reach):
            self._of(target, piece)[fixed] = 0

    def go_to_bounds(self, gradient: str, reach: float, direction: str) -> None:
        """Write ``bound - point`` to those elements of ``direction`` that :meth:`drop_fixed` would set to 0.

        Not collective. ``point`` is the vector :data:`POINT`, the last iterate.
        """
        for piece, limit, fixed in self._fixed(gradient, reach):
            distance = limit - self._of(POINT, piece)
            self._of(direction, piece)[fixed] = distance[fixed]

    def _fixed(self, gradient: str, reach: float) -> Iterator[tuple[UpdatePiece, Any, Array]]:
        """Yield each piece (range of parameters) with bounds, once for each bound, with the bound and a mask.

        Not collective. The mask tells which elements :meth:`drop_fixed` sets to 0 because of this bound.
        """
        for piece, lower, upper in self._limited:
            slope = self._of(gradient, piece)
            ahead = self._of(POINT, piece) - slope.dtype.type(reach) * slope
            if lower is not None:
                yield piece, lower, (ahead <= lower) & (slope > 0)
            if upper is not None:
                yield piece, upper, (ahead >= upper) & (slope < 0)

    def clip(self, origin: str, step: float, direction: str) -> None:
        """Set ``direction`` to ``P(origin + step * direction) - origin``, where P clips to bounds. Not collective."""
        self.scale(step, direction)
        for piece, lower, upper in self._limited:
            start, move = self._of(origin, piece), self._of(direction, piece)
            np.subtract(np.clip(start + move, lower, upper), start, out=move)

    def longest_step(self, origin: str, direction: str) -> float:
        """Return the longest step along ``direction`` within bounds; infinite without bounds. Collective."""
        if not self.bounded:
            return math.inf
        longest = math.inf
        for piece, lower, upper in self._limited:
            start, move = self._of(origin, piece), self._of(direction, piece)
            for limit, ahead in ((upper, move > 0), (lower, move < 0)):
                if limit is not None and ahead.any():
                    distance = np.broadcast_to(limit, start.shape)[ahead] - start[ahead]
                    longest = min(longest, float((distance / move[ahead]).min()))
        return self._over_world(longest, "min")

    def _of(self, slot: str, piece: UpdatePiece) -> Array:
        return self._updater.state[slot][piece.state : piece.state + piece.size]

    def _over_world(self, value: float, operation: str) -> float:
        numbers = np.array([value])
        self._updater.grid.world.allreduce(numbers, operation, "vectors")
        return float(numbers[0])


#: MPI tags of messages with parameters, directions, and gradients or products of terms.
_PARAMETER, _DIRECTION, _GRADIENT = 4, 5, 6


class RegularizedGradient:
    """Compute regularization terms and their gradients; methods are collective over all ranks.

    A term is computed from the whole parameter on one rank, its owner, so its bits do not depend on the layout.

    Parameters
    ----------
    regularization : Regularization
        The terms.
    store : ParameterStore
        Holds the parameters.
    pieces : sequence of UpdatePiece
        The ranges of all parameters that this rank updates.
    replicated : bool
        Whether every node keeps the whole optimizer state (DDP).

    Raises
    ------
    ConfigError
        If a parameter with a term is complex, or split over a tensor group.
    """

    def __init__(
        self, regularization: Regularization, store: ParameterStore, pieces: Sequence[UpdatePiece], *, replicated: bool
    ) -> None:
        self._store, grid, layout = store, store.grid, store.layout
        self._terms: list[Term] = []
        tensors: list[ParameterUse] = []
        for entry in layout.parameters:
            term = regularization.of(home_of(entry.spec)) if entry.spec.optimized else None
            if term is not None:
                _check(entry.spec)
                self._terms.append(term)
                tensors.append(entry)
        owners = owners_by_cost([entry.spec.size for entry in tensors], grid.data.size)
        plan = TensorPlan(layout, tuple(tensors), owners, grid.nodes, replicated)
        self._exchange = TensorExchange(store, plan, pieces)
        #: Whether this rank's terms count in the value: not those of copies of a parameter on other ranks.
        self._counts = grid.coordinates.tensor == 0

    def add(self, gradient: Array) -> float:
        """Add the gradients of all terms to ``gradient``, sharded like optimizer state; return the sum of the terms.

        The sum is NaN if a term or its gradient is not finite. Terms are computed at the parameters of the store.
        """
        tensors, requests = self._exchange.begin_parameters(_PARAMETER)
        for request in requests:
            request.wait()
        values: dict[str, float] = {}
        gradients: dict[int, Array] = {}
        with all_ranks(self._store.grid.world, "regularization"):
            for number in self._exchange.owned:
                spec = self._exchange.plan.tensors[number].spec
                value, gradients[number] = self._computed(number, tensors[number].reshape(spec.shape))
                if self._counts and spec.guest is None:
                    values[spec.name] = value
        self._add(gradients, gradient)
        gathered = self._store.grid.world.allgather_object(values, "regularization")
        return float(ordered_sum(value for _, value in sorted(item for rank in gathered for item in rank.items())))

    def _computed(self, number: int, values: Array) -> tuple[float, Array]:
        """Return the checked value and gradient of a term; the value is NaN if one of the two is not finite."""
        spec = self._exchange.plan.tensors[number].spec
        name = home_of(spec)
        try:
            value, gradient = self._terms[number](values)
            value = float(value)
        except Exception as error:
            error.add_note(f"In the regularization of parameter {name!r} of shape {spec.shape}")
            raise
        checked = _of_shape(gradient, spec, values.dtype, f"the regularization of {name!r} returned a gradient")
        return value if np.isfinite(checked).all() and math.isfinite(value) else math.nan, checked

    def add_products(self, direction: Array, target: Array) -> None:
        """Add the products of all terms' Hessians with ``direction`` to ``target``, sharded like optimizer state.

        Raises
        ------
        ConfigError
            If a term has no method ``product``.
        """
        tensors, requests = self._exchange.begin_parameters(_PARAMETER)
        along, more = self._exchange.begin_gather(direction, lambda piece: piece.state, _DIRECTION)
        for request in requests + more:
            request.wait()
        products: dict[int, Array] = {}
        with all_ranks(self._store.grid.world, "regularization"):
            for number in self._exchange.owned:
                spec = self._exchange.plan.tensors[number].spec
                name = home_of(spec)
                product = getattr(self._terms[number], "product", None)
                if product is None:
                    raise ConfigError(
                        f"the regularization of {name!r} has no method product(values, direction), which goes with "
                        "exact products of the model; without it use options={'exact': False}"
                    )
                result = product(tensors[number].reshape(spec.shape), along[number].reshape(spec.shape))
                products[number] = _of_shape(
                    result, spec, target.dtype, f"the regularization of {name!r} returned a product"
                )
        self._add(products, target)

    def _add(self, tensors: dict[int, Array], target: Array) -> None:
        added = np.zeros_like(target)
        self._exchange.send_back(tensors, added, lambda piece: piece.state, _GRADIENT)
        target += added


def _of_shape(value: object, spec: ParameterSpec, dtype: DTypeLike, what: str) -> Array:
    """Check an array's shape, and return the array flat and of the type ``dtype``, in which it is sent."""
    array = np.asarray(unmasked(value, f"{what} that"))
    if array.shape != spec.shape or array.dtype.kind not in "fiu":
        raise ArgumentError(f"{what} of shape {array.shape} and type {array.dtype}, expected {spec.shape}")
    return np.ascontiguousarray(array, dtype).reshape(-1)


def _check(spec: ParameterSpec) -> None:
    if spec.part is not None and spec.part.shape != spec.shape:
        raise ConfigError(
            f"regularization needs whole parameters, and a tensor group splits {home_of(spec)!r} of shape "
            f"{spec.part.shape}: train with tensor_parallel_size=1 (data, pipeline and context ranks work)"
        )
    if spec.complex:
        raise ConfigError(f"the complex parameter {home_of(spec)!r} cannot have a regularization term")

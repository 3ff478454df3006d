"""Compute with vectors that are sharded over ranks like the optimizer state, for methods of whole vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.kernels import jit
from mpizero.optim.minimizers import POINT
from mpizero.optim.regularization import Bounds, Diagonal, Limit
from mpizero.parallel.optimizer.sharded_update import Updater
from mpizero.parallel.optimizer.tied_parameters import home_of
from mpizero.parallel.parameters.global_view import take
from mpizero.parallel.parameters.shards import UpdatePiece
from mpizero.types import Array, as_reals

#: Elements of which temporary arrays are made at a time.
_BLOCK = 1 << 15


class _Limited(NamedTuple):
    """Hold the bounds of a piece: a number, or an array as long as the piece; None is no bound."""

    piece: UpdatePiece
    lower: Any
    upper: Any


class ShardedVectors:
    """Compute with the arrays of an updater's state; implements :class:`~mpizero.optim.regularization.VectorSpace`.

    A rank holds its own ranges of a vector, and those of its peers where the state is replicated; sums count each
    element once.

    Parameters
    ----------
    updater : Updater
        Holds the arrays and the parameters.
    bounds : Bounds or None
        The bounds of the parameters.
    preconditioner : Diagonal or None
        Factors of the elements of the parameters.
    """

    def __init__(self, updater: Updater, bounds: Bounds | None, preconditioner: Diagonal | None = None) -> None:
        self._updater, self._bounds = updater, bounds
        self.bounded = bounds is not None
        self.precision = float(np.finfo(updater.dtype).eps)
        #: Number of threads that this rank uses.
        self.threads = 1
        self._starts = [piece.state for piece in updater.trees.own]
        self._limited = tuple(self._limits())
        self._factors = () if preconditioner is None else tuple(self._scaled(preconditioner))

    def _scaled(self, preconditioner: Diagonal) -> Iterator[tuple[UpdatePiece, Any]]:
        """Yield pieces and their factors, numbers or arrays, where these are not 1. Not collective."""
        for piece in self._updater.pieces:
            spec = piece.entry.spec
            factors = self._side(piece, preconditioner.of(spec, home_of(spec)))
            if isinstance(factors, np.ndarray) or factors != 1.0:
                yield piece, factors

    def _limits(self) -> Iterator[_Limited]:
        """Yield the pieces that have bounds. Not collective."""
        for piece in self._updater.pieces:
            if self._bounds is not None:
                spec = piece.entry.spec
                sides = [self._side(piece, limit) for limit in self._bounds.of(spec, home_of(spec))]
                if any(limit is not None for limit in sides):
                    yield _Limited(piece, *sides)

    def _side(self, piece: UpdatePiece, limit: Limit) -> Limit:
        """Return the elements of a bound, or factors, that belong to a piece. Not collective."""
        if not isinstance(limit, np.ndarray):
            return limit
        found = np.empty(piece.size, self._updater.dtype)
        take(piece.entry.spec, as_reals(limit.astype(found.dtype)), piece.span.start - piece.entry.offset, found)
        return found

    def dot(self, a: str, b: str) -> float:
        """Return the dot product of two vectors. Collective over all ranks."""
        trees, first, second = self._updater.trees, self._updater.state[a], self._updater.state[b]
        sums = trees.square_sums(first, self._starts) if a == b else trees.dots(first, second, self._starts)
        return float(sum(self._updater.over_ranks(sums).values()))

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
        jit.run_range(kernels.cpu.optimizer.add_scaled, (y, x, np.array([factor], y.dtype)), 0, y.size, self.threads)

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
        """Add ``y**2 / curvature - bs**2 / square`` by element to ``target``, which stays positive. Not collective."""
        values, ys, products = (self._updater.state[slot] for slot in (target, y, bs))
        kind = values.dtype.type
        for start in range(0, values.size, _BLOCK):  # so that temporary arrays stay in the cache
            there = slice(start, start + _BLOCK)
            old, grown, lost = values[there], ys[there] * kind(curvature**-0.5), products[there] * kind(square**-0.5)
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
        """Move the parameters into their bounds; tell whether that changed any. Collective over all ranks."""
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
        """Return the largest magnitude of ``point - P(point - gradient)``. Collective over all ranks."""
        limited = {piece.state for piece, _, _ in self._limited}
        parts = [self._of(gradient, piece) for piece in self._updater.pieces if piece.state not in limited]
        for piece, lower, upper in self._limited:
            point = self._of(POINT, piece)
            parts.append(np.clip(point - self._of(gradient, piece), lower, upper) - point)
        largest = max((float(np.abs(part).max()) for part in parts if part.size), default=0.0)
        return self._over_world(largest, "max")

    def drop_fixed(self, gradient: str, reach: float, target: str) -> None:
        """Set to 0 the elements of a vector for which ``point - reach * gradient`` is at or beyond a bound.

        Not collective.
        """
        for piece, _, fixed in self._fixed(gradient, reach):
            self._of(target, piece)[fixed] = 0

    def go_to_bounds(self, gradient: str, reach: float, direction: str) -> None:
        """Set the elements that :meth:`drop_fixed` clears to the way from ``point`` to their bound. Not collective."""
        for piece, limit, fixed in self._fixed(gradient, reach):
            room = limit - self._of(POINT, piece)
            self._of(direction, piece)[fixed] = room[fixed]

    def _fixed(self, gradient: str, reach: float) -> Iterator[tuple[UpdatePiece, Any, Array]]:
        """Yield pieces, one of their bounds, and which elements ``-reach * gradient`` takes to it. Not collective."""
        for piece, lower, upper in self._limited:
            slope = self._of(gradient, piece)
            ahead = self._of(POINT, piece) - slope.dtype.type(reach) * slope
            if lower is not None:
                yield piece, lower, (ahead <= lower) & (slope > 0)
            if upper is not None:
                yield piece, upper, (ahead >= upper) & (slope < 0)

    def clip(self, origin: str, step: float, direction: str) -> None:
        """Set ``direction`` to ``P(origin + step * direction) - origin``. Not collective."""
        self.scale(step, direction)
        for piece, lower, upper in self._limited:
            start, way = self._of(origin, piece), self._of(direction, piece)
            np.subtract(np.clip(start + way, lower, upper), start, out=way)

    def longest_step(self, origin: str, direction: str) -> float:
        """Return the longest step along ``direction`` within bounds; infinite without bounds. Collective."""
        if not self.bounded:
            return math.inf
        longest = math.inf
        for piece, lower, upper in self._limited:
            start, way = self._of(origin, piece), self._of(direction, piece)
            for limit, ahead in ((upper, way > 0), (lower, way < 0)):
                if limit is not None and ahead.any():
                    room = np.broadcast_to(limit, start.shape)[ahead] - start[ahead]
                    longest = min(longest, float((room / way[ahead]).min()))
        return self._over_world(longest, "min")

    def _of(self, slot: str, piece: UpdatePiece) -> Array:
        return self._updater.state[slot][piece.state : piece.state + piece.size]

    def _over_world(self, value: float, operation: str) -> float:
        numbers = np.array([value])
        self._updater.grid.world.allreduce(numbers, operation, "vectors")
        return float(numbers[0])

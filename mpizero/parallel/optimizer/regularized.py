"""Add regularization terms to a loss and its gradient: each is computed once, on the rank that owns the parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from mpizero._util.checks import unmasked
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ArgumentError, ConfigError
from mpizero.layout.flat import ParameterUse, owners_by_cost
from mpizero.optim.regularization import Regularization, Term
from mpizero.parallel.optimizer.tensor_exchange import TensorExchange
from mpizero.parallel.optimizer.tensor_plan import TensorPlan
from mpizero.parallel.optimizer.tied_parameters import home_of
from mpizero.parallel.parameters.shards import UpdatePiece
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array, ParameterSpec

#: MPI tags of messages with parameters, directions, and gradients or products of terms.
_PARAMETER, _DIRECTION, _GRADIENT = 4, 5, 6


class RegularizedGradient:
    """Compute regularization terms and their gradients; methods are collective over all ranks.

    A term sees the whole parameter on one rank, its owner, so its bits depend on no layout.

    Parameters
    ----------
    regularization : Regularization
        The terms.
    store : ParameterStore
        The parameters.
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
        self._counts = grid.here.tensor == 0

    def add(self, gradient: Array) -> float:
        """Add the gradients of all terms to ``gradient``, kept like optimizer state; return the sum of their values.

        The value is NaN if one of them, or a gradient, is not finite. Parameters are those of the store.
        """
        whole, requests = self._exchange.begin_parameters(_PARAMETER)
        for request in requests:
            request.wait()
        values: dict[str, float] = {}
        gradients: dict[int, Array] = {}
        with all_ranks(self._store.grid.world, "regularization"):
            for number in self._exchange.owned:
                spec = self._exchange.plan.tensors[number].spec
                value, gradients[number] = self._computed(number, whole[number].reshape(spec.shape))
                if self._counts and spec.guest is None:
                    values[spec.name] = value
        self._add(gradients, gradient)
        told = self._store.grid.world.allgather_object(values, "regularization")
        return float(sum(value for _, value in sorted(item for rank in told for item in rank.items())))

    def _computed(self, number: int, values: Array) -> tuple[float, Array]:
        """Return value and gradient of a term, checked; the value is NaN if one of them is not finite."""
        spec = self._exchange.plan.tensors[number].spec
        name = home_of(spec)
        try:
            value, gradient = self._terms[number](values)
            value = float(value)
        except Exception as error:
            error.add_note(f"In the regularization of parameter {name!r} of shape {spec.shape}")
            raise
        found = _of_shape(gradient, spec, values.dtype, f"the regularization of {name!r} returned a gradient")
        return value if np.isfinite(found).all() and math.isfinite(value) else math.nan, found

    def add_products(self, direction: Array, target: Array) -> None:
        """Add the products of all terms' Hessians with a direction to ``target``; both are kept like optimizer state.

        Raises
        ------
        ConfigError
            If a term has no method ``product``.
        """
        whole, requests = self._exchange.begin_parameters(_PARAMETER)
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
                found = product(whole[number].reshape(spec.shape), along[number].reshape(spec.shape))
                products[number] = _of_shape(
                    found, spec, target.dtype, f"the regularization of {name!r} returned a product"
                )
        self._add(products, target)

    def _add(self, whole: dict[int, Array], target: Array) -> None:
        added = np.zeros_like(target)
        self._exchange.send_back(whole, added, lambda piece: piece.state, _GRADIENT)
        target += added


def _of_shape(given: object, spec: ParameterSpec, dtype: DTypeLike, what: str) -> Array:
    """Return an array as a flat one of the type ``dtype``, in which it is sent, after a check of its shape."""
    found = np.asarray(unmasked(given, f"{what} that"))
    if found.shape != spec.shape or found.dtype.kind not in "fiu":
        raise ArgumentError(f"{what} of shape {found.shape} and type {found.dtype}, expected {spec.shape}")
    return np.ascontiguousarray(found, dtype).reshape(-1)


def _check(spec: ParameterSpec) -> None:
    if spec.part is not None and spec.part.shape != spec.shape:
        raise ConfigError(
            f"regularization needs whole parameters, and a tensor group splits {home_of(spec)!r} of shape "
            f"{spec.part.shape}: train with tensor_parallel_size=1 (data, pipeline and context ranks work)"
        )
    if spec.complex:
        raise ConfigError(f"the complex parameter {home_of(spec)!r} cannot have a regularization term")

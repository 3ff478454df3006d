"""Define vectors, bounds, preconditioners and regularization terms for :mod:`mpizero.optim.minimizers`.

A minimizer works on the parameters through a :class:`VectorSpace`, which hides how they are sharded. :class:`Bounds`
are lower and upper bounds of parameters, a :class:`Diagonal` holds the positive factors of a preconditioner, and a
:class:`Regularization` holds terms that are added to a loss and depend on the parameters alone: Tikhonov's, total
variation, the user's. A user gives bounds, factors and terms by names of parameters or patterns of names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpizero._util.checks import number, positive, require, unmasked
from mpizero._util.names import explains, fits, selected
from mpizero.errors import ConfigError
from mpizero.types import Array, ParameterSpec

#: The state array that holds the gradient of the last evaluation.
TRIAL = "trial_gradient"


class VectorSpace(Protocol):
    """Compute with vectors that are as long as all optimized parameters of a model together.

    A vector is referred to by its name; a rank holds its own elements of every vector, and never needs those of other
    ranks. Scalars have the same bits on all ranks and on every layout. So all ranks make the same decisions.
    """

    #: The distance from 1 to the next number of the vectors' type.
    precision: float

    def dot(self, a: str, b: str) -> float:
        """Return the dot product of two vectors, summed in float64 in the order of a binary tree. Collective."""

    def copy(self, source: str, target: str) -> None:
        """Copy one vector to another. Not collective."""

    def scale(self, factor: float, target: str) -> None:
        """Multiply a vector by a number. Not collective."""

    def add(self, factor: float, source: str, target: str) -> None:
        """Add ``factor`` times one vector to another. Not collective."""

    def precondition(self, target: str) -> None:
        """Multiply a vector by the preconditioner, if there is one. Not collective."""

    def fill(self, value: float, target: str) -> None:
        """Set all elements of a vector to a number. Not collective."""

    def multiply(self, factors: str, target: str) -> None:
        """Multiply one vector by another, element by element. Not collective."""

    def divide(self, divisors: str, target: str) -> None:
        """Divide one vector by another, element by element. Not collective."""

    def update_diagonal(self, target: str, y: str, curvature: float, bs: str, square: float) -> None:
        """Add ``y**2 / curvature - bs**2 / square`` to ``target``, which stays positive, elementwise. Not collective.

        The result is the diagonal of the BFGS update of a diagonal matrix B by a pair s and y, if ``target`` is B's
        diagonal, ``bs`` is B s, ``curvature`` is s^T y and ``square`` is s^T B s.
        """

    def parameters(self, target: str) -> None:
        """Copy the parameters to a vector. Not collective."""

    def move(self, origin: str, step: float, direction: str) -> None:
        """Set the parameters to ``origin + step * direction``, within their bounds. Not collective."""

    # ------------------------------------------------------------------ bounds

    #: Whether there are bounds. If there are none, the methods below clip nothing.
    bounded: bool

    def enter_bounds(self) -> bool:
        """Move the parameters into their bounds; tell whether that changed any of them. Collective."""

    def largest_projected(self, gradient: str) -> float:
        """Return the largest magnitude of ``parameters - P(parameters - gradient)``; P clips to bounds. Collective.

        Without bounds this is the largest magnitude of the gradient.
        """

    def drop_fixed(self, gradient: str, reach: float, target: str) -> None:
        """Set to 0 the elements of a vector for which ``point - reach * gradient`` is at or beyond a bound.

        Not collective. ``point`` is the last iterate.
        """

    def go_to_bounds(self, gradient: str, reach: float, direction: str) -> None:
        """Write ``bound - point`` to those elements that :meth:`drop_fixed` would set to 0. Not collective."""

    def clip(self, origin: str, step: float, direction: str) -> None:
        """Set ``direction`` to ``P(origin + step * direction) - origin``, where P clips to bounds. Not collective."""

    def longest_step(self, origin: str, direction: str) -> float:
        """Return the longest step along ``direction`` within the bounds; infinite without bounds. Collective."""


#: A bound is one number for all elements of a parameter, or an array of its shape; None is no bound.
Limit = float | Array | None


@dataclass(frozen=True)
class Bounds:
    """Hold the bounds that a user gives: one pair for all parameters, or pairs by names or patterns of names.

    Attributes
    ----------
    pairs : dict of str to pair
        Lower and upper bound by pattern. The first pattern that matches a parameter's name is used; parameters without
        one have no bounds.
    """

    pairs: Mapping[str, tuple[Limit, Limit]]

    @classmethod
    def parse(cls, value: Any, owner: str) -> Bounds | None:
        """Return the bounds that ``value`` describes; None if ``value`` is None.

        Raises
        ------
        ConfigError
            If ``value`` is neither a pair nor a mapping of pairs of numbers and arrays, or a lower bound is above the
            upper.
        """
        if value is None or isinstance(value, cls):
            return value
        named = value if isinstance(value, Mapping) else {"*": value}
        return cls({str(name): _pair(f"{owner}: bounds[{name!r}]", pair) for name, pair in named.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: bounds", tuple(self.pairs))

    def of(self, spec: ParameterSpec, name: str) -> tuple[Limit, Limit]:
        """Return the bounds of the parameter ``name``: numbers, or arrays of all elements of the whole parameter.

        Raises
        ------
        ConfigError
            If an array does not have the parameter's shape, or the parameter is complex.
        """
        pair = next((pair for pattern, pair in self.pairs.items() if fits(name, pattern)), (None, None))
        shape = spec.shape if spec.part is None else spec.part.shape
        for side, limit in zip(("lower", "upper"), pair, strict=True):
            if isinstance(limit, np.ndarray) and limit.shape != shape:
                raise ConfigError(f"the {side} bound of {name!r} has shape {limit.shape}, the parameter {shape}")
        if spec.complex and pair != (None, None):
            raise ConfigError(f"the complex parameter {name!r} cannot have bounds: complex numbers have no order")
        return pair


EXPECTED_BOUNDS = "a pair (lower, upper), or pairs by the names of parameters, {'velocity': (1500.0, None)}"


def _pair(where: str, value: Any) -> tuple[Limit, Limit]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{where}={value!r:.80}: expected {EXPECTED_BOUNDS}")
    lower, upper = (_limit(where, side) for side in value)
    if lower is not None and upper is not None and np.any(np.greater(lower, upper)):
        raise ConfigError(f"{where}: a lower bound is above the upper one")
    return lower, upper


def _limit(where: str, value: Any) -> Limit:
    if value is None or (isinstance(value, float) and math.isinf(value)):
        return None
    limit = np.asarray(unmasked(value, f"{where}: a bound", ConfigError))
    if limit.dtype.kind not in "fiu" or np.isnan(limit).any():
        raise ConfigError(f"{where}: a bound is {value!r:.80}: expected a number, an array of numbers or None")
    return limit if limit.ndim else float(limit)


#: One factor for all elements of a parameter, or an array of its shape.
Factors = float | Array
EXPECTED_FACTORS = "positive factors by the names of parameters, {'velocity': 0.01}, each a number or an array"


@dataclass(frozen=True)
class Diagonal:
    """Hold the factors of a diagonal preconditioner, which a user gives by names of parameters or patterns of names.

    Attributes
    ----------
    factors : dict of str to float or Array
        Factors by pattern. The first pattern that matches a parameter's name is used; parameters without one have the
        factor 1.
    """

    factors: Mapping[str, Factors]

    @classmethod
    def parse(cls, value: Any, owner: str) -> Diagonal | None:
        """Return the diagonal that ``value`` describes; None if ``value`` is None.

        Raises
        ------
        ConfigError
            If ``value`` is not a mapping of names to positive numbers and arrays.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{owner}: preconditioner={value!r:.80}: expected {EXPECTED_FACTORS}")
        return cls({str(name): _factors(f"{owner}: preconditioner[{name!r}]", f) for name, f in value.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: preconditioner", tuple(self.factors))

    def of(self, spec: ParameterSpec, name: str) -> Factors:
        """Return the factors of the parameter ``name``: a number, or an array of all elements of the whole parameter.

        Raises
        ------
        ConfigError
            If an array does not have the parameter's shape, or is given for a complex parameter.
        """
        match = next((factors for pattern, factors in self.factors.items() if fits(name, pattern)), 1.0)
        shape = spec.shape if spec.part is None else spec.part.shape
        if isinstance(match, np.ndarray) and match.shape != shape:
            raise ConfigError(f"the preconditioner of {name!r} has shape {match.shape}, the parameter {shape}")
        if isinstance(match, np.ndarray) and spec.complex:
            raise ConfigError(f"the preconditioner of the complex parameter {name!r} must be one number")
        return match


def _factors(where: str, value: Any) -> Factors:
    factors = np.asarray(unmasked(value, where, ConfigError))
    if factors.dtype.kind not in "fiu" or not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{where}={value!r:.80}: expected {EXPECTED_FACTORS}")
    return factors if factors.ndim else float(factors)


@explains
@dataclass(frozen=True)
class Tikhonov:
    """Penalize the squared distance of a parameter from a reference (Tikhonov 1963).

    Calling the term with a parameter returns ``weight / 2 * sum((values - reference)**2)`` and its gradient.

    Attributes
    ----------
    weight : float
        Factor of the term, at least 0.
    reference : float or Array
        A number, or an array of the parameter's shape.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> term = mz.Tikhonov(0.5, reference=1.0)
    >>> value, gradient = term(np.array([3.0, 1.0]))
    >>> value, gradient
    (1.0, array([1., 0.]))
    """

    weight: float
    reference: Any = 0.0

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        require("Tikhonov: weight", self.weight, number())
        unmasked(self.reference, "Tikhonov: reference", ConfigError)

    def __call__(self, values: Array) -> tuple[float, Array]:
        """Return value and gradient of the term."""
        apart = values - np.asarray(self.reference, values.dtype)
        return 0.5 * self.weight * float(np.sum(apart * apart, dtype=np.float64)), self.product(values, apart)

    def product(self, values: Array, direction: Array) -> Array:
        """Return the product of the term's Hessian with an array of the parameter's shape."""
        product: Array = direction * direction.dtype.type(self.weight)
        return product


@explains
@dataclass(frozen=True)
class TotalVariation:
    """Penalize absolute differences of neighbouring elements: jumps cost no more than slopes (Rudin et al. 1992).

    Calling the term with a parameter returns ``weight * sum(sqrt(smoothing**2 + d_1**2 + ... + d_k**2) - smoothing)``
    and its gradient. The sum is over all elements; ``d_i`` is the difference to the next element along axis i, and 0
    for the last element.

    Attributes
    ----------
    weight : float
        Factor of the term, at least 0.
    smoothing : float
        Positive number. Differences that are much smaller are penalized by their squares, so that the term has a
        gradient at differences of 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> term = mz.TotalVariation(1.0, smoothing=1e-6)
    >>> round(term(np.array([0.0, 0.0, 5.0, 5.0]))[0], 3)  # one jump costs its height
    5.0
    >>> round(term(np.array([0.0, 2.0, 3.0, 5.0]))[0], 3)  # as does a slope
    5.0
    """

    weight: float
    smoothing: float = 1e-3

    def __post_init__(self) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a setting is out of range."""
        require("TotalVariation: weight", self.weight, number())
        require("TotalVariation: smoothing", self.smoothing, positive)

    def __call__(self, values: Array) -> tuple[float, Array]:
        """Return value and gradient of the term."""
        steps = _differences(values)
        length = self._length(steps)
        value = self.weight * float(np.sum(length - length.dtype.type(self.smoothing), dtype=np.float64))
        return value, self._scaled([step / length for step in steps], values.shape)

    def product(self, values: Array, direction: Array) -> Array:
        """Return the product of the term's Hessian with an array of the parameter's shape."""
        steps, moved = _differences(values), _differences(direction)
        length = self._length(steps)
        along = sum((step * move for step, move in zip(steps, moved, strict=True)), np.zeros_like(length)) / length**2
        parts = [(move - step * along) / length for step, move in zip(steps, moved, strict=True)]
        return self._scaled(parts, values.shape)

    def _length(self, steps: Sequence[Array]) -> Array:
        start = np.full_like(steps[0], self.smoothing * self.smoothing)
        length: Array = np.sqrt(sum((step * step for step in steps), start))
        return length

    def _scaled(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Return ``weight`` times the adjoint of :func:`_differences`, applied to one array for each axis."""
        total = np.zeros_like(parts[0])
        for axis, part in enumerate(parts):
            inner = np.take(part, range(part.shape[axis] - 1), axis)
            total[_but(total.ndim, axis, slice(1, None))] += inner
            total[_but(total.ndim, axis, slice(None, -1))] -= inner
        total *= total.dtype.type(self.weight)
        return total.reshape(shape)


def _differences(values: Array) -> list[Array]:
    """Return, for each axis, the differences to the next elements, 0 for the last ones; a scalar gets one axis."""
    values = np.atleast_1d(values)
    differences = []
    for axis in range(values.ndim):
        step = np.zeros_like(values)
        step[_but(values.ndim, axis, slice(None, -1))] = np.diff(values, axis=axis)
        differences.append(step)
    return differences


def _but(axes: int, axis: int, part: slice) -> tuple[slice, ...]:
    return tuple(part if number == axis else slice(None) for number in range(axes))


#: ``term(values)`` returns the value of a term and its gradient by the parameter ``values``, a whole array.
Term = Callable[[Array], tuple[float, Array]]
EXPECTED_TERMS = (
    "terms by the names of parameters, {'velocity': mpizero.TotalVariation(0.01)}, where a term is called with the "
    "whole parameter and returns its value and gradient"
)


@dataclass(frozen=True)
class Regularization:
    """Hold the regularization terms that a user gives by names of parameters or patterns of names.

    Attributes
    ----------
    terms : dict of str to callable
        The terms by pattern. The first pattern that matches a parameter's name is used; parameters without one have no
        term.
    """

    terms: Mapping[str, Term]

    @classmethod
    def parse(cls, value: Any, owner: str) -> Regularization | None:
        """Return the terms that ``value`` describes; None if ``value`` is None.

        Raises
        ------
        ConfigError
            If ``value`` is not a mapping of names to callables.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{owner}: regularization={value!r:.80}: expected {EXPECTED_TERMS}")
        for name, term in value.items():
            if not callable(term):
                raise ConfigError(f"{owner}: regularization[{name!r}]={term!r:.80}: expected {EXPECTED_TERMS}")
        return cls({str(name): term for name, term in value.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: regularization", tuple(self.terms))

    def of(self, name: str) -> Term | None:
        """Return the term of the parameter ``name``; None if it has none."""
        return next((term for pattern, term in self.terms.items() if fits(name, pattern)), None)

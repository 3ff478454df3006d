"""Define terms that are added to a loss and depend on the parameters alone: Tikhonov's, total variation, the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.checks import number, positive, require, unmasked
from mpizero._util.names import explains, fits, selected
from mpizero.errors import ConfigError
from mpizero.types import Array

#: ``term(values)`` returns the value of a term and its gradient by the parameter ``values``, a whole array.
Term = Callable[[Array], tuple[float, Array]]
EXPECTED = (
    "terms by the names of parameters, {'velocity': mpizero.TotalVariation(0.01)}, where a term is called with the "
    "whole parameter and returns its value and gradient"
)


@explains
@dataclass(frozen=True)
class Tikhonov:
    """Penalize the squared distance of a parameter from a reference (Tikhonov 1963).

    Calling it with the parameter returns ``weight / 2 * sum((values - reference)**2)`` and its gradient.

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
        found: Array = direction * direction.dtype.type(self.weight)
        return found


@explains
@dataclass(frozen=True)
class TotalVariation:
    """Penalize differences between neighbouring elements of a parameter, but not few large ones (Rudin et al. 1992).

    Calling it with the parameter returns ``weight * sum(sqrt(smoothing**2 + d_1**2 + ... + d_k**2) - smoothing)`` and
    its gradient. The sum is over all elements; ``d_i`` is the difference to the next one along axis i, 0 at the end.

    Attributes
    ----------
    weight : float
        Factor of the term, at least 0.
    smoothing : float
        Differences that are much smaller than this count by their squares, so that there is a gradient; > 0.

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
        start = np.full_like(steps[0], self.smoothing**2)
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
    """Return, for each axis, the differences to the next elements, 0 for the last ones; a number has one axis."""
    values = np.atleast_1d(values)
    found = []
    for axis in range(values.ndim):
        step = np.zeros_like(values)
        step[_but(values.ndim, axis, slice(None, -1))] = np.diff(values, axis=axis)
        found.append(step)
    return found


def _but(axes: int, axis: int, part: slice) -> tuple[slice, ...]:
    return tuple(part if number == axis else slice(None) for number in range(axes))


@dataclass(frozen=True)
class Regularization:
    """Hold the terms that a user gives, by names of parameters or patterns of names.

    Attributes
    ----------
    terms : dict of str to callable
        The terms by pattern; the first pattern that matches a name counts, and other parameters have none.
    """

    terms: Mapping[str, Term]

    @classmethod
    def parse(cls, given: Any, owner: str) -> Regularization | None:
        """Return the terms that ``given`` describes; None for None.

        Raises
        ------
        ConfigError
            If it is not a mapping of names to callables.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"{owner}: regularization={given!r:.80}: expected {EXPECTED}")
        for name, term in given.items():
            if not callable(term):
                raise ConfigError(f"{owner}: regularization[{name!r}]={term!r:.80}: expected {EXPECTED}")
        return cls({str(name): term for name, term in given.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: regularization", tuple(self.terms))

    def of(self, name: str) -> Term | None:
        """Return the term of the parameter ``name``; None if it has none."""
        return next((term for pattern, term in self.terms.items() if fits(name, pattern)), None)

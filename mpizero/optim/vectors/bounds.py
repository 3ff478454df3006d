"""Hold lower and upper bounds of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.checks import unmasked
from mpizero._util.names import fits, selected
from mpizero.errors import ConfigError
from mpizero.types import Array, ParameterSpec

#: A bound is one number for all elements of a parameter, or an array of its shape; None is no bound.
Limit = float | Array | None
EXPECTED = "a pair (lower, upper), or pairs by the names of parameters, {'velocity': (1500.0, None)}"


@dataclass(frozen=True)
class Bounds:
    """Hold the bounds that a user gives: one pair for all parameters, or pairs by names or patterns of names.

    Attributes
    ----------
    pairs : dict of str to pair
        Lower and upper bound by pattern; the first pattern that matches a name counts, and other parameters are free.
    """

    pairs: Mapping[str, tuple[Limit, Limit]]

    @classmethod
    def parse(cls, given: Any, owner: str) -> Bounds | None:
        """Return the bounds that ``given`` describes; None for None.

        Raises
        ------
        ConfigError
            If it is neither a pair nor a mapping of pairs of numbers and arrays, or a lower bound is above the upper.
        """
        if given is None or isinstance(given, cls):
            return given
        named = given if isinstance(given, Mapping) else {"*": given}
        return cls({str(name): _pair(f"{owner}: bounds[{name!r}]", pair) for name, pair in named.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: bounds", tuple(self.pairs))

    def of(self, spec: ParameterSpec, name: str) -> tuple[Limit, Limit]:
        """Return the bounds of the parameter ``name``: numbers, or arrays of all elements of the whole parameter.

        Raises
        ------
        ConfigError
            If an array has not the parameter's shape, or the parameter is complex.
        """
        pair = next((pair for pattern, pair in self.pairs.items() if fits(name, pattern)), (None, None))
        shape = spec.shape if spec.part is None else spec.part.shape
        for side, limit in zip(("lower", "upper"), pair, strict=True):
            if isinstance(limit, np.ndarray) and limit.shape != shape:
                raise ConfigError(f"the {side} bound of {name!r} has shape {limit.shape}, the parameter {shape}")
        if spec.complex and pair != (None, None):
            raise ConfigError(f"the complex parameter {name!r} cannot have bounds: complex numbers have no order")
        return pair


def _pair(where: str, given: Any) -> tuple[Limit, Limit]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigError(f"{where}={given!r:.80}: expected {EXPECTED}")
    lower, upper = (_limit(where, side) for side in given)
    if lower is not None and upper is not None and np.any(np.greater(lower, upper)):
        raise ConfigError(f"{where}: a lower bound is above the upper one")
    return lower, upper


def _limit(where: str, given: Any) -> Limit:
    if given is None or (isinstance(given, float) and math.isinf(given)):
        return None
    limit = np.asarray(unmasked(given, f"{where}: a bound", ConfigError))
    if limit.dtype.kind not in "fiu" or np.isnan(limit).any():
        raise ConfigError(f"{where}: a bound is {given!r:.80}: expected a number, an array of numbers or None")
    return limit if limit.ndim else float(limit)

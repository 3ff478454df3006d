"""Hold a diagonal preconditioner: positive factors of the elements of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.checks import unmasked
from mpizero._util.names import fits, selected
from mpizero.errors import ConfigError
from mpizero.types import Array, ParameterSpec

#: One factor for all elements of a parameter, or an array of its shape.
Factors = float | Array
EXPECTED = "positive factors by the names of parameters, {'velocity': 0.01}, each a number or an array"


@dataclass(frozen=True)
class Diagonal:
    """Hold the factors that a user gives by names of parameters or patterns of names.

    Attributes
    ----------
    factors : dict of str to float or Array
        Factors by pattern; the first pattern that matches a name counts, and other parameters have the factor 1.
    """

    factors: Mapping[str, Factors]

    @classmethod
    def parse(cls, given: Any, owner: str) -> Diagonal | None:
        """Return the diagonal that ``given`` describes; None for None.

        Raises
        ------
        ConfigError
            If it is not a mapping of names to positive numbers and arrays.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"{owner}: preconditioner={given!r:.80}: expected {EXPECTED}")
        return cls({str(name): _factors(f"{owner}: preconditioner[{name!r}]", f) for name, f in given.items()})

    def check_names(self, names: Sequence[str], owner: str) -> None:
        """Raise :class:`~mpizero.errors.ConfigError` if a pattern matches no name of a parameter."""
        selected(names, f"{owner}: preconditioner", tuple(self.factors))

    def of(self, spec: ParameterSpec, name: str) -> Factors:
        """Return the factors of the parameter ``name``: a number, or an array of all elements of the whole parameter.

        Raises
        ------
        ConfigError
            If an array has not the parameter's shape, or the parameter is complex.
        """
        found = next((factors for pattern, factors in self.factors.items() if fits(name, pattern)), 1.0)
        shape = spec.shape if spec.part is None else spec.part.shape
        if isinstance(found, np.ndarray) and found.shape != shape:
            raise ConfigError(f"the preconditioner of {name!r} has shape {found.shape}, the parameter {shape}")
        if isinstance(found, np.ndarray) and spec.complex:
            raise ConfigError(f"the preconditioner of the complex parameter {name!r} must be one number")
        return found


def _factors(where: str, given: Any) -> Factors:
    factors = np.asarray(unmasked(given, where, ConfigError))
    if factors.dtype.kind not in "fiu" or not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{where}={given!r:.80}: expected {EXPECTED}")
    return factors if factors.ndim else float(factors)

"""Define the sections ``[optimizer]`` of methods of whole vectors: L-BFGS, conjugate gradients, Newton-CG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpizero._util.checks import number, positive, whole
from mpizero.optim.minimizers import INITIAL
from mpizero.train.config.setting_checks import ConfigSection, allowed, choice, many, optional, setting

#: Names of the methods.
VECTOR_METHODS = ("l-bfgs", "cg", "newton-cg")
#: Settings of ``[train]`` with which they do not know the loss and its exact gradient in the host's memory, and the
#: values with which they do.
_CLASHES: Mapping[str, Any] = {
    "clip": 0.0,
    "ema": None,
    "gradient_compression": None,
    "mixed_precision": None,
    "device": "cpu",
}
_BOUNDS = "[low, high] for all parameters, or a table of such pairs by name; inf and -inf are no bounds"


def _limit(value: Any) -> float | None:
    if value is None:  # no bound, in what a checkpoint has recorded
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("must be a number")
    return None if math.isinf(value) else float(value)


def _bounds(value: Any) -> dict[str, list[float | None]]:
    """Check bounds, and return the pairs by patterns of names; None is no bound."""
    found = {}
    for name, pair in (value if isinstance(value, Mapping) else {"*": value}).items():
        where = f"{name}: " if isinstance(value, Mapping) else ""
        try:
            low, high = many(_limit, count=2)(pair)
        except ValueError as error:
            raise ValueError(f"must be {_BOUNDS}; {where}{allowed(error)}") from None
        if None not in (low, high) and low > high:
            raise ValueError(f"must be {_BOUNDS}; {where}low is above high")
        found[str(name)] = [low, high]
    return found


@dataclass(frozen=True, kw_only=True)
class VectorMethodSection(ConfigSection):
    """Hold the settings that all methods of whole vectors have; subclasses add their own."""

    name: str = setting("l-bfgs", choice(*VECTOR_METHODS))
    gtol: float = setting(1e-5, number())
    ftol: float = setting(0.0, number())

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file."""
        return "optimizer"

    def check_run(self, train: ConfigSection, model: ConfigSection) -> None:
        """Raise an error for settings of ``[train]`` and ``[model]`` that do not go together with these methods."""
        method = f'optimizer.name = "{self.name}"'
        for key, without in _CLASHES.items():
            if getattr(train, key) != without:
                raise train.reject(
                    key, f"must be left out with {method}, which needs the exact loss and gradient, on the host"
                )
        if getattr(model, "dropout", 0.0):
            raise model.reject("dropout", f"must be 0 with {method}, which needs the same function in every step")


@dataclass(frozen=True, kw_only=True)
class ConjugateGradientSection(VectorMethodSection):
    """Hold the settings of nonlinear conjugate gradients."""

    name: str = setting("cg", choice(*VECTOR_METHODS))
    most_trials: int = setting(20, whole(1))


@dataclass(frozen=True, kw_only=True)
class LbfgsSection(VectorMethodSection):
    """Hold the settings of L-BFGS."""

    most_trials: int = setting(20, whole(1))
    history: int = setting(10, whole(1))
    bounds: Any = setting(None, optional(_bounds))
    initial: str = setting("scalar", choice(*INITIAL))


@dataclass(frozen=True, kw_only=True)
class NewtonSection(VectorMethodSection):
    """Hold the settings of Newton's method with conjugate gradients."""

    name: str = setting("newton-cg", choice(*VECTOR_METHODS))
    radius: float = setting(1.0, positive)


VECTOR_SECTIONS: dict[str, type[VectorMethodSection]] = {
    "l-bfgs": LbfgsSection,
    "cg": ConjugateGradientSection,
    "newton-cg": NewtonSection,
}

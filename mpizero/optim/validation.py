"""Checks of optimizer settings: every error names the argument, its value and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from mpizero.errors import ConfigError


def number(
    owner: str, name: str, value: Any, low: float = 0.0, high: float = math.inf, *, above: bool = False
) -> float:
    """Return ``value`` as a float in [low, high); with ``above`` in (low, high).

    Raises
    ------
    ConfigError
        It is not a finite number in that range.
    """
    given = math.nan if isinstance(value, (bool, np.bool)) or not isinstance(value, Real) else float(value)
    if not (math.isfinite(given) and (low < given if above else low <= given) and given < high):
        allowed = f"{'>' if above else '>='} {low:g}" + ("" if high == math.inf else f" and < {high:g}")
        raise ConfigError(f"{owner}: {name}={value!r} is not allowed; expected a finite number {allowed}")
    return given


def pair(owner: str, name: str, value: Any) -> tuple[float, float]:
    """Return two decay rates in [0, 1).

    Raises
    ------
    ConfigError
        It is not a pair of such numbers.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ConfigError(f"{owner}: {name}={value!r} is not allowed; expected two numbers in [0, 1)")
    return (number(owner, f"{name}[0]", value[0], high=1.0), number(owner, f"{name}[1]", value[1], high=1.0))


def flag(owner: str, name: str, value: Any) -> bool:
    """Return a bool.

    Raises
    ------
    ConfigError
        It is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{owner}: {name}={value!r} is not allowed; expected True or False")
    return value


def schedule(owner: str, name: str, value: Callable[..., Any]) -> None:
    """Raise :class:`ConfigError` if ``value`` cannot be called with the number of a step alone."""
    try:
        inspect.signature(value).bind(0)
    except TypeError as error:
        raise ConfigError(
            f"{owner}: {name} is called as {name}(step), which this function does not take: {error}"
        ) from None
    except ValueError:  # a function of C that does not tell what it takes
        return


def count(owner: str, name: str, value: Any, low: int = 0) -> int:
    """Return a whole number >= ``low``.

    Raises
    ------
    ConfigError
        It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{owner}: {name}={value!r} is not allowed; expected a whole number >= {low}")
    return value

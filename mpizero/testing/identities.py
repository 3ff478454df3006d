"""Test gradients by their Taylor remainder, and communication by its adjoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpizero.comm.startup import communicator_of
from mpizero.types import Array

Point = Array | Mapping[str, Array]


def _flat(value: Point) -> Array:
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    return np.concatenate([np.asarray(p).reshape(-1) for p in parts])


def _like(flat: Array, value: Point) -> Point:
    if not isinstance(value, Mapping):
        return flat.reshape(np.shape(value))
    stops = np.cumsum([np.size(v) for v in value.values()])
    parts = np.split(flat, stops[:-1])
    return {name: p.reshape(np.shape(v)) for (name, v), p in zip(value.items(), parts, strict=True)}


def _gradient_at(x: Point, gradient: Point | Callable[[Any], Point]) -> Array:
    start = _flat(x)
    if start.dtype != np.float64:
        raise TypeError(f"taylor_test needs float64, got {start.dtype}: rounding would hide the slope")
    slope_at_x = _flat(gradient(x) if callable(gradient) else gradient)
    if slope_at_x.size != start.size:
        raise ValueError(f"the gradient has {slope_at_x.size} elements, x has {start.size}")
    return slope_at_x


def taylor_test(
    f: Callable[[Any], float],
    gradient: Point | Callable[[Any], Point],
    x: Point,
    *,
    step: float = 1e-3,
    seed: int = 0,
    tolerance: float = 0.05,
) -> float:
    """Check that ``gradient`` is the gradient of ``f`` at ``x``: the Taylor remainder must fall with the step squared.

    The remainder ``|f(x + h p) - f(x) - h <g, p>|``, with the gradient ``g`` and a random direction ``p``, is computed
    for nine values of ``h``, each half of the one before. The slope is the exponent with which it falls: 2 for the
    right gradient, 1 for a wrong one, even by a factor 1/n. Collective if ``f`` is; all ranks use the same direction.

    Parameters
    ----------
    f : callable
        Function of a value like ``x`` that returns a number. It must be smooth near ``x``.
    gradient : array, mapping or callable
        Gradient at ``x``, or a function that is called with ``x`` and returns it.
    x : array or mapping of arrays
        The point at which the gradient is tested, in float64.
    step : float
        The first, largest ``h``. The length of ``p`` is the norm of ``x``, but at least 1.
    seed : int
        Seed of the random direction.
    tolerance : float
        Largest allowed distance of the slope from 2.

    Returns
    -------
    float
        The slope; ``inf`` if all remainders are rounding errors, as they are where ``f`` is linear along ``p``.

    Raises
    ------
    AssertionError
        If the slope differs from 2 by more than ``tolerance``. The message contains the slopes between all steps.
    TypeError
        If ``x`` is not float64, because rounding would hide the slope.

    Examples
    --------
    >>> import numpy as np
    >>> from mpizero.testing import taylor_test
    >>> x = np.random.default_rng(0).normal(size=5)
    >>> round(taylor_test(lambda x: float(np.sin(x).sum()), np.cos, x), 1)
    2.0
    """
    rest, slopes = _remainders(f, _gradient_at(x, gradient), x, step, seed)
    if slopes is None:
        return math.inf
    slope = float(np.median(slopes[-3:])) if slopes else math.nan
    if not abs(slope - 2.0) <= tolerance:
        raise AssertionError(
            f"Taylor slope {slope:.3f}, expected 2.00 +- {tolerance}: slopes {[round(s, 3) for s in slopes]}, "
            f"remainders {[f'{r:.2e}' for r in rest]} for steps from {step}"
        )
    return slope


def _remainders(
    f: Callable[[Any], float], gradient: Array, x: Point, step: float, seed: int
) -> tuple[list[float], list[float] | None]:
    """Return the Taylor remainders for nine steps, and the slopes between the remainders above rounding error.

    Instead of the slopes None is returned if no remainder is above rounding error.
    """
    start = _flat(x)
    direction = np.random.default_rng(seed).standard_normal(start.size)
    direction *= max(1.0, float(np.linalg.norm(start))) / max(float(np.linalg.norm(direction)), 1e-300)
    here, along = float(f(x)), float(gradient @ direction)
    steps = [step / 2**k for k in range(9)]
    there = [float(f(_like(start + h * direction, x))) for h in steps]
    rest = [abs(value - here - h * along) for h, value in zip(steps, there, strict=True)]
    floor = 1e3 * np.finfo(np.float64).eps * max(abs(here), *map(abs, there), abs(along) * step)
    above = [not r <= floor for r in rest]  # keeps NaN
    pairs = [(rest[k], rest[k + 1]) for k in range(len(rest) - 1) if above[k] and above[k + 1]]
    return rest, [math.log2(a / b) for a, b in pairs] if any(above) else None


def adjoint_test(
    forward: Callable[[Array], Array],
    adjoint: Callable[[Array], Array],
    x: Array,
    y: Array,
    comm: Any = None,
    *,
    rtol: float = 1e-12,
) -> float:
    """Check that ``adjoint`` is the adjoint of the linear function ``forward``.

    With F for ``forward`` and F* for ``adjoint``, this means that ``<F x, y> = <x, F* y>``, where both scalar products
    are summed over the ranks.

    Collective over ``comm``, which may be anything that :class:`~mpizero.ShardingConfig` accepts as ``comm``. ``x`` and
    ``y`` are this rank's parts of two vectors; ``y`` has the shape of ``forward(x)``, and both may be empty. Every
    linear communication has an adjoint: scatter is the adjoint of gather, and a sum is the adjoint of a broadcast.

    Returns
    -------
    float
        Relative difference of the two scalar products.

    Raises
    ------
    AssertionError
        On every rank, if the relative difference is greater than ``rtol``. The message contains both scalar products.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.testing import adjoint_test
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=5), rng.normal(size=5)
    >>> adjoint_test(np.cumsum, lambda y: np.cumsum(y[::-1])[::-1], x, y, comm="self") < 1e-12
    True
    >>> adjoint_test(np.cumsum, np.cumsum, x, y, comm="self")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: <F x, y> = ...
    """
    fx, fy = np.asarray(forward(x)), np.asarray(adjoint(y))
    if fx.shape != np.shape(y) or fy.shape != np.shape(x):
        raise ValueError(f"forward maps {np.shape(x)} to {fx.shape}, adjoint {np.shape(y)} to {fy.shape}")
    left, right = (np.vdot(a.astype(np.float64), b.astype(np.float64)) for a, b in ((fx, y), (x, fy)))
    size = np.linalg.norm(fx) * np.linalg.norm(y) + np.linalg.norm(x) * np.linalg.norm(fy)
    sums = np.array([left, right, size])
    with communicator_of(comm) as world:
        world.allreduce(sums, tag="adjoint_test")
    difference = float(abs(sums[0] - sums[1]) / max(sums[2], np.finfo(np.float64).tiny))
    if not difference <= rtol:
        raise AssertionError(
            f"<F x, y> = {sums[0]!r} but <x, F* y> = {sums[1]!r}: relative difference {difference:.2e}"
        )
    return difference

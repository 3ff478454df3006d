"""Compute start values from the seed, the parameter's name and the element's index, never from a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from mpizero import kernels
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.parts import part_rows, part_runs, take_rows
from mpizero.nn.layer import namespace, vector
from mpizero.types import Array, ParameterSpec, Part

#: Random site of start values. The name is already in the key, so one site serves all parameters.
_SITE = 0
#: A run of a slice costs as much besides its values as this many random numbers: the call, and those that are thrown
#: away at its ends. Where that is too much, whole rows are computed and the runs copied out of them.
_RUN_COST = 1500
#: Elements of the whole rows computed at once.
_ROWS_AT_ONCE = 1 << 16

#: ``fill(start, out)`` writes the values of a parameter from element ``start`` on.
_Fill = Callable[[int, Array], None]


def initial_values(spec: ParameterSpec, seed: int, start: int, stop: int, out: Array) -> None:
    """Fill ``out`` with elements ``start:stop`` of a parameter's flat C-order start values.

    Any cut of a parameter into ranges gives the values of the whole, and so do slices (``spec.part``).

    Parameters
    ----------
    spec : ParameterSpec
        The parameter, under its global name; a tied use starts as the parameter it shares, so ask for that one. A copy
        (``spec.guest``) starts as the parameter it names, whose ``init`` it has to declare.
    seed : int
        The model's seed.
    start, stop : int
        Range of flat elements; of a slice, its own.
    out : Array
        Contiguous 1-D array of ``stop - start`` elements, float32 or float64.
    """
    if not 0 <= start <= stop <= spec.size or out.shape != (stop - start,):
        raise LayoutError(
            f"elements {start}:{stop} of {spec.name} ({spec.size} elements) cannot fill an array of shape {out.shape}"
        )
    kind = spec.init.kind
    if kind in ("zeros", "ones"):
        out[...] = kind == "ones"
        return
    fill = _random(spec, seed, out)
    if spec.part is None:
        fill(start, out)
    elif out.size:
        _fill_part(spec, spec.part, fill, start, out)


def _random(spec: ParameterSpec, seed: int, like: Array) -> _Fill:
    """Return what fills arrays of the kind of ``like`` with a parameter's random start values."""
    key0, key1 = _key(seed, spec.guest or spec.name)
    random, scale = kernels.backend(like).random, spec.init.scale
    if spec.init.kind == "normal":
        deviation = vector(like, scale)
        return lambda first, out: random.fill_normal(key0, key1, _SITE, first, out, deviation)
    if spec.init.kind == "uniform":
        low, high = vector(like, -scale), vector(like, scale)
        return lambda first, out: random.fill_uniform(key0, key1, _SITE, first, out, low, high)
    kind = spec.init.kind
    raise ConfigError(f'{spec.name}: Init kind {kind!r} is not one of "zeros", "ones", "normal", "uniform"')


def _fill_part(spec: ParameterSpec, part: Part, fill: _Fill, start: int, out: Array) -> None:
    """Fill ``out`` with elements ``start ...`` of a slice."""
    rows, stop = part_rows(part), start + out.size
    if rows.whole > _ROWS_AT_ONCE or rows.local + _RUN_COST * len(rows.runs) <= rows.whole:
        for run in part_runs(part, spec.shape, start, stop):
            fill(run.whole, out[run.local - start : run.local - start + run.size])
        return
    at_once, end = _ROWS_AT_ONCE // rows.whole, -(-stop // rows.local)
    buffer = namespace(out).empty(min(at_once, end - start // rows.local) * rows.whole, out.dtype)
    for row in range(start // rows.local, end, at_once):
        whole = buffer[: min(at_once, end - row) * rows.whole]
        fill(row * rows.whole, whole)
        origin = row * rows.local
        low, high = max(start, origin), min(stop, origin + at_once * rows.local)
        take_rows(rows, whole, low - origin, out[low - start : high - start])


def _key(seed: int, name: str) -> tuple[int, int]:
    """Return for each (seed, name) its own 64-bit Philox key, so that no two parameters share random numbers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

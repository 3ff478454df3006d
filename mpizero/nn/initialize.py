"""Compute start values from the seed, the parameter's name and the element's index, never from a rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import unmasked
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.tensor_parts import part_rows, part_runs, take_rows
from mpizero.nn.arrays import namespace, vector
from mpizero.types import Array, ParameterSpec, Part, as_reals, complex_type

#: Number that keys the random numbers of start values. The parameter's name is already in the key, so all parameters
#: use the same number.
_SITE = 0
#: Fixed cost of filling one contiguous run of a tensor-parallel part, in random numbers: the call, and the numbers that
#: are thrown away at its ends. Where many short runs cost too much, whole rows are computed and the runs copied out.
_RUN_COST = 1500
#: Largest number of elements of whole rows that are computed at once.
_ROWS_AT_ONCE = 1 << 16

#: ``fill(start, out)`` writes the values of a parameter from element ``start`` on.
_Fill = Callable[[int, Array], None]


#: ``fill(spec, start, stop, out)`` writes elements ``start:stop`` of a parameter's start values to ``out``.
StartValues = Callable[[ParameterSpec, int, int, Array], None]


def start_values_of(model: Any) -> StartValues:
    """Return a function that writes any range of a parameter's start values. Not collective.

    A model of blocks computes them from ``spec.init``, but for parameters in its optional attribute ``start_values``: a
    mapping from global names to arrays of the parameters' shapes. The attribute is read once in this call, so it may be
    a property that makes the arrays anew. A black box has the arrays in its attribute of this name or in
    ``parameters``.
    """
    given = getattr(model, "start_values", None)
    if given is None:
        given = getattr(model, "parameters", {})

    def fill(spec: ParameterSpec, start: int, stop: int, out: Array) -> None:
        name = spec.guest or spec.name
        if name not in given:
            initial_values(spec, model.seed, start, stop, out)
            return
        array, part = np.asarray(unmasked(given[name], f"parameter {name!r}")), spec.part
        if spec.complex:
            array = np.asarray(array, complex_type(out.dtype))
        whole = spec.shape if part is None else part.shape
        if array.shape != whole:
            raise LayoutError(f"parameter {name} has shape {whole}, its start values have shape {array.shape}")
        if part is not None:
            array = np.take(array, np.r_[tuple(slice(*ends) for ends in part.ranges)], part.axis)
        out[:] = as_reals(array)[start:stop]

    return fill


def initial_values(spec: ParameterSpec, seed: int, start: int, stop: int, out: Array) -> None:
    """Fill ``out`` with elements ``start:stop`` of a parameter's flat C-order start values.

    The values do not depend on how a parameter is cut: ranges of elements and tensor-parallel parts (``spec.part``) get
    the same values as in the whole parameter.

    Parameters
    ----------
    spec : ParameterSpec
        The parameter, under its global name. For a tied use pass the spec of the parameter that it shares. If
        ``spec.guest`` names a parameter of another pipeline stage, this one is its copy: it gets that parameter's
        values, and must declare the same ``init``.
    seed : int
        The model's seed.
    start, stop : int
        The range of flat elements to compute. If ``spec.part`` is given, they are counted within the part.
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
        if spec.complex:  # the parts of a number follow one another, and 1 has no imaginary one
            out[(start + 1) % 2 :: 2] = 0
        return
    fill = _random(spec, seed, out)
    if spec.part is None:
        fill(start, out)
    elif out.size:
        _fill_part(spec, spec.part, fill, start, out)


def _random(spec: ParameterSpec, seed: int, like: Array) -> _Fill:
    """Return a function ``fill(start, out)``, which writes random start values to ``out``, from element ``start`` on.

    ``like`` is an array of the library (NumPy or CuPy) and dtype that ``out`` will have.
    """
    key0, key1 = _key(seed, spec.guest or spec.name)
    random, scale = kernels.backend(like).random, spec.init.scale
    if spec.init.kind == "normal":
        deviation = vector(like, scale / math.sqrt(2) if spec.complex else scale)
        return lambda first, out: random.fill_normal(key0, key1, _SITE, first, out, deviation)
    if spec.init.kind == "uniform":
        low, high = vector(like, -scale), vector(like, scale)
        return lambda first, out: random.fill_uniform(key0, key1, _SITE, first, out, low, high)
    kind = spec.init.kind
    raise ConfigError(f'{spec.name}: Init kind {kind!r} is not one of "zeros", "ones", "normal", "uniform"')


def _fill_part(spec: ParameterSpec, part: Part, fill: _Fill, start: int, out: Array) -> None:
    """Fill ``out`` with start values of a tensor-parallel part, from flat element ``start`` of the part on."""
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
    """Return a 64-bit Philox key, as two 32-bit integers, made from seed and parameter name by a hash.

    So no two parameters share random numbers.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

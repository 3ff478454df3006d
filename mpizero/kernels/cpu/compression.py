"""Compress messages with error feedback: what a message lost is kept in ``residual`` and added to the next message.

``int8`` sends eight bits for each value, and a scale for each block of ``BLOCK`` consecutive values. ``top`` sends the
values of largest magnitude with their indices. They are found exactly: the smallest magnitude that is sent is found by
counting how often each pattern of bits occurs in the magnitudes, first of the highest 11 bits and then of 10 bits
twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.jit import kernel
from mpizero.types import Array

BLOCK = formulas.BLOCK
#: Counters that ``top`` needs: for 11, then 10, then the last 10 bits of a magnitude.
COUNTERS = 2048

_magnitude = formulas.magnitude
_scale_of = formulas.scale_of
_inverse_of = formulas.inverse_of
_code_of = formulas.code_of

_HIGH, _LOW = np.uint32(20), np.uint32(10)
_LOW_BITS = np.uint32(1023)


def _largest(values: Array, residual: Array) -> Any:
    """Add ``values`` to ``residual`` and return the largest magnitude of the sum.

    The magnitude is returned as bits (see :func:`mpizero.kernels.formulas.magnitude`).
    """
    largest = np.uint32(0)
    for i in range(values.size):
        total = values[i] + residual[i]
        residual[i] = total
        largest = max(largest, _magnitude(total))
    return largest


@kernel("void(const f4[::1], f4[::1], f4[::1], i1[::1])")
def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Round ``values + residual`` to ``codes`` with ``scales``, and write the rounding errors to ``residual``.

    A code is an integer from -127 to 127, and ``code * scale`` is the rounded value. Each block of ``BLOCK``
    consecutive values has one scale. If a block has a value that is infinite or NaN, its scale and its errors are NaN.
    If its values are too small to be scaled in float32, its scale and codes are 0, and ``residual`` receives the values
    themselves.
    """
    for block in range(scales.size):
        first = block * BLOCK
        rest = residual[first : first + BLOCK]
        scale = _scale_of(_largest(values[first : first + BLOCK], rest))
        inverse = _inverse_of(scale)
        scales[block] = scale
        part = codes[first : first + BLOCK]
        for i in range(rest.size):
            code = _code_of(rest[i], inverse)
            part[i] = np.int8(code)
            rest[i] = rest[i] - code * scale


@kernel("void(const f4[::1], const i1[::1], f4[::1])")
def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    """Write the values to which :func:`int8_encode` rounded, ``code * scale`` for each code, to ``out``."""
    for block in range(scales.size):
        first = block * BLOCK
        scale, part, whole = scales[block], codes[first : first + BLOCK], out[first : first + BLOCK]
        for i in range(whole.size):
            whole[i] = np.float32(part[i]) * scale


def _reach(counts: Array, used: int, wanted: int) -> int:
    """Return the largest index for which the sum of ``counts[index:used]`` is at least ``wanted``."""
    place = used
    while wanted > 0:
        place -= 1
        wanted -= counts[place]
    return place


def _above(counts: Array, used: int, place: int) -> int:
    """Return the sum of ``counts[place + 1 : used]``."""
    total = 0
    for i in range(place + 1, used):
        total += counts[i]
    return total


@kernel("void(const f4[::1], f4[::1], i8[::1], i4[::1], f4[::1])")
def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual`` to ``largest``.

    ``indices`` receives their indices, in ascending order. Of values of equal magnitude, those of the smallest indices
    are chosen. ``residual`` receives all other values of the sum, and 0 at the chosen indices. ``counts`` is temporary
    memory for 2048 integers, which only the CPU kernel uses.
    """
    wanted = indices.size
    if wanted == 0:
        for i in range(values.size):
            residual[i] = values[i] + residual[i]
        return
    counts[:] = 0
    for i in range(values.size):
        total = values[i] + residual[i]
        residual[i] = total
        counts[_magnitude(total) >> _HIGH] += 1
    place = _reach(counts, COUNTERS, wanted)
    wanted -= _above(counts, COUNTERS, place)
    prefix = np.uint32(place)
    counts[:] = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >> _HIGH == prefix:
            counts[(bits >> _LOW) & _LOW_BITS] += 1
    place = _reach(counts, COUNTERS // 2, wanted)
    wanted -= _above(counts, COUNTERS // 2, place)
    prefix = (prefix << _LOW) | np.uint32(place)
    counts[:] = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >> _LOW == prefix:
            counts[bits & _LOW_BITS] += 1
    place = _reach(counts, COUNTERS // 2, wanted)
    wanted -= _above(counts, COUNTERS // 2, place)
    threshold = (prefix << _LOW) | np.uint32(place)
    taken = 0
    for i in range(residual.size):
        bits = _magnitude(residual[i])
        if bits >= threshold:
            if bits == threshold:
                if wanted == 0:
                    continue
                wanted -= 1
            indices[taken] = i
            largest[taken] = residual[i]
            residual[i] = 0
            taken += 1


@kernel("void(const i4[::1], const f4[::1], f4[::1])")
def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write ``largest[i]`` to ``out[indices[i]]`` for every i, and 0 to all other elements of ``out``."""
    out[:] = 0
    for i in range(indices.size):
        out[indices[i]] = largest[i]

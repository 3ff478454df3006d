"""Compress messages with error feedback: the error of a message stays in ``residual``, to be sent with the next one.

``int8`` sends eight bits for each value, and a scale for each block of ``BLOCK`` values. ``top`` sends the values of
largest magnitude with their indices; they are found exactly, by counting the bits of magnitudes from the top.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels.compile import kernel
from mpizero.kernels.formulas import compression as formulas
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
    """Add ``values`` to ``residual``; return the bits of the largest magnitude there."""
    largest = np.uint32(0)
    for i in range(values.size):
        total = values[i] + residual[i]
        residual[i] = total
        largest = max(largest, _magnitude(total))
    return largest


@kernel("void(const f4[::1], f4[::1], f4[::1], i1[::1])")
def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Write scales and codes of ``values + residual``, and their rounding errors to ``residual``."""
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
    """Write the values that the scales and codes of ``int8_encode`` stand for."""
    for block in range(scales.size):
        first = block * BLOCK
        scale, part, whole = scales[block], codes[first : first + BLOCK], out[first : first + BLOCK]
        for i in range(whole.size):
            whole[i] = np.float32(part[i]) * scale


def _reach(counts: Array, used: int, wanted: int) -> int:
    """Return the largest index such that the counts from there to the end add up to ``wanted`` or more."""
    place = used
    while wanted > 0:
        place -= 1
        wanted -= counts[place]
    return place


def _above(counts: Array, used: int, place: int) -> int:
    """Return the sum of the counts above index ``place``."""
    total = 0
    for i in range(place + 1, used):
        total += counts[i]
    return total


@kernel("void(const f4[::1], f4[::1], i8[::1], i4[::1], f4[::1])")
def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual``; ``residual`` keeps the rest.

    Indices ascend; of equal magnitudes the first are taken. ``counts`` is room for ``COUNTERS`` numbers.
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
    """Write the values that ``top_encode`` selected to their indices, and 0 to all other elements."""
    out[:] = 0
    for i in range(indices.size):
        out[indices[i]] = largest[i]

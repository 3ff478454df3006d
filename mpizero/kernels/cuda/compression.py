"""Compress messages with error feedback on the GPU: what a message lost is kept and added to the next message.

One thread works on a block of ``BLOCK`` consecutive values (``int8``), or on a tile of ``TILE`` (``top``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels import formulas
from mpizero.kernels.cuda.launch import cuda, kernel
from mpizero.types import Array

BLOCK = formulas.BLOCK
#: Neighbours whose largest values one thread collects, so that indices ascend.
TILE = 256

_magnitude = formulas.magnitude
_scale_of = formulas.scale_of
_inverse_of = formulas.inverse_of
_code_of = formulas.code_of


@kernel("void(const f4[::1], f4[::1], f4[::1], i1[::1])")
def int8_encode(values: Array, residual: Array, scales: Array, codes: Array) -> None:
    """Round ``values + residual`` to ``codes`` with ``scales``, and write the rounding errors to ``residual``.

    The arguments are those of :func:`mpizero.kernels.cpu.compression.int8_encode`.
    """
    for block in range(cuda.grid(1), scales.size, cuda.gridsize(1)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, values.size)
        largest = np.uint32(0)
        for i in range(first, last):
            residual[i] = values[i] + residual[i]
            largest = max(largest, _magnitude(residual[i]))
        scale = _scale_of(largest)
        inverse = _inverse_of(scale)
        scales[block] = scale
        for i in range(first, last):
            code = _code_of(residual[i], inverse)
            codes[i] = np.int8(code)
            residual[i] = residual[i] - code * scale


@kernel("void(const f4[::1], const i1[::1], f4[::1])")
def int8_decode(scales: Array, codes: Array, out: Array) -> None:
    """Write the values to which :func:`int8_encode` rounded, ``code * scale`` for each code, to ``out``."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = np.float32(codes[i]) * scales[i // BLOCK]


@kernel("void(const f4[::1], f4[::1])")
def _add(values: Array, residual: Array) -> None:
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        residual[i] = values[i] + residual[i]


@kernel("void(const f4[::1], u4, u4, u4, u4, i8[::1])")
def _count(values: Array, prefix: int, above: int, shift: int, mask: int, counts: Array) -> None:
    """Count the magnitudes of ``values`` by some of their bits, ``(bits >> shift) & mask``: the index into ``counts``.

    Only magnitudes with ``bits >> above == prefix`` are counted; with ``above`` = 32 all are.
    """
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        bits = _magnitude(values[i])
        if above == 32 or bits >> np.uint32(above) == np.uint32(prefix):
            cuda.atomic.add(counts, int((bits >> np.uint32(shift)) & np.uint32(mask)), 1)


@kernel("void(const f4[::1], u4, i8[::1], i8[::1])")
def _count_tiles(values: Array, threshold: int, more: Array, equal: Array) -> None:
    """Count, for each tile of ``TILE`` values, the magnitudes above ``threshold`` and those equal to it.

    The counts are written to ``more`` and ``equal``. ``threshold`` is the bits of a magnitude.
    """
    for tile in range(cuda.grid(1), more.size, cuda.gridsize(1)):
        more[tile], equal[tile] = 0, 0
        for i in range(tile * TILE, min((tile + 1) * TILE, values.size)):
            bits = _magnitude(values[i])
            more[tile] += bits > np.uint32(threshold)
            equal[tile] += bits == np.uint32(threshold)


@kernel("void(f4[::1], u4, const i8[::1], const i8[::1], i4[::1], f4[::1])")
def _collect(residual: Array, threshold: int, starts: Array, allowed: Array, indices: Array, largest: Array) -> None:
    """Move the values of largest magnitude from ``residual`` to ``largest``, and their indices to ``indices``.

    Tile t moves its values of a magnitude above ``threshold`` and the first ``allowed[t]`` of its values of a magnitude
    equal to it, to the elements of the outputs from index ``starts[t]`` on. Moved values become 0 in ``residual``.
    ``threshold`` is the bits of a magnitude.
    """
    for tile in range(cuda.grid(1), starts.size, cuda.gridsize(1)):
        place, left = starts[tile], allowed[tile]
        for i in range(tile * TILE, min((tile + 1) * TILE, residual.size)):
            bits = _magnitude(residual[i])
            equal = bits == np.uint32(threshold)
            if bits > np.uint32(threshold) or (equal and left > 0):
                left -= equal
                indices[place] = i
                largest[place] = residual[i]
                residual[i] = 0
                place += 1


def top_encode(values: Array, residual: Array, counts: Array, indices: Array, largest: Array) -> None:
    """Write the ``indices.size`` values of largest magnitude of ``values + residual`` to ``largest``.

    The arguments are those of :func:`mpizero.kernels.cpu.compression.top_encode`.
    """
    _add(values, residual)
    if not indices.size:
        return
    threshold, equal_wanted = _threshold(residual, int(indices.size))
    tiles = -(-int(residual.size) // TILE)
    more, equal = np.zeros((2, tiles), np.int64)
    _count_tiles(residual, threshold, more, equal)
    before = np.cumsum(equal) - equal
    allowed = np.clip(equal_wanted - before, 0, equal)
    taken = more + allowed
    _collect(residual, threshold, np.cumsum(taken) - taken, allowed, indices, largest)


def _threshold(values: Array, wanted: int) -> tuple[int, int]:
    """Return the smallest magnitude among the ``wanted`` largest, and how many of these are equal to it.

    The magnitude is returned as bits (see :func:`mpizero.kernels.formulas.magnitude`).
    """
    prefix, above = 0, 32
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        counts: Any = np.zeros(1 << width, np.int64)
        _count(values, prefix, above, shift, (1 << width) - 1, counts)
        from_top = np.cumsum(counts[::-1])
        place = counts.size - 1 - int(np.searchsorted(from_top, wanted))
        wanted -= int(counts[place + 1 :].sum())
        prefix, above = (prefix << width) | place, shift
    return prefix, wanted


@kernel("void(const i4[::1], const f4[::1], f4[::1])")
def _scatter(indices: Array, largest: Array, out: Array) -> None:
    for i in range(cuda.grid(1), indices.size, cuda.gridsize(1)):
        out[indices[i]] = largest[i]


@kernel("void(f4[::1])")
def _clear(out: Array) -> None:
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = 0


def top_decode(indices: Array, largest: Array, out: Array) -> None:
    """Write ``largest[i]`` to ``out[indices[i]]`` for every i, and 0 to all other elements of ``out``."""
    _clear(out)
    if indices.size:
        _scatter(indices, largest, out)

"""Multiply two matrices on the CPU, with the same bits whatever the shape around an element is.

The left operand is cut into blocks that stay in the cache and the right one into panels as wide as a tile; both are
packed, that is copied into the order in which tiles read them (Goto and van de Geijn, *Anatomy of High-Performance
Matrix Multiplication*, 2008). While a tile computes, the next panel is prefetched.

[Note: equal bits] An element is a sum over the inner axis. ``DEPTH`` terms at a time are added in ascending order, each
by a fused multiply-add, and then these sums in ascending order. Nothing else enters: neither the numbers of rows and
columns, nor the element's place, nor strides, nor threads, nor the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels.compile import apart, kernel
from mpizero.kernels.products.tile import HIGH, LOW, VECTOR, SumsTile, VectorCopy, VectorTranspose, tile_columns
from mpizero.types import Array

#: Terms of a sum that are added before the sum is stored. Longer is faster, up to the size of a cache; shorter is more
#: accurate.
DEPTH = 1024
#: Bytes of one column of a block of the left operand: 480 rows of float32.
_BLOCK = 1920
_high, _low, _one = SumsTile(HIGH), SumsTile(LOW), SumsTile(1)
_copy_one, _copy_rows, _copy_columns = VectorCopy(1), VectorCopy(HIGH), VectorCopy()
_transpose, _transpose_rest = VectorTranspose(), VectorTranspose(HIGH)
_LINE = 64


def memory_size(rows: int, depth: int, itemsize: int) -> int:
    """Return the number of elements of temporary memory that :func:`product` needs for ``rows`` and inner ``depth``."""
    block = min(rows, _BLOCK // itemsize) + tile_columns(itemsize)
    return block * min(depth, DEPTH) + 2 * (VECTOR + _LINE) // itemsize


@kernel("bool(const T[:,:], const T[:,:], T[:,:], T[::1])")
def product(a: Array, b: Array, c: Array, memory: Array) -> bool:
    """Write ``a @ b`` to ``c``; return False and do nothing if matrices lie in memory in a way that it cannot read.

    No axis has length 0. Rows or columns of ``a`` and ``b``, and rows of ``c``, must be contiguous. ``memory`` is
    temporary, of :func:`memory_size` elements.
    """
    item, wide = c.itemsize, tile_columns(c.itemsize)
    (rows, depth), columns = a.shape, b.shape[1]
    a_rows, b_rows = by_rows(a), by_rows(b)
    if not ((a_rows or by_columns(a)) and (b_rows or by_columns(b)) and by_rows(c)):
        return False
    a_step, b_step = a.strides[0 if a_rows else 1] // item, b.strides[0 if b_rows else 1] // item
    c_step, block = c.strides[0] // item, _BLOCK // item
    for start in range(0, depth, DEPTH):  # numba wants steps that are constants: others might be 0 and raise
        terms = min(DEPTH, depth - start)
        right = first_line(memory, min(rows, block) * terms + VECTOR // item)
        for number in range((rows + block - 1) // block):
            top = number * block
            height = min(block, rows - top)
            at = top * a_step + start if a_rows else start * a_step + top
            pack_left(a, at, a_step, a_rows, height, terms, memory, 0)
            for panel in range((columns + wide - 1) // wide):
                left = panel * wide
                width = min(wide, columns - left)
                at = start * b_step + left if b_rows else left * b_step + start
                pack_right(b, at, b_step, b_rows, width, terms, memory, right)
                ahead = at + (wide if b_rows else wide * b_step) if left + 2 * wide <= columns else 0
                to = top * c_step + left
                tiles(memory, 0, right, height, terms, c, to, c_step, width, start == 0, b, ahead, b_step, b_rows)
    return True


def by_rows(x: Any) -> Any:
    """Tell whether the rows of a matrix are contiguous."""
    return x.strides[1] == x.itemsize or x.shape[1] == 1


def by_columns(x: Any) -> Any:
    """Tell whether the columns of a matrix are contiguous."""
    return x.strides[0] == x.itemsize or x.shape[0] == 1


def first_line(memory: Any, index: Any) -> Any:
    """Return the first index from ``index`` on at which a cache line begins."""
    past = (np.int64(memory.ctypes.data) + index * memory.itemsize) % _LINE
    return index + (_LINE - past) % _LINE // memory.itemsize


@apart
def tiles(
    memory: Any, left: Any, right: Any, rows: Any, terms: Any, c: Any, c_at: Any, c_step: Any, columns: Any, first: Any,
    b: Any, ahead: Any, b_step: Any, b_rows: Any,
) -> None:  # fmt: skip
    """Compute the tiles of the packed block at index ``left`` of ``memory`` by the packed panel at index ``right``.

    They go to ``c`` from index ``c_at`` on. The first two prefetch the panel of ``b`` at index ``ahead``, each a half.
    """
    row, mask, line = 0, -1 if b_rows else _LINE // c.itemsize - 1, 0 if b_rows else 1
    step = b_step if ahead else 0
    further = (_LINE // c.itemsize if b_rows else (mask + 1) * b_step) if ahead else 0
    while rows - row >= HIGH:
        at, packed = c_at + row * c_step, left + row * terms
        _high(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, ahead, mask, step, line)
        row, ahead, further = row + HIGH, ahead + further, 0
    while rows - row >= LOW:
        at, packed = c_at + row * c_step, left + row * terms
        _low(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, ahead, mask, step, line)
        row += LOW
    while rows - row >= 1:
        at, packed = c_at + row * c_step, left + row * terms
        _one(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, ahead, mask, step, line)
        row += 1


@apart
def pack_left(a: Any, at: Any, step: Any, by_rows: Any, rows: Any, terms: Any, memory: Any, first: Any) -> None:
    """Copy ``rows`` rows of ``terms`` elements, from index ``at`` of ``a`` on, to index ``first`` of ``memory``.

    They are stored in the order in which tiles read them.
    """
    row = 0
    while row < rows:
        left, to, whole = rows - row, first + row * terms, 0
        height = HIGH if left >= HIGH else (LOW if left >= LOW else 1)
        place = at + row * step if by_rows else at + row
        if height == HIGH and by_rows:
            whole = pack_transposed(a, place, step, HIGH, terms, memory, to)
        elif height == HIGH:
            whole = terms
            for p in range(terms):
                _copy_rows(a, place + p * step, memory, to + p * HIGH)
        for i in range(height):
            for p in range(whole, terms):
                _copy_one(a, place + (i * step + p if by_rows else i + p * step), memory, to + p * height + i)
        row += height


@apart
def pack_right(b: Any, at: Any, step: Any, by_rows: Any, columns: Any, terms: Any, memory: Any, right: Any) -> None:
    """Copy ``terms`` rows of ``columns`` elements, from index ``at`` of ``b`` on, to index ``right`` of ``memory``.

    Columns that the tile has beyond them become 0.
    """
    wide, whole = tile_columns(b.itemsize), 0
    if columns == wide and by_rows:
        whole = terms
        for p in range(terms):
            _copy_columns(b, at + p * step, memory, right + p * wide)
    elif columns == wide:
        whole = pack_transposed(b, at, step, wide, terms, memory, right)
    else:
        memory[right : right + terms * wide] = 0
    for j in range(columns):
        for p in range(whole, terms):
            _copy_one(b, at + (p * step + j if by_rows else j * step + p), memory, right + p * wide + j)


def pack_transposed(x: Any, at: Any, step: Any, count: Any, terms: Any, memory: Any, to: Any) -> Any:
    """Copy ``count`` rows of ``terms`` elements to ``memory``, one column after the other; return how many columns.

    These are as many as fill whole vectors. ``count`` is the height of a high tile, or its number of columns. The
    rows that fill no vector go first, since what is stored beyond them is overwritten then.
    """
    lanes = VECTOR // x.itemsize
    rest = count % lanes
    for number in range(terms // lanes):
        p = number * lanes
        if rest:
            _transpose_rest(x, at + (count - rest) * step + p, step, memory, to + p * count + count - rest, count)
        for group in range(count // lanes):
            i = group * lanes
            _transpose(x, at + i * step + p, step, memory, to + p * count + i, count)
    return terms // lanes * lanes

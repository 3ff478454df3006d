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
from mpizero.kernels.products.tile import HIGH, LOW, UNROLL, VECTOR, SumsTile, VectorCopy, VectorTranspose, tile_columns
from mpizero.types import Array

#: Terms of a sum that are added before the sum is stored. Longer is faster, up to the size of a cache; shorter is more
#: accurate.
DEPTH = 1024
#: Bytes of one column of a block of the left operand: 480 rows of float32.
_BLOCK = 1920
_high, _low, _one = SumsTile(HIGH), SumsTile(LOW), SumsTile(1)
_copy_one, _copy_rows, _copy_columns = VectorCopy(1), VectorCopy(HIGH), VectorCopy()
_transpose, _transpose_rest = VectorTranspose(), VectorTranspose(HIGH)
#: Panels that are packed at once, and their bytes, at most: rows of the right operand lie in one page after the other.
_MOST_PANELS, _PANEL_BYTES = 8, 1 << 18
#: Tiles whose rows are packed at once, where these are columns of the left operand in memory.
_TOGETHER = 4
_LINE = 64


def memory_size(rows: int, depth: int, itemsize: int) -> int:
    """Return the number of elements of temporary memory that :func:`product` needs for ``rows`` and inner ``depth``."""
    terms, wide = min(depth, DEPTH), tile_columns(itemsize)
    panels = max(wide * terms, min(_MOST_PANELS * wide * terms, _PANEL_BYTES // itemsize))
    return min(rows, _BLOCK // itemsize) * terms + panels + 2 * (VECTOR + _LINE) // itemsize


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
        together = _MOST_PANELS
        while together > 1 and together * wide * terms * item > _PANEL_BYTES:
            together //= 2
        for number in range((rows + block - 1) // block):
            top = number * block
            height = min(block, rows - top)
            at = top * a_step + start if a_rows else start * a_step + top
            pack_left(a, at, a_step, a_rows, height, terms, memory, 0)
            left = 0
            while left < columns:
                width = min(wide, columns - left)
                panels = min(together, (columns - left) // wide) if width == wide and b_rows else 1
                at = start * b_step + left if b_rows else left * b_step + start
                pack_right(b, at, b_step, b_rows, width, panels, terms, memory, right)
                further = columns - left - panels * wide >= panels * wide
                ahead = next_panels(at, b_step, b_rows, panels, terms, item) if further else nothing_ahead()
                for panel in range(panels):
                    at, to = right + panel * wide * terms, top * c_step + left + panel * wide
                    tiles(memory, 0, at, height, terms, c, to, c_step, width, start == 0, b, ahead)
                    ahead = after_tiles(ahead, height // HIGH)
                left += panels * width
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


def nothing_ahead() -> Any:
    """Return a plan that prefetches nothing: see :func:`next_panels`."""
    return 0, 0, 1, -1, 0, 0


def next_panels(at: Any, step: Any, by_rows: Any, panels: Any, terms: Any, item: Any) -> Any:
    """Return how tiles prefetch the panels that follow those at index ``at``.

    These are: the index where the first tile begins, the distance to where the next one does, the number of tiles, and
    the arguments ``mask``, ``step`` and ``line`` of a tile. Of contiguous rows a tile fetches all lines of some rows,
    as every row may lie in a page of its own; of contiguous columns it fetches one line's width of them, and of these
    as much as it has steps for.
    """
    wide, line, steps = tile_columns(item), _LINE // item, terms // UNROLL
    if by_rows:
        lines = panels * wide // line
        return at + panels * wide, steps // lines * step, lines * UNROLL, lines - 1, line, step // lines
    return at + wide * step, line * step if UNROLL == 1 else steps, wide // line * UNROLL, line - 1, step, 1


def after_tiles(ahead: Any, count: Any) -> Any:
    """Return what is left to prefetch after ``count`` tiles."""
    at, further, tiles_left, mask, step, line = ahead
    done = min(count, tiles_left - 1)
    return at + done * further, further, tiles_left - done, mask, step, line


@apart
def tiles(
    memory: Any, left: Any, right: Any, rows: Any, terms: Any, c: Any, c_at: Any, c_step: Any, columns: Any, first: Any,
    b: Any, ahead: Any,
) -> None:  # fmt: skip
    """Compute the tiles of the packed block at index ``left`` of ``memory`` by the packed panel at index ``right``.

    They go to ``c`` from index ``c_at`` on. Meanwhile they prefetch parts of ``b``: see :func:`next_panels`.
    """
    place, further, tiles_left, mask, step, line = ahead
    row = 0
    while rows - row >= HIGH:
        at, packed = c_at + row * c_step, left + row * terms
        _high(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, place, mask, step, line)
        row, tiles_left = row + HIGH, tiles_left - 1
        if tiles_left > 0:
            place += further
    while rows - row >= LOW:
        at, packed = c_at + row * c_step, left + row * terms
        _low(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, place, mask, step, line)
        row += LOW
    while rows - row >= 1:
        at, packed = c_at + row * c_step, left + row * terms
        _one(memory, packed, memory, right, terms, c, at, c_step, columns, first, b, place, mask, step, line)
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
            whole, together = terms, min(left // HIGH, _TOGETHER)  # several tiles' rows share lines of the cache
            for p in range(terms):
                for tile in range(together):
                    _copy_rows(a, place + p * step + tile * HIGH, memory, to + (tile * terms + p) * HIGH)
            row += (together - 1) * HIGH
        for i in range(height):
            for p in range(whole, terms):
                _copy_one(a, place + (i * step + p if by_rows else i + p * step), memory, to + p * height + i)
        row += height


@apart
def pack_right(
    b: Any, at: Any, step: Any, by_rows: Any, columns: Any, panels: Any, terms: Any, memory: Any, right: Any
) -> None:  # fmt: skip
    """Copy ``terms`` rows of ``columns`` elements, from index ``at`` of ``b`` on, to index ``right`` of ``memory``.

    Columns that the tile has beyond them become 0. Of contiguous rows, ``panels`` such panels are copied at once.
    """
    wide, whole = tile_columns(b.itemsize), 0
    if columns == wide and by_rows:
        whole = terms
        for p in range(terms):
            for panel in range(panels):
                _copy_columns(b, at + p * step + panel * wide, memory, right + (panel * terms + p) * wide)
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

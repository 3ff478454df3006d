"""Compute convolutions on the CPU without a matrix of columns, by the tiles of matrix products.

All convolutions are made of two sums over *windows*. A view of windows is an array (samples, three axes of space, 1) of
any strides: its element [s, i, j, k, 0] is the first element that the window of output position (i, j, k) reads. A
window reads several *runs* of ``length`` successive elements each; the array ``runs`` holds the distance of each run
from that first element.

- :func:`window_products` writes, for each position, the product of the elements of its window and a matrix: the forward
  pass of a convolution, and the gradient of its input.
- :func:`window_sums` writes the sum over all positions of the products of window elements and the elements of another
  array: the gradient of the weights.

Each element of a product is one chain of fused multiply-adds over the window. Each element of a sum is one such chain
over the positions of each spatial tile, in ascending order; the chains of the tiles are added by the binary tree. So
the bits of an element depend neither on the shape of the field nor on the part of it that is computed, and not on the
CPU, as with matrix products ([Note: equal bits] in :mod:`.matmul`). On a CPU without fused multiply-adds NumPy
multiplies, run by run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpizero.kernels import jit
from mpizero.kernels.jit import apart, kernel
from mpizero.kernels.matmul import fuses, matmul
from mpizero.kernels.matmul_tile import HIGH, LOW, RunsTile, VectorCopy, flat, fold, tile_columns
from mpizero.types import Array

_high, _low, _one = (RunsTile(rows, along=True) for rows in (HIGH, LOW, 1))
_high_sums, _low_sums, _one_sums = (RunsTile(rows, along=False) for rows in (HIGH, LOW, 1))
#: Tiles for few columns, of one vector register: twice as many rows keep as many sums in registers.
_tall, _tall_low, _tall_one = (RunsTile(rows, along=True, across=1) for rows in (2 * HIGH, 2 * LOW, 1))
_tall_sums, _tall_low_sums, _tall_one_sums = (RunsTile(rows, along=False, across=1) for rows in (2 * HIGH, 2 * LOW, 1))
_copy, _copy_half, _copy_rows = VectorCopy(), VectorCopy(across=1), VectorCopy(HIGH)
#: Least number of multiplications of a thread's part.
_WORTH_A_THREAD = 1 << 22


def window_products(x: Array, runs: Array, length: int, weight: Array, bias: Array | None, out: Array) -> None:
    """Write ``sum_r sum_p x[..., runs[r] + p] * weight[r * length + p] + bias`` to ``out``, for each position.

    Parameters
    ----------
    x : Array
        The view of windows: (samples, n1, n2, n3, 1), of any strides.
    runs : Array
        Distance of each run (successive elements that a window reads) from the first element of a window, in elements:
        int64.
    length : int
        Elements of a run.
    weight : Array
        Matrix (runs * length, channels of the output).
    bias : Array or None
        Vector (channels of the output,), with which each sum begins; None stands for zeros.
    out : Array
        (samples, n1, n2, n3, channels), of any strides but for the last axis, which is contiguous.
    """
    if not out.size:
        return
    if not fuses():
        _products_by_numpy(x, runs, length, weight, bias, out)
        return
    columns = weight.shape[1]
    wide = panel_columns(columns, weight.itemsize)
    panels = -(-columns // wide)
    packed = np.zeros((panels, len(weight), wide), weight.dtype)
    for panel, target in enumerate(packed):
        part = weight[:, panel * wide : (panel + 1) * wide]
        target[:, : part.shape[1]] = part
    start = np.zeros(panels * wide, weight.dtype)
    start[:columns] = 0 if bias is None else bias
    at = np.arange(len(runs), dtype=np.int64) * length * wide
    lines, work = prod(out.shape[:3]), out.size * len(weight)
    parts = min(lines, jit.threads_for(work, _WORTH_A_THREAD))
    tasks = [
        functools.partial(_products, x, runs, packed, at, start, out, length, part.start, part.stop)
        for part in jit.parts_of(lines, parts)
    ]
    jit.run_tasks(tasks, parts)


@kernel(
    "void(const T[:,:,:,:,:], const i8[::1], const T[:,:,::1], const i8[::1], const T[::1], T[:,:,:,:,:], i8, i8, i8)"
)
def _products(
    x: Array, runs: Array, packed: Array, at: Array, start: Array, out: Array, length: int, first: int, stop: int
) -> None:
    """Compute lines ``first`` to ``stop`` - 1 of ``out``, a line being all positions along the third axis of space."""
    item, wide = out.itemsize, packed.shape[2]
    x_step, c_step = x.strides[3] // item, out.strides[3] // item
    for number in range(stop - first):
        line = first + number
        s, i, j = line // (out.shape[1] * out.shape[2]), line // out.shape[2] % out.shape[1], line % out.shape[2]
        source = (s * x.strides[0] + i * x.strides[1] + j * x.strides[2]) // item
        target = (s * out.strides[0] + i * out.strides[1] + j * out.strides[2]) // item
        for panel in range(packed.shape[0]):
            width, b_at = min(wide, out.shape[4] - panel * wide), panel * packed.shape[1] * wide
            line_products(x, source, x_step, packed, b_at, runs, at, length, start, panel * wide, out,
                          target + panel * wide, c_step, out.shape[3], width)  # fmt: skip


@apart
def line_products(
    x: Any, source: Any, x_step: Any, packed: Any, b_at: Any, runs: Any, at: Any, length: Any, start: Any, s_at: Any,
    out: Any, target: Any, c_step: Any, rows: Any, width: Any,
) -> None:  # fmt: skip
    """Compute ``width`` channels of the output at a line of ``rows`` positions, in tiles of a matrix product.

    So that all tiles have their full height, a tile may overlap the one before: some positions are computed twice, with
    the same bits.
    """
    wide = packed.shape[2]
    narrow = wide < tile_columns(out.itemsize)
    high, low = (2 * HIGH, 2 * LOW) if narrow else (HIGH, LOW)
    row = 0
    while row < rows:
        left = rows - row
        if left >= high or (rows >= high and left > low):
            row = min(row, rows - high)
            if narrow:
                _tall(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide, start,
                      s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            else:
                _high(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide, start,
                      s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            row += high
        elif rows >= low:
            row = min(row, rows - low)
            if narrow:
                _tall_low(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide,
                          start, s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            else:
                _low(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide, start,
                     s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            row += low
        else:
            if narrow:
                _tall_one(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide,
                          start, s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            else:
                _one(x, source + row * x_step, packed, b_at, runs, 0, at, 0, runs.size, length, x_step, wide, start,
                     s_at, 0, out, target + row * c_step, c_step, width)  # fmt: skip
            row += 1


def panel_columns(columns: int, itemsize: int) -> int:
    """Return how many columns a tile of the product has: those of one vector register, or of two if one is too few.

    ``columns`` is how many columns the whole product has.
    """
    wide = tile_columns(itemsize)
    return wide // 2 if columns <= wide // 2 else wide


def window_sums(x: Array, runs: Array, length: int, dy: Array, boxes: Array, out: Array) -> None:
    """Write ``sum over positions of x[..., runs[r] + p] * dy[..., c]`` to ``out[r * length + p, c]``.

    Each spatial tile has a sum of its own, over its positions in ascending order, sample after sample; the sums of
    tiles are added by the binary tree.

    Parameters
    ----------
    x : Array
        The view of windows: (samples, n1, n2, n3, 1), of any strides.
    runs : Array
        Distance of each run (successive elements that a window reads) from the first element of a window, in elements:
        int64.
    length : int
        Elements of a run.
    dy : Array
        (samples, n1, n2, n3, channels), of any strides but for the last axis, which is contiguous. As many elements as
        a tile of a matrix product has columns are read together, so there must be readable memory after the array's
        last element: see :func:`with_margin`.
    boxes : Array
        Ranges of positions [start, stop) of each spatial tile on three axes: (tiles, 3, 2) integers, for 1, 2, 4, ...
        tiles.
    out : Array
        Matrix (runs * length, channels), contiguous.
    """
    if not dy.size:
        out[...] = 0
    elif not fuses():
        _sums_by_numpy(x, runs, length, dy, boxes, out)
    else:
        dtype = out.dtype
        together = _boxes_at_once(prod(dy.shape[:4]) * (x.strides[3] + dy.strides[3]), len(boxes))
        counts = len(dy) * np.prod((boxes[..., 1] - boxes[..., 0])[:, :2], axis=1)
        first = np.concatenate([[0], np.cumsum(counts)])
        lines = np.empty((2, first[-1]), np.int64)
        _lines(x, dy, boxes, lines[0], lines[1])
        levels = (len(boxes) // together).bit_length()
        partial = np.empty((levels, *out.shape), dtype) if levels > 1 else out[None]
        wide = panel_columns(out.shape[1], out.itemsize)
        high = HIGH * tile_columns(out.itemsize) // wide
        units = len(runs) * -(-length // high)
        parts = min(units, jit.threads_for(dy.size * len(out), _WORTH_A_THREAD))
        unit = high * wide * -(-out.shape[1] // wide)
        at_once = min(-(-units // parts), max(1, _NEAREST // (unit * out.itemsize)))
        stacks = np.empty((parts, together.bit_length() + 1, at_once * unit), dtype)
        near = max(128, _NEAREST // (dy.shape[4] * dy.itemsize + max(x.strides[3], 64)))
        most = max(near, int((boxes[:, 2, 1] - boxes[:, 2, 0]).max()))
        packed = [np.empty((2, most * max(high, -(-out.shape[1] // wide) * wide)), dtype) for _ in range(parts)]
        places = np.empty((parts, most), np.int64)
        given = flat(x), runs, dy, boxes, first, *lines, partial
        sizes = length, x.strides[3] // x.itemsize, together, near, wide
        tasks = [
            functools.partial(_sums, *given, stack, *operands, starts, *sizes, part.start, part.stop)
            for stack, operands, starts, part in zip(stacks, packed, places, jit.parts_of(units, parts), strict=True)
        ]
        jit.run_tasks(tasks, parts)
        if levels > 1:
            out[...] = partial[0]


#: Bytes of operands that are read again for every block of the result; and of what is to be in the nearest cache.
_NEAR, _NEAREST = 1 << 20, 1 << 15
#: Positions of a line from which on its loop hides what it costs to begin and to end.
_SHORT = 12


def _boxes_at_once(nbytes: int, boxes: int) -> int:
    """Return over how many spatial tiles a block of the result is summed before the next block is begun.

    ``nbytes`` is the size of the operands of all ``boxes`` tiles. The more tiles, the fewer partial sums of the whole
    result there are; but the operands shall stay in the cache.
    """
    together = boxes
    while together > 1 and nbytes * together > boxes * _NEAR:
        together //= 2
    return together


@kernel("void(const T[:,:,:,:,:], const T[:,:,:,:,:], const i8[:,:,::1], i8[::1], i8[::1])")
def _lines(x: Array, dy: Array, boxes: Array, x_lines: Array, dy_lines: Array) -> None:
    """Write the index in ``x`` and ``dy`` at which each line (a spatial tile's positions on the last axis) begins."""
    item, line = dy.itemsize, 0
    for box in range(boxes.shape[0]):
        a, b, c = boxes[box, 0, 0], boxes[box, 1, 0], boxes[box, 2, 0]
        a_stop, b_stop = boxes[box, 0, 1], boxes[box, 1, 1]
        for s in range(dy.shape[0]):
            for i in range(a_stop - a):
                for j in range(b_stop - b):
                    place = s * x.strides[0] + (a + i) * x.strides[1] + (b + j) * x.strides[2] + c * x.strides[3]
                    x_lines[line] = place // item
                    place = s * dy.strides[0] + (a + i) * dy.strides[1] + (b + j) * dy.strides[2] + c * dy.strides[3]
                    dy_lines[line] = place // item
                    line += 1


@kernel(
    "void(const T[::1], const i8[::1], const T[:,:,:,:,:], const i8[:,:,::1], const i8[::1], const i8[::1],"
    "const i8[::1], T[:,:,::1], T[:,::1], T[::1], T[::1], i8[::1], i8, i8, i8, i8, i8, i8, i8)"
)
def _sums(
    x: Array, runs: Array, dy: Array, boxes: Array, first: Array, x_lines: Array, dy_lines: Array, partial: Array,
    stack: Array, left: Array, packed: Array, places: Array, length: int, x_step: int, together: int, near: int,
    wide: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Compute the units (blocks of rows of the result) ``begin`` to ``end`` - 1, with tiles of ``wide`` columns.

    The result is a sum over spatial tiles, which are added as a binary tree. ``stack`` has memory for partial sums of
    spatial tiles, ``partial`` for sums of groups of ``together`` spatial tiles; the result ends in ``partial[0]``. As
    many units are computed together as ``stack`` has room for, from about ``near`` positions at a time, so that the
    operands at these positions stay in the first-level cache.

    A line is the positions of a spatial tile along the last axis of space; ``x_lines`` and ``dy_lines`` hold the index
    at which each begins in ``x`` and ``dy``, and ``first`` holds each spatial tile's first line. ``packed`` gets a copy
    of the elements of ``dy`` at the positions that are computed, because in ``dy`` these elements lie many channels
    apart, so that few of them fit into the cache. Where lines are short, and the result has more than ``2 * wide``
    columns, ``left`` gets a copy of the elements of ``x`` at these positions, without a gap, so that one loop runs over
    all lines.
    """
    high = HIGH * tile_columns(dy.itemsize) // wide
    columns, blocks = partial.shape[2], (length + high - 1) // high
    panels, block = (columns + wide - 1) // wide, high * wide
    at_once, depth = stack.shape[1] // (panels * block), 0
    for group in range(boxes.shape[0] // together):
        lead = begin
        while lead < end:
            after, top = min(lead + at_once, end), 0
            for number in range(together):
                box = group * together + number
                count = boxes[box, 2, 1] - boxes[box, 2, 0]
                stack[top] = 0
                joins = panels > 2 and count < _SHORT
                line, step = first[box], max(1, near // max(1, count))
                while line < first[box + 1]:
                    lines = min(step, first[box + 1] - line)
                    pack_panels(dy, dy_lines, line, lines, count, packed, places, panels, wide)
                    for unit in range(lead, after):
                        run, row = unit // blocks, unit % blocks * high
                        height = min(high, length - row)
                        if joins:
                            pack_rows(x, runs[run] + row, x_lines, line, lines, count, x_step, left, height, high)
                        for panel in range(panels):
                            to = top * stack.shape[1] + ((unit - lead) * panels + panel) * block
                            at = panel * lines * count * wide
                            if joins:
                                block_sums(left, 0, packed, at, places, 0, places, 1, lines * count, high, stack, to,
                                           height, wide)  # fmt: skip
                            else:
                                block_sums(x, runs[run] + row, packed, at, x_lines, line, places, lines, count, x_step,
                                           stack, to, height, wide)  # fmt: skip
                    line += lines
                added = number + 1
                while added % 2 == 0:
                    top, added = top - 1, added // 2
                    for k in range((after - lead) * panels * block):
                        stack[top, k] += stack[top + 1, k]
                top += 1
            for unit in range(lead, after):
                run, row = unit // blocks, unit % blocks * high
                at, to = run * length + row, (unit - lead) * panels * block
                write_rows(stack, to, partial, depth, at, min(high, length - row), block, wide)
            lead = after
        added = group + 1
        while added % 2 == 0:
            depth, added = depth - 1, added // 2
            for unit in range(begin, end):
                run, row = unit // blocks, unit % blocks * high
                for i in range(min(high, length - row)):
                    for k in range(columns):
                        at = run * length + row + i
                        partial[depth, at, k] += partial[depth + 1, at, k]
        depth += 1


@apart
def write_rows(
    stack: Any, at: Any, partial: Any, depth: Any, row: Any, height: Any, block: Any, wide: Any
) -> None:  # fmt: skip
    """Copy ``height`` rows of sums, which ``stack[0]`` holds as blocks of ``wide`` columns, to ``partial[depth]``.

    ``stack[0]`` holds the sums of some spatial tiles from index ``at`` on; each block of ``wide`` columns takes
    ``block`` elements. The first row is row ``row`` of ``partial[depth]``.
    """
    columns, panel = partial.shape[2], 0
    while panel * wide < columns:
        for i in range(height):
            for k in range(min(wide, columns - panel * wide)):
                partial[depth, row + i, panel * wide + k] = stack[0, at + panel * block + i * wide + k]
        panel += 1


@apart
def pack_panels(
    dy: Any, dy_lines: Any, line: Any, lines: Any, count: Any, packed: Any, places: Any, panels: Any, wide: Any
) -> None:  # fmt: skip
    """Copy ``dy`` at ``count`` positions of each of ``lines`` lines to ``packed``, one panel after the other.

    A line is the positions of a spatial tile along the last axis of space; the first one to copy has the index
    ``line``, and ``dy_lines`` holds the index in ``dy`` at which each begins. A panel holds ``wide`` channels of all
    these positions. ``places[i]`` gets the index in a panel at which line i begins.
    """
    step = dy.strides[3] // dy.itemsize
    for i in range(lines):
        places[i] = i * count * wide
        for panel in range(panels):
            source, to = dy_lines[line + i] + panel * wide, (panel * lines + i) * count * wide
            for k in range(count):
                if wide < tile_columns(dy.itemsize):
                    _copy_half(dy, source + k * step, packed, to + k * wide)
                else:
                    _copy(dy, source + k * step, packed, to + k * wide)


@apart
def pack_rows(
    x: Any, at: Any, x_lines: Any, line: Any, lines: Any, count: Any, step: Any, left: Any, height: Any, high: Any
) -> None:  # fmt: skip
    """Copy ``height`` elements of ``x`` at each of the ``count`` positions of ``lines`` lines to ``left``.

    A line is the positions of a spatial tile along the last axis of space; ``x_lines`` holds the index in ``x`` at
    which each begins, and the elements lie ``at`` elements after each position. In ``left``, each position has room for
    ``high`` elements.
    """
    for i in range(lines):
        source, to = x_lines[line + i] + at, i * count * high
        for k in range(count):
            if height == high:
                _copy_rows(x, source + k * step, left, to + k * high)
            else:
                for r in range(height):
                    left[to + k * high + r] = x[source + k * step + r]


@apart
def block_sums(
    x: Any, at: Any, packed: Any, panel: Any, x_lines: Any, first: Any, places: Any, lines: Any, count: Any,
    x_step: Any, stack: Any, place: Any, height: Any, wide: Any,
) -> None:  # fmt: skip
    """Add a block of a weight gradient, ``height`` rows of ``wide`` elements, to ``stack`` from index ``place`` on.

    An element is the sum, over ``count`` positions in each of ``lines`` lines (positions of a spatial tile along the
    last axis of space), of an element of ``x`` times one of ``dy``. Line i begins in ``x`` at ``x_lines[first + i]``;
    the element of row r lies ``at + r`` elements after a position. ``dy`` is read from ``packed``, where
    :func:`pack_panels` has written ``wide`` channels of each position, from index ``panel`` on.
    """
    narrow = wide < tile_columns(packed.itemsize)
    high, low = (2 * HIGH, 2 * LOW) if narrow else (HIGH, LOW)
    done = 0
    while done < height:
        to = place + done * wide
        if height - done == high:
            if narrow:
                _tall_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step, wide,
                           stack, to, wide, stack, to, wide, wide)  # fmt: skip
            else:
                _high_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step, wide,
                           stack, to, wide, stack, to, wide, wide)  # fmt: skip
            done += high
        elif height - done >= low:
            if narrow:
                _tall_low_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step,
                               wide, stack, to, wide, stack, to, wide, wide)  # fmt: skip
            else:
                _low_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step, wide,
                          stack, to, wide, stack, to, wide, wide)  # fmt: skip
            done += low
        else:
            if narrow:
                _tall_one_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step,
                               wide, stack, to, wide, stack, to, wide, wide)  # fmt: skip
            else:
                _one_sums(x, at + done, packed, panel, x_lines, first, places, 0, lines, count, x_step, wide,
                          stack, to, wide, stack, to, wide, wide)  # fmt: skip
            done += 1


def with_margin(dy: Array, groups: int = 1) -> Array:
    """Return ``dy`` as a contiguous array, followed in memory by elements that :func:`window_sums` may read.

    :func:`window_sums` is called for each of ``groups`` equal ranges of the channels of ``dy``.
    """
    wide = tile_columns(dy.itemsize)
    if dy.shape[-1] // groups % max(wide, 1) == 0:
        return np.ascontiguousarray(dy)
    memory = np.empty(dy.size + wide, dy.dtype)
    memory[dy.size :] = 0
    copy = memory[: dy.size].reshape(dy.shape)
    copy[...] = dy
    return copy


def position_sums(dy: Array, boxes: Array, out: Array) -> None:
    """Write the sum of ``dy`` (samples, n1, n2, n3, channels) over samples and positions to ``out``, by channel.

    Each spatial tile of ``boxes`` has a sum of its own; the order of additions is that of :func:`window_sums`.
    """
    _position_sums(np.ascontiguousarray(dy), boxes, np.empty((len(boxes).bit_length() + 1, len(out)), out.dtype), out)


@kernel("void(const T[:,:,:,:,::1], const i8[:,:,::1], T[:,::1], T[::1])")
def _position_sums(dy: Array, boxes: Array, stack: Array, out: Array) -> None:
    """Compute the sums of :func:`position_sums`; ``stack`` is temporary memory."""
    top = 0
    for box in range(boxes.shape[0]):
        stack[top] = 0
        a, b, c = boxes[box, 0, 0], boxes[box, 1, 0], boxes[box, 2, 0]
        a_stop, b_stop, c_stop = boxes[box, 0, 1], boxes[box, 1, 1], boxes[box, 2, 1]
        for s in range(dy.shape[0]):
            for i in range(a_stop - a):
                for j in range(b_stop - b):
                    for k in range(c_stop - c):
                        for channel in range(out.size):
                            stack[top, channel] += dy[s, a + i, b + j, c + k, channel]
        added = box + 1
        while added % 2 == 0:
            top, added = top - 1, added // 2
            for channel in range(out.size):
                stack[top, channel] += stack[top + 1, channel]
        top += 1
    for channel in range(out.size):
        out[channel] = stack[0, channel]


def _elements(x: Array, run: int, length: int) -> Any:
    """Return the elements of a run (contiguous part of a window) in all windows, as a matrix (positions, length)."""
    first: Any = as_strided(x, (*x.shape[:4], run + length), (*x.strides[:4], x.itemsize))
    return first[..., run:].reshape(-1, length)


def _products_by_numpy(x: Array, runs: Array, length: int, weight: Array, bias: Array | None, out: Array) -> None:
    total = np.zeros((prod(out.shape[:4]), weight.shape[1]), out.dtype)
    total += 0 if bias is None else bias
    for number, run in enumerate(runs.tolist()):
        total += matmul(_elements(x, run, length), weight[number * length : (number + 1) * length])
    out[...] = total.reshape(out.shape)


def _sums_by_numpy(x: Array, runs: Array, length: int, dy: Array, boxes: Array, out: Array) -> None:
    def sums(box: Array) -> Array:
        place = (slice(None), *(slice(*pair) for pair in box.tolist()))
        right, total = np.ascontiguousarray(dy[place]).reshape(-1, dy.shape[4]), np.zeros_like(out)
        for number, run in enumerate(runs.tolist()):
            left = np.ascontiguousarray(_elements(x[place], run, length).T)
            total[number * length : (number + 1) * length] = matmul(left, right)
        return total

    fold(np.add, list(map(sums, boxes)), out)


def merged(offsets: Sequence[Sequence[int]], steps: Sequence[int], channels: int) -> tuple[Array, int]:
    """Return the runs of a window and their length; if all taps of the last axis are neighbours, they make one run.

    A tap is one position of the window, with its channels; neighbours follow one another in memory without a gap. A run
    is a range of successive elements in memory, given by its distance from the window's first element.

    Parameters
    ----------
    offsets : sequence of sequences of int
        By axis, the positions of the taps relative to the first one.
    steps : sequence of int
        By axis, elements from one position to the next.
    channels : int
        Elements of a tap.
    """
    *outer, last = (np.asarray(axis, np.int64) * step for axis, step in zip(offsets, steps, strict=True))
    if steps[-1] == channels and all(b - a == channels for a, b in zip(last[:-1], last[1:], strict=True)):
        last, channels = last[:1], channels * len(last)
    runs = functools.reduce(lambda a, b: (a[:, None] + b).reshape(-1), [*outer, last])
    return np.ascontiguousarray(runs), channels

"""Compute on the CPU what layers of fields need: pooling, interpolation, and normalization over space.

A field comes as an array (samples, planes, rows, columns, channels); the axes of space that it does not have are of
length 1, before those that it has. The innermost loops are over channels, one row of memory. So each channel's sum
is computed in the order of the positions, and LLVM still vectorizes the loops.

Every element of an output and of a gradient is computed by itself, as a sum over the positions that it depends on, in
ascending order. So its bits do not depend on which part of a field is computed. Sums over a whole field have one
partial sum for each spatial tile of :mod:`mpizero.layout.fields`, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero.kernels.formulas import layernorm_gradient, scaled, standardized
from mpizero.kernels.jit import kernel
from mpizero.types import Array


def covered(output: Any, window: Any, stride: Any, extent: Any) -> Any:
    """Return how many positions of an axis of ``extent`` positions the window of an output position covers."""
    rest = extent - output * stride
    return window if window < rest else rest


def covering(position: Any, window: Any, stride: Any, outputs: Any) -> Any:
    """Return the first output position whose window may cover ``position``, and the one after the last."""
    first, end = (position - window + stride) // stride if position >= window else 0, position // stride + 1
    return first, end if end < outputs else outputs


def clear(x: Any) -> None:
    """Write zeros to ``x``, the channels of one position."""
    for c in range(x.size):
        x[c] = x.dtype.type(0)


@kernel("void(const T[:,:,:,:,::1], const i8[:,::1], T[:,:,:,:,::1], i4[:,:,:,:,::1])", divided=("x", "y", "places"))
def max_pool(x: Array, sizes: Array, y: Array, places: Array) -> None:
    """Write the maximum of each window to ``y``, and the index of the first place that has it to ``places``.

    ``sizes`` are the windows and the strides of the three axes: (2, 3). The index of a place is its row-major index in
    a whole window, also where the window is cut at the end of an axis. A NaN counts as larger than all numbers.
    """
    for n in range(y.shape[0]):
        for d in range(y.shape[1]):
            for h in range(y.shape[2]):
                for w in range(y.shape[3]):
                    best, place = y[n, d, h, w], places[n, d, h, w]
                    first = x[n, d * sizes[1, 0], h * sizes[1, 1], w * sizes[1, 2]]
                    for c in range(best.size):
                        best[c], place[c] = first[c], 0
                    for i in range(covered(d, sizes[0, 0], sizes[1, 0], x.shape[1])):
                        for j in range(covered(h, sizes[0, 1], sizes[1, 1], x.shape[2])):
                            for k in range(covered(w, sizes[0, 2], sizes[1, 2], x.shape[3])):
                                part = x[n, d * sizes[1, 0] + i, h * sizes[1, 1] + j, w * sizes[1, 2] + k]
                                number = np.int32((i * sizes[0, 1] + j) * sizes[0, 2] + k)
                                for c in range(best.size):
                                    larger = (part[c] > best[c]) | ((part[c] != part[c]) & (best[c] == best[c]))
                                    best[c] = part[c] if larger else best[c]
                                    place[c] = number if larger else place[c]


@kernel(
    "void(const T[:,:,:,:,::1], const i4[:,:,:,:,::1], const i8[:,::1], T[:,:,:,:,::1])", divided=("dx", "dy", "places")
)
def max_pool_backward(dy: Array, places: Array, sizes: Array, dx: Array) -> None:
    """Write the gradient of the input of :func:`max_pool` to ``dx``, from ``dy``, the gradient of y."""
    T = dy.dtype.type  # noqa: N806
    for n in range(dx.shape[0]):
        for d in range(dx.shape[1]):
            plane, after_plane = covering(d, sizes[0, 0], sizes[1, 0], dy.shape[1])
            for h in range(dx.shape[2]):
                row, after_row = covering(h, sizes[0, 1], sizes[1, 1], dy.shape[2])
                for w in range(dx.shape[3]):
                    column, after_column = covering(w, sizes[0, 2], sizes[1, 2], dy.shape[3])
                    result = dx[n, d, h, w]
                    clear(result)
                    for i in range(plane, after_plane):
                        for j in range(row, after_row):
                            number = ((d - i * sizes[1, 0]) * sizes[0, 1] + h - j * sizes[1, 1]) * sizes[0, 2] + w
                            for k in range(column, after_column):
                                above, place, here = dy[n, i, j, k], places[n, i, j, k], number - k * sizes[1, 2]
                                for c in range(result.size):
                                    result[c] += above[c] if place[c] == np.int32(here) else T(0)


@kernel("void(const T[:,:,:,:,::1], const i8[:,::1], i8, T[:,:,:,:,::1])", divided=("x", "y"))
def sum_pool(x: Array, sizes: Array, mean: int, y: Array) -> None:
    """Write the sum of each window to ``y``, or the mean if ``mean`` is not 0; positions are added in row-major order.

    ``sizes`` are the windows and the strides of the three axes: (2, 3). A window at the end of an axis covers only the
    positions that the field has.
    """
    T = x.dtype.type  # noqa: N806
    for n in range(y.shape[0]):
        for d in range(y.shape[1]):
            for h in range(y.shape[2]):
                for w in range(y.shape[3]):
                    planes = covered(d, sizes[0, 0], sizes[1, 0], x.shape[1])
                    rows = covered(h, sizes[0, 1], sizes[1, 1], x.shape[2])
                    columns = covered(w, sizes[0, 2], sizes[1, 2], x.shape[3])
                    result = y[n, d, h, w]
                    clear(result)
                    for i in range(planes):
                        for j in range(rows):
                            for k in range(columns):
                                part = x[n, d * sizes[1, 0] + i, h * sizes[1, 1] + j, w * sizes[1, 2] + k]
                                for c in range(result.size):
                                    result[c] += part[c]
                    count = T(planes * rows * columns)
                    if mean:
                        for c in range(result.size):
                            result[c] /= count


@kernel("void(const T[:,:,:,:,::1], const i8[:,::1], T[:,:,:,:,::1])", divided=("dx", "dy"))
def mean_pool_backward(dy: Array, sizes: Array, dx: Array) -> None:
    """Write the gradient of the input of :func:`sum_pool`, with means, to ``dx``, from ``dy``, the gradient of y."""
    T = dy.dtype.type  # noqa: N806
    for n in range(dx.shape[0]):
        for d in range(dx.shape[1]):
            plane, after_plane = covering(d, sizes[0, 0], sizes[1, 0], dy.shape[1])
            for h in range(dx.shape[2]):
                row, after_row = covering(h, sizes[0, 1], sizes[1, 1], dy.shape[2])
                for w in range(dx.shape[3]):
                    column, after_column = covering(w, sizes[0, 2], sizes[1, 2], dy.shape[3])
                    result = dx[n, d, h, w]
                    clear(result)
                    for i in range(plane, after_plane):
                        planes = covered(i, sizes[0, 0], sizes[1, 0], dx.shape[1])
                        for j in range(row, after_row):
                            rows = covered(j, sizes[0, 1], sizes[1, 1], dx.shape[2])
                            for k in range(column, after_column):
                                above = dy[n, i, j, k]
                                count = T(planes * rows * covered(k, sizes[0, 2], sizes[1, 2], dx.shape[3]))
                                for c in range(result.size):
                                    result[c] += above[c] / count


def place_between(output: Any, factor: Any, extent: Any) -> Any:
    """Return where position ``output`` of a stretched axis lies on the original axis, in steps of 1 / (2 factor).

    Positions have half-pixel centers; the result is limited to the centers of the first and the last position.
    """
    place, last = 2 * output + 1 - factor, 2 * factor * (extent - 1)
    if place < 0:
        return 0
    return place if place < last else last


@kernel("void(const T[:,:,::1], i8, T[:,:,::1])", divided=("y", "x"))
def interpolate(x: Array, factor: int, y: Array) -> None:
    """Write ``x`` to ``y`` with ``factor`` times as many positions on the middle axis, by linear interpolation."""
    T = x.dtype.type  # noqa: N806
    whole = T(2 * factor)
    for n in range(y.shape[0]):
        for i in range(y.shape[1]):
            place = place_between(i, factor, x.shape[1])
            left = place // (2 * factor)
            rest = place - left * (2 * factor)
            here, result = x[n, left], y[n, i]
            if rest:
                after, a, b = x[n, left + 1], T(2 * factor - rest) / whole, T(rest) / whole
                for c in range(result.size):
                    result[c] = a * here[c] + b * after[c]
            else:
                for c in range(result.size):
                    result[c] = here[c]


@kernel("void(const T[:,:,::1], i8, T[:,:,::1])", divided=("dy", "dx"))
def interpolate_backward(dy: Array, factor: int, dx: Array) -> None:
    """Write the gradient of the input of :func:`interpolate` to ``dx``, from ``dy``, the gradient of y."""
    T = dy.dtype.type  # noqa: N806
    whole = T(2 * factor)
    for n in range(dx.shape[0]):
        for i in range(dx.shape[1]):
            result = dx[n, i]
            clear(result)
            for k in range(3 * factor):
                j = factor * (i - 1) + k
                distance = abs(place_between(j, factor, dx.shape[1]) - 2 * factor * i)
                if 0 <= j < dy.shape[1] and distance < 2 * factor:
                    above, a = dy[n, j], T(2 * factor - distance) / whole
                    for c in range(result.size):
                        result[c] += a * above[c]


@kernel("void(const T[:,:,:,:,::1], const i8[:,:,::1], f8[:,:,::1], f8[:,:,::1])", divided=("x", "mean", "squares"))
def tile_moments(x: Array, boxes: Array, mean: Array, squares: Array) -> None:
    """Write the mean over each spatial tile to ``mean``, and the sum of the squared differences from it to ``squares``.

    Both are (samples, tiles, channels). ``boxes`` are the ranges [start, stop) of each tile along the three axes:
    (tiles, 3, 2).
    """
    for n in range(x.shape[0]):
        for tile in range(boxes.shape[0]):
            box, m, q = boxes[tile], mean[n, tile], squares[n, tile]
            clear(m)
            clear(q)
            for d in range(box[0, 0], box[0, 1]):
                for h in range(box[1, 0], box[1, 1]):
                    for w in range(box[2, 0], box[2, 1]):
                        part = x[n, d, h, w]
                        for c in range(m.size):
                            m[c] += np.float64(part[c])
            count = (box[0, 1] - box[0, 0]) * (box[1, 1] - box[1, 0]) * (box[2, 1] - box[2, 0])
            if count:
                for c in range(m.size):
                    m[c] /= np.float64(count)
            for d in range(box[0, 0], box[0, 1]):
                for h in range(box[1, 0], box[1, 1]):
                    for w in range(box[2, 0], box[2, 1]):
                        part = x[n, d, h, w]
                        for c in range(q.size):
                            difference = np.float64(part[c]) - m[c]
                            q[c] += difference * difference


@kernel(
    "void(const T[:,:,:,:,::1], const T[:,:,:,:,::1], const T[:,::1], const T[:,::1], const i8[:,:,::1], "
    "f8[:,:,::1], f8[:,:,::1])",
    divided=("dy", "x", "mean", "rstd", "sums", "products"),
)
def tile_sums(dy: Array, x: Array, mean: Array, rstd: Array, boxes: Array, sums: Array, products: Array) -> None:
    """Write the sum of ``dy`` over each spatial tile to ``sums``, and that of ``dy * (normalized x)`` to ``products``.

    Both are (samples, tiles, channels); ``mean`` and ``rstd`` are (samples, channels). ``boxes`` are as in
    :func:`tile_moments`.
    """
    for n in range(x.shape[0]):
        for tile in range(boxes.shape[0]):
            box, s, p, m, r = boxes[tile], sums[n, tile], products[n, tile], mean[n], rstd[n]
            clear(s)
            clear(p)
            for d in range(box[0, 0], box[0, 1]):
                for h in range(box[1, 0], box[1, 1]):
                    for w in range(box[2, 0], box[2, 1]):
                        above, part = dy[n, d, h, w], x[n, d, h, w]
                        for c in range(s.size):
                            s[c] += np.float64(above[c])
                            p[c] += np.float64(above[c]) * np.float64(standardized(part[c], m[c], r[c]))


@kernel(
    "void(const T[:,:,::1], const T[:,::1], const T[:,::1], const T[::1], const T[::1], T[:,:,::1])",
    divided=("x", "mean", "rstd", "y"),
)
def normalize(x: Array, mean: Array, rstd: Array, gamma: Array, beta: Array, y: Array) -> None:
    """Write ``(x - mean) * rstd * gamma + beta``, for ``x`` (samples, positions, channels), to ``y``."""
    for n in range(x.shape[0]):
        m, r = mean[n], rstd[n]
        for i in range(x.shape[1]):
            part, result = x[n, i], y[n, i]
            for c in range(part.size):
                result[c] = scaled(standardized(part[c], m[c], r[c]), gamma[c], beta[c])


@kernel(
    "void(const T[:,:,::1], const T[:,:,::1], const T[::1], const T[:,::1], const T[:,::1], const T[:,::1], "
    "const T[:,::1], T[:,:,::1])",
    divided=("dy", "x", "mean", "rstd", "mean_g", "mean_gs", "dx"),
)
def normalize_backward(
    dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array, mean_g: Array, mean_gs: Array, dx: Array
) -> None:
    """Write the gradient of ``x``, the input of :func:`normalize`, to ``dx``; mean and rstd depend on ``x``, too.

    ``mean_g`` and ``mean_gs`` are the means of dy * gamma and of dy * gamma * (normalized x), over all elements that
    share a mean and rstd.
    """
    for n in range(x.shape[0]):
        m, r, g, s = mean[n], rstd[n], mean_g[n], mean_gs[n]
        for i in range(x.shape[1]):
            above, part, result = dy[n, i], x[n, i], dx[n, i]
            for c in range(part.size):
                standard = standardized(part[c], m[c], r[c])
                result[c] = layernorm_gradient(above[c] * gamma[c], standard, g[c], s[c], r[c])

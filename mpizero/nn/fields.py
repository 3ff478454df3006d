"""Define the layers of fields: pooling, upsampling, normalization over space, and branches that join again.

A *field* is an array (samples, one to three axes of space, channels), float32 or float64. :class:`MaxPool` and
:class:`AvgPool` make a field coarser, :class:`Upsample` makes it finer: each element of an output or of a gradient is a
sum over few neighbours, in the order of their positions. So its bits do not depend on which part of the field is
computed. :class:`GroupNorm` and :class:`InstanceNorm` sum over all of space, and so do the gradients of their weights
and those of :class:`ChannelLayerNorm`: with one partial sum for each spatial tile, added by the tree of
:func:`mpizero.layout.fields.tree_sum`. Their loops are in :mod:`mpizero.kernels.fields`, for the CPU only.

:class:`Residual` adds a layer's output to its input; :class:`Concatenate` appends the output as further channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Any

import numpy as np

from mpizero._util.checks import Unexpected, flag, is_whole, positive, require
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError, DataError, UnsupportedError
from mpizero.kernels import fields as kernels
from mpizero.kernels.convolution import position_sums
from mpizero.layout.fields import Box, tile_boxes, tree_sum
from mpizero.nn.arrays import namespace, require_floats
from mpizero.nn.layer import Composite, Graph, Layer, NodeOutput, Operations, require_layer, require_positive
from mpizero.nn.layers import LayerNorm
from mpizero.nn.space import FieldLayer, Space, Wanted
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run

#: A setting for all axes of space, or one for each of them.
PerAxis = int | tuple[int, ...]


def require_field(x: Any, channels: int | None, where: str, setting: PerAxis = 1) -> Array:
    """Return ``x`` as a C-contiguous array; raise an error unless it is a field with ``channels`` channels.

    ``channels=None`` allows any number. If ``setting``, a setting of the layer, is a tuple with an item for each axis,
    the field must have as many axes of space. ``where`` is the layer's name in the message.

    Raises
    ------
    DataError
        If ``x`` is not an array of floats with the shape of a field that the layer takes.
    UnsupportedError
        If ``x`` is on a GPU.
    """
    if hasattr(x, "__cuda_array_interface__"):
        raise UnsupportedError(f'{where}: layers of fields compute on the CPU only; set device="cpu"')
    require_floats(x, where)
    require_shape(tuple(x.shape), channels, where, setting)
    return np.ascontiguousarray(x)


def require_shape(shape: Sequence[int | str], channels: int | None, where: str, setting: PerAxis = 1) -> None:
    """Raise :class:`DataError` unless ``shape`` (samples, axes of space, channels) is that of a field.

    The other parameters are those of :func:`require_field`. The first item of ``shape`` is not looked at.
    """
    axes = [len(setting)] if isinstance(setting, tuple) else [1, 2, 3]
    if len(shape) - 2 not in axes or channels not in (None, shape[-1]):
        space = ("one axis", "two axes", "three axes", "one to three axes")[axes[0] - 1 if len(axes) == 1 else 3]
        raise DataError(
            f"{where}: takes fields (samples, {space} of space, {'channels' if channels is None else channels}), the "
            f"input has shape ({', '.join(map(str, shape))}); channels come last (numpy.moveaxis(x, 1, -1) moves them)"
        )


def on_each(setting: Any, axes: int) -> tuple[Any, ...]:
    """Return the setting for each of ``axes`` axes: the items of a tuple or list; anything else is for all axes."""
    return tuple(setting) if isinstance(setting, tuple | list) else (setting,) * axes


def _per_axis(value: Any) -> PerAxis:
    """Check a setting of a layer: a positive integer, or a tuple of one to three of them."""
    if is_whole(value, 1):
        return int(value)
    if not isinstance(value, tuple) or len(value) not in (1, 2, 3) or not all(is_whole(one, 1) for one in value):
        raise Unexpected("a whole number >= 1, or a tuple of one to three of them")
    return value


def with_three_axes(x: Array) -> Array:
    """Return a view of a field with three axes of space; axes that the field does not have come first, of length 1."""
    view: Array = x[(slice(None), *(None,) * (5 - x.ndim))]
    return view


def _sizes(windows: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return windows and strides as kernels take them, for the axes of :func:`with_three_axes`."""
    missing = (1,) * (3 - len(windows))
    return np.array([(*missing, *windows), (*missing, *strides)], np.int64)


@dataclass(frozen=True)
class Pool(FieldLayer):
    """Reduce windows of a field to one number for each channel; the base class of max pooling and average pooling.

    Position o of an axis of the output covers positions [o * stride, min(o * stride + window, n)) of the input.
    """

    window: PerAxis
    stride: PerAxis | None = None
    partial: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(f"{name}: window", self.window, _per_axis)
        require(f"{name}: stride", self._stride, _per_axis)
        require(f"{name}: partial", self.partial, flag)
        if len({len(one) for one in (self.window, self._stride) if isinstance(one, tuple)}) == 2:
            raise ConfigError(f"{name}: window={self.window} and stride={self.stride} must have one number for an axis")

    @property
    def _stride(self) -> PerAxis:
        return self.window if self.stride is None else self.stride

    @property
    def _setting(self) -> PerAxis:
        """The window or the stride: one that is a tuple, with an item for each axis, if there is one."""
        return self.window if isinstance(self.window, tuple) else self._stride

    def _on_axes(self, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return windows and strides on each axis."""
        return on_each(self.window, axes), on_each(self._stride, axes)

    def _windows(self, x: Array) -> tuple[Array, Array, tuple[int, ...]]:
        """Return the positions that this rank's windows cover, an array for the output, and the field's extents."""
        name = type(self).__name__
        x = require_field(x, None, name, self._setting)
        extents = self._space.extents(x, self)
        outputs = self.output_shape((*extents, x.shape[-1]))[:-1]
        windows, strides = self._on_axes(len(extents))

        def covered(axis: int, first: int, stop: int) -> tuple[int, int]:
            step, n = strides[axis], extents[axis]
            return (min(first * step, n), min((stop - 1) * step + windows[axis], n)) if stop > first else (0, 0)

        wide = self._space.fetch(x, extents, self._space.wanted(outputs, covered), name)
        return wide, np.empty((len(x), *self._space.shape(outputs), x.shape[-1]), x.dtype), extents

    def _covering(self, extents: tuple[int, ...], channels: int) -> tuple[tuple[int, ...], Wanted]:
        """Return the extents of the output, and the outputs whose windows cover each rank's part of the input.

        The second result has, for each axis and each of the parts into which it is cut, a range of outputs.
        """
        outputs = self.output_shape((*extents, channels))[:-1]
        windows, strides = self._on_axes(len(extents))

        def covering(axis: int, first: int, stop: int) -> tuple[int, int]:
            step, n = strides[axis], outputs[axis]
            low = max(0, min((first - windows[axis]) // step + 1, first // step))
            return (min(low, n), min((stop - 1) // step + 1, n)) if stop > first else (0, 0)

        return outputs, self._space.wanted(extents, covering)

    def _gradient(self, dy: Array, extents: tuple[int, ...], kernel: Any, *others: Array) -> Array:
        """Return this rank's part of the gradient of the input; ``kernel`` computes it from ``dy`` and ``others``.

        ``others`` are further arrays with the shape of the output that ``kernel`` reads.
        """
        outputs, wanted = self._covering(extents, dy.shape[-1])
        tag = f"{type(self).__name__} backward"
        read = [self._space.fetch(x, outputs, wanted, tag) for x in (dy, *others)]
        windows, strides = self._on_axes(len(extents))
        first = [o * step for o, step in zip(self._space.first(wanted), strides, strict=True)]
        box, ends = self._space.box(extents), []
        for axis, part in enumerate(box):
            end = first[axis] + (read[0].shape[1 + axis] - 1) * strides[axis] + windows[axis]
            ends.append(max(part.stop, min(end, extents[axis])) - first[axis])
        dx = np.empty((len(dy), *ends, dy.shape[-1]), dy.dtype)
        if dx.size:
            kernel(*map(with_three_axes, read), _sizes(windows, strides), with_three_axes(dx))
        return _own_part(dx, box, first)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ceil(n / stride) in place of n, or (n - window) // stride + 1 without partial windows.

        Raises
        ------
        DataError
            If an axis is shorter than a window, and partial windows are left out.
        """
        name, axes = type(self).__name__, len(shape) - 1
        require_shape(("samples", *shape), None, name, self._setting)
        windows, strides = self._on_axes(axes)
        if self.partial:
            return (*(-(-n // stride) for n, stride in zip(shape, strides, strict=False)), shape[-1])
        if any(n < window for n, window in zip(shape, windows, strict=False)):
            raise DataError(
                f"{name}: takes fields of at least {windows} positions, the input has shape (samples, "
                f"{', '.join(map(str, shape))}); partial=True takes windows that the field does not fill"
            )
        return (*((n - k) // stride + 1 for n, k, stride in zip(shape, windows, strides, strict=False)), shape[-1])


@explains
@dataclass(frozen=True)
class MaxPool(Pool):
    """Take the maximum of each window of a field: ``y[o] = max(x[o * stride : o * stride + window])`` on every axis.

    Inputs are (samples, one to three axes of space, channels), float32 or float64, on the CPU. The gradient of an
    output goes to the first of equal maxima, in row-major order, as in ``torch.nn.MaxPool2d``; where windows overlap,
    gradients are added in ascending order of the outputs. No method is collective.

    Parameters
    ----------
    window : int or tuple of int
        Number of positions of a window: one number for all axes, or one for each.
    stride : int, tuple of int or None
        Distance between the first positions of neighbouring windows, for all axes or for each; None is ``window``.
    partial : bool
        Whether windows that the end of an axis cuts have an output, so that an axis of n positions gives
        ceil(n / stride): PyTorch's ``ceil_mode=True`` if the windows do not overlap. False leaves them out.

    Raises
    ------
    ConfigError
        If ``window`` or ``stride`` is not positive, or they are tuples of different lengths.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> pool, x = mz.nn.MaxPool(2), np.array([[1.0, 3.0, 2.0, 2.0, 5.0]])[..., None]
    >>> y, cache = pool.forward({}, x)
    >>> y[0, :, 0]
    array([3., 2., 5.])
    >>> pool.backward({}, cache, np.ones_like(y), {})[0, :, 0]
    array([0., 1., 1., 0., 1.])
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the maxima of the windows of ``x``, and the cache for the backward pass."""
        x, y, extents = self._windows(x)
        places = np.empty(y.shape, np.int32)
        if y.size:
            kernels.max_pool(
                with_three_axes(x), _sizes(*self._on_axes(len(extents))), with_three_axes(y), with_three_axes(places)
            )
        return y, (places, extents)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, where only maxima of windows have one, and None, as there are no weights."""
        places, extents = cache
        return self._gradient(dy, extents, kernels.max_pool_backward, places), None


@explains
@dataclass(frozen=True)
class AvgPool(Pool):
    """Take the mean of each window of a field: ``y[o] = mean(x[o * stride : o * stride + window])`` on every axis.

    Inputs are (samples, one to three axes of space, channels), float32 or float64, on the CPU. A window that the end of
    an axis cuts has the mean of the positions that are there. Sums are computed in row-major order, and where windows
    overlap, gradients are added in ascending order of the outputs. No method is collective.

    Parameters
    ----------
    window : int or tuple of int
        Number of positions of a window: one number for all axes, or one for each.
    stride : int, tuple of int or None
        Distance between the first positions of neighbouring windows, for all axes or for each; None is ``window``.
    partial : bool
        Whether windows that the end of an axis cuts have an output, so that an axis of n positions gives
        ceil(n / stride): PyTorch's ``ceil_mode=True`` if the windows do not overlap. False leaves them out.

    Raises
    ------
    ConfigError
        If ``window`` or ``stride`` is not positive, or they are tuples of different lengths.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.array([[1.0, 3.0, 2.0, 2.0, 5.0]])[..., None]
    >>> mz.nn.AvgPool(2).forward({}, x)[0][0, :, 0]
    array([2., 2., 5.])
    >>> mz.nn.AvgPool(2, partial=False).forward({}, x)[0][0, :, 0]
    array([2., 2.])
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the means of the windows of ``x``, and the cache for the backward pass."""
        x, y, extents = self._windows(x)
        if y.size:
            kernels.sum_pool(with_three_axes(x), _sizes(*self._on_axes(len(extents))), 1, with_three_axes(y))
        return y, extents

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and None, as there are no weights.

        The gradient of a window's mean is divided equally among the positions of the window.
        """
        return self._gradient(dy, cache, kernels.mean_pool_backward), None


@explains
@dataclass(frozen=True)
class Upsample(FieldLayer):
    """Make a field finer by a whole factor, by repetition or by linear interpolation.

    "nearest" repeats: ``y[j] = x[j // factor]``. "linear" interpolates along one axis after the other, the last one
    first: ``y[j] = (1 - t) * x[i] + t * x[i + 1]`` with ``i + t = (j + 1/2) / factor - 1/2``, limited to the first and
    the last position. These are half-pixel centers, PyTorch's ``align_corners=False`` (in two dimensions "bilinear").
    An element of the gradient is a sum over positions in ascending order. Inputs are (samples, one to three axes of
    space, channels), float32 or float64, on the CPU. No method is collective.

    Parameters
    ----------
    factor : int or tuple of int
        Number of positions of the output for each position of the input: one number for all axes, or one for each.
    mode : {"nearest", "linear"}
        Whether positions are repeated or interpolated.

    Raises
    ------
    ConfigError
        If ``factor`` is not positive, or ``mode`` is not known.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.array([[0.0, 4.0]])[..., None]
    >>> mz.nn.Upsample(2).forward({}, x)[0][0, :, 0]
    array([0., 0., 4., 4.])
    >>> mz.nn.Upsample(2, mode="linear").forward({}, x)[0][0, :, 0]
    array([0., 1., 3., 4.])
    """

    factor: PerAxis
    mode: str = "nearest"

    def __post_init__(self) -> None:
        require("Upsample: factor", self.factor, _per_axis)
        if self.mode not in (known := ("nearest", "linear")):
            hint = nearest(self.mode, known)
            raise ConfigError(f"Upsample: mode={self.mode!r} is not known; choose one of {', '.join(known)}{hint}")

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` on the finer grid, and the extents of the whole field."""
        x = require_field(x, None, "Upsample", self.factor)
        extents = self._space.extents(x, self)
        factors, reach = on_each(self.factor, len(extents)), int(self.mode == "linear")
        fine = tuple(n * factor for n, factor in zip(extents, factors, strict=True))

        def between(axis: int, first: int, stop: int) -> tuple[int, int]:
            factor, n = factors[axis], extents[axis]
            if stop == first:
                return 0, 0
            return max(first // factor - reach, 0), min((stop - 1) // factor + 1 + reach, n)

        wanted = self._space.wanted(fine, between)
        x = self._space.fetch(x, extents, wanted, "Upsample")
        y, first = self._finer(x, factors), self._space.first(wanted)
        return _own_part(
            y, self._space.box(fine), [n * factor for n, factor in zip(first, factors, strict=True)]
        ), extents

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and None, as there are no weights."""
        factors, reach = on_each(self.factor, len(cache)), int(self.mode == "linear")
        fine = tuple(n * factor for n, factor in zip(cache, factors, strict=True))

        def finer(axis: int, first: int, stop: int) -> tuple[int, int]:
            factor, n = factors[axis], cache[axis]
            return (max(first - reach, 0) * factor, min(stop + reach, n) * factor) if stop > first else (0, 0)

        wanted = self._space.wanted(cache, finer)
        dy = self._space.fetch(dy, fine, wanted, "Upsample backward")
        dx, first = self._coarser(dy, factors), self._space.first(wanted)
        return _own_part(
            dx, self._space.box(cache), [n // factor for n, factor in zip(first, factors, strict=True)]
        ), None

    def _finer(self, x: Array, factors: tuple[int, ...]) -> Array:
        """Return a field on the finer grid."""
        if self.mode == "linear":
            for axis in reversed(range(1, x.ndim - 1)):
                x = _interpolated(x, axis, factors[axis - 1])
            return x
        pairs = list(zip(x.shape[1:], factors, strict=False))
        y = np.empty((len(x), *(n * factor for n, factor in pairs), x.shape[-1]), x.dtype)
        repeated = y.reshape(len(x), *(size for pair in pairs for size in pair), x.shape[-1])
        repeated[...] = x.reshape(len(x), *(size for n, _ in pairs for size in (n, 1)), x.shape[-1])
        return y

    def _coarser(self, dy: Array, factors: tuple[int, ...]) -> Array:
        """Return the adjoint of :meth:`_finer`."""
        if self.mode == "linear":
            for axis in range(1, dy.ndim - 1):
                dy = _interpolated_adjoint(dy, axis, factors[axis - 1])
            return dy
        shape = (n // factor for n, factor in zip(dy.shape[1:], factors, strict=False))
        dx = np.empty((len(dy), *shape, dy.shape[-1]), dy.dtype)
        if dx.size:
            kernels.sum_pool(with_three_axes(dy), _sizes(factors, factors), 0, with_three_axes(dx))
        return dx

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``factor`` times as many positions on each axis of space."""
        require_shape(("samples", *shape), None, "Upsample", self.factor)
        factors = on_each(self.factor, len(shape) - 1)
        return (*(n * factor for n, factor in zip(shape, factors, strict=False)), shape[-1])


def _own_part(x: Array, box: Box, first: Sequence[int]) -> Array:
    """Return the positions of ``box`` from an array that begins at the positions ``first``."""
    own = (slice(part.start - at, part.stop - at) for part, at in zip(box, first, strict=True))
    return np.ascontiguousarray(x[(slice(None), *own)])


def _interpolated(x: Array, axis: int, factor: int) -> Array:
    """Return ``x`` with ``factor`` times as many positions along an axis, by linear interpolation."""
    return _along(x, axis, x.shape[axis] * factor, factor, kernels.interpolate)


def _interpolated_adjoint(dy: Array, axis: int, factor: int) -> Array:
    """Return the gradient of the input of :func:`_interpolated`, from ``dy``, the gradient of its result."""
    return _along(dy, axis, dy.shape[axis] // factor, factor, kernels.interpolate_backward)


def _along(x: Array, axis: int, extent: int, factor: int, kernel: Any) -> Array:
    """Apply ``kernel`` to ``x`` along an axis, and return the result, which has ``extent`` positions there."""
    if factor == 1:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    y = np.empty((*before, extent, *after), x.dtype)
    outer, inner = prod(before), prod(after)
    kernel(x.reshape(outer, x.shape[axis], inner), factor, y.reshape(outer, extent, inner))
    return y


@lru_cache(maxsize=64)
def _counts(extents: tuple[int, ...]) -> Array:
    """Return the number of positions of each spatial tile of a field with these extents, as float64."""
    return np.array([prod(part.stop - part.start for part in box) for box in tile_boxes(extents)], np.float64)


def _merged(a: Array, b: Array) -> Array:
    """Return the moments of two sets of values together, by the formula of Chan, Golub and LeVeque, 1979.

    Moments (tiles, 3, ...) are the number of values, their mean, and the sum of the squared differences from it.
    """
    count, delta = a[:, 0] + b[:, 0], b[:, 1] - a[:, 1]
    share = b[:, 0] / np.maximum(count, 1.0)
    squares = a[:, 2] + b[:, 2] + delta * delta * (a[:, 0] * share)
    return np.stack([count, a[:, 1] + delta * share, squares], axis=1)


def _statistics(x: Array, groups: int, space: Space, extents: tuple[int, ...]) -> tuple[Array, Array]:
    """Return mean and variance of each sample and group of channels of a field, in float64. Collective over a domain.

    The moments of a tile are merged over the channels of a group, in ascending order, and then those of all tiles.
    ``x`` is this rank's part of a field with the given extents.
    """
    boxes, counts = np.concatenate(space.boxes(extents)), _counts(extents)
    own = np.empty((2, len(x), len(boxes), x.shape[-1]))
    kernels.tile_moments(with_three_axes(x), boxes, *own)
    gathered = space.gather_tiles(own, 2, "moments")
    moments = np.empty((len(counts), 3, len(x), x.shape[-1]))
    moments[:, 0], moments[:, 1:] = counts[:, None, None], np.moveaxis(gathered, 2, 0)
    count, mean, squares = tree_sum(reduce(_merged, _channels(moments, groups)), _merged)
    return mean, squares / np.maximum(count, 1.0)


def _channels(values: Array, groups: int) -> list[Array]:
    """Return a list of arrays (..., groups): the values of each group's first channel, of its second, and so on."""
    return [values[..., first :: values.shape[-1] // groups] for first in range(values.shape[-1] // groups)]


def _group_sums(values: Array, groups: int) -> Array:
    """Return the sums over tiles and each group's channels, (samples, groups), of values (samples, tiles, channels)."""
    return tree_sum(np.moveaxis(reduce(np.add, _channels(values, groups)), 1, 0), np.add)


def _weight_sums(values: Array, space: Space, extents: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return this rank's share of the sums over samples and tiles, from values (..., samples, own tiles, channels).

    Tiles are added in ``dtype``. Collective over a domain.
    """
    tiles = reduce(np.add, np.moveaxis(values, -3, 0), np.zeros((*values.shape[:-3], *values.shape[-2:]))).astype(dtype)
    nodes, first = [], 0
    for boxes in space.boxes(extents):
        nodes.append(tree_sum(np.moveaxis(tiles[..., first : first + len(boxes), :], -2, 0), np.add))
        first += len(boxes)
    return space.add_up(np.stack(nodes), "norm's gradient")


class FieldNorm(FieldLayer):
    """Shift and scale groups of channels to mean 0 and variance 1 over space; the base class of norms of fields."""

    channels: int
    eps: float

    @property
    @abstractmethod
    def _groups(self) -> int: ...

    @property
    def _affine(self) -> bool:
        return True

    def _require_settings(self) -> None:
        require_positive(type(self).__name__, channels=self.channels, groups=self._groups)
        require(f"{type(self).__name__}: eps", self.eps, positive)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, which starts as ones, and ``bias``, which starts as zeros; neither has weight decay."""
        weight = ParameterSpec("weight", (self.channels,), Init("ones"), decay=False)
        return (weight, ParameterSpec("bias", (self.channels,), decay=False)) if self._affine else ()

    def _weights(self, params: Params, like: Array) -> tuple[Array, Array]:
        """Return weight and bias; ones and zeros in the dtype of ``like`` if the layer has none."""
        if self._affine:
            return params["weight"], params["bias"]
        return np.ones(self.channels, like.dtype), np.zeros(self.channels, like.dtype)

    def _on_channels(self, values: Array, dtype: np.dtype[Any]) -> Array:
        """Return ``values`` (samples, groups) repeated for each channel: (samples, channels)."""
        return np.repeat(values.astype(dtype), self.channels // self._groups, axis=1)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, space, channels) normalized, and the cache for the backward pass."""
        x = require_field(x, self.channels, type(self).__name__)
        weight, bias = self._weights(params, x)
        x = np.ascontiguousarray(x, weight.dtype)
        extents = self._space.extents(x, self)
        mean, variance = _statistics(x, self._groups, self._space, extents)
        rstd = 1 / np.sqrt(variance + self.eps).astype(x.dtype)
        mean, rstd = self._on_channels(mean, x.dtype), self._on_channels(rstd, x.dtype)
        y = np.empty_like(x)
        kernels.normalize(_positions(x), mean, rstd, weight, bias, _positions(y))
        return y, (x, mean, rstd, extents)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        The second value has, by sample, tile of this rank and channel, the sums of ``dy`` times the normalized ``x``,
        and the sums of ``dy``.
        """
        x, mean, rstd, extents = cache
        dy, (weight, _) = np.ascontiguousarray(dy, x.dtype), self._weights(params, x)
        boxes = np.concatenate(self._space.boxes(extents))
        own = np.empty((2, len(x), len(boxes), self.channels))
        kernels.tile_sums(with_three_axes(dy), with_three_axes(x), mean, rstd, boxes, *own)
        sums, products = self._space.gather_tiles(own, 2, "norm's sums")
        count = max(float(prod(extents)), 1.0) * (self.channels // self._groups)
        mean_g, mean_gs = (
            self._on_channels(_group_sums(weight * one, self._groups) / count, x.dtype) for one in (sums, products)
        )
        dx = np.empty_like(x)
        kernels.normalize_backward(_positions(dy), _positions(x), weight, mean, rstd, mean_g, mean_gs, _positions(dx))
        return dx, own[::-1]

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of ``weight`` and ``bias``, if the layer has them."""
        if self._affine:
            grads["weight"][...], grads["bias"][...] = _weight_sums(pending, self._space, cache[3], cache[0].dtype)


def _positions(x: Array) -> Array:
    """Return a view of a field as (samples, positions, channels)."""
    return x.reshape(len(x), prod(x.shape[1:-1]), x.shape[-1])


@explains
@dataclass(frozen=True)
class GroupNorm(FieldNorm):
    """Shift and scale each group of channels to mean 0 and variance 1 over space, then apply ``weight`` and ``bias``.

    ``y = (x - mean) / sqrt(variance + eps) * weight + bias``, with the mean and the variance of each sample and group
    of consecutive channels over all positions. Parameters of the layer are ``weight`` (channels,), which starts as
    ones, and ``bias`` (channels,), which starts as zeros. Statistics are computed in float64, from those of each
    spatial tile. The formula is that of Wu and He, *Group Normalization*, 2018, section 3. No method is collective.

    Parameters
    ----------
    groups, channels : int
        Number of groups, and number of channels, a multiple of it. Inputs are (samples, one to three axes of space,
        channels), on the CPU. The output has the input's shape and the parameters' dtype, float32 or float64.
    eps : float
        Added to the variance under the root; greater than 0.

    Raises
    ------
    ConfigError
        If a setting is not positive, or ``channels`` is not a multiple of ``groups``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> params = {"weight": np.ones(2), "bias": np.zeros(2)}
    >>> y, cache = mz.nn.GroupNorm(1, 2).forward(params, np.array([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> y.round(3)
    array([[[-1.342, -0.447],
            [ 0.447,  1.342]]])
    """

    groups: int
    channels: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_settings()
        if self.channels % self.groups:
            raise ConfigError(f"GroupNorm: channels={self.channels} must be a multiple of groups={self.groups}")

    @property
    def _groups(self) -> int:
        return self.groups


@explains
@dataclass(frozen=True)
class InstanceNorm(FieldNorm):
    """Shift and scale each channel of each sample to mean 0 and variance 1 over space: groups of one channel.

    It is :class:`GroupNorm` with as many groups as channels (Ulyanov, Vedaldi and Lempitsky, *Instance Normalization*,
    2016). No method is collective.

    Parameters
    ----------
    channels : int
        Number of channels. Inputs are (samples, one to three axes of space, channels), on the CPU. The output has the
        input's shape and the parameters' dtype, float32 or float64.
    eps : float
        Added to the variance under the root; greater than 0.
    affine : bool
        Whether the layer has the parameters ``weight`` and ``bias``.

    Raises
    ------
    ConfigError
        If ``channels`` or ``eps`` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.InstanceNorm(2, affine=False).forward({}, np.array([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> y.round(3)
    array([[[-1., -1.],
            [ 1.,  1.]]])
    """

    channels: int
    eps: float = 1e-5
    affine: bool = True

    def __post_init__(self) -> None:
        self._require_settings()
        require("InstanceNorm: affine", self.affine, flag)

    @property
    def _groups(self) -> int:
        return self.channels

    @property
    def _affine(self) -> bool:
        return self.affine


@explains
@dataclass(frozen=True)
class ChannelLayerNorm(FieldNorm):
    """Shift and scale the channels of each position to mean 0 and variance 1, then apply ``weight`` and ``bias``.

    It is :class:`LayerNorm` of each position (Ba, Kiros and Hinton, *Layer Normalization*, 2016, section 3). But the
    gradients of weight and bias are sums over spatial tiles, so that space can be cut. No method is collective.

    Parameters
    ----------
    channels : int
        Number of channels. Inputs are (samples, one to three axes of space, channels), on the CPU. The output has the
        input's shape and the parameters' dtype, float32 or float64.
    eps : float
        Added to the variance under the root; greater than 0.

    Raises
    ------
    ConfigError
        If ``channels`` or ``eps`` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> params = {"weight": np.ones(2), "bias": np.zeros(2)}
    >>> y, cache = mz.nn.ChannelLayerNorm(2).forward(params, np.array([[[1.0, 2.0], [4.0, 3.0]]]))
    >>> y.round(3)
    array([[[-1.,  1.],
            [ 1., -1.]]])
    """

    channels: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self._require_settings()

    @property
    def _groups(self) -> int:
        return 1

    @property
    def _of_rows(self) -> LayerNorm:
        return LayerNorm(self.channels, self.eps)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, space, channels) normalized, and the cache for the backward pass."""
        x = require_field(x, self.channels, type(self).__name__)
        y, cache = self._of_rows.forward(params, x)
        return y, (cache, self._space.extents(x, self))

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and ``dy`` for :meth:`backward_weights`."""
        dx, _ = self._of_rows.backward_input(params, cache[0], dy)
        return dx, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of ``weight`` and ``bias``."""
        (rows, mean, rstd), extents = cache
        dy = np.ascontiguousarray(pending, rows.dtype)
        products = dy * ((rows - mean[:, None]) * rstd[:, None]).reshape(dy.shape)
        nodes = self._space.boxes(extents)
        sums = np.empty((len(nodes), 2, self.channels), rows.dtype)
        for boxes, node in zip(nodes, sums, strict=True):
            for field, total in zip((products, dy), node, strict=True):
                position_sums(with_three_axes(field), boxes, total)
        grads["weight"][...], grads["bias"][...] = self._space.add_up(sums, "norm's gradient")


@explains
@dataclass(frozen=True)
class Residual(Composite):
    """Add a layer's output to its input: ``y = layer(x) + x``, or ``layer(x) + shortcut(x)``.

    Parameters are named "layer.<name>" and "shortcut.<name>". The layer's output has the shape of the input, or that of
    the shortcut's output (He et al., *Deep Residual Learning*, 2016). Inputs are arrays of float32 or float64, such as
    fields. No method is collective, unless a layer's is.

    Parameters
    ----------
    layer : Layer
        The layer whose output is added.
    shortcut : Layer or None
        What is applied to the other summand: a convolution with windows of one position, for example, to change the
        number of channels. None adds the input itself.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> layer = mz.nn.Residual(mz.nn.ReLU())
    >>> y, cache = layer.forward({}, np.array([[-1.0, 2.0]]))
    >>> y
    array([[-1.,  4.]])
    >>> layer.backward({}, cache, np.ones((1, 2)), {})
    array([[1., 2.]])
    """

    layer: Layer
    shortcut: Layer | None = None

    def __post_init__(self) -> None:
        for layer in self.children().values():
            require_layer("Residual", layer)

    def children(self) -> dict[str, Layer]:
        """Return the layers by name: ``layer`` and, if there is one, ``shortcut``."""
        return {"layer": self.layer} | ({} if self.shortcut is None else {"shortcut": self.shortcut})

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the sum, and the cache for the backward pass."""
        require_floats(x, "Residual")
        outputs, caches = [], []
        for name, child in self.children().items():
            y, cache = child.forward(params.get(name, {}), x, run)
            outputs.append(y)
            caches.append(cache)
        y, other = [*outputs, x][:2]
        if y.shape != other.shape:
            what = "the input" if self.shortcut is None else "the shortcut's output"
            raise DataError(
                f"Residual: the layer's output has shape {y.shape}, {what} has shape {other.shape}; "
                "give a shortcut that returns the layer's shape"
            )
        return y + namespace(y).asarray(other, y.dtype), (caches,)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, added up over both branches, and what :meth:`backward_weights` needs."""
        gradients, pendings = [], []
        for (name, child), child_cache in zip(self.children().items(), cache[0], strict=True):
            dx, pending = child.backward_input(params.get(name, {}), child_cache, dy)
            gradients.append(dx)
            pendings.append(pending)
        first, other = [*gradients, dy][:2]
        return None if first is None or other is None else first + other, pendings

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layer's output shape for one sample of ``shape``."""
        return self.layer.output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of both layers' operations for one sample of ``shape``."""
        return sum((child.operations(shape) for child in self.children().values()), Operations())

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the nodes of both layers, and of their sum, to the exported computation graph; return the sum."""
        node = self.layer.trace(graph, f"{name}.layer", source)
        other = source if self.shortcut is None else self.shortcut.trace(graph, f"{name}.shortcut", source)
        return graph.add("Add", f"{name}.residual", (other, node), node.shape)


@explains
@dataclass(frozen=True)
class Concatenate(Composite, FieldLayer):
    """Append a layer's output to its input as further channels: ``y = concatenate((x, layer(x)), axis=-1)``.

    It is the skip connection of a U-Net (Ronneberger et al., 2015), whose layer makes a field coarser, computes, and
    makes it finer again. If the output then has more positions than the input, because windows at the end of an axis
    were partial, the additional positions are left out. Parameters are named "layer.<name>". No method is collective,
    unless the layer's is.

    Parameters
    ----------
    layer : Layer
        The layer. Its output has the input's samples and axes, and at least as many positions.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> inner = mz.nn.Sequential([mz.nn.AvgPool(2), mz.nn.Upsample(2)])  # of 3 positions come 4
    >>> y, cache = mz.nn.Concatenate(inner).forward({}, np.array([[[1.0], [3.0], [5.0]]]))
    >>> y
    array([[[1., 2.],
            [3., 2.],
            [5., 5.]]])
    """

    layer: Layer

    def __post_init__(self) -> None:
        require_layer("Concatenate", self.layer)

    def children(self) -> dict[str, Layer]:
        """Return the layer, whose name is ``layer``."""
        return {"layer": self.layer}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` and the layer's output side by side, and the cache for the backward pass."""
        require_floats(x, "Concatenate")
        y, cache = self.layer.forward(params.get("layer", {}), x, run)
        extents, inner = (self._space.extents(one, self) for one in (x, y))
        if y.ndim != x.ndim or len(y) != len(x) or any(a < b for a, b in zip(inner, extents, strict=True)):
            raise DataError(
                f"Concatenate: the layer's output has shape {y.shape}, the input has shape {x.shape}; the output must "
                "have the same number of axes, and at least as many positions along each"
            )
        kept = y if inner == extents else self._space.resize(y, inner, extents, "Concatenate")
        return np.concatenate([x.astype(y.dtype, copy=False), kept], axis=-1), ([cache], x.shape[-1], extents, inner)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs.

        The gradient is the sum of those of its two uses: as channels of the output, and as the layer's input.
        """
        (inner_cache,), channels, extents, inner = cache
        kept = dy[..., channels:]
        if inner != extents:
            kept = self._space.resize(kept, extents, inner, "Concatenate backward")
        dx, pending = self.layer.backward_input(params.get("layer", {}), inner_cache, kept)
        return None if dx is None else dx + dy[..., :channels], [pending]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with the number of the layer's output channels added to its last element."""
        return (*shape[:-1], shape[-1] + self.layer.output_shape(shape)[-1])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the layer's floating-point operations for one sample of ``shape``."""
        return self.layer.operations(shape)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the layer's nodes and one that appends channels to the exported computation graph; return its output.

        If the layer's output is longer than the input, a node "Crop", which leaves positions out, is added before the
        node that appends channels.
        """
        node = self.layer.trace(graph, f"{name}.layer", source)
        if node.shape[:-1] != source.shape[:-1]:
            node = graph.add("Crop", f"{name}.crop", (node,), (*source.shape[:-1], node.shape[-1]))
        return graph.add("Concatenate", f"{name}.concatenate", (source, node), self.output_shape(source.shape))

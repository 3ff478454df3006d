"""Define convolutions of fields, and their adjoints, in one to three dimensions.

:class:`Conv` and :class:`ConvTranspose` are made of the same three functions. :func:`_convolve` computes each position
of the result from a window of the input, :func:`_convolve_adjoint` is the adjoint of that, and
:meth:`_Window._weight_gradients` sums over space. No matrix of columns (im2col) is formed; the sums are computed by
:mod:`mpizero.kernels.convolution`. So the bits of an element of the output, or of the gradient of the input, do not
depend on which other elements are computed with it; and gradients of weights are sums over spatial tiles, added by the
binary tree (:mod:`mpizero.layout.fields`).

A layer first fetches what its windows read (:mod:`mpizero.nn.space`), with what is around the field: zeros, or the
field itself, continued periodically or reflected. Zeros are multiplied like all other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod, sqrt
from typing import Any

import numpy as np

from mpizero._util.checks import is_whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.convolution import merged, position_sums, window_products, window_sums, with_margin
from mpizero.nn.fields import on_each, require_field, with_three_axes
from mpizero.nn.layer import Operations, linear_operations, require_init, require_positive
from mpizero.nn.space import FieldLayer
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run

#: What a convolution puts around a field.
PADDINGS = ("zeros", "periodic", "reflect", "none")


@dataclass(frozen=True)
class _Window(FieldLayer):
    """Describe a convolution's window on each axis of space: its size, steps, and what surrounds the field."""

    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    padding: str | tuple[str, ...] = "zeros"
    bias: bool = True
    init: Init | None = None
    input_gradient: bool = True

    def __post_init__(self) -> None:
        where = type(self).__name__
        require_positive(where, inputs=self.inputs, outputs=self.outputs, groups=self.groups)
        require_init(where, self.init)
        if not isinstance(self.kernel, tuple) or not 1 <= len(self.kernel) <= 3 or not _all_whole(self.kernel):
            raise ConfigError(
                f"{where}: kernel={self.kernel!r} is not allowed; give a size for each of one to three axes of space, "
                "such as (3, 3)"
            )
        for name in ("stride", "dilation"):
            value = getattr(self, name)
            if not _all_whole(value if isinstance(value, tuple) else (value,)):
                raise ConfigError(f"{where}: {name}={value!r} is not allowed; expected whole numbers >= 1")
        for name in ("stride", "dilation", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != len(self.kernel):
                raise ConfigError(
                    f"{where}: {name}={value!r} has {len(value)} values for the {len(self.kernel)} axes of "
                    f"kernel={self.kernel!r}; give one for each axis, or one for all"
                )
        if unknown := [p for p in self._by_axis("padding") if p not in PADDINGS]:
            raise ConfigError(f"{where}: padding={unknown[0]!r} is not known; choose from {', '.join(PADDINGS)}")
        for name in ("inputs", "outputs"):
            if getattr(self, name) % self.groups:
                raise ConfigError(f"{where}: {name}={getattr(self, name)} is no multiple of groups={self.groups}")

    def _by_axis(self, name: str) -> tuple[Any, ...]:
        """Return the setting ``name`` for each axis of space."""
        return on_each(getattr(self, name), len(self.kernel))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """By axis, the distance between the first and the last position of a window."""
        return tuple(d * (k - 1) for k, d in zip(self.kernel, self._by_axis("dilation"), strict=True))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """By axis, the number of positions put before the field."""
        modes = self._by_axis("padding")
        return tuple(0 if mode == "none" else reach // 2 for mode, reach in zip(modes, self.reach, strict=True))

    @cached_property
    def after(self) -> tuple[int, ...]:
        """By axis, the number of positions put after the field."""
        modes = self._by_axis("padding")
        return tuple(0 if mode == "none" else r - r // 2 for mode, r in zip(modes, self.reach, strict=True))

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, ``(*kernel, inputs / groups, outputs)``, and ``bias``, if the layer has one."""
        inputs = self.inputs // self.groups
        init = self.init or Init("uniform", 1.0 / sqrt(prod(self.kernel) * inputs))
        weight = ParameterSpec("weight", (*self.kernel, inputs, self.outputs), init)
        return (weight, ParameterSpec("bias", (self.outputs,), decay=False)) if self.bias else (weight,)

    def window_counts(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the number of windows on each axis of a field with the extents ``space``."""
        rows = zip(space, self.reach, self.before, self.after, self._by_axis("stride"), strict=True)
        return tuple((n + before + after - reach - 1) // stride + 1 for n, reach, before, after, stride in rows)

    def _padded(self, x: Array, space: tuple[int, ...], tag: str) -> Array:
        """Return what this rank's windows read of a field with the extents ``space``. Collective if space is cut."""

        def read(axis: int, first: int, stop: int) -> tuple[int, int]:
            stride, before = self._by_axis("stride")[axis], self.before[axis]
            return (
                (first * stride - before, (stop - 1) * stride - before + self.reach[axis] + 1)
                if stop > first
                else (0, 0)
            )

        wanted = self._space.wanted(self.window_counts(space), read)
        return self._space.fetch(x, space, wanted, tag, self._by_axis("padding"))

    def _weight_gradients(
        self, x: Array, dy: Array, extents: tuple[int, ...], outer: Array, finest: tuple[int, ...]
    ) -> tuple[Array, Array]:
        """Return this rank's shares of the gradients of weight and bias. Collective if space is cut.

        The gradient of the weight is, for each group, the sum over samples and space of the windows of ``x``, padded
        already, times ``dy``: (groups, taps * channels of x, channels of dy). The taps are the positions of a window.
        The gradient of the bias is the sum of ``outer``, the gradient of the layer's output, over samples and space:
        (outputs,), or empty without a bias. ``extents`` are those of the whole field of ``dy``, ``finest`` those of the
        whole field of ``outer``.
        """
        steps, origin, counts = self._by_axis("stride"), (0,) * len(self.kernel), dy.shape[1:-1]
        taps = [range(0, reach + 1, d) for reach, d in zip(self.reach, self._by_axis("dilation"), strict=True)]
        shape = self.groups, prod(self.kernel) * x.shape[-1] // self.groups, dy.shape[-1] // self.groups
        nodes, size = self._space.boxes(extents), prod(shape)
        sums = np.empty((len(nodes), size + self.outputs * self.bias), x.dtype)
        pairs = zip(_parts(x, self.groups), _parts(with_margin(dy, self.groups), self.groups), strict=True)
        for group, (part, right) in enumerate(pairs):
            view, runs, wide = _windows(part, origin, steps, counts), _runs(part, taps), with_three_axes(right)
            for boxes, node in zip(nodes, sums, strict=True):
                window_sums(view, *runs, wide, boxes, node[:size].reshape(shape)[group])
        if self.bias:
            for boxes, node in zip(self._space.boxes(finest), sums, strict=True):
                position_sums(with_three_axes(outer), boxes, node[size:])
        share = self._space.add_up(sums, f"{type(self).__name__} gradient")
        return share[:size].reshape(shape), share[size:]

    def _ends(self, axis: int, space: Sequence[int]) -> list[int]:
        """Return how many positions of an axis its first part has, and how many its last, leaving out empty parts."""
        starts = self._space.cut_of(len(space)).starts(space)[axis]
        sizes = [stop - start for start, stop in zip(starts[:-1], starts[1:], strict=True) if stop > start]
        return [sizes[0], sizes[-1]]

    def check_space(self, where: str, space: Sequence[int]) -> None:
        """Raise :class:`DataError` if a field with the extents ``space`` is too small for the windows.

        The error is also raised if a stride does not divide the extent of a periodic axis. ``where`` is the layer's
        name in the message.
        """
        for axis, mode in enumerate(self._by_axis("padding")):
            n, reach, most = space[axis], self.reach[axis], max(self.before[axis], self.after[axis])
            stride = self._by_axis("stride")[axis]
            why = ""
            if n < 1:
                why = "a field has at least one"
            elif mode == "none" and n <= reach:
                why = f"no window of {reach + 1} positions fits into it"
            elif mode == "reflect" and n <= most:
                why = f"it cannot be reflected by {most} positions"
            elif mode == "reflect" and min(ends := self._ends(axis, space)) <= most:
                why = f"a rank at its end has {min(ends)} of them: too few to be reflected by {most}"
            elif mode == "periodic" and n < most:
                why = f"a window reaches around it: {most} positions further"
            elif mode == "periodic" and n % stride:
                why = f"stride={stride} does not divide it, so the result would not be periodic"
            if why:
                raise DataError(
                    f"{where}: axis {axis} of a space of {tuple(space)} has {n} position{'s' * (n != 1)}, and {why} "
                    f"(padding={mode!r}); give a field with other extents, or another padding or kernel"
                )


def _all_whole(values: Sequence[Any]) -> bool:
    return all(is_whole(value, 1) for value in values)


def _windows(x: Array, first: Sequence[int], steps: Sequence[int], counts: Sequence[int]) -> Array:
    """Return a view of the first element of each window of ``x``.

    On each axis there are ``counts`` windows, ``steps`` apart, of which the first begins at position ``first``.
    """
    rows = zip(first, steps, counts, strict=True)
    places = (slice(i, i + step * (count - 1) + 1, step) if count else slice(0, 0) for i, step, count in rows)
    return with_three_axes(x[(slice(None), *places, slice(0, 1))])


def _runs(x: Array, offsets: Sequence[Sequence[int]]) -> tuple[Array, int]:
    """Return the runs of a window (ranges of contiguous elements), and how many elements each has.

    Each run is given by its distance in memory from the window's first element. ``offsets`` are, by axis, the positions
    of the window, relative to the first one.
    """
    return merged(offsets, [stride // x.itemsize for stride in x.strides[1:-1]], x.shape[-1])


def _parts(x: Array, groups: int) -> list[Array]:
    """Return, for each group of channels, a view of these channels of ``x``."""
    width = x.shape[-1] // groups
    return [x[..., group * width : (group + 1) * width] for group in range(groups)]


def _convolve(window: _Window, x: Array, weights: list[Array], bias: Array | None, counts: tuple[int, ...]) -> Array:
    """Return the products of the windows of ``x``, padded already, with the matrices of all groups.

    ``weights`` are the matrices (taps * channels, columns) of the groups; the taps are the positions of a window.
    """
    y = np.empty((len(x), *counts, sum(weight.shape[1] for weight in weights)), x.dtype)
    steps, origin = window._by_axis("stride"), (0,) * len(counts)
    taps = [range(0, reach + 1, d) for reach, d in zip(window.reach, window._by_axis("dilation"), strict=True)]
    biases = [None] * len(weights) if bias is None else _parts(bias, len(weights))
    for part, weight, added, out in zip(_parts(x, len(weights)), weights, biases, _parts(y, len(weights)), strict=True):
        view = _windows(part, origin, steps, counts)
        window_products(view, *_runs(part, taps), weight, added, with_three_axes(out))
    return y


def _convolve_adjoint(
    window: _Window, dy: Array, weights: list[Array], bias: Array | None, space: tuple[int, ...], tag: str
) -> Array:
    """Return the adjoint of padding and :func:`_convolve`: this rank's part of a field with the extents ``space``.

    ``weights`` are the arrays ``(*kernel, channels of dy, columns)`` of the groups. A position of the result is one sum
    over the windows that read it, in ascending order. Positions that are a multiple of the stride apart are read by the
    same taps (positions of a window): they are one phase (:func:`_phases`). Where the field is reflected, values are
    also computed for positions beyond its ends, and added to the positions that these reflect.
    """
    modes, box = window._by_axis("padding"), window._space.box(space)
    beyond = [
        (b * (reflects and not part.start), a * (reflects and part.stop == n))
        for reflects, n, part, b, a in zip(
            (mode == "reflect" and part.start < part.stop for mode, part in zip(modes, box, strict=True)),
            space,
            box,
            window.before,
            window.after,
            strict=True,
        )  # fmt: skip
    ]
    phases = [
        _phases(window, axis, window.before[axis] + part.start - b, part.stop - part.start + b + a)
        for axis, (part, (b, a)) in enumerate(zip(box, beyond, strict=True))
    ]

    def read(axis: int, first: int, stop: int) -> tuple[int, int]:
        """Return the first window that reads a position of ``first`` to ``stop`` - 1, and the one after the last."""
        mode, before, after = modes[axis], window.before[axis], window.after[axis]
        low = first + before * (mode != "reflect" or first > 0)
        high = stop + before + after * (mode == "reflect" and stop == space[axis])
        if stop == first:
            return 0, 0
        stride = window._by_axis("stride")[axis]
        return -(-(low - window.reach[axis]) // stride), max((high - 1) // stride, 0) + 1

    wanted = window._space.wanted(space, read)
    outside = ["periodic" if mode == "periodic" else "zeros" for mode in modes]
    dy = window._space.fetch(dy, window.window_counts(space), wanted, tag, outside)
    origin = window._space.first(wanted)
    wide = [part.stop - part.start + b + a for part, (b, a) in zip(box, beyond, strict=True)]
    y = np.empty((len(dy), *wide, sum(weight.shape[-1] for weight in weights)), dy.dtype)
    biases = [None] * len(weights) if bias is None else _parts(bias, len(weights))
    groups = list(zip(_parts(dy, len(weights)), weights, biases, _parts(y, len(weights)), strict=True))
    for phase in product(*phases):
        steps = window._by_axis("stride")
        place = tuple(slice(start, None, stride) for (start, *_), stride in zip(phase, steps, strict=True))
        counts, taps = [count for _, count, _, _ in phase], [list(t) for _, _, t, _ in phase]
        for part, weight, added, out in groups:
            target = out[(slice(None), *place)]
            if not all(taps):
                target[...] = 0 if added is None else added
                continue
            corner = [at[0] - first for (*_, at), first in zip(phase, origin, strict=True)]
            view = _windows(part, corner, (1,) * len(counts), counts)
            runs = _runs(part, [[o - at[0] for o in at] for *_, at in phase])
            chosen = weight[np.ix_(*taps)].reshape(-1, weight.shape[-1])
            window_products(view, *runs, chosen, added, with_three_axes(target))
    return _folded(y, beyond)


def _folded(dx: Array, beyond: Sequence[tuple[int, int]]) -> Array:
    """Return the adjoint of a reflection: add the positions beyond the ends of each axis to those that they reflect.

    ``beyond`` says how many positions ``dx`` has before the first and after the last position of each axis.
    """
    for axis, (b, a) in enumerate(beyond, start=1):
        if b or a:
            n = dx.shape[axis] - b - a
            line = np.moveaxis(dx, axis, 0)
            inner = line[b : b + n]
            if b:
                inner[1 : b + 1] += line[:b][::-1]
            if a:
                inner[n - 1 - a : n - 1] += line[b + n :][::-1]
            dx = np.moveaxis(inner, 0, axis)
    return np.ascontiguousarray(dx)


def _phases(window: _Window, axis: int, first: int, extent: int) -> list[tuple[int, int, tuple[int, ...], list[int]]]:
    """Return the phases of an axis: each is those of its ``extent`` positions that the same taps read.

    A tap is one position of a window, by its number. A phase is a tuple: its first position, the number of its
    positions, the taps that read them, in descending order, and the windows that read the first position, in ascending
    order. ``first`` is the first position of the axis, counted in the padded field.
    """
    stride, dilation = window._by_axis("stride")[axis], window._by_axis("dilation")[axis]
    found = []
    for start in range(min(stride, extent)):
        taps = tuple(t for t in reversed(range(window.kernel[axis])) if (first + start - t * dilation) % stride == 0)
        at = [(first + start - t * dilation) // stride for t in taps]
        found.append((start, (extent - start - 1) // stride + 1, taps, at))
    return found


@explains
@dataclass(frozen=True)
class Conv(_Window):
    """Convolve a field: ``y[o] = bias + sum_t x[o * stride + t * dilation - before] @ weight[t]``, t over the kernel.

    Inputs are (samples, space, inputs) with one to three axes of space, outputs (samples, space, outputs), in the
    parameters' dtype, float32 or float64. ``weight`` is ``(*kernel, inputs / groups, outputs)``: PyTorch's weight with
    the axes of its kernel first, then inputs, then outputs. Unless ``padding`` is "none", an axis of n positions
    becomes one of ceil(n / stride), and ``before`` is half of the window's reach, dilation * (kernel - 1), rounded
    down. With "none", ``before`` is 0. As in PyTorch, the kernel is not flipped, so the operation is a correlation
    (LeCun et al., *Gradient-based learning applied to document recognition*, 1998, section II). No method is
    collective.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels of the input and of the output.
    kernel : tuple of int
        Size of the window on each axis of space, even or odd.
    stride : int or tuple of int
        Distance between the windows of neighbouring outputs, for all axes or by axis.
    dilation : int or tuple of int
        Distance between the positions of a window.
    groups : int
        Number of groups into which channels are divided; outputs of a group depend on its inputs alone.
    padding : str or tuple of str
        What surrounds the field, for all axes or by axis: "zeros", the field itself, continued ("periodic") or
        reflected at its first and last position ("reflect"), or nothing ("none": windows lie inside the field).
    bias : bool
        Whether a bias is added. A bias has no weight decay.
    init : Init or None
        Start values of the weight; None is the uniform distribution between -1/sqrt(n) and 1/sqrt(n), where n is the
        number of values in a window.
    input_gradient : bool
        Whether ``backward_input`` computes the gradient of the input; False for a model's first layer saves time.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> second_difference = {"weight": np.array([1.0, -2.0, 1.0]).reshape(3, 1, 1)}
    >>> layer = mz.nn.Conv(1, 1, (3,), padding="periodic", bias=False)
    >>> y, cache = layer.forward(second_difference, np.array([0.0, 0.0, 1.0, 0.0]).reshape(1, 4, 1))
    >>> y.ravel()
    array([ 0.,  1., -2.,  1.])
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the convolution of ``x`` (samples, space, inputs), and the cache for the backward pass."""
        weight = params["weight"]
        x = require_field(x, self.inputs, "Conv", self.kernel).astype(weight.dtype, copy=False)
        space = self._space.extents(x, self)
        self.check_space("Conv", space)
        matrices = [part.reshape(-1, part.shape[-1]) for part in _parts(weight, self.groups)]
        wide = self._padded(x, space, "Conv")
        bias = params["bias"] if self.bias else None
        return _convolve(self, wide, matrices, bias, self._space.shape(self.window_counts(space))), (wide, space)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the input, and ``dy`` for :meth:`backward_weights`."""
        if not self.input_gradient:
            return None, dy
        matrices = [np.swapaxes(part, -1, -2) for part in _parts(params["weight"], self.groups)]
        return _convolve_adjoint(self, dy, matrices, None, cache[1], "Conv backward"), dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of weight and bias with their sums over samples and space."""
        x, counts = cache[0], self.window_counts(cache[1])
        products, biases = self._weight_gradients(x, pending, counts, pending, counts)
        for out, part in zip(_parts(grads["weight"], self.groups), products, strict=True):
            out[...] = part.reshape(out.shape)
        if self.bias:
            grads["bias"][...] = biases

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents of the result, and ``outputs``."""
        return (*self.window_counts(shape[:-1]), self.outputs)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations for one sample of ``shape``: output and two gradients."""
        inputs = prod(self.kernel) * self.inputs // self.groups
        return linear_operations(prod(self.window_counts(shape[:-1])), inputs, self.outputs, self.input_gradient)


@explains
@dataclass(frozen=True)
class ConvTranspose(_Window):
    """Refine a field by the adjoint of a convolution: ``y[j] = bias + sum_t x[o] @ weight[t]``, over all windows.

    The sum is over all o and t with ``j = o * stride + t * dilation - before``, as in :class:`Conv` (Zeiler et al.,
    *Deconvolutional networks*, 2010, section 3). An axis of n positions becomes one of ``n * stride``; with padding
    "none" one of ``(n - 1) * stride + dilation * (kernel - 1) + 1``. Inputs are (samples, space, inputs), outputs
    (samples, space, outputs), float32 or float64. ``weight`` is ``(*kernel, inputs / groups, outputs)``. No method is
    collective.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels of the input and of the output.
    kernel : tuple of int
        Size of the window on each axis of space, even or odd.
    stride : int or tuple of int
        Factor by which the field becomes finer, for all axes or by axis.
    dilation : int or tuple of int
        Distance between the positions of a window.
    groups : int
        Number of groups into which channels are divided; outputs of a group depend on its inputs alone.
    padding : str or tuple of str
        What happens to values beyond the ends of the ``n * stride`` positions: they are dropped ("zeros"), added at the
        other end ("periodic"), or part of the result ("none").
    bias : bool
        Whether a bias is added. A bias has no weight decay.
    init : Init or None
        Start values of the weight; None is the uniform distribution between -1/sqrt(n) and 1/sqrt(n), where n is the
        number of elements of the weight divided by the outputs.
    input_gradient : bool
        Whether ``backward_input`` computes the gradient of the input; False for a model's first layer saves time.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> layer = mz.nn.ConvTranspose(1, 1, (2,), stride=2, bias=False)
    >>> y, cache = layer.forward({"weight": np.array([1.0, 10.0]).reshape(2, 1, 1)}, np.array([[[1.0], [2.0]]]))
    >>> y.ravel()
    array([ 1., 10.,  2., 20.])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if "reflect" in self._by_axis("padding"):
            raise ConfigError(
                'ConvTranspose: padding="reflect" is not allowed: the adjoint of a reflection adds to its own output; '
                'choose "zeros", "periodic" or "none"'
            )

    def refined(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the extents of the result of a field with the extents ``space``."""
        rows = zip(space, self._by_axis("stride"), self.reach, self._by_axis("padding"), strict=True)
        return tuple((n - 1) * s + reach + 1 if mode == "none" else n * s for n, s, reach, mode in rows)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the refined field of ``x`` (samples, space, inputs), and the cache for the backward pass."""
        weight = params["weight"]
        x = require_field(x, self.inputs, "ConvTranspose", self.kernel).astype(weight.dtype, copy=False)
        space = self._space.extents(x, self)
        self.check_space("ConvTranspose", self.refined(space))
        bias = params["bias"] if self.bias else None
        y = _convolve_adjoint(self, x, _parts(weight, self.groups), bias, self.refined(space), "ConvTranspose")
        return y, (x, space)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the input, and the pair of ``dy`` and padded ``dy`` for :meth:`backward_weights`."""
        x, space = cache
        wide = self._padded(dy, self.refined(space), "ConvTranspose backward")
        if not self.input_gradient:
            return None, (dy, wide)
        swapped = [np.swapaxes(part, -1, -2) for part in _parts(params["weight"], self.groups)]
        matrices = [part.reshape(-1, part.shape[-1]) for part in swapped]
        return _convolve(self, wide, matrices, None, x.shape[1:-1]), (dy, wide)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of weight and bias with their sums over samples and space."""
        (x, space), (dy, wide) = cache, pending
        products, biases = self._weight_gradients(wide, x, space, dy, self.refined(space))
        for out, part in zip(_parts(grads["weight"], self.groups), products, strict=True):
            out[...] = np.swapaxes(part.reshape(*self.kernel, out.shape[-1], out.shape[-2]), -1, -2)
        if self.bias:
            grads["bias"][...] = biases

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the extents of the result, and ``outputs``."""
        return (*self.refined(shape[:-1]), self.outputs)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations for one sample of ``shape``: output and two gradients."""
        inputs = prod(self.kernel) * self.inputs // self.groups
        return linear_operations(prod(shape[:-1]), inputs, self.outputs, self.input_gradient)

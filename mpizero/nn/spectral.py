"""Define convolutions of whole fields by their Fourier modes, and the Fourier neural operator made of them.

:class:`SpectralConv` computes the lowest modes of a field, multiplies each by a matrix of its own, and returns the
field of the results. The transforms are products with matrices of cosines and sines, so no rank sends its part of the
field: each spatial tile has a partial sum of each mode, added by the binary tree (:mod:`mpizero.layout.fields`), and
each position of the result is one sum over the modes. Where space is cut, each rank gets the sums of some frequencies
of the last axis, multiplies these modes, and all ranks gather the products.

Inside, sums over space have the real basis functions of each axis, cosines and sines
(:func:`~mpizero.kernels.spectral.axis_basis`), and modes are arrays (2, samples, modes of three axes, channels) of real
and imaginary parts. Axes that a field does not have come first, with one mode. :func:`_to_modes` and :func:`_to_sums`
are adjoints of each other.

:class:`FNO` is the Fourier neural operator of Li et al., 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np

from mpizero._util.checks import flag, is_whole, require
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.spectral import Bases, analyse, field_bases, mode_products, synthesize
from mpizero.layout.fields import TILES
from mpizero.nn.arrays import require_numbers
from mpizero.nn.convolution import Conv
from mpizero.nn.fields import on_each, require_field, with_three_axes
from mpizero.nn.layer import Composite, Graph, Layer, NodeOutput, Operations, Wrapper, require_init, require_positive
from mpizero.nn.layers import Activation, Checkpointed, Sequential, named_activation
from mpizero.nn.space import FieldLayer
from mpizero.nn.unet import FieldModel
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run


def _last_to_modes(sums: Array) -> Array:
    """Return the modes of the last axis, ``cosines - i sines``.

    ``sums`` are the sums over space of a field times the cosines, and times the sines, of each frequency of that axis.
    The result has a new first axis: real and imaginary parts.
    """
    zero = sums.shape[3] % 2  # only the first frequency, 0, has no sine
    modes = np.zeros((2, *sums.shape[:3], (sums.shape[3] + 1) // 2, sums.shape[4]), sums.dtype)
    modes[0, :, :, :, :zero], modes[0, :, :, :, zero:] = sums[:, :, :, :zero], sums[:, :, :, zero::2]
    np.negative(sums[:, :, :, zero + 1 :: 2], out=modes[1, :, :, :, zero:])
    return modes


def _last_to_sums(modes: Array, zero: bool) -> Array:
    """Return the adjoint of :func:`_last_to_modes`; ``zero`` tells whether the first frequency is 0."""
    sums = np.empty((*modes.shape[1:4], 2 * modes.shape[4] - zero, modes.shape[5]), modes.dtype)
    sums[:, :, :, :zero], sums[:, :, :, zero::2] = modes[0, :, :, :, :zero], modes[0, :, :, :, zero:]
    np.negative(modes[1, :, :, :, zero:], out=sums[:, :, :, zero + 1 :: 2])
    return sums


def _turned(pairs: Array, sign: int) -> Array:
    """Return ``sign * i`` times the complex numbers ``pairs``: (n, 2, ...), the second axis real and imaginary part."""
    return np.stack([-sign * pairs[:, 1], sign * pairs[:, 0]], axis=1)


def _signed(sums: Array, axis: int, modes: int) -> Array:
    """Return the modes of an axis other than the last one, from the lowest negative frequency on.

    ``sums`` has, along the axis, sums over space of the field times its cosines, and then times its sines. ``modes`` is
    the number of modes.
    """
    half, above = modes // 2, (modes - 1) // 2
    sums = np.moveaxis(sums, axis, 0)
    found = np.empty((modes, *sums.shape[1:]), sums.dtype)
    cosines, sines = sums[: half + 1], _turned(sums[half + 1 :], -1)
    found[half] = cosines[0]
    np.add(cosines[1 : above + 1], sines[:above], out=found[half + 1 :])
    np.subtract(cosines[1:], sines, out=found[:half][::-1])
    return np.moveaxis(found, 0, axis)


def _unsigned(modes: Array, axis: int) -> Array:
    """Return the adjoint of :func:`_signed`."""
    modes = np.moveaxis(modes, axis, 0)
    half, above = len(modes) // 2, (len(modes) - 1) // 2
    found = np.empty((2 * half + 1, *modes.shape[1:]), modes.dtype)
    found[: half + 1] = modes[half::-1]
    difference = -found[1 : half + 1]
    found[1 : above + 1] += modes[half + 1 :]
    difference[:above] += modes[half + 1 :]
    found[half + 1 :] = _turned(difference, 1)
    return np.moveaxis(found, 0, axis)


def _to_modes(sums: Array, modes: Sequence[int], factors: Array) -> Array:
    """Return the modes of a field, times ``factors``, which has one number for each frequency of the last axis.

    ``sums`` are the sums over space of the field times each product of basis functions (cosines and sines) of the axes.
    ``modes`` are the numbers of modes of the axes.
    """
    found = _last_to_modes(sums) * factors[:, None]
    for axis in (0, 1):
        if modes[axis] > 1:
            found = _signed(found, axis + 2, modes[axis])
    return found


def _to_sums(modes: Array, factors: Array, zero: bool) -> Array:
    """Return the adjoint of :func:`_to_modes`; ``zero`` tells whether the first frequency of the last axis is 0."""
    for axis in (3, 2):
        if modes.shape[axis] > 1:
            modes = _unsigned(modes, axis)
    return _last_to_sums(modes * factors[:, None], zero)


def _matrices(modes: Array, sign: int) -> Array:
    """Return for each mode a real matrix (2 samples, 2 channels): rows ``(re, -sign im)``, then rows ``(im, sign re)``.

    Its product with ``(re, im)`` of a weight, one above the other, is the complex product; with ``sign = -1`` that with
    the weight's conjugate.
    """
    found = np.empty((*modes.shape[2:5], 2, modes.shape[1], 2, modes.shape[5]), modes.dtype)
    re, im = np.moveaxis(modes, 1, 4)
    found[..., 0, :, 0, :], found[..., 1, :, 0, :] = re, im
    found[..., 0, :, 1, :], found[..., 1, :, 1, :] = -sign * im, sign * re
    return found.reshape(prod(modes.shape[2:5]), 2 * modes.shape[1], 2 * modes.shape[5])


@explains
@dataclass(frozen=True)
class SpectralConv(FieldLayer):
    """Multiply the Fourier modes of a field by matrices, and drop the modes of higher frequencies.

    In NumPy, for a field of one channel and two axes with n1 x n2 positions::

        modes = numpy.fft.rfftn(x, axes=(1, 2))
        kept = numpy.zeros_like(modes)
        for k1 in range(-(modes1 // 2), (modes1 + 1) // 2):
            for k2 in range(modes2 // 2 + 1):
                kept[:, k1, k2] = modes[:, k1, k2] * weight[k1 + modes1 // 2, k2]
        y = numpy.fft.irfftn(kept, s=(n1, n2), axes=(1, 2))

    As in neuraloperator, ``modes`` frequencies of each axis are kept, of the last axis those from 0 to ``modes // 2``:
    the modes of a real field at negative ones are conjugates. Where ``modes`` is even, the lowest frequency of another
    axis, ``-modes // 2``, has no positive counterpart. The inverse transform of the last axis, which comes after those
    of the other axes, ignores the imaginary part at frequency 0 and, if the axis has an even number n of positions, at
    frequency n / 2. Parameter of the layer is ``weight``, ``(*modes, last modes // 2 + 1, 2, inputs, outputs)``: real
    and imaginary parts of the matrices. Inputs are (samples, space, inputs), on the CPU, outputs (samples, space,
    outputs), in the parameters' dtype, float32 or float64. (Li et al., *Fourier neural operator*, 2021, section 4.) No
    method is collective.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels of the input and of the output.
    modes : tuple of int
        Number of frequencies on each of one to three axes of space; at most the extent of a field.
    padding : float or tuple of float
        How many zeros are put after the field, as a fraction of its extent, for all axes or by axis; rounded to whole
        positions. Without zeros the field is treated as periodic.
    init : Init or None
        Start values of the weight; None is the normal distribution of standard deviation 1/sqrt(inputs + outputs).

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> layer = mz.nn.SpectralConv(1, 1, (3,))  # frequencies 0 and 1
    >>> x = np.array([1.0, 3.0, 1.0, 3.0])[None, :, None]  # frequencies 0 and 2
    >>> y, cache = layer.forward({"weight": np.array([1.0, 0.0, 1.0, 0.0]).reshape(2, 2, 1, 1)}, x)
    >>> y.ravel()
    array([2., 2., 2., 2.])
    """

    inputs: int
    outputs: int
    modes: tuple[int, ...]
    padding: float | tuple[float, ...] = 0.0
    init: Init | None = None

    def __post_init__(self) -> None:
        require_positive("SpectralConv", inputs=self.inputs, outputs=self.outputs)
        require_init("SpectralConv", self.init)
        whole = isinstance(self.modes, tuple) and all(is_whole(one, 1) for one in self.modes)
        if not whole or len(self.modes) not in TILES:
            raise ConfigError(
                f"SpectralConv: modes={self.modes!r} is not allowed; give a number for each of one to three axes of "
                "space, such as (12, 12)"
            )
        parts = on_each(self.padding, len(self.modes))
        if len(parts) != len(self.modes) or not all(isinstance(p, int | float) and 0 <= p < 100 for p in parts):
            raise ConfigError(
                f"SpectralConv: padding={self.padding!r} is not allowed; give a part of the extent from 0, such as "
                f"0.25, for all axes, or one for each of the {len(self.modes)} axes of modes={self.modes}"
            )

    @property
    def _three(self) -> tuple[int, ...]:
        """Number of modes on each of three axes; 1 on axes that the field does not have, which come first."""
        return (*(1,) * (3 - len(self.modes)), *self.modes)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, ``(*modes, last modes // 2 + 1, 2, inputs, outputs)``."""
        shape = (*self.modes[:-1], self.modes[-1] // 2 + 1, 2, self.inputs, self.outputs)
        return (ParameterSpec("weight", shape, self.init or Init("normal", 1 / sqrt(self.inputs + self.outputs))),)

    def periods(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the period of each axis: the extent with the zeros after it."""
        return tuple(n + round(n * part) for n, part in zip(extents, on_each(self.padding, len(extents)), strict=True))

    def check_space(self, extents: Sequence[int]) -> None:
        """Raise :class:`DataError` if a field with these extents does not have all modes."""
        if any(n < modes for n, modes in zip(extents, self.modes, strict=True)):
            raise DataError(
                f"SpectralConv: modes={self.modes} are more than a field of {tuple(extents)} positions has; give at "
                "most as many modes as positions on each axis"
            )

    def _bases(self, extents: Sequence[int], dtype: np.dtype[Any]) -> Bases:
        """Return the values of each axis's Fourier basis functions at this rank's positions, for three axes."""
        return field_bases(self.periods(extents), self.modes, self._space.box(extents), dtype)

    def _frequencies(self) -> slice:
        """Return the range of those frequencies of the last axis whose modes this rank multiplies."""
        return self._space.shards(self.modes[-1] // 2 + 1)[self._space.rank]

    def _functions(self) -> list[slice]:
        """Return, for each rank, the range of those cosines and sines of the last axis that have its frequencies."""
        shards = self._space.shards(self.modes[-1] // 2 + 1)
        return [slice(max(2 * shard.start - 1, 0), max(2 * shard.stop - 1, 0)) for shard in shards]

    def _factors(self, extents: Sequence[int], dtype: np.dtype[Any], inverse: bool) -> Array:
        """Return a factor for each of this rank's frequencies of the last axis: of the transform, or of the inverse.

        The transform divides by the number of positions. In the inverse, a frequency counts twice, because it stands
        for its conjugate, too; only 0 and half of the period count once.
        """
        periods, own = self.periods(extents), self._frequencies()
        if not inverse:
            return np.full(own.stop - own.start, 1 / prod(periods), dtype)
        return np.array([1 + (0 < 2 * k < periods[-1]) for k in range(own.start, own.stop)], dtype)

    def _transform(self, x: Array, extents: Sequence[int], inverse: bool, tag: str) -> Array:
        """Return the modes of a field whose frequencies this rank has (:meth:`_frequencies`).

        With ``inverse``, the adjoint of the inverse transform is computed in place of the transform. Collective over a
        domain.
        """
        bases = self._bases(extents, x.dtype)
        nodes = np.stack([analyse(x, bases, boxes) for boxes in self._space.boxes(extents)])
        sums = self._space.reduce_scatter(nodes, 3, self._functions(), tag)
        return _to_modes(sums, self._three, self._factors(extents, x.dtype, inverse))

    def _field(self, modes: Array, extents: Sequence[int], inverse: bool, start: Array | None, tag: str) -> Array:
        """Return this rank's part of the field that has ``modes``, of which each rank passes its own.

        This is the adjoint of :meth:`_transform`. ``start``, if not None, is added. Collective over a domain.
        """
        own = _to_sums(modes, self._factors(extents, modes.dtype, inverse), self._frequencies().start == 0)
        sums = self._space.all_gather(own, 3, self._functions(), tag)
        field = synthesize(sums, self._bases(extents, modes.dtype), None if start is None else with_three_axes(start))
        return field.reshape(len(sums), *self._space.shape(extents), sums.shape[-1])

    def _weights(self, params: Params) -> Array:
        """Return the weights of this rank's modes, (modes, 2, inputs, outputs)."""
        weight = params["weight"]
        own = weight.reshape(prod(self.modes[:-1]), *weight.shape[-4:])[:, self._frequencies()]
        return np.ascontiguousarray(own).reshape(prod(own.shape[:2]), *weight.shape[-3:])

    def _by_axis(self, products: Array) -> Array:
        """Reshape the products (modes, 2 samples, channels) to modes (2, samples, modes of three axes, channels)."""
        one, two, _ = self._three
        own = self._frequencies()
        shape = one, two, own.stop - own.start, 2, products.shape[1] // 2, products.shape[2]
        return products.reshape(shape).transpose(3, 4, 0, 1, 2, 5)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the field of the multiplied modes of ``x`` (samples, space, inputs), and the cache."""
        return self.added(params, x, None)

    def added(self, params: Params, x: Array, start: Array | None) -> tuple[Array, Any]:
        """Do as :meth:`forward`, and add the result to the field ``start``."""
        weights = self._weights(params)
        x = require_field(x, self.inputs, "SpectralConv", self.modes).astype(weights.dtype, copy=False)
        extents = self._space.extents(x, self)
        self.check_space(extents)
        left = _matrices(self._transform(x, extents, False, "SpectralConv"), 1)
        products = mode_products(left, weights.reshape(len(weights), 2 * self.inputs, self.outputs))
        return self._field(self._by_axis(products), extents, True, start, "SpectralConv"), (left, extents)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs."""
        return self.backward_added(params, cache, dy, None)

    def backward_added(self, params: Params, cache: Any, dy: Array, start: Array | None) -> tuple[Array, Any]:
        """Do as :meth:`backward_input`, and add the gradient to the field ``start``."""
        extents, weights = cache[1], self._weights(params)
        gradient = self._transform(np.ascontiguousarray(dy), extents, True, "SpectralConv backward")
        right = np.ascontiguousarray(weights.swapaxes(2, 3)).reshape(len(weights), 2 * self.outputs, self.inputs)
        products = mode_products(_matrices(gradient, -1), right)
        dx = self._field(self._by_axis(products), extents, False, start, "SpectralConv backward")
        return dx, gradient

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient of ``weight``: computed for this rank's modes, 0 for all others."""
        right = np.moveaxis(pending, (0, 1), (3, 4))
        left = cache[0].swapaxes(1, 2)
        products = mode_products(left, right.reshape(*left.shape[::2], self.outputs))
        target = grads["weight"]
        shape, own = (prod(self.modes[:-1]), *target.shape[-4:]), self._frequencies()
        whole = np.zeros(shape, target.dtype)
        whole[:, own] = products.reshape(whole[:, own].shape)
        target[...] = whole.reshape(target.shape)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``outputs`` channels."""
        return (*shape[:-1], self.outputs)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations for one sample of ``shape``: output and two gradients."""
        axes, to_modes, to_field = range(len(self.modes)), 0, 0
        for axis in axes:
            positions, functions = prod(shape[: axis + 1]), prod(2 * (modes // 2) + 1 for modes in self.modes[axis:])
            to_field += positions * functions
            to_modes += positions * functions * TILES[len(axes)] ** len(axes[axis + 1 :])
        products = 8 * self.inputs * self.outputs * prod(self.own_specs()[0].shape[:-3])
        forward = 2 * (self.inputs * to_modes + self.outputs * to_field) + products
        return Operations(forward, 2 * (self.outputs * to_modes + self.inputs * to_field) + products, products)


@dataclass(frozen=True)
class FNOLift(Wrapper, FieldLayer):
    """Apply layers to a field of any real dtype, to which the coordinates of each position may be appended.

    Parameters
    ----------
    layer : Layer
        The layers; the first one is called "first".
    coordinates : bool
        Whether further channels are appended: for each axis the position's index, divided by the extent.
    """

    coordinates: bool

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Append coordinates of positions to ``x`` as channels; return the layers' output for it, and their cache."""
        require_numbers(x, "FNO")
        first: Any = self.layer.children()["first"]
        inputs = first.inputs - self.coordinates * len(first.kernel)
        x = require_field(x.astype(params["first"]["weight"].dtype, copy=False), inputs, "FNO", first.kernel)
        if self.coordinates:
            extents = self._space.extents(x, self)
            fields = [x]
            for axis, (part, n) in enumerate(zip(self._space.box(extents), extents, strict=True), start=1):
                along = (np.arange(part.start, part.stop) / n).astype(x.dtype)
                along = along.reshape(-1, *(1,) * (x.ndim - 1 - axis))
                fields.append(np.broadcast_to(along, (*x.shape[:-1], 1)))
            x = np.concatenate(fields, axis=-1)
        return self.layer.forward(params, x, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the field, without that of the coordinates, and what ``backward_weights`` needs."""
        dx, pending = self.layer.backward_input(params, cache, dy)
        return dx if dx is None or not self.coordinates else dx[..., : 2 - dx.ndim], pending

    def _wide(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with as many more channels as there are coordinates."""
        return (*shape[:-1], shape[-1] + self.coordinates * (len(shape) - 1))

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the output shape for one sample of ``shape``."""
        return self.layer.output_shape(self._wide(shape))

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of the layers' operations for one sample of ``shape``."""
        return self.layer.operations(self._wide(shape))

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add nodes for the coordinates and the layers to the exported computation graph; return the last output."""
        if self.coordinates:
            source = graph.add("Coordinates", f"{name}.coordinates", (source,), self._wide(source.shape))
        return self.layer.trace(graph, name, source)


@dataclass(frozen=True)
class FNOBlock(Composite):
    """Add a spectral convolution and a linear map of each position, and apply an activation if there is one.

    Parameters
    ----------
    spectral : SpectralConv
        The convolution.
    linear : Conv
        The linear map, with windows of one position.
    activation : Activation or None
        What is applied to the sum.
    """

    spectral: SpectralConv
    linear: Conv
    activation: Activation | None

    def children(self) -> dict[str, Layer]:
        """Return the two layers with parameters by name: ``spectral`` and ``linear``."""
        return {"spectral": self.spectral, "linear": self.linear}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the activation of the sum of both layers' outputs, and the cache."""
        linear, second = self.linear.forward(params["linear"], x, run)
        y, first = self.spectral.added(params["spectral"], x, linear)
        if self.activation is None:
            return y, ([first, second], None)
        y, last = self.activation.forward({}, y, run)
        return y, ([first, second], last)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs."""
        (first, second), last = cache
        d: Any = dy if self.activation is None else self.activation.backward_input({}, last, dy)[0]
        dlinear, after = self.linear.backward_input(params["linear"], second, d)
        dx, before = self.spectral.backward_added(params["spectral"], first, d, dlinear)
        return dx, [before, after]

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for one sample of ``shape``."""
        return self.spectral.output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return the sum of both layers' operations for one sample of ``shape``."""
        return self.spectral.operations(shape) + self.linear.operations(shape)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the nodes of both layers, of their sum, and of the activation; return the last one."""
        branches = [child.trace(graph, f"{name}.{key}", source) for key, child in self.children().items()]
        y = graph.add("Add", f"{name}.sum", tuple(branches), branches[0].shape)
        return y if self.activation is None else self.activation.trace(graph, f"{name}.activation", y)


@explains
@dataclass(frozen=True)
class FNO(FieldModel):
    """Describe a Fourier neural operator, made of the blocks "lift", "fourier.0", "fourier.1", ..., "project".

    Inputs are fields (samples, one to three axes of space, inputs), outputs (samples, space, outputs). For regression
    targets have the output's shape; for classification they are integers (samples, space), of which negative ones are
    ignored. Inputs of another dtype are cast to ``dtype``.

    "lift" maps the channels of each position, and its coordinates, to ``width`` channels by two linear maps with an
    activation between them. Each Fourier block is ``activation(SpectralConv(x) + linear(x))``, the last one without an
    activation, and "project" is two linear maps again. (Li et al., *Fourier neural operator for parametric partial
    differential equations*, 2021, section 4.) The parameters do not depend on the extents of fields, but an axis needs
    at least ``modes`` positions. Blocks cannot be split over tensor groups.

    Parameters
    ----------
    inputs, outputs : int
        Number of channels of the input and of the output; for classification ``outputs`` is the number of classes.
    axes : int
        Number of axes of space, 1 to 3.
    modes : int or tuple of int
        Number of frequencies that :class:`~mpizero.nn.SpectralConv` keeps, for all axes or by axis.
    width : int
        Number of channels of the Fourier blocks.
    layers : int
        Number of Fourier blocks.
    expansion : int
        Number of channels between the two linear maps of "lift" and of "project", as a multiple of ``width``.
    activation : str
        "gelu", "silu", "relu" or "tanh".
    padding : float or tuple of float
        Zeros after a field that is not periodic, in :class:`~mpizero.nn.SpectralConv`.
    coordinates : bool
        Whether "lift" gets the coordinates of each position.
    task : str
        "regression" or "classification".
    loss : str, Loss or None
        As for :class:`~mpizero.nn.UNet`.
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the start values.
    space : tuple of int or None
        As for :class:`~mpizero.nn.UNet`.
    activation_checkpointing : bool
        Whether a block keeps only its input for the backward pass, and computes its other activations again.

    Raises
    ------
    ConfigError
        A setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> net = mz.nn.FNO(inputs=1, outputs=1, axes=1, modes=4, width=8, layers=2)
    >>> list(net.blocks)
    ['lift', 'fourier.0', 'fourier.1', 'project']
    >>> x = np.random.default_rng(0).normal(size=(8, 16, 1))
    >>> with mz.ShardingConfig(comm="self") as config:
    ...     with mz.distribute(net, mz.Adam(lr=0.01), "ddp", config=config) as model:
    ...         losses = [model.train(x, x[:, ::-1]) for step in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    inputs: int
    outputs: int
    axes: int = 2
    modes: int | tuple[int, ...] = 12
    width: int = 32
    layers: int = 4
    expansion: int = 2
    activation: str = "gelu"
    padding: float | tuple[float, ...] = 0.0
    coordinates: bool = True
    task: str = "regression"
    loss: Any = None
    dtype: Any = "float32"
    seed: int = 0
    space: tuple[int, ...] | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "width", "layers", "expansion"):
            require_positive("FNO", **{name: getattr(self, name)})
        self._resolve_settings()
        for name in ("coordinates", "activation_checkpointing"):
            require(f"FNO: {name}", getattr(self, name), flag)
        if len(on_each(self.modes, self.axes)) != self.axes:
            raise ConfigError(f"FNO: modes={self.modes!r} must be a number, or one for each of axes={self.axes}")
        if self.space is not None:
            self._spectral.check_space(self.space)
        _ = self.blocks  # raises the errors of its layers

    @property
    def _spectral(self) -> SpectralConv:
        return SpectralConv(self.width, self.width, on_each(self.modes, self.axes), self.padding)

    @cached_property
    def blocks(self) -> dict[str, Layer]:
        """The blocks by name, in the order in which they run."""
        inputs, middle = self.inputs + self.coordinates * self.axes, self.expansion * self.width
        lift = FNOLift(self._linears(inputs, middle, self.width, input_gradient=False), self.coordinates)
        blocks: dict[str, Layer] = {"lift": lift}
        for number in range(self.layers):
            activation = named_activation(self.activation) if number < self.layers - 1 else None
            blocks[f"fourier.{number}"] = FNOBlock(self._spectral, self._linear(self.width, self.width), activation)
        blocks["project"] = self._linears(self.width, middle, self.outputs)
        return (
            {name: Checkpointed(block) for name, block in blocks.items()} if self.activation_checkpointing else blocks
        )

    def _linear(self, inputs: int, outputs: int, **settings: Any) -> Conv:
        return Conv(inputs, outputs, (1,) * self.axes, **settings)

    def _linears(self, inputs: int, middle: int, outputs: int, **settings: Any) -> Sequential:
        first, last = self._linear(inputs, middle, **settings), self._linear(middle, outputs)
        return Sequential({"first": first, "activation": named_activation(self.activation), "last": last})

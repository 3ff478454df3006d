"""Define the protocols and dataclasses that all packages share.

This module imports nothing of mpizero, so every module can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
#: Nested dictionaries of arrays: ``params["attention"]["qkv"]["weight"]``.
Params = Mapping[str, Any]
#: For each range of positions two slices: its indices in an array of only the positions of all ranges, and its
#: indices in the whole sequences.
Pieces = list[tuple[slice, slice]]
#: ``schedule(step)`` gives the learning rate of optimizer step ``step`` (0 is the first).
LearningRate = float | Callable[[int], float]


def complex_type(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the complex type whose real and imaginary parts have the type ``dtype``, float32 or float64."""
    return np.result_type(dtype, np.complex64)


def as_reals(array: Array) -> Array:
    """Return the elements of an array as a 1-D array of real numbers: a complex element as real and imaginary part.

    The result is a view if the array is C-contiguous, else a copy.
    """
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


@dataclass(frozen=True)
class Init:
    """Describe the initial values of a parameter.

    ``kind`` is "zeros", "ones", "normal" (``scale`` = standard deviation) or "uniform" (on [-scale, scale)). Each
    random value is a function of the seed, the name of the parameter and the index of the element. For a complex
    parameter, "ones" is 1 + 0i, "uniform" draws real and imaginary part on [-scale, scale), and "normal" draws both
    parts with standard deviation ``scale`` divided by the square root of 2, so that the complex number has standard
    deviation ``scale``.
    """

    kind: str = "zeros"
    scale: float = 0.0


#: Half-open ranges of indices (start, stop), ascending and disjoint.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """Describe the slice of a parameter that one rank of a tensor group holds.

    The parameter may be cut into more tiles than the group has ranks: a tile is the slice that a rank would hold if
    there were one rank for each tile.

    Attributes
    ----------
    shape : tuple of int
        The shape of the whole parameter.
    axis : int
        The axis that is split.
    ranges : tuple of (int, int)
        Half-open ranges of indices along that axis, ascending and disjoint. The array that the rank holds is the
        concatenation of these ranges.
    tiles : tuple of tuples of (int, int)
        For each tile that the rank holds, in ascending order, the tile's ranges of indices along the whole axis; () if
        the rank holds one tile, which ``ranges`` describes. Every index in ``ranges`` is in one tile. Every rank of the
        group holds the same number n of tiles: rank r has the n tiles from r * n on. The parameter's norm adds squares
        tile by tile, so its bits depend on the number of tiles, and not on the number of ranks.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: Ranges
    tiles: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """Describe one named parameter, without its values.

    Attributes
    ----------
    name : str
        Dotted name. :meth:`Layer.specs` gives it relative to the block; elsewhere it begins with the name of the block.
    shape : tuple of int
        Shape of the array that the layer gets on this rank: the whole parameter, or the slice that ``part`` describes.
        The array may have zero elements.
    init : Init
        Initial values.
    decay : bool
        Whether weight decay applies. Layers set it to False for biases, norms and embeddings.
    trainable : bool
        False for a frozen parameter, which has no gradient and no optimizer state, and which no step changes.
    tied : str or None
        Global name of the earlier parameter whose storage this one shares. Each use has its own gradient.
    part : Part or None
        The slice of the whole parameter that the array holds; None if the array is the whole parameter.
    guest : str or None
        Global name of the parameter of another pipeline stage to which this one is tied; None for all other parameters.
        The array is then a copy of that parameter, with the same values at every step; it is not saved in checkpoints
        and not counted among the parameters.
    averaged : bool
        True for a statistic of the samples, such as the running mean of a batch normalization: a parameter that no
        optimizer trains, and that every step replaces by an average. In the backward pass the layer overwrites
        ``grads[name]`` with the parameter's new value after these samples, computed from the value that the pass got.
        At the end of the step the parameter becomes the mean of the new values of all micro-batches, weighted by their
        numbers of samples and added in the order of the tree over grains. Weight of the loss, loss scale, learning
        rate, clipping, weight decay and norms have no effect on it, and it has no optimizer state. A step that is
        skipped leaves it unchanged. An averaged parameter cannot be tied, nor used with context parallelism;
        compression of gradients leaves its values exact. If ``trainable`` is False, it is an ordinary frozen parameter.
    complex : bool
        Whether elements are complex numbers: complex64 in a model of float32, complex128 in one of float64. Shards,
        sums, norms and optimizers treat each element as two real numbers. The parameter's gradient is ``dL/dRe + i
        dL/dIm``, as in PyTorch, so that ``w -= lr * gradient`` descends. A tensor group cannot split a complex
        parameter.
    """

    name: str
    shape: tuple[int, ...]
    init: Init = Init()
    decay: bool = True
    trainable: bool = True
    tied: str | None = None
    part: Part | None = None
    guest: str | None = None
    averaged: bool = False
    complex: bool = False

    @property
    def size(self) -> int:
        """Number of real numbers that are stored: the number of elements, doubled if they are complex."""
        return int(prod(self.shape)) << self.complex

    def element_type(self, dtype: DTypeLike) -> np.dtype[Any]:
        """Return the type of the parameter's elements in a model whose real numbers are of type ``dtype``."""
        return complex_type(dtype) if self.complex else np.dtype(dtype)

    def view(self, reals: Array) -> Array:
        """Return a view, with the parameter's shape, of a contiguous 1-D array of :attr:`size` real numbers."""
        return (reals.view(complex_type(reals.dtype)) if self.complex else reals).reshape(self.shape)

    @property
    def optimized(self) -> bool:
        """True if an optimizer trains the parameter: it is neither frozen nor an averaged statistic."""
        return self.trainable and not self.averaged


#: The dtypes that an integer array may have.
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class IntegerSpec:
    """Describe a named array of whole numbers of a block, such as a counter of batches.

    A layer declares its own arrays by a method ``own_integers()``; a block that is no :class:`~mpizero.nn.layer.Layer`
    declares all of its arrays by a method ``integers()``. The layer reads ``params[name]`` like a parameter; on a GPU
    the array is in host memory. In the backward pass ``grads[name]`` holds the old value, and the layer may write a new
    one to ``grads[name][...]``. Every micro-batch starts from the value at the beginning of the step, and all
    micro-batches must compute the same new value, which replaces the old one when the step has updated the parameters.
    The arrays are small: each rank of the block's pipeline stage has a copy.

    Attributes
    ----------
    name : str
        Dotted name, relative to the block.
    shape : tuple of int
        Shape of the array.
    dtype : str
        One of :data:`INTEGER_DTYPES`.
    start : int
        Start value of all elements. The model's attribute ``start_values`` may have an array instead.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    start: int = 0

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the array in checkpoints: uint8 in place of bool, which checkpoints cannot store."""
        return np.dtype("uint8" if self.dtype == "bool" else self.dtype)


@dataclass(frozen=True)
class Run:
    """Hold what a forward pass gets besides its input ``x`` and the parameters: step, seed, positions of samples.

    For the same samples, only ``ranges`` depends on the rank and on the number of ranks.

    Attributes
    ----------
    training : bool
        Whether dropout is active.
    seed, step : int
        Random seed, and number of the training step from 0. Random numbers are computed from seed and step, the name of
        the layer and the index of the sample.
    first_sample : int
        The index, within the global batch, of the first sample of ``x``.
    count : int
        Number of samples of ``x``; 0 if unknown.
    epoch : int
        The epoch that the caller passed to ``train``.
    length : int
        Length of the whole sequences; 0 if unknown. Where a context group splits sequences, a rank cannot compute the
        length from the positions that it holds, because the number of positions may differ by one between ranks. If
        ``length`` is 0, each layer that needs it asks the other ranks with one small message.
    ranges : tuple of (int, int)
        The ranges (start, stop) of positions in the whole sequences that this rank of a context group holds, ascending:
        ``((0, length),)`` without a context group; () if unknown. A tensor group with sequence parallelism splits the
        concatenation of these ranges further.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    length: int = 0
    count: int = 0
    epoch: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def samples(self) -> range:
        """The indices, within the global batch, of the samples of ``x``."""
        return range(self.first_sample, self.first_sample + self.count)

    @property
    def held(self) -> int:
        """The number of positions in :attr:`ranges`; :attr:`length` if these are unknown."""
        return sum(stop - start for start, stop in self.ranges) if self.ranges else self.length

    @property
    def described(self) -> str:
        """Text with the length of whole sequences, to follow a shape in a message; "" if the rank holds whole ones."""
        return "" if self.held == self.length else f" of sequences of {self.length}"

    def on_whole(self, length: int) -> Run:
        """Return a copy whose :attr:`ranges` are whole sequences of ``length`` positions. Not collective."""
        return replace(self, length=length, ranges=((0, length),))

    def pieces(self, start: int = 0, stop: int | None = None) -> Pieces:
        """Find the positions from ``start`` to ``stop`` in the concatenation of :attr:`ranges`.

        ``stop=None`` is the end of the last range. For each range that has some of these positions, two slices are
        returned: the indices of the positions among those from ``start`` to ``stop``, and in the whole sequences. Not
        collective.
        """
        stop, before = self.held if stop is None else stop, 0
        found = []
        for first, last in self.ranges or ((0, self.length),):
            low, high = max(start, before), min(stop, before + last - first)
            if low < high:
                shift = first - before
                found.append((slice(low - start, high - start), slice(low + shift, high + shift)))
            before += last - first
        return found


EVALUATE = Run()


class ShiftRequest(Protocol):
    """Represent the messages that :meth:`Group.shift` has started and that are still in flight."""

    def wait(self) -> tuple[Array, ...]:
        """Wait for the arrays that the other rank sends, and return them. Not collective."""

    def test(self) -> bool:
        """Let MPI make progress, and tell whether :meth:`wait` would now return without waiting. Not collective."""


class Group(Protocol):
    """Describe the collectives of a tensor group or context group: the ranks over which layers are split.

    Every method is collective over the group. ``sizes`` holds, for each rank, the length of its part of the split axis;
    by the shard rule the lengths differ by at most one. Sums are added in the order of the binary tree over the ranks'
    numbers, and all ranks get the same bits. ``tag`` names the call in traces and error messages.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return the sum over the ranks as a new array."""

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return the elementwise maximum over the ranks as a new array."""

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Concatenate the arrays of all ranks along ``axis``; the array of rank r has length ``sizes[r]`` there.

        Callers must not write to the result: on a rank with several tiles, all tiles share it.
        """

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's part, of length ``sizes[rank]`` along ``axis``, of the sum over the ranks."""

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive as many from rank - ``by``, modulo :attr:`size`."""


@runtime_checkable
class Layer(Protocol):
    """Describe a layer: a differentiable function that keeps no state between calls.

    ``forward`` is given the parameters and returns the output and a cache, which the backward methods are given.
    ``backward`` does ``backward_input`` and then ``backward_weights``; zero-bubble pipelines call these separately.
    ``backward_input`` returns the gradient of the input and a value that ``backward_weights`` is given as ``pending``.
    ``grads`` holds the arrays for the gradients, nested like ``params``. A backward pass *overwrites* these arrays and
    never adds to them.
    """

    def specs(self) -> tuple[ParameterSpec, ...]: ...

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]: ...

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]: ...

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None: ...

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None: ...


@runtime_checkable
class Loss(Protocol):
    """Compute the sum of the losses over a batch, and the weight of the batch; the mean loss is their quotient.

    ``forward`` returns the sum, the weight and a cache; ``backward`` returns the gradient of the sum times ``scale``.
    """

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]: ...

    def backward(self, cache: Any, scale: float = 1.0) -> Array: ...


@runtime_checkable
class BlockModel(Protocol):
    """Describe a model as a sequence of named blocks and a loss, as ZeRO-3, tensor and pipeline parallelism need it."""

    @property
    def blocks(self) -> Mapping[str, Layer]: ...

    @property
    def loss(self) -> Loss: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def seed(self) -> int: ...


@runtime_checkable
class BlackBoxModel(Protocol):
    """Describe a model as one function that computes loss and gradients from named arrays.

    ``loss_and_grad`` returns the sum of the losses over the batch, the gradients of that sum by name, and the weight of
    the batch. If the model has an attribute ``in_place`` that is True, ``loss_and_grad`` is called as
    ``loss_and_grad(parameters, batch, gradients)``. The function then overwrites the arrays in ``gradients``, and
    returns the sum and the weight.
    """

    @property
    def parameters(self) -> Mapping[str, Array]: ...

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: tuple[Array, Array]
    ) -> tuple[float, Mapping[str, Array], float]: ...


@runtime_checkable
class Optimizer(Protocol):
    """Update flat arrays in place, elementwise; an optimizer never sees a model, a rank or a communicator.

    ``slots`` names the state arrays, such as moments. Each is as long as the array of parameters that ``update`` is
    given.
    """

    slots: Sequence[str]

    def update(self, params: Array, grads: Array, state: Mapping[str, Array]) -> None: ...


Dtype = DTypeLike

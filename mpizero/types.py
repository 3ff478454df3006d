"""Define the protocols and plain values that all packages share; import nothing above :mod:`mpizero.errors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
#: Nested dictionaries of arrays: ``params["attention"]["qkv"]["weight"]``.
Params = Mapping[str, Any]
#: ``schedule(step)`` gives the learning rate of optimizer step ``step`` (0 is the first).
LearningRate = float | Callable[[int], float]


@dataclass(frozen=True)
class Init:
    """Describe the initial values of a parameter.

    ``kind`` is "zeros", "ones", "normal" (``scale`` = standard deviation) or "uniform" (on [-scale, scale)).
    Random values are keyed by seed, parameter name and element index.
    """

    kind: str = "zeros"
    scale: float = 0.0


@dataclass(frozen=True)
class Part:
    """Describe the slice of a parameter that one rank of a tensor group holds.

    Attributes
    ----------
    shape : tuple of int
        Of the whole parameter.
    axis : int
        The axis that is split.
    ranges : tuple of (int, int)
        Ascending, disjoint half-open ranges of that axis; the local array holds them one behind the other.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterSpec:
    """Describe one named parameter, without its values.

    Attributes
    ----------
    name : str
        Dotted name; relative to the block in :meth:`Layer.specs`, global in a layout.
    shape : tuple of int
        Zero-size shapes are legal.
    init : Init
        Start values.
    decay : bool
        Whether weight decay applies (false for biases, norms and embeddings).
    trainable : bool
        A frozen parameter has no gradient and no optimizer state.
    tied : str or None
        Global name of the earlier parameter whose storage this use shares; the use has its own gradient slot.
    part : Part or None
        The slice of the whole parameter that ``shape`` describes; None is all of it.
    guest : str or None
        Global name of the parameter of another pipeline stage of which this storage is a copy, since tied uses were
        cut apart: it starts and changes as that one does, and is neither saved nor counted.
    """

    name: str
    shape: tuple[int, ...]
    init: Init = Init()
    decay: bool = True
    trainable: bool = True
    tied: str | None = None
    part: Part | None = None
    guest: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(prod(self.shape))


@dataclass(frozen=True)
class Run:
    """Hold what a forward pass gets besides its input; all of it independent of ranks.

    Attributes
    ----------
    training : bool
        Whether dropout masks.
    seed, step : int
        What random numbers are keyed by, besides the place that they are for.
    first_sample : int
        The index, within the global batch, of the first sample of ``x``.
    count : int
        Samples of ``x``; 0 is unknown.
    epoch : int
        What :meth:`train` was told.
    length : int
        Of the whole sequences; 0 is unknown. Where ranks hold parts of sequences, none can read it off its own, since
        parts may differ by one place: layers that are not told ask the other ranks, with one small message each.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    length: int = 0
    count: int = 0
    epoch: int = 0

    @property
    def samples(self) -> range:
        """The indices, within the global batch, of the samples of ``x``."""
        return range(self.first_sample, self.first_sample + self.count)


EVALUATE = Run()


class ShiftRequest(Protocol):
    """Represent arrays that are sent around a group."""

    def wait(self) -> tuple[Array, ...]:
        """Return what has arrived. Not collective."""

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return at once. Not collective."""


class Group(Protocol):
    """Describe the group of ranks, tensor or context, that layers are split over, and its collectives.

    Every method is collective over the group. Shards of an axis follow the shard rule, so ``sizes``, one for each
    rank, may differ by one. Sums are added in the order of the ranks and have the same bits on all of them.
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
        """Return the ranks' arrays concatenated along ``axis``; rank r's has ``sizes[r]`` there."""

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block of the sum: ``sizes[rank]`` along ``axis``."""

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start sending ``arrays`` to rank + ``by`` and receiving the like from rank - ``by``, around the ring."""


@runtime_checkable
class Layer(Protocol):
    """Describe a differentiable function; parameters and caches are arguments and return values.

    ``backward`` = ``backward_input`` followed by ``backward_weights``; zero-bubble pipelines call the halves.
    Gradients are *overwritten* in ``grads`` (nested views like ``params``), never added to.
    """

    def specs(self) -> tuple[ParameterSpec, ...]: ...

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]: ...

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]: ...

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None: ...

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None: ...


@runtime_checkable
class Loss(Protocol):
    """Compute the sum of the losses over a batch, and the weight that it counts for."""

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
    """Describe a model that is known only by a function of named arrays."""

    @property
    def parameters(self) -> Mapping[str, Array]: ...

    def loss_and_grad(
        self, parameters: Mapping[str, Array], batch: tuple[Array, Array]
    ) -> tuple[float, Mapping[str, Array], float]: ...


@runtime_checkable
class Optimizer(Protocol):
    """Update flat arrays elementwise; an optimizer never sees a model, a rank or a communicator.

    ``slots`` names its state arrays, each as long as the parameters it updates.
    """

    slots: Sequence[str]

    def update(self, params: Array, grads: Array, state: Mapping[str, Array]) -> None: ...


Dtype = DTypeLike

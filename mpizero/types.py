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
        The shape of the whole parameter.
    axis : int
        The axis that is split.
    ranges : tuple of (int, int)
        Ascending, disjoint, half-open ranges of that axis. The local array is their concatenation.
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
        May have zero elements.
    init : Init
        Initial values.
    decay : bool
        Whether weight decay applies (false for biases, norms and embeddings).
    trainable : bool
        A frozen parameter has no gradient and no optimizer state.
    tied : str or None
        Global name of the earlier parameter whose storage this one shares. Each use has its own gradient.
    part : Part or None
        The slice of the whole parameter that ``shape`` describes; None if it is the whole.
    guest : str or None
        Set where a parameter is tied to one of another pipeline stage: the global name of that other parameter. This
        storage is then a copy. It has the same values at every step, and is neither saved nor counted.
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
    """Hold what a forward pass gets besides its input. Nothing in it depends on the number of ranks.

    Attributes
    ----------
    training : bool
        Whether dropout is active.
    seed, step : int
        Keys of random numbers. Further keys are the place in the model and the sample.
    first_sample : int
        The index, within the global batch, of the first sample of ``x``.
    count : int
        Number of samples of ``x``; 0 is unknown.
    epoch : int
        The epoch that the caller passed to ``train``.
    length : int
        Length of the whole sequences; 0 is unknown. Where a context group splits sequences, a rank cannot compute it
        from its own part, because parts may differ by one place. If it is 0, each layer that needs it asks the other
        ranks with one small message.
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
    """Represent the messages of a :meth:`Group.shift` in flight."""

    def wait(self) -> tuple[Array, ...]:
        """Wait for the arrays from the other rank and return them. Not collective."""

    def test(self) -> bool:
        """Make progress and tell whether :meth:`wait` would return at once. Not collective."""


class Group(Protocol):
    """Describe the collectives of the group of ranks, tensor or context, that layers are split over.

    Every method is collective over the group. An axis is split by the shard rule: ``sizes`` has one length for each
    rank, and they may differ by one. Sums are added in the order of the ranks, and all ranks get the same bits.
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
        """Return the arrays of all ranks, concatenated along ``axis``; rank r's has length ``sizes[r]`` there."""

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return this rank's block of the sum: ``sizes[rank]`` along ``axis``."""

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> ShiftRequest:
        """Start to send ``arrays`` to rank + ``by`` and to receive such arrays from rank - ``by``, modulo the size."""


@runtime_checkable
class Layer(Protocol):
    """Describe a layer: a differentiable function without state; it is given its parameters and returns its cache.

    ``backward`` does ``backward_input`` and then ``backward_weights``; zero-bubble pipelines call the two separately.
    ``grads`` holds views nested like ``params``. A backward pass *overwrites* them and never adds to them.
    """

    def specs(self) -> tuple[ParameterSpec, ...]: ...

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]: ...

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]: ...

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None: ...

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None: ...


@runtime_checkable
class Loss(Protocol):
    """Compute the sum of the losses over a batch, and its weight: the mean loss is the sum divided by the weight."""

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]: ...

    def backward(self, cache: Any, scale: float = 1.0) -> Array: ...


@runtime_checkable
class BlockModel(Protocol):
    """Describe a model as a sequence of named blocks and a loss; ZeRO-3, tensor and pipeline parallelism need this."""

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
    """Describe a model as one function that computes loss and gradients from named arrays."""

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

"""Find what a grain costs besides the work of its samples: counted, to choose its default size, and timed, to advise.

The time of a grain's forward and backward pass is about ``a + b n`` for ``n`` samples. ``a`` is what each grain costs
whatever its size: calls of Python and of kernels, and reading the parameters and adding their gradients; ``b`` is the
work of a sample. The default follows from counts, never from a clock, so that every rank of every job finds the same
number. docs/measurements.md has the measurements behind the constants, which are times in nanoseconds on a processor's
core. Times of the first passes are for a line of advice alone.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.pytree import leaves_of, map_leaves

#: A grain's calls between engine and model; a kernel's call; what a convolution's call takes more, on few samples; a
#: parameter that is read, and whose gradient is written and added.
_GRAIN, _CALL, _CONVOLUTION, _PARAMETER = 300_000, 15_000, 130_000, 3.6
#: A floating-point operation of a product, and a byte that is read or written.
_OPERATION, _BYTE = 0.01, 1 / 12
#: The work of a grain's samples over its fixed cost from which on the latter is small.
_ENOUGH = 20
#: Numbers of samples with which a model is run to count its work. Batch norms refuse a single one, and kernels leave
#: copies out that they make of more.
_FEW, _MORE = 2, 3


class PassWork(NamedTuple):
    """Count the work of a forward and backward pass.

    Attributes
    ----------
    calls, convolutions : int
        Calls of kernels; those of them that are convolutions.
    operations : int
        Floating-point operations of products and convolutions.
    bytes : int
        Bytes that kernels read and write.
    """

    calls: int = 0
    convolutions: int = 0
    operations: int = 0
    bytes: int = 0

    def plus(self, other: PassWork) -> PassWork:
        """Return the work of both."""
        return PassWork(*(a + b for a, b in zip(self, other, strict=True)))


class EfficientSamples:
    """Find, once for samples of each shape, with how many of them a grain's fixed cost is a twentieth of its work.

    Parameters
    ----------
    work : callable
        Takes trees ``x`` and ``y`` of so many samples as are to be counted, and returns the work of a pass.
    parameters : int
        Number of parameters.
    """

    def __init__(self, work: Callable[[Any, Any], PassWork], parameters: int) -> None:
        self._work, self._parameters = work, parameters
        self._found: dict[Any, int | None] = {}

    def __call__(self, x: Any, y: Any) -> int | None:
        """Return the number of samples, a power of two; None if samples take no work, or if it cannot be counted.

        Kernels are slower for other numbers: of XLA a convolution of 7 samples takes longer than one of 8. Of ``x`` and
        ``y``, trees of samples, only shapes and types count. Not collective.
        """
        kind = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves_of((x, y)))
        if kind not in self._found:
            try:
                few, more = (self._work(*_zeros((x, y), samples)) for samples in (_FEW, _MORE))
            except Exception:  # code of the user's own, given zeros: what is wrong with it, its first pass tells
                self._found[kind] = None
            else:
                self._found[kind] = self._enough(few, more)
        return self._found[kind]

    def _enough(self, few: PassWork, more: PassWork) -> int | None:
        operations, moved = more.operations - few.operations, more.bytes - few.bytes
        sample = (operations * _OPERATION + moved * _BYTE) / (_MORE - _FEW)
        fixed = _GRAIN + few.calls * _CALL + few.convolutions * _CONVOLUTION + self._parameters * _PARAMETER
        return 1 << (ceil(_ENOUGH * fixed / sample) - 1).bit_length() if sample > 0 else None


def _zeros(tree: Any, samples: int) -> Any:
    return map_leaves(lambda leaf: np.zeros((samples, *leaf.shape[1:]), leaf.dtype), tree)


#: Passes of a block that are left out because they also prepare something, and passes that are timed after them.
_LEFT_OUT, _TIMED = 2, 3


class PassSeconds(NamedTuple):
    """Hold the least seconds of a forward and backward pass of ``samples`` samples, and of one sample."""

    samples: int
    all: float
    one: float


class PassTimes:
    """Keep the seconds of the first passes of each block, forward and backward together.

    They advise, and determine nothing: a clock is another one on every rank.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], int] = {}
        self._all: dict[tuple[int, int], float] = {}
        self._one: dict[int, float] = {}

    def timed(self, block: int, samples: int, seconds: float) -> bool:
        """Add a pass of block number ``block``; tell whether one of a single sample is to be timed beside it."""
        key = block, samples
        if samples < 2 or self._passes.get(key, 0) >= _LEFT_OUT + _TIMED:
            return False
        self._passes[key] = self._passes.get(key, 0) + 1
        if self._passes[key] <= _LEFT_OUT:
            return False
        self._all[key] = min(seconds, self._all.get(key, seconds))
        return True

    @property
    def first(self) -> bool:
        """Tell whether no pass of a single sample was timed yet."""
        return not self._one

    def one_timed(self, block: int, seconds: float) -> None:
        """Add a pass of a single sample."""
        self._one[block] = min(seconds, self._one.get(block, seconds))

    @property
    def seconds(self) -> PassSeconds | None:
        """The sums over this rank's blocks; None before all of them were timed."""
        enough = [key for key, count in self._passes.items() if count == _LEFT_OUT + _TIMED]
        samples = max((samples for _, samples in enough), default=0)
        blocks = {block for block, _ in self._passes}
        if not enough or not blocks == {block for block, own in enough if own == samples} == set(self._one):
            return None
        return PassSeconds(
            samples, sum(self._all[block, samples] for block in blocks), sum(self._one[block] for block in blocks)
        )

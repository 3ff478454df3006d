"""Estimate from counted operations with how many samples the fixed cost of a grain is small.

The time of a grain's forward and backward pass is about ``a + b n`` for ``n`` samples. ``a`` is what each grain costs
whatever its size: calls of Python and of kernels, and reading the parameters and adding their gradients; ``b`` is the
work of a sample. Both follow from counts, never from a clock, so that every rank of every job finds the same number.
docs/measurements.md has the measurements behind the constants, which are times in nanoseconds on a processor's core.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

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


def efficient_samples(work: Callable[[int], PassWork], parameters: int) -> int | None:
    """Return with how many samples a grain's fixed cost is at most a twentieth of its work: a power of two.

    Kernels are slower for other numbers: of XLA a convolution of 7 samples takes longer than one of 8.

    Parameters
    ----------
    work : callable
        Takes a number of samples, and returns the work of a pass of so many.
    parameters : int
        Number of parameters.

    Returns
    -------
    int or None
        None if samples take no work, or if it cannot be counted.
    """
    try:
        few, more = work(_FEW), work(_MORE)
    except Exception:  # code of the user's own, given zeros: what is wrong with it, its first pass tells
        return None
    operations, moved = more.operations - few.operations, more.bytes - few.bytes
    sample = (operations * _OPERATION + moved * _BYTE) / (_MORE - _FEW)
    fixed = _GRAIN + few.calls * _CALL + few.convolutions * _CONVOLUTION + parameters * _PARAMETER
    return 1 << (ceil(_ENOUGH * fixed / sample) - 1).bit_length() if sample > 0 else None

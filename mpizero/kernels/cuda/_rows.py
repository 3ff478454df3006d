"""Compute sums and maxima of a row by the threads of one block, in an order fixed by the block's size.

Every thread of the block takes part in every call, with its own part of the row reduced; all get the result.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

#: Threads of a block at most (compute capability 3 and newer).
MOST_THREADS = 1024


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers, ``b`` where ``a`` is NaN."""
    return a if a > b else b


def block_sum(value: Any, shared: Any) -> Any:
    """Return the sum of the block's values, added pairwise."""
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    count = cuda.blockDim.x
    while count > 1:
        half = (count + 1) // 2
        if thread < count - half:
            shared[thread] += shared[thread + half]
        cuda.syncthreads()
        count = half
    total = shared[0]
    cuda.syncthreads()
    return total


def block_max(value: Any, shared: Any) -> Any:
    """Return the largest of the block's values."""
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    count = cuda.blockDim.x
    while count > 1:
        half = (count + 1) // 2
        if thread < count - half:
            shared[thread] = larger(shared[thread], shared[thread + half])
        cuda.syncthreads()
        count = half
    largest = shared[0]
    cuda.syncthreads()
    return largest

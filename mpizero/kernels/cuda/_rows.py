"""Compute the sum or maximum of one value per thread over a block of threads, in an order fixed by the block's size.

All threads of the block must call these functions, each with its own value, and all get the same result. To reduce a
row of a matrix, each thread first reduces some of the row's elements.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels.cuda.launch import cuda

#: Threads of a block at most (compute capability 3 and newer).
MOST_THREADS = 1024


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers; return ``b`` if one of them is NaN."""
    return a if a > b else b


def block_sum(value: Any, shared: Any) -> Any:
    """Return the sum of ``value`` over all threads of the block, added pairwise.

    ``shared`` is an array of shared memory with at least one element for each thread.
    """
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
    """Return the largest ``value`` of all threads of the block.

    ``shared`` is an array of shared memory with at least one element for each thread.
    """
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

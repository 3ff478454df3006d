"""Run kernels in several threads of a rank; the result does not depend on the number of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BLOCK = 1 << 17


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mpizero-kernel")


def run(kernel: Callable[..., None], args: tuple[Any, ...], start: int, stop: int, threads: int = 1) -> None:
    """Call ``kernel(*args, start, stop)``; with several threads, call it in parallel for blocks of the range.

    A block has ``BLOCK`` elements; the last one can have fewer. The calling thread is one of the ``threads`` threads.

    Raises
    ------
    Exception
        An exception that the kernel raised in one of the threads, after all threads have ended.
    """
    if threads <= 1 or stop - start <= BLOCK:
        kernel(*args, start, stop)
        return
    blocks = range(start, stop, BLOCK)
    run_tasks([functools.partial(kernel, *args, block, min(block + BLOCK, stop)) for block in blocks], threads)


def run_tasks(tasks: Iterable[Callable[[], Any]], threads: int) -> None:
    """Call all functions ``tasks`` in ``threads`` threads, of which the calling thread is one.

    Raises
    ------
    Exception
        An exception that a task raised, after all threads have ended.
    """
    left = iter(tuple(tasks))

    def work() -> None:
        while (task := next(left, None)) is not None:  # next() on a tuple's iterator is atomic under the lock
            task()

    helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        errors = [error for helper in helpers if (error := helper.exception()) is not None]
    if errors:
        raise errors[0]

"""Run kernels in several threads of a rank; the result does not depend on the number of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

BLOCK = 1 << 17


@functools.cache
def _blas_threads() -> Callable[[], int]:
    """Return a function that returns how many threads NumPy's BLAS may use now; 1 if threadpoolctl does not know it.

    Of OpenBLAS with threads of its own, as in NumPy's wheels, this is the library's function: threadpoolctl searches
    the library for it at every call, which takes as long as a small kernel.
    """
    from threadpoolctl import ThreadpoolController

    found: Any = next(iter(ThreadpoolController().select(user_api="blas").lib_controllers), None)
    if found is None:
        return lambda: 1
    own = getattr(found, "check_symbols", ()) if getattr(found, "threading_layer", "") == "pthreads" else ()
    symbols = [symbol for symbol in own if "get_num_threads" in symbol and hasattr(found.dynlib, symbol)]
    return getattr(found.dynlib, symbols[0]) if symbols else lambda: found.num_threads or 1


def threads_for(work: int, least: int) -> int:
    """Return how many threads to use for ``work``, if a thread is worth ``least`` of it.

    These are at most as many as NumPy's BLAS may use now, which ``ShardingConfig(threads=...)`` sets.
    """
    worth = work // least
    return 1 if worth < 2 else max(1, min(worth, _blas_threads()()))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

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


def parts_of(length: int, parts: int, multiple: int = 1) -> list[slice]:
    """Cut ``range(length)`` into ``parts`` ranges of about equal length, which begin at multiples of ``multiple``."""
    cuts = [length * part // parts // multiple * multiple for part in range(parts)] + [length]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def run_divided(kernel: Callable[..., Any], args: Sequence[Any], divided: Sequence[int], parts: int) -> None:
    """Call ``kernel`` in ``parts`` threads, each with a part of the first axis of ``args[i]`` for ``i`` in ``divided``.

    Raises
    ------
    Exception
        As :func:`run_tasks` raises it.
    """
    tasks = [
        functools.partial(kernel, *(value[part] if i in divided else value for i, value in enumerate(args)))
        for part in parts_of(len(args[divided[0]]), parts)
    ]
    run_tasks(tasks, parts)


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
        # A helper that has not begun has nothing left to do, and may wait for this very thread.
        errors = [error for helper in helpers if not helper.cancel() and (error := helper.exception()) is not None]
    if errors:
        raise errors[0]

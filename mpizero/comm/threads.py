"""Run a function on several ranks that are threads of this process, without a launcher: for debuggers and tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.errors import ArgumentError, PeerFailure, StateError

T = TypeVar("T")


def run_in_threads(size: int, function: Callable[[InMemoryCommunicator], T]) -> list[T]:
    """Call ``function(comm)`` on ``size`` threads, one for each rank, and return the results as a list in rank order.

    When a thread raises, all other threads raise PeerFailure in their present or next call of ``comm``. This function
    then raises the first error that is not a PeerFailure. It also raises if a thread ends while others wait for it, or
    if all threads wait. So the threads cannot wait for one another for ever.

    Raises
    ------
    StateError
        If the system does not start that many threads.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.testing import run_in_threads
    >>> def train(comm):
    ...     with mz.ShardingConfig(comm=comm) as config, mz.FSDPModel(mz.nn.MLP(2, [8], 2), config) as model:
    ...         return comm.rank, model.shard_size
    >>> run_in_threads(3, train)
    [(0, 14), (1, 14), (2, 14)]
    """
    if not callable(function):
        raise ArgumentError(f"run_in_threads: function must be one of a communicator, got {function!r}")
    communicators = InMemoryCommunicator.group(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(comm: InMemoryCommunicator) -> None:
        try:
            results[comm.rank] = function(comm)
        except BaseException as error:
            errors.append(error)
            comm.abort(error)
        finally:
            comm.leave()

    threads = [threading.Thread(target=work, args=(c,), name=f"rank {c.rank}", daemon=True) for c in communicators]
    try:
        for number, thread in enumerate(threads):
            _start(thread, number, size)
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C reaches the main thread alone
        communicators[0].abort(error)
        raise
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerFailure)), errors[0])
    return [results[rank] for rank in range(size)]


def _start(thread: threading.Thread, started: int, size: int) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise StateError(
            f"run_in_threads: only {started} of {size} threads have started ({error}): allow this user more processes "
            "and threads (ulimit -u; in a container its pids limit), give each thread a smaller stack (ulimit -s), or "
            "use fewer ranks"
        ) from error

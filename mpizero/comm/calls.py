"""Compare the operations that all ranks have called before any of them begins.

[Note: calls] A public collective call (``train``, ``evaluate``, ``save_model``, ``close``) is an operation. Its name
and the user's line are recorded in the trace of the communicator of all ranks, like a collective. The first message of
every operation is the same under every strategy: the hash of all calls of this rank so far, with up to three numbers
that the operation needs of all ranks. So ranks that call different operations exchange the same message, and raise an
error with both names and both lines before shared memory is changed. A step sends its sample counts in this message,
so it costs no message more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from mpizero.comm.communicator import Communicator
from mpizero.errors import CollectiveError
from mpizero.types import Array

#: Number of 64-bit integers that an operation may send in its first message.
FIGURES = 3

P = ParamSpec("P")
R = TypeVar("R")


class Collective(Protocol):
    """Have collective methods, and know the ranks that call them."""

    def _callers(self) -> tuple[Communicator, str]:
        """Return the ranks that make the calls, and a name that tells several objects apart; "" for the first."""


C = TypeVar("C", bound=Collective)


def record_call(comm: Communicator, operation: str, which: str = "") -> None:
    """Record that the user has called an operation on this rank, and where. Not collective, but called on all ranks."""
    if comm.size > 1:
        comm.trace.begin_operation((operation, which))


def agree_on_call(comm: Communicator, figures: Sequence[int] = ()) -> Array:
    """Send the first message of an operation; return the figures of all ranks, one row for each.

    Collective over ``comm``.

    Raises
    ------
    CollectiveMismatch
        On every rank, if they have called different operations: names the operations, their ranks and lines.
    """
    mine = np.zeros(1 + FIGURES, np.int64)
    mine[1 : 1 + len(figures)] = figures
    if comm.size == 1:
        return mine.reshape(1, -1)[:, 1:]
    if comm.out_of_step is not None:  # a close() in a ``finally``: the others may have ended
        raise comm.out_of_step
    mine[0] = comm.trace.number
    table = np.empty((comm.size, mine.size), np.int64)
    try:
        comm.allgather(mine, table.reshape(-1), "operation")
        if (table[:, 0] != table[0, 0]).any():
            raise comm.mismatch()
    except CollectiveError as error:
        comm.out_of_step = error
        raise
    return table[:, 1:]


def check_call(comm: Communicator, operation: str, which: str = "") -> None:
    """Compare the operation that all ranks have called. Collective over ``comm``: one message of 32 bytes a rank.

    Raises
    ------
    CollectiveMismatch
        As :func:`agree_on_call`.
    """
    record_call(comm, operation, which)
    agree_on_call(comm)


def _compared(
    compare: Callable[[Communicator, str, str], None], method: Callable[Concatenate[C, P], R]
) -> Callable[Concatenate[C, P], R]:
    """Return a method that compares its name, by ``compare``, before it does anything else."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        comm, which = self._callers()
        compare(comm, f"{type(self).__name__}.{method.__name__}", which)
        return method(self, *args, **kwargs)

    return call


def collective(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Compare calls of a method between ranks before it begins, see :func:`check_call`."""
    return _compared(check_call, method)


def recorded(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Compare calls of a method between ranks in its own first message; see :func:`agree_on_call`.

    One that sends none (a gradient of local steps) is compared in the first message of the next.
    """
    return _compared(record_call, method)

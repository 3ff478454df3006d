"""Check that all ranks have called the same public operation, before any of them executes it.

[Note: calls] A public collective call (``train``, ``evaluate``, ``save_model``, ``close``) is an operation. Its name
and the source line of the user's call are recorded in the trace of the world communicator, as collectives are. The
first message of every operation has the same form: a hash of all calls that this rank has made so far, and up to three
integers that the operation needs from every rank. So even ranks that call different operations can exchange this
message. They then raise an error with the names and source lines of the operations, before shared memory is changed. A
training step sends its sample counts in this message, so the comparison adds no message to it.
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
    """Describe a class whose methods are decorated with :func:`collective` or :func:`recorded`."""

    def _callers(self) -> tuple[Communicator, str]:
        """Return the communicator of the calling ranks, and a label that tells this object from others of its class.

        The label of the first object of a class is "".
        """


C = TypeVar("C", bound=Collective)


def record_call(comm: Communicator, operation: str, which: str = "") -> None:
    """Record in the trace of ``comm`` that the user has called ``operation``, and the source line of the call.

    ``which`` is the label of the object whose method was called, see :class:`Collective`. Sends nothing, but all ranks
    must call it: the next :func:`agree_on_call` compares the records.
    """
    if comm.size > 1:
        comm.trace.begin_operation((operation, which))


def agree_on_call(comm: Communicator, figures: Sequence[int] = ()) -> Array:
    """Check that all ranks have called the same operation; return the ``figures`` of all ranks, one row for each rank.

    Collective over ``comm``: this is the first message of an operation, see [Note: calls]. ``figures`` are up to three
    integers; rows are filled up with zeros to three columns.

    Raises
    ------
    CollectiveMismatch
        On every rank, if the ranks have called different operations; names the operations, their ranks and source
        lines. Later calls of this function on the same communicator raise the same error again.
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
    """Check that all ranks have called the same operation. Collective over ``comm``: one message of 32 bytes a rank.

    ``which`` is the label of the object whose method was called; it must be the same too.

    Raises
    ------
    CollectiveMismatch
        On every rank, if the ranks have called different operations.
    """
    record_call(comm, operation, which)
    agree_on_call(comm)


def _compared(
    compare: Callable[[Communicator, str, str], None], method: Callable[Concatenate[C, P], R]
) -> Callable[Concatenate[C, P], R]:
    """Return a method that first calls ``compare(comm, name of the method, label of the object)``, then ``method``."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        comm, which = self._callers()
        compare(comm, f"{type(self).__name__}.{method.__name__}", which)
        return method(self, *args, **kwargs)

    return call


def collective(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a collective method: one message before each call checks that all ranks call the same method.

    See :func:`check_call`.
    """
    return _compared(check_call, method)


def recorded(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a collective method that calls :func:`agree_on_call` itself: only record each call, send no message.

    If a call of the method sends no message at all, the first message of the next operation compares it.
    """
    return _compared(record_call, method)

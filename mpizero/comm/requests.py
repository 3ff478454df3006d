"""Describe arrays to MPI, wait for its operations, asleep where ranks share cores, and keep their buffers alive.

[Note: shared cores] MPI libraries poll while they wait. If a node has more ranks than cores, a rank that polls takes
the time of those that it waits for: of 64 ranks on two cores, polling takes nine tenths of the processor time of small
steps. There a rank asks whether an operation has ended, and sleeps between its questions. Only non-blocking operations
can be asked. So a blocking collective that adds no floats becomes its non-blocking twin. Before other blocking calls
the ranks meet in a barrier for which they wait asleep; so none polls for long. The two forms of a collective do not fit
together, so all ranks of a communicator use the same one: they agree when the first communicator is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpizero.comm.supervision.verification import PendingComparison
from mpizero.comm.transport import Request, Transport
from mpizero.types import Array

#: Seconds in which a rank that waits only lets others run; then those of its first sleep, and of its longest for each
#: rank that a core has (many ranks may come before the awaited one), but at most so many. Each sleep is longer than the
#: one before by this factor. On two cores: with a longest sleep of 1 ms steps of 3 and 8 ranks took nearly twice as
#: long as with 0.3 ms; with one of 5 ms steps of 32 ranks took twice as long as with 1 ms; with one of 2 ms and a first
#: one eight times as long steps of 64 ranks took 0.31 s, not 0.36 s, and their start a tenth less.
_YIELD, _FIRST, _LONGEST, _AT_MOST, _GROWTH = 2e-4, 5e-5, 7.5e-5, 2e-3, 1.2

_INTEGERS = {
    ("i", 1): MPI.INT8_T, ("i", 2): MPI.INT16_T, ("i", 4): MPI.INT32_T, ("i", 8): MPI.INT64_T,
    ("u", 1): MPI.UINT8_T, ("u", 2): MPI.UINT16_T, ("u", 4): MPI.UINT32_T, ("u", 8): MPI.UINT64_T,
}  # fmt: skip
#: MPI's types by the character of the dtype; float16 has no MPI type and travels as 16-bit integers.
TYPES: dict[str, MPI.Datatype] = {
    "?": MPI.UINT8_T, "e": MPI.UINT16_T, "f": MPI.FLOAT, "d": MPI.DOUBLE,
    "F": MPI.C_FLOAT_COMPLEX, "D": MPI.C_DOUBLE_COMPLEX,
    **{c: _INTEGERS[np.dtype(c).kind, np.dtype(c).itemsize] for c in "bBhHiIlLqQ"},
}  # fmt: skip
OPERATIONS: dict[str, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def spec(array: Array) -> list[Any]:
    """Describe an array to mpi4py. Not collective."""
    return [array, array.size, TYPES[array.dtype.char]]


class Waiting:
    """Wait for operations of MPI: inside the library, or asleep; see [Note: shared cores].

    Parameters
    ----------
    ranks : float
        The number of ranks for each core of a node; more than 1 if they share cores. It is the same on all ranks of a
        communicator.

    Attributes
    ----------
    asleep : bool
        True if ranks share cores.
    """

    def __init__(self, ranks: float) -> None:
        self.asleep = ranks > 1.0
        self._longest = min(_AT_MOST, _LONGEST * ranks)
        crowd = max(1.0, ranks / 4)  # so many ranks come before the awaited one
        self._yield, self._first = _YIELD / crowd, min(self._longest, _FIRST * crowd)

    def end(self, request: MPI.Request, status: MPI.Status | None = None) -> None:
        """Wait until an operation has ended."""
        if not self.asleep:
            request.Wait(status)
        elif not request.Test(status):
            until, pause = monotonic() + self._yield, self._first
            while monotonic() < until:
                os.sched_yield()
                if request.Test(status):
                    return
            while not request.Test(status):
                sleep(pause)
                pause = min(self._longest, _GROWTH * pause)

    def call(self, blocking: Callable[..., None], started: Callable[..., MPI.Request], *arguments: Any) -> None:
        """Call ``blocking``, or its non-blocking twin ``started`` if ranks sleep. Collective."""
        if self.asleep:
            self.end(started(*arguments))
        else:
            blocking(*arguments)

    def allreduce(self, comm: MPI.Intracomm, buffer: Array, operation: MPI.Op) -> None:
        """Reduce an array in place over the ranks of ``comm``. Collective."""
        if self.asleep and buffer.dtype.kind in "biu":  # exact, in whatever order the twin adds
            self.end(comm.Iallreduce(MPI.IN_PLACE, spec(buffer), operation))
        else:
            self.meet(comm)
            comm.Allreduce(MPI.IN_PLACE, spec(buffer), operation)

    def meet(self, comm: MPI.Intracomm) -> None:
        """If ranks sleep, wait until all ranks of ``comm`` have come here. Collective over ``comm``."""
        if self.asleep:
            self.end(comm.Ibarrier())


class MpiRequest(Request):
    """Wait for the MPI requests of one operation, and keep its buffers alive until they have ended.

    An operation has several requests if its buffer was cut into several messages.
    """

    __slots__ = ("_buffers", "_communicator", "_operation", "_requests", "_sequence", "_tag", "_waiting")

    def __init__(self, communicator: Transport, waiting: Waiting, requests: list[MPI.Request], buffers: object) -> None:
        trace = communicator.trace
        self._communicator = communicator
        self._waiting = waiting
        self._requests = requests
        self._buffers = buffers
        self._operation, self._tag, self._sequence = trace.operation, trace.tag, trace.sequence

    def wait(self) -> None:
        """Wait until the operation has ended on this rank; a second call returns at once."""
        if self._requests:
            self._communicator._run(self._operation, self._tag, self._sequence, self._wait_all)
            self._release()

    def test(self) -> bool:
        """Let MPI make progress, and tell whether the operation has ended; always True after MPI_Finalize."""
        if self._requests and (MPI.Is_finalized() or self._ended()):
            self._release()
        return not self._requests

    def _ended(self) -> bool:
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            raise self._communicator._failure(self._operation, self._tag, error) from error

    def _wait_all(self) -> None:
        for request in self._requests:  # Waitall would say only "error code in status"
            self._waiting.end(request)

    def _release(self) -> None:
        self._requests = []
        self._buffers = None


class MpiReceive(MpiRequest):
    """Wait for a receive, and raise if the message is shorter than the buffer; MPI itself accepts shorter messages."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait until the whole buffer has been received; a second call returns at once."""
        if self._requests:
            self._communicator._run(self._operation, self._tag, self._sequence, self._wait_full, self._buffers)
            self._release()

    def _ended(self) -> bool:
        statuses = [MPI.Status() for _ in self._requests]
        try:
            ended = MPI.Request.Testall(self._requests, statuses)
        except MPI.Exception as error:
            raise self._communicator._failure(self._operation, self._tag, error, self._buffers) from error
        if ended:
            self._check(statuses)
        return ended

    def _wait_full(self, _: object) -> None:
        statuses = [MPI.Status() for _ in self._requests]
        for request, status in zip(self._requests, statuses, strict=True):
            self._waiting.end(request, status)
        self._check(statuses)

    def _check(self, statuses: list[MPI.Status]) -> None:
        buffer = cast("Array", self._buffers)
        if (arrived := sum(s.Get_elements(MPI.BYTE) for s in statuses)) != buffer.nbytes:
            reason = f"expected {buffer.nbytes} bytes, the message has {arrived}"
            raise self._communicator.error(self._operation, self._tag, reason, buffer)


class VerifiedRequest(Request):
    """Wait for the comparison of a non-blocking collective, then for the collective itself."""

    def __init__(self, communicator: Transport, verification: PendingComparison, request: Request) -> None:
        trace = communicator.trace
        self._communicator, self._request = communicator, request
        self._verification: PendingComparison | None = verification
        self._call = (trace.operation, trace.tag, trace.sequence)

    def wait(self) -> None:
        """Return when the operation has ended on this rank. Not collective; a second call returns at once."""
        if self._verification is not None:
            self._communicator._run(*self._call, self._verification.wait)
            self._verification = None
        self._request.wait()

    def test(self) -> bool:
        """Make progress and tell whether the operation has ended. Not collective."""
        if self._verification is not None:
            if not self._verification.test():
                return False
            self._verification = None
        return self._request.test()

"""Wait for non-blocking operations of MPI, and keep their buffers alive."""

from __future__ import annotations

from typing import cast

from mpi4py import MPI

from mpizero.comm.transport import Request, Transport
from mpizero.types import Array


class MpiRequest(Request):
    """Wait for the MPI requests of one operation, and keep its buffers alive until they have ended.

    An operation has several requests if its buffer was cut into several messages.
    """

    __slots__ = ("_buffers", "_communicator", "_operation", "_requests", "_sequence", "_tag")

    def __init__(self, communicator: Transport, requests: list[MPI.Request], buffers: object) -> None:
        trace = communicator.trace
        self._communicator = communicator
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
            request.Wait()

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
            request.Wait(status)
        self._check(statuses)

    def _check(self, statuses: list[MPI.Status]) -> None:
        buffer = cast("Array", self._buffers)
        if (arrived := sum(s.Get_elements(MPI.BYTE) for s in statuses)) != buffer.nbytes:
            reason = f"expected {buffer.nbytes} bytes, the message has {arrived}"
            raise self._communicator.error(self._operation, self._tag, reason, buffer)

"""Check before every collective that all ranks call the same collective, if MPIZERO_DEBUG=collectives is set.

Every collective then costs one more small message, on a separate communicator. The comparison of a non-blocking
collective ends when its request is waited for or tested, so that ranks may still start it at different times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpizero.errors import CollectiveError
from mpizero.guard.call_trace import CallTrace, mismatch
from mpizero.types import Array


class CallVerifier:
    """Compare the ranks' hashes of their calls on one communicator; if they differ, raise the same error on all ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator. The constructor is collective over it, and splits off a communicator for the comparisons.
    trace : CallTrace
        The calls of this rank on the communicator.
    members : sequence of int
        World ranks of the communicator, for the report.
    """

    def __init__(self, comm: MPI.Intracomm, trace: CallTrace, members: Sequence[int]) -> None:
        self._comm = comm.Split(0, comm.Get_rank())
        self._trace, self._members = trace, members

    def start(self) -> PendingComparison:
        """Start to compare the hashes of all ranks, and return the comparison. Collective over the communicator."""
        mine, everyone = np.array([self._trace.number]), np.empty(self._comm.Get_size(), np.int64)
        request = self._comm.Iallgather([mine, MPI.INT64_T], [everyone, 1, MPI.INT64_T])
        return PendingComparison(self, request, mine, everyone)

    def error(self) -> CollectiveError:
        """Return the error that says which different calls the ranks have made. Collective over the communicator."""
        records = dict(self._comm.allgather((self._members[self._comm.Get_rank()], self._trace.records())))
        found = mismatch(self._trace.name, records)
        return found or CollectiveError(f"the ranks of {self._trace.name!r} have called different collectives")

    def blocks(self, send_counts: Sequence[int], recv_counts: Sequence[int]) -> str:
        """Return a text about a block of an alltoallv whose sender and receiver pass different lengths; "" if none.

        Collective over the communicator. The counts are the lengths of the blocks in elements.
        """
        size = self._comm.Get_size()
        mine = np.array([*send_counts, *recv_counts], np.int64)
        every = np.empty((size, 2, size), np.int64)
        self._comm.Allgather([mine, MPI.INT64_T], [every, 2 * size, MPI.INT64_T])
        wrong = np.argwhere(every[:, 0] != every[:, 1].T)
        if not wrong.size:
            return ""
        a, b = wrong[0]
        return (
            f"rank {self._members[a]} sends {every[a, 0, b]} elements to rank {self._members[b]}, which expects "
            f"{every[b, 1, a]}"
        )

    def close(self) -> None:
        """Free the communicator of the comparisons. Collective over its ranks."""
        self._comm.Free()


class PendingComparison:
    """Represent a comparison of hashes that :meth:`CallVerifier.start` has started."""

    def __init__(self, verifier: CallVerifier, request: MPI.Request, mine: Array, everyone: Array) -> None:
        self._verifier, self._request = verifier, request
        self._mine, self._everyone = mine, everyone

    def wait(self) -> None:
        """Wait for the hashes of all ranks; if they differ, raise CollectiveMismatch on every rank.

        Collective over the communicator.
        """
        self._request.Wait()
        self._compare()

    def test(self) -> bool:
        """Tell whether the comparison has ended; raise like :meth:`wait` if hashes differ. Not collective."""
        arrived = self._request.Test()
        if arrived:
            self._compare()
        return arrived

    def _compare(self) -> None:
        if (self._everyone != self._mine).any():
            raise self._verifier.error()

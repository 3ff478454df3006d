"""Agree on requests to stop early, from any source, over all ranks once a step."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.transport import Request

#: What may ask for a stop: returns the reason, "" while there is none. Called once a step, so it must be quick.
StopSource = Callable[[], str]


class StopDecision(IntEnum):
    """Name what all ranks do after a step; of several requests the largest wins."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


class StopRequests:
    """Let all ranks of ``comm`` agree on what the stop requests of some of them mean.

    The answer of one small reduction, started before a step and read after it, is the same on every rank, so all save
    the same step. A request that comes during a step counts after the next one. Background work rides along: whether
    any rank is still busy with it.

    Parameters
    ----------
    comm : Communicator
        Used for nothing else while a question is open.
    *sources : callable
        What may ask this rank to stop; other ranks may have others, or none.
    """

    def __init__(self, comm: Communicator, *sources: StopSource) -> None:
        self.comm, self._sources = comm, list(sources)
        self._request, self._own, self._reason = StopDecision.GO_ON, "", ""
        self._buffer = np.zeros(2, dtype=np.int64)
        self._question: Request | None = None
        self._finished = True

    @property
    def reason(self) -> str:
        """Return why all stop, as the lowest rank that was asked says; "" before the decision."""
        return self._reason

    @property
    def all_finished(self) -> bool:
        """Tell whether no rank was busy at the time of the last answered :meth:`ask`; the same on every rank."""
        return self._finished

    def listen(self, *sources: StopSource) -> None:
        """Take more sources of requests to this rank.

        Not collective.
        """
        self._sources += sources

    def fail(self) -> None:
        """Ask every rank to stop with an error after the next agreed step.

        Not collective.
        """
        self._request = StopDecision.FAIL

    def ask(self, busy: bool = False) -> None:
        """Start asking every rank for its request.

        Collective over the communicator.

        Parameters
        ----------
        busy : bool
            This rank has background work that must end before :attr:`all_finished` can be true.
        """
        self._own = self._own or next(filter(None, (source() for source in self._sources)), "")
        request = max(self._request, StopDecision.STOP if self._own else StopDecision.GO_ON)
        size, rank = self.comm.size, self.comm.rank
        self._buffer[:] = request * size + (size - 1 - rank), busy  # of equal requests the lowest rank's
        self._question = self.comm.iallreduce(self._buffer, op="max", tag="stop requests")

    def answer(self) -> StopDecision:
        """Return the largest request of all ranks at the time of :meth:`ask`.

        Collective over the communicator.
        """
        if self._question is None:
            raise RuntimeError("answer() needs a question: call ask() first")
        self._question.wait()
        self._question = None
        self._finished = not self._buffer[1]
        request, place = divmod(int(self._buffer[0]), self.comm.size)
        if request == StopDecision.STOP:
            rank = self.comm.size - 1 - place
            self._reason = self.comm.broadcast_object(self._own, rank, tag="stop requests")
        return StopDecision(request)

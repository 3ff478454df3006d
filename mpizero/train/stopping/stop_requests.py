"""Let all ranks decide together, once a step, whether to stop early because a rank has a request to stop."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.communicator import Request

#: Type of a function that may request a stop: it returns the reason, or "". It is called once a step.
StopSource = Callable[[], str]


class StopDecision(IntEnum):
    """List what all ranks can do after a step: if ranks request different things, the largest value wins."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


class StopRequests:
    """Let all ranks of ``comm`` decide together whether to stop, from the requests of single ranks.

    :meth:`ask` starts one small reduction before a step, and :meth:`answer` reads its result after the step. The result
    is the same on every rank, so all ranks save the same step. A request that comes during a step takes effect after
    the next step. The same reduction tells whether any rank is still busy with background work.

    Parameters
    ----------
    comm : Communicator
        Must not be used for anything else between :meth:`ask` and :meth:`answer`.
    *sources : callable
        Functions that may request a stop on this rank; other ranks may have different functions, or none.
    """

    def __init__(self, comm: Communicator, *sources: StopSource) -> None:
        self.comm, self._sources = comm, list(sources)
        self._request, self._own, self._reason = StopDecision.GO_ON, "", ""
        self._buffer = np.zeros(2, dtype=np.int64)
        self._question: Request | None = None
        self._finished = True

    @property
    def reason(self) -> str:
        """Reason of the stop, from the lowest rank that requested it; "" before the ranks have decided to stop."""
        return self._reason

    @property
    def all_finished(self) -> bool:
        """True if no rank had background work at the :meth:`ask` of the last :meth:`answer`; the same on all ranks."""
        return self._finished

    def listen(self, *sources: StopSource) -> None:
        """Add functions that may request a stop on this rank.

        Not collective.
        """
        self._sources += sources

    def fail(self) -> None:
        """Request that every rank stops with an error; the next :meth:`ask` sends the request.

        Not collective.
        """
        self._request = StopDecision.FAIL

    def ask(self, busy: bool = False) -> None:
        """Start the reduction over the requests of all ranks.

        Collective over the communicator.

        Parameters
        ----------
        busy : bool
            Whether this rank still has background work.
        """
        self._own = self._own or next(filter(None, (source() for source in self._sources)), "")
        request = max(self._request, StopDecision.STOP if self._own else StopDecision.GO_ON)
        size, rank = self.comm.size, self.comm.rank
        self._buffer[:] = request * size + (size - 1 - rank), busy  # of equal requests the lowest rank's
        self._question = self.comm.iallreduce(self._buffer, op="max", tag="stop requests")

    def answer(self) -> StopDecision:
        """Wait for the reduction that :meth:`ask` started; return the largest request of all ranks.

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

"""Give the samples of a simulation to the trainers of the same job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from mpizero.comm import Communicator, Request
from mpizero.data.online.messages import ANSWER, END, ERROR, GIVEN, HEADER, SAMPLE, STOPPED, message
from mpizero.data.online.sample import SampleForm
from mpizero.errors import StateError
from mpizero.guard.reports import describe_error
from mpizero.types import Array

#: Longest pause between two looks at what has arrived, in seconds.
PAUSE = 0.005


def wait_until(done: Callable[[], bool]) -> None:
    """Look at ``done`` until it is true, and sleep meanwhile; no call of MPI lasts."""
    pause = 20e-6
    while not done():
        time.sleep(pause)
        pause = min(1.5 * pause, PAUSE)


class OnlineProducer:
    """Give samples to the trainers; made by :meth:`OnlineJob.producer`. No method is collective.

    It is a context manager: the end of the block is the end of this producer's samples, and an exception in it is told
    to the trainers, which raise it too or go on without this producer. The exception leaves the block when they are
    done.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> like = np.zeros(2), np.zeros(1)  # one sample: its shapes and dtypes
    >>> def work(comm):
    ...     with mz.data.OnlineJob(comm, trainers=1, like=like) as job:
    ...         if job.trains:
    ...             with job.source() as source, mz.ShardingConfig(comm=job.group) as config:
    ...                 return len(next(mz.data.batches(source, config, global_batch=3))[0])
    ...         with job.producer() as producer:
    ...             while producer.put(np.ones(2), np.ones(1)):  # False when the trainers have done their steps
    ...                 pass
    ...             return "the trainers have ended"
    >>> mz.testing.run_in_threads(2, work)
    [3, 'the trainers have ended']
    """

    def __init__(self, comm: Communicator, form: SampleForm, window: int) -> None:
        self._comm, self._form, self._window = comm, form, window
        self._given = self._taken = 0
        self._stopped = self._closed = False
        self._sent: list[Request] = []
        self._answer = np.empty(1, np.int64)
        self._request: Request = comm.irecv(self._answer, 0, ANSWER)

    def put(self, x: Any, y: Any) -> bool:
        """Give one sample; wait while ``window`` samples of this producer are not in a batch yet.

        Returns True if the trainers have a place for the sample, and False if they have ended: then the sample is not
        used, and the simulation may end, too. The arrays are copied.

        Raises
        ------
        DataError
            If shape or dtype of an array is not that of the samples of this run.
        StateError
            If the producer is closed.
        """
        if self._closed:
            raise StateError(f"OnlineProducer of rank {self._comm.rank} is closed: put comes before close()")
        x, y = self._form.checked(x, y, f"sample {self._given} of the producer on rank {self._comm.rank}")
        wait_until(lambda: self._listen() or self._given - self._taken < self._window)
        if self._stopped:
            return False
        data = message(self._form)
        self._form.pack(x, y, data[HEADER:])
        self._send(GIVEN, self._given, data)
        self._given += 1
        return True

    def close(self) -> None:
        """Tell the trainers that no more samples come, and wait until all have arrived; a second call does nothing."""
        if not self._closed:
            self._end(END, "")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the producer; tell the trainers of an error."""
        if error is None or self._closed:
            self.close()
        else:
            self._end(ERROR, describe_error(error))

    def _end(self, kind: int, text: str) -> None:
        self._closed = True
        data = message(self._form)
        told = np.frombuffer(text.encode(), np.uint8)[: data.size - HEADER]
        data[HEADER : HEADER + told.size] = told
        self._send(kind, told.size, data)
        wait_until(lambda: self._listen() and not self._sent)

    def _send(self, kind: int, number: int, data: Array) -> None:
        data[:HEADER].view(np.int64)[:] = kind, number
        self._sent.append(self._comm.isend(data, 0, SAMPLE))

    def _listen(self) -> bool:
        """Take in the answers that have arrived; tell whether the trainers have ended."""
        self._sent = [one for one in self._sent if not one.test()]
        while not self._stopped and self._request.test():
            if self._answer[0] == STOPPED:
                self._stopped = True
            else:
                self._taken += 1
                self._request = self._comm.irecv(self._answer, 0, ANSWER)
        return self._stopped

"""Bring samples from producers to trainers of the same job, by messages that nobody waits in.

[Note: window] A producer numbers its samples and has at most ``window`` of them in flight or in the reservoir. For
each one that a batch takes, it receives a message of 8 bytes. One receive is posted for each producer, so messages of a
producer that are not received yet wait in its own memory.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mpizero.comm import Communicator, Request
from mpizero.data.online.receiver import Receiver
from mpizero.data.online.sample import Sample, SampleForm
from mpizero.types import Array

#: Tags of the messages with samples, and of the answers.
SAMPLE, ANSWER = 1, 2
#: Kinds of messages of producers: a sample, the end, an error.
GIVEN, END, ERROR = 0, 1, 2
#: An answer: one sample was taken; or nobody trains any more.
TAKEN, STOPPED = 0, 1
#: Bytes before a sample: its kind and its number, or the length of the text of an error.
HEADER = 16
#: Least number of bytes after the header, for the text of an error.
_TEXT = 2000


def message(form: SampleForm) -> Array:
    """Return a new buffer for one message of a producer."""
    return np.zeros(HEADER + max(form.nbytes, _TEXT), np.uint8)


class _Line:
    """Receive the messages of one producer, and answer them."""

    def __init__(self, comm: Communicator, rank: int, form: SampleForm) -> None:
        self.name, self.ended, self.error, self.told = f"rank {rank}", False, "", False
        self._comm, self._rank, self._form = comm, rank, form
        self.samples: deque[Sample] = deque()
        self._answers: list[Request] = []
        self._buffer = message(form)
        self._request: Request = comm.irecv(self._buffer, rank, SAMPLE)

    def receive(self) -> bool:
        """Take in one message if it has arrived; tell whether it has."""
        self._answers = [one for one in self._answers if not one.test()]
        if self.ended or not self._request.test():
            return False
        kind, number = self._buffer[:HEADER].view(np.int64).tolist()
        body = self._buffer[HEADER:]
        if kind == GIVEN:
            self.samples.append(Sample(self.name, number, *self._form.unpack(body)))
            self._request = self._comm.irecv(self._buffer, self._rank, SAMPLE)
        else:
            self.ended, self.error = True, body[:number].tobytes().decode(errors="replace") if kind == ERROR else ""
            if kind == END:  # one that has failed waits for the end of the training
                self.answer(STOPPED)
        return True

    def answer(self, what: int) -> None:
        """Start to tell the producer ``what`` has become of its samples."""
        if self.told:
            return
        self.told = what == STOPPED
        self._answers.append(self._comm.isend(np.array([what]), self._rank, ANSWER))

    @property
    def answered(self) -> bool:
        """True if all answers have left."""
        self._answers = [one for one in self._answers if not one.test()]
        return not self._answers


class MessageReceiver(Receiver):
    """Receive samples on rank 0 from the ranks ``producers`` of ``comm``, which take turns.

    The next sample of the stream is always that of the next producer in turn, whichever message has come first; one
    that has ended is passed over. So the stream depends on what each producer has put, and not on time.
    """

    def __init__(self, comm: Communicator, producers: range, form: SampleForm) -> None:
        super().__init__()
        self._lines = [_Line(comm, rank, form) for rank in producers]
        self._turn = 0

    def poll(self, wanted: int) -> bool:
        """Take in what has arrived, until ``arrivals`` has ``wanted`` samples; tell whether anything has."""
        found = [line.receive() for line in self._lines]
        for line in self._lines:
            if line.error:
                self.arrivals.failures[line.name] = line.error
        while len(self.arrivals.samples) < wanted and (chosen := self._next()) is not None:
            self.arrivals.samples.append(chosen.samples.popleft())
            chosen.answer(TAKEN)
        return any(found)

    def _next(self) -> _Line | None:
        """Return the producer in turn and go on to the one after it; None if its sample has not come yet."""
        for _ in self._lines:
            line = self._lines[self._turn]
            if not line.samples:
                if not line.ended:
                    return None
                self.arrivals.ended.add(line.name)
                if self.first_end_stops:
                    return None
            self._turn = (self._turn + 1) % len(self._lines)
            if line.samples:
                return line
        return None

    @property
    def complete(self) -> bool:
        """True if all producers have ended and all of their samples are in ``arrivals``."""
        return all(line.ended and not line.samples for line in self._lines)

    def waits_for(self) -> str:
        """Return a text that names the producers that have not ended."""
        return ", ".join(line.name for line in self._lines if not line.ended)

    def release(self, samples: list[Sample]) -> None:
        """Forget samples on which all ranks have trained: they are in no file."""

    def stop(self) -> None:
        """Tell the producers that nobody trains any more."""
        for line in self._lines:
            line.answer(STOPPED)

    def gone(self) -> bool:
        """Receive what is still under way, and drop it; tell whether all producers have ended."""
        for line in self._lines:
            line.receive()
            line.samples.clear()
        return all([line.ended and line.answered for line in self._lines])

"""What a rank has called through one communicator: the call it is in, and a record of its last collectives.

[Note: contract] All ranks of a communicator must call the same collectives in the same order with the same element
type, count, operation and tag. MPI reports some breaches, hangs on others, and gives wrong numbers in silence for equal
counts in another order. So each rank folds what it calls into one number for each communicator: ranks that have called
alike have the same number after as many calls. Counts that may differ by rank (an alltoallv's) are not in it; neither
are the lines that call, which are kept for the report only.

[Note: cold calls] Amid a step's other work a record costs what it finds outside the caches, so a call only appends to
a queue: the line as a code object with the place of an instruction in it, which becomes text when somebody asks.
Numbers are folded many calls at a time, when the rank compares them; threads that watch fold for themselves.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

#: Collectives of a communicator that are remembered.
REMEMBERED = 64
#: Sums of numbers are taken modulo this prime, so that those of 65,536 ranks add up in 64 bits.
MODULUS = 2**47 - 115
#: A rank folds the numbers of its calls at least this often; a divisor of REMEMBERED.
_FOLDED = 32
_SHOWN = 160
#: Calls whose numbers are at hand.
_LEARNT = 4096
#: What the last part of these calls is.
_MEANING = {"broadcast": "root ", "ibroadcast": "root ", "broadcast_object": "root "}

#: A collective as all ranks must call it: operation, tag, then dtype character, count or counts, and what else.
Call = tuple[Any, ...]
#: Number of the collective, the call, and where it stands in the source.
_Entry = tuple[int, Call, CodeType, int]
#: Number of a collective, and the number that stands for all up to it.
_Mark = tuple[int, int]

#: As the code objects of this package have them.
_OWN_FILES = frozenset(map(str, Path(__file__).parent.glob("*.py")))


class Record(NamedTuple):
    """A collective of one rank, to be shown.

    Attributes
    ----------
    sequence : int
        Number of the collective in its communicator.
    number : int
        Stands for this call and all before it.
    what, where : str
        For example ``"allreduce 'losses' float64[4] sum"`` and ``"train.py:12 in step"``.
    """

    sequence: int
    number: int
    what: str
    where: str


class CallTrace:
    """The call a rank of one communicator is in, or was in last, and what it called before.

    Written by the communicator, read by the watchdog and the contract. See [Note: contract].

    Attributes
    ----------
    name : str
        Name of the communicator.
    sequence : int
        Number of the collective, the same on all ranks of the communicator; point-to-point calls do not count.
    operation, tag : str
        For example ``"allgatherv"`` and ``"blocks.3"``.
    entered : float
        ``time.monotonic()`` at entry; 0.0 while the rank is not inside a call.
    started : int
        Collectives begun so far; above ``sequence`` while an older non-blocking one is waited for.
    duty : tuple of str and float
        What the rank is doing that all ranks must end together, and since when; ("", 0.0) if nothing.
    duties : int
        How many such things it has ended.
    """

    __slots__ = (
        "_calls", "_marks", "_numbers", "_record",
        "duties", "duty", "entered", "name", "operation", "sequence", "started", "tag",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequence = 0
        self.operation = ""
        self.tag = ""
        self.entered = 0.0
        self.started = 0
        self.duty = ("", 0.0)
        self.duties = 0
        self._numbers: dict[Call, int] = {}
        self._calls: deque[_Entry] = deque(maxlen=REMEMBERED)
        self._marks: deque[_Mark] = deque([(0, 0)], maxlen=REMEMBERED)
        self._record = self._calls.append

    def begin(
        self, call: Call, frame_of: Callable[[int], FrameType] = sys._getframe, own: frozenset[str] = _OWN_FILES
    ) -> int:
        """Record a collective, called three frames up or further out, and return its number. Not collective.

        The last arguments are constants, so that no dictionary is searched for them, see [Note: cold calls].
        """
        sequence = self.started + 1
        frame = frame_of(3)
        code = frame.f_code
        while code.co_filename in own and (outer := frame.f_back) is not None:
            frame, code = outer, outer.f_code
        self._record((sequence, call, code, frame.f_lasti))
        self.started = sequence
        if not sequence % _FOLDED:
            self._fold()
        return sequence

    @property
    def number(self) -> int:
        """The number that stands for all collectives begun so far; for the thread that calls them. Not collective."""
        if self._marks[-1][0] != self.started:
            self._fold()
        return self._marks[-1][1]

    def _fold(self) -> None:
        self._marks.extend(self._folded(self._marks[-1], list(self._calls)))

    def _folded(self, last: _Mark, calls: Sequence[_Entry]) -> list[_Mark]:
        """Return the marks after ``last``, as far as the calls go."""
        sequence, number = last
        found, numbers = [], self._numbers
        for entry in calls[len(calls) - (calls[-1][0] - sequence) :] if calls else ():
            own = numbers.get(entry[1])
            number = hash((number, self._learn(entry[1]) if own is None else own))  # of integers: alike everywhere
            found.append((entry[0], number))
        return found

    def _learn(self, call: Call) -> int:
        """Remember the number of a call; those of calls that never come again are forgotten now and then."""
        if len(self._numbers) >= _LEARNT:
            self._numbers.clear()
        return self._numbers.setdefault(call, number_of(call))

    def _seen(self) -> tuple[list[_Mark], list[_Entry]]:
        """Return what is remembered, of one moment, the oldest first. For any thread; changes nothing."""
        while True:
            marks, calls = list(self._marks), list(self._calls)
            if not calls or calls[0][0] <= marks[-1][0] + 1 and marks[-1][0] <= calls[-1][0]:
                return marks + self._folded(marks[-1], calls), calls

    @contextmanager
    def common_duty(self, what: str) -> Iterator[None]:
        """Do what all ranks must end together, though it may be long before they meet. Not collective.

        A rank that ends its program before, or amid it, is then missed soon. Not to be nested.
        """
        self.duty = (what, monotonic())
        try:
            yield
            self.duties += 1
        finally:
            self.duty = ("", 0.0)

    def last(self) -> _Mark:
        """Return how many collectives have begun, and their number; both of one moment. Not collective."""
        return self._seen()[0][-1]

    def number_at(self, sequence: int) -> int | None:
        """Return the number after collective ``sequence``; None if it is not remembered. Not collective."""
        return dict(self._seen()[0][-REMEMBERED:]).get(sequence)

    def records(self) -> list[Record]:
        """Return the last collectives, the oldest first. Not collective."""
        marks, calls = self._seen()
        numbers = dict(marks)
        return [Record(n, numbers[n], describe(call), _line(code, at)) for n, call, code, at in calls]


def number_of(call: Call) -> int:
    """Return a number below the modulus that is the same for the same call in every process. Not collective."""
    return int.from_bytes(blake2b(describe(call, shown=None).encode(), digest_size=8).digest(), "little") % MODULUS


def describe(call: Call, shown: int | None = _SHOWN) -> str:
    """Describe a call in at most ``shown`` characters: operation, tag, type and count, the rest. Not collective."""
    operation, tag, *rest = call
    parts = [operation, repr(tag)] if tag else [operation]
    if rest and isinstance(rest[0], str) and len(rest) > 1:
        char, count, *rest = rest
        counts = ", ".join(str(int(n)) for n in count) if isinstance(count, Sequence) else int(count)
        parts.append(f"{np.dtype(char)}[{counts}]")
    elif rest and isinstance(rest[0], str):
        parts.append(str(np.dtype(rest.pop(0))))
    text = " ".join([*parts, *(f"{_MEANING.get(operation, '')}{other}" for other in rest)])
    return text if shown is None or len(text) <= shown else f"{text[:shown]}..."


def _line(code: CodeType, instruction: int) -> str:
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop)
    return f"{Path(code.co_filename).name}:{next(lines, None) or code.co_firstlineno} in {code.co_name}"

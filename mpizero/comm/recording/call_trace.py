"""Record what a rank calls through one communicator: the present call, and its last collectives.

[Note: contract] All ranks of a communicator must call the same collectives in the same order with the same element
type, count, operation and tag. MPI reports some breaches, hangs on others, and gives wrong numbers in silence for equal
counts in another order. So each rank folds what it calls into one number for each communicator: ranks that have called
alike have the same number after as many calls. Counts that may differ by rank (an alltoallv's) are not in it; neither
are the lines that call, which are kept for the report only. Recording costs one to two microseconds amid other work:
the line is kept as a code object with the place of an instruction in it, and becomes text when somebody asks.

[Note: counted calls] The barriers by which an engine orders its windows are half of the calls of a short step. They are
counted only: ranks that have made another number of them between two recorded calls differ, ranks that have made them
for other reasons do not. Under MPIZERO_DEBUG=collectives they are recorded like all others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from os import sep
from pathlib import Path
from threading import Lock
from time import monotonic
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

#: Collectives of a communicator that are remembered.
REMEMBERED = 64
#: Sums of numbers are taken modulo this prime, so that those of 65,536 ranks add up in 64 bits.
MODULUS = 2**47 - 115
_SHOWN = 160
#: Where a counted call stands.
_COUNTED = "a place that is not recorded"
#: What the ranks of a communicator do before it has any collective.
MAKING = "making the communicator"
#: Calls whose numbers are at hand.
_LEARNT = 4096
#: What the last part of these calls is.
_MEANING = {"broadcast": "root ", "ibroadcast": "root ", "broadcast_object": "root "}

#: A collective as all ranks must call it: operation, tag, then dtype character, count or counts, and what else.
Signature = tuple[Any, ...]
#: Number of the collective, the number that stands for all up to it, the call, and where it stands in the source.
_Entry = tuple[int, int, Signature, CodeType | None, int]

#: As the code objects of this package have them.
_OWN_FILES = frozenset(map(str, Path(__file__).parents[1].rglob("*.py")))
#: Where the package lies, and its programs, which use it as any other does.
_LIBRARY = f"{Path(__file__).parents[2]}{sep}"
_PROGRAMS = f"{_LIBRARY}train{sep}"


class CallRecord(NamedTuple):
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


class FileTransfer:
    """Bytes on their way from or to files: how many have come, and when the last did."""

    __slots__ = ("bytes", "moved", "what")

    def __init__(self, what: str) -> None:
        self.what, self.bytes, self.moved = what, 0, monotonic()

    def advance(self, nbytes: int) -> None:
        """Count bytes that have been read, written or made durable. Not collective."""
        self.bytes += nbytes
        self.moved = monotonic()


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
    present_task : tuple of str and float
        What the rank is doing that all ranks must end together, and since when; ("", 0.0) if nothing.
    joint_tasks : int
        How many such things it has ended.
    transfers : tuple of Transfer
        What it is reading or writing at this moment, while others may wait for it.
    """

    __slots__ = (
        "_changing", "_entries", "_errors", "_last", "_numbers", "entered", "joint_tasks", "name", "operation",
        "present_task", "sequence", "started", "tag", "transfers",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequence = 0
        self.operation = ""
        self.tag = ""
        self.entered = 0.0
        self.started = 0
        self.present_task = ("", 0.0)
        self.joint_tasks = 0
        self.transfers: tuple[FileTransfer, ...] = ()
        self._changing = Lock()  # a checkpoint's writer is a thread of its own
        self._numbers: dict[Signature, int] = {}
        self._errors: dict[int, str] = {}
        self._last: _Entry = (0, 0, (), None, 0)
        self._entries: list[_Entry] = [self._last] * REMEMBERED

    def begin(self, call: Signature) -> int:
        """Record a collective, called three frames up or further out, and return its number. Not collective."""
        sequence = self.started + 1
        own = self._numbers.get(call)
        if own is None:
            own = self._learn(call)
        number = hash((self._last[1], own, sequence))  # of integers: the same in every process
        frame = sys._getframe(3)
        code = frame.f_code
        while code.co_filename in _OWN_FILES and (outer := frame.f_back) is not None:
            frame, code = outer, outer.f_code
        self._entries[sequence % REMEMBERED] = self._last = (sequence, number, call, code, frame.f_lasti)
        self.started = sequence
        return sequence

    def begin_operation(self, operation: Signature) -> None:
        """Record what the user has asked this rank for, which takes a number like a collective. Not collective.

        The line is the user's: the first outside of this package, or in its command line. An error that is being
        handled is told with it: what one rank does in a ``finally`` is not what went wrong.
        """
        frame = sys._getframe(1)
        while _is_library(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        sequence, own = self.started + 1, self._numbers.get(operation)
        number = hash((self._last[1], self._learn(operation) if own is None else own, sequence))
        entry = (sequence, number, operation, frame.f_code, frame.f_lasti)
        self._entries[sequence % REMEMBERED] = self._last = entry
        self.started = sequence
        if (error := sys.exc_info()[1]) is not None:
            self._errors[sequence] = _described(error)
            self._errors.pop(sequence - REMEMBERED, None)

    def count(self) -> int:
        """Count a collective and return its number, without a record; see [Note: counted calls]. Not collective."""
        sequence = self.started = self.started + 1
        return sequence

    @property
    def number(self) -> int:
        """The number that stands for all collectives begun so far."""
        return self.last()[1]

    def _learn(self, call: Signature) -> int:
        """Remember the number of a call; those of calls that never come again are forgotten now and then."""
        if len(self._numbers) >= _LEARNT:
            self._numbers.clear()
        return self._numbers.setdefault(call, number_of(call))

    @contextmanager
    def joint_task(self, what: str) -> Iterator[None]:
        """Do what all ranks must end together, though it may be long before they meet. Not collective.

        A rank that ends its program before, or amid it, is then missed soon. Not to be nested.
        """
        self.present_task = (what, monotonic())
        try:
            yield
            self.joint_tasks += 1
        finally:
            self.present_task = ("", 0.0)

    @contextmanager
    def transfer(self, what: str) -> Iterator[Callable[[int], None]]:
        """Tell the others that files are read or written: hands out what is to be told of every piece's bytes.

        Not collective; in any thread. As long as bytes come, those who wait for this rank are not stuck.
        """
        transfer = FileTransfer(what)
        with self._changing:
            self.transfers = (*self.transfers, transfer)
        try:
            yield transfer.advance
        finally:
            with self._changing:
                self.transfers = tuple(other for other in self.transfers if other is not transfer)

    def last(self) -> tuple[int, int]:
        """Return how many collectives have begun, and their number; both of one moment. Not collective."""
        started, last = self.started, self._last
        return max(started, last[0]), _after(last, started)

    def number_at(self, sequence: int) -> int | None:
        """Return the number after collective ``sequence``; None if it is not remembered. Not collective."""
        entry = self._before(sequence)
        return None if entry is None or sequence > self.started else _after(entry, sequence)

    def records(self) -> list[CallRecord]:
        """Return the last collectives, the oldest first. Not collective."""
        started, found = self.started, []
        for sequence in range(max(1, started + 1 - REMEMBERED), started + 1):
            entry = self._before(sequence)
            if entry is not None and entry[0] == sequence:
                where = _line(entry[3], entry[4]) + self._errors.get(sequence, "")
                found.append(CallRecord(*entry[:2], describe_call(entry[2]), where))
            elif entry is not None:
                tag = f" {self.tag!r}" if sequence == self.sequence and self.tag else ""
                found.append(CallRecord(sequence, _after(entry, sequence), f"node_barrier{tag}", _COUNTED))
        return found

    def _before(self, sequence: int) -> _Entry | None:
        """Return the last record up to a collective; None if one was overwritten, or none is remembered."""
        for place in range(sequence, max(-1, sequence - REMEMBERED), -1):
            entry = self._entries[place % REMEMBERED]
            if entry[0] == place:
                return entry
            if entry[0] > place:
                return None
        return None


def _described(error: BaseException) -> str:
    """Describe an error amid which something is called, with the user's line that it comes from."""
    trace, line = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not line or not _is_library(code.co_filename):
            line = f" at {Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f", after {text[:_SHOWN]}{line}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and not file.startswith(_PROGRAMS)


def _after(entry: _Entry, sequence: int) -> int:
    """Return the number after collective ``sequence``, if all behind the record were only counted."""
    counted = sequence - entry[0]
    return entry[1] if counted <= 0 else hash((entry[1], counted))


def weighted_sum(terms: Sequence[tuple[int, CallTrace]]) -> int:
    """Return the sum of the traces' numbers, each times its weight. Not collective.

    Asked once a step, amid other work: no call for each of them, since what a call reads is in no cache.
    """
    total = 0
    for weight, trace in terms:
        last = trace._last
        counted = trace.started - last[0]
        total += weight * (hash((last[1], counted)) if counted else last[1])
    return total


def number_of(call: Signature) -> int:
    """Return a number below the modulus that is the same for the same call in every process. Not collective."""
    return int.from_bytes(blake2b(describe_call(call, shown=None).encode(), digest_size=8).digest(), "little") % MODULUS


def describe_call(call: Signature, shown: int | None = _SHOWN) -> str:
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


def _line(code: CodeType | None, instruction: int) -> str:
    if code is None:
        return "?"
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop)
    return f"{Path(code.co_filename).name}:{next(lines, None) or code.co_firstlineno} in {code.co_name}"

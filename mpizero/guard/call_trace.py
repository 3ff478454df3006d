"""Record the collectives that each rank calls, and find the first collective that ranks have called differently.

A :class:`CallTrace` belongs to one communicator of one rank: it holds the present call and the last 64 collectives. A
:class:`CommunicatorRegistry` lists the communicators of the process, under keys that are the same on all ranks of a
communicator. From the records of several ranks, :func:`mismatch` makes an error with the source line of each rank.

[Note: matching calls] All ranks of a communicator must call the same collectives in the same order with the same
element type, count, operation and tag. MPI reports some mismatches, hangs on others, and silently returns wrong numbers
if equal counts are in another order. So each rank keeps one hash of all its calls for each communicator. Ranks that
have made the same calls have the same hash. Counts that may differ between ranks (those of an alltoallv) are not
hashed, and neither are source lines, which are kept for the report only. Recording takes one to two microseconds: a
line is stored as a code object with the offset of an instruction, and becomes text only for a report.

[Note: counted calls] Half of the calls of a short step are barriers of shared windows. Such barriers are only counted:
if the number of barriers between two recorded calls differs between ranks, the hashes differ, but the tags of the
barriers are not compared. With MPIZERO_DEBUG=collectives these barriers are recorded like all other calls.

[Note: three comparisons] Hashes of calls ([Note: matching calls]) are compared in three ways. First, once a step,
before it changes a parameter, the training engine adds up one number of every rank in a message that it sends anyway;
the sum is 0 if all calls match ([Note: one sum]). Second, the heartbeat threads of a node compare the hashes on the
status table all the time (:class:`.MismatchWatch`). The second comparison finds ranks that wait for one another in
different calls, and works without a training engine. Third, with MPIZERO_DEBUG=collectives every collective is compared
before it starts (:class:`.CallVerifier`). All three comparisons raise the same error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from os import sep
from pathlib import Path
from threading import Lock
from time import monotonic
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from mpizero.errors import CollectiveMismatch, StateError
from mpizero.guard.reports import ranks_by_text

#: Number of the last collectives of a communicator that are kept.
REMEMBERED = 64
#: Sums of hashes are taken modulo this prime, so that those of 65,536 ranks add up in 64 bits.
MODULUS = 2**47 - 115
_TEXT_LIMIT = 160
#: Shown in reports instead of the source line of a call that was only counted.
_COUNTED = "a place that is not recorded"
#: Name, in reports, of the operation in which ranks make a communicator.
MAKING = "making the communicator"
#: Number of calls whose hashes are cached.
_LEARNT = 4096
#: Text before the last entry of the signatures of these operations in reports: broadcasts end with their root.
_MEANING = {"broadcast": "root ", "ibroadcast": "root ", "broadcast_object": "root "}

#: What must be equal on all ranks that call a collective: operation, tag, dtype character, counts, further arguments.
Signature = tuple[Any, ...]
#: Sequence number of a collective, hash of all calls up to it, the call, and its line as code object and instruction.
_Entry = tuple[int, int, Signature, CodeType | None, int]

#: Folder of the package, and the folders of its programs, whose lines count as the user's code.
_LIBRARY = f"{Path(__file__).parents[1]}{sep}"
_PROGRAMS = tuple(f"{_LIBRARY}{folder}{sep}" for folder in ("train", "cli", "tools"))
#: Files whose frames are skipped in the search for the source line of a call, as their code objects name them.
_INNER_FILES = {contextlib.__file__}.union(*(map(str, Path(_LIBRARY, name).glob("*.py")) for name in ("comm", "guard")))


class CallRecord(NamedTuple):
    """Describe one collective that a rank has called, for a report.

    Attributes
    ----------
    sequence : int
        Number of the collective in its communicator.
    number : int
        Hash of this call and all calls before it.
    what, where : str
        The call and its source line, for example ``"allreduce 'losses' float64[4] sum"`` and ``"train.py:12 in step"``.
    """

    sequence: int
    number: int
    what: str
    where: str


class Transfer:
    """Count the bytes that a rank has moved, of one file or of its messages, and store the time of the last change.

    ``what`` describes the file or the messages, ``bytes`` is the count, and ``moved`` the ``time.monotonic()`` of the
    count's last change.
    """

    __slots__ = ("bytes", "moved", "what")

    def __init__(self, what: str) -> None:
        self.what, self.bytes, self.moved = what, 0, monotonic()

    def advance(self, nbytes: int) -> None:
        """Add the number of bytes that have just been read, written, flushed to disk or sent. Not collective."""
        self.bytes += nbytes
        self.moved = monotonic()


class CallTrace:
    """Record the current call of a rank through one communicator, and the calls before it.

    The communicator writes the trace; the watchdog and the comparison of calls read it. See [Note: matching calls].

    Attributes
    ----------
    name : str
        Name of the communicator.
    sequence : int
        Number of the current or last collective, the same on all ranks; point-to-point calls are not numbered.
    operation, tag : str
        Name and label of the current or last call, for example ``"allgatherv"`` and ``"blocks.3"``.
    entered : float
        ``time.monotonic()`` when the rank entered the call; 0.0 while it is not inside a call.
    started : int
        Number of collectives begun so far. ``started`` is above ``sequence`` while the rank waits for a non-blocking
        collective that is not the last one begun.
    present_task : tuple of str and float
        Name and start time of a task that all ranks must finish together, such as a training step; ("", 0.0) if none.
    joint_tasks : int
        Number of joint tasks (see ``present_task``) that the rank has finished.
    transfers : tuple of Transfer
        Files that the rank is reading or writing now, while other ranks may be waiting for this rank.
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
        self.transfers: tuple[Transfer, ...] = ()
        self._changing = Lock()  # a checkpoint's writer is a thread of its own
        self._numbers: dict[Signature, int] = {}
        self._errors: dict[int, str] = {}
        self._last: _Entry = (0, 0, (), None, 0)
        self._entries: list[_Entry] = [self._last] * REMEMBERED

    def begin(self, call: Signature) -> int:
        """Record a collective that begins, and return its sequence number. Not collective.

        The source line of the call is recorded too: that of the first frame outside ``mpizero.comm`` and
        ``mpizero.guard``, searched outwards from three frames above this method.
        """
        sequence = self.started + 1
        known = self._numbers.get(call)
        if known is None:
            known = self._learn(call)
        number = hash((self._last[1], known, sequence))  # of integers: the same in every process
        frame = sys._getframe(3)
        code = frame.f_code
        while code.co_filename in _INNER_FILES and (outer := frame.f_back) is not None:
            frame, code = outer, outer.f_code
        self._entries[sequence % REMEMBERED] = self._last = (sequence, number, call, code, frame.f_lasti)
        self.started = sequence
        return sequence

    def begin_operation(self, operation: Signature) -> None:
        """Record a public operation that the user has called; it gets a sequence number like a collective.

        Not collective. The innermost source line outside this package, or in one of its programs (``mpizero.train``,
        ``mpizero.cli`` and ``mpizero.tools``), is recorded too. An exception that is being handled is also recorded: a
        report then shows that the call, ``close()`` in a ``finally`` for example, is only a consequence of the
        exception.
        """
        frame = sys._getframe(1)
        while _is_library(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        sequence, known = self.started + 1, self._numbers.get(operation)
        number = hash((self._last[1], self._learn(operation) if known is None else known, sequence))
        entry = (sequence, number, operation, frame.f_code, frame.f_lasti)
        self._entries[sequence % REMEMBERED] = self._last = entry
        self.started = sequence
        if (error := sys.exc_info()[1]) is not None:
            self._errors[sequence] = _described(error)
            self._errors.pop(sequence - REMEMBERED, None)

    def count(self) -> int:
        """Count a collective without recording it, and return its sequence number. Not collective.

        See [Note: counted calls].
        """
        sequence = self.started = self.started + 1
        return sequence

    @property
    def number(self) -> int:
        """Hash of all collectives begun so far."""
        return self.last()[1]

    def _learn(self, call: Signature) -> int:
        """Return the hash of a call, and store it in the cache; a full cache is emptied first."""
        if len(self._numbers) >= _LEARNT:
            self._numbers.clear()
        return self._numbers.setdefault(call, number_of(call))

    @contextmanager
    def joint_task(self, what: str) -> Iterator[None]:
        """Mark a ``with`` block, such as a training step, as a joint task: all ranks must finish it. Not collective.

        ``what`` is the name of the task. If a rank ends its program before or inside the block, the job is ended within
        seconds, even before other ranks communicate with that rank. Blocks must not be nested.
        """
        self.present_task = (what, monotonic())
        try:
            yield
            self.joint_tasks += 1
        finally:
            self.present_task = ("", 0.0)

    @contextmanager
    def transfer(self, what: str) -> Iterator[Callable[[int], None]]:
        """Mark a ``with`` block that reads or writes a file; yield a function to call with numbers of bytes.

        Not collective; can be called in any thread. The block calls the function after each piece that it has read or
        written. As long as the block keeps calling the function, ranks that wait for this rank do not count as stuck.
        ``what`` describes the file.
        """
        transfer = Transfer(what)
        with self._changing:
            self.transfers = (*self.transfers, transfer)
        try:
            yield transfer.advance
        finally:
            with self._changing:
                self.transfers = tuple(other for other in self.transfers if other is not transfer)

    def last(self) -> tuple[int, int]:
        """Return the number of collectives begun so far, and the hash of all of them. Not collective."""
        started, last = self.started, self._last
        return max(started, last[0]), _after(last, started)

    def number_at(self, sequence: int) -> int | None:
        """Return the hash of all collectives up to number ``sequence``. Not collective.

        Returns None if the hash is no longer stored, or if collective ``sequence`` has not begun yet.
        """
        entry = self._before(sequence)
        return None if entry is None or sequence > self.started else _after(entry, sequence)

    def records(self) -> list[CallRecord]:
        """Return the stored records of the last collectives, the oldest first. Not collective."""
        started, records = self.started, []
        for sequence in range(max(1, started + 1 - REMEMBERED), started + 1):
            entry = self._before(sequence)
            if entry is not None and entry[0] == sequence:
                where = _line(entry[3], entry[4]) + self._errors.get(sequence, "")
                records.append(CallRecord(*entry[:2], describe_call(entry[2]), where))
            elif entry is not None:
                tag = f" {self.tag!r}" if sequence == self.sequence and self.tag else ""
                records.append(CallRecord(sequence, _after(entry, sequence), f"node_barrier{tag}", _COUNTED))
        return records

    def _before(self, sequence: int) -> _Entry | None:
        """Return the record of collective ``sequence``, or the last record before; None if that is overwritten."""
        for number in range(sequence, max(-1, sequence - REMEMBERED), -1):
            entry = self._entries[number % REMEMBERED]
            if entry[0] == number:
                return entry
            if entry[0] > number:
                return None
        return None


def _described(error: BaseException) -> str:
    """Return a text about an exception, with the innermost line of user code in its traceback."""
    trace, line = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not line or not _is_library(code.co_filename):
            line = f" at {Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f", after {text[:_TEXT_LIMIT]}{line}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and not file.startswith(_PROGRAMS) or file == contextlib.__file__


def _after(entry: _Entry, sequence: int) -> int:
    """Return the hash of all collectives up to number ``sequence``; ``entry`` is the last of them that was recorded.

    Collectives after ``entry`` were only counted ([Note: counted calls]); their number is a part of the hash.
    """
    counted = sequence - entry[0]
    return entry[1] if counted <= 0 else hash((entry[1], counted))


def weighted_sum(terms: Sequence[tuple[int, CallTrace]]) -> int:
    """Return the sum over ``terms``, pairs (weight, trace), of the weight times the trace's hash of all its calls.

    This function is called once a step, and repeats the code of :meth:`CallTrace.last`, because a method call for each
    trace is slower.
    """
    total = 0
    for weight, trace in terms:
        last = trace._last
        counted = trace.started - last[0]
        total += weight * (hash((last[1], counted)) if counted else last[1])
    return total


def number_of(call: Signature) -> int:
    """Return the hash of one call: an integer below :data:`MODULUS`, the same in every process. Not collective."""
    return int.from_bytes(blake2b(describe_call(call, limit=None).encode(), digest_size=8).digest(), "little") % MODULUS


def describe_call(call: Signature, limit: int | None = _TEXT_LIMIT) -> str:
    """Return a call as text: operation, tag, dtype, counts and further arguments. Not collective.

    The text is cut after ``limit`` characters; None is no limit.
    """
    operation, tag, *rest = call
    parts = [operation, repr(tag)] if tag else [operation]
    if rest and isinstance(rest[0], str) and len(rest) > 1:
        char, count, *rest = rest
        counts = ", ".join(str(int(n)) for n in count) if isinstance(count, Sequence) else int(count)
        parts.append(f"{np.dtype(char)}[{counts}]")
    elif rest and isinstance(rest[0], str):
        parts.append(str(np.dtype(rest.pop(0))))
    text = " ".join([*parts, *(f"{_MEANING.get(operation, '')}{other}" for other in rest)])
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."


def _line(code: CodeType | None, instruction: int) -> str:
    if code is None:
        return "?"
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop)
    return f"{Path(code.co_filename).name}:{next(lines, None) or code.co_firstlineno} in {code.co_name}"


#: Number of closed communicators whose traces are kept.
_CLOSED = 32
#: Communicators that may be open at once. MPICH has 2,048 numbers for communicators and windows, and crashes when they
#: are used up: seen at 1,300 communicators with their models' windows.
MOST_LIVE = 1200


@dataclass(eq=False)
class CommunicatorEntry:
    """Describe a communicator of this process: its trace, its world ranks (``members``), its key and its weight.

    The key identifies the communicator, and is the same on all its ranks. The key is made of the world ranks and an
    ordinal among the communicators of the same ranks. All ranks get the same ordinal, because they make communicators
    of the same ranks in the same order. Each rank has its own ``weight``: the weights of all ranks of a communicator
    add up to 0 modulo :data:`MODULUS`, see [Note: one sum].
    """

    trace: CallTrace
    members: tuple[int, ...]
    key: str
    weight: int = 0


@dataclass
class CommunicatorRegistry:
    """List all communicators of this process, and the functions that free resources which an error has left open.

    Each communicator is identified by a key, a string that is the same on all its ranks.
    """

    live: list[CommunicatorEntry] = field(default_factory=list)
    #: The last closed communicators by key; other ranks may still wait in calls of them.
    closed: dict[str, CommunicatorEntry] = field(default_factory=dict)
    #: Functions that free what an error has left open, each with its communicator; see :meth:`run_deferred_closes`.
    left: list[tuple[CommunicatorEntry, Callable[[], None]]] = field(default_factory=list)
    _ordinals: dict[tuple[int, ...], int] = field(default_factory=dict)
    _inside: dict[CallTrace, list[CommunicatorEntry]] = field(default_factory=dict)
    _terms: dict[CallTrace, list[tuple[int, CallTrace]]] = field(default_factory=dict)

    def add(self, trace: CallTrace, members: Sequence[int], rank: int = 0) -> CommunicatorEntry:
        """Add the communicator of ``trace``, which has the world ranks ``members``; return its entry. Not collective.

        ``rank`` is the number of this rank in the communicator.

        Raises
        ------
        StateError
            If :data:`MOST_LIVE` communicators are open, because MPI may not be able to make another one.
        """
        if (live := len(self.live)) >= MOST_LIVE:
            raise StateError(
                f"{live} communicators of mpizero are open in this process, and MPI has room for about 2,000, windows "
                "included: close models and configurations that are no longer needed, by close() or a with statement, "
                "or give all models one configuration"
            )
        group = tuple(members)
        ordinal = self._ordinals[group] = self._ordinals.get(group, -1) + 1
        key = f"{blake2b(repr(group).encode(), digest_size=4).hexdigest()}.{ordinal}"
        entry = CommunicatorEntry(trace, group, key, _weight(key, rank, len(group)))
        self.live.append(entry)
        self._inside.clear()
        self._terms.clear()
        return entry

    def remove(self, trace: CallTrace) -> None:
        """Move the communicator of ``trace`` from the open communicators to the closed ones. Not collective."""
        for entry in [entry for entry in self.live if entry.trace is trace]:
            self.live.remove(entry)
            self.closed[entry.key] = entry
            if len(self.closed) > _CLOSED:
                del self.closed[next(iter(self.closed))]
        self._inside.clear()
        self._terms.clear()

    def defer_close(self, trace: CallTrace, close: Callable[[], None]) -> None:
        """Store ``close``, a function that frees what an error has left open, for :meth:`run_deferred_closes`.

        Not collective; ``close`` itself is collective over the communicator of ``trace``.
        """
        self.left += [(entry, close) for entry in self.live if entry.trace is trace]

    def run_deferred_closes(self, trace: CallTrace, allgather: Callable[[Any], list[Any]]) -> None:
        """Call the deferred functions that every rank of the communicator of ``trace`` has stored.

        Collective over that communicator. ``allgather`` takes an object and returns the list of all its ranks' objects.

        [Note: deferred closes] When a rank leaves a model because of an error, it does not know whether the other ranks
        fail too. Closing the model is collective, so it is deferred. When the same ranks next make a model together,
        they compare the resources that each has left open. A resource that all ranks have left open, after the same
        calls, is closed. All other resources stay open, because their ranks have made different calls.
        """
        members = next((entry.members for entry in self.live if entry.trace is trace), None)
        leftover = [left for left in self.left if left[0].members == members]
        gathered = allgather([(entry.key, self.mismatch_term(entry.trace)) for entry, _ in leftover])
        for left, *theirs in zip(leftover, *gathered, strict=False):
            in_step = sum(number for _, number in theirs) % MODULUS == 0
            if in_step and all(key == left[0].key for key, _ in theirs) and left in self.left:
                self.left.remove(left)
                left[1]()

    def counts(self) -> dict[str, int]:
        """Return the number of collectives begun on each communicator, by the communicator's key.

        A key is a string that identifies a communicator on all of its ranks. The open communicators come first, the
        newest before the older ones; the closed ones come last.
        """
        return {entry.key: entry.trace.started for entry in (*reversed(self.live), *self.closed.values())}

    def progress(self) -> dict[str, tuple[int, int]]:
        """Return the number of collectives begun on each communicator, and their hash, by the communicator's key.

        A key is a string that identifies a communicator on all of its ranks. The order is the same as in
        :meth:`counts`.
        """
        entries = (*reversed(list(self.live)), *list(self.closed.values()))
        return {entry.key: entry.trace.last() for entry in entries}

    def find(self, key: str) -> CommunicatorEntry | None:
        """Return the entry of the open or closed communicator that ``key`` identifies; None if there is none."""
        return next((entry for entry in (*self.live, *self.closed.values()) if entry.key == key), None)

    def inside(self, trace: CallTrace) -> list[CommunicatorEntry]:
        """Return the open communicators of two or more ranks that lie inside the communicator of ``trace``.

        A communicator lies inside another if all its ranks are ranks of the other; the communicator itself is included.
        """
        if trace not in self._inside:
            members = next((set(entry.members) for entry in self.live if entry.trace is trace), set[int]())
            entries = [e for e in self.live if len(e.members) > 1 and members.issuperset(e.members)]
            self._inside[trace] = entries
        return self._inside[trace]

    def mismatch_term(self, trace: CallTrace) -> int:
        """Return this rank's number for the check of calls: its sum over ranks is 0 mod ``MODULUS`` if calls match.

        Not collective.

        [Note: one sum] One number from each rank is enough to compare the calls of all communicators whose ranks all
        belong to the communicator of ``trace``. For each of these communicators to which a rank belongs, the rank
        multiplies the hash of its calls by its weight in the communicator; its number is the sum of these products. The
        weights of all ranks of a communicator add up to 0. So equal hashes cancel in the sum over the ranks, modulo
        :data:`MODULUS`. Different hashes do not cancel, except with a probability of 1 / MODULUS.
        """
        terms = self._terms.get(trace)
        if terms is None:
            terms = self._terms[trace] = [(entry.weight, entry.trace) for entry in self.inside(trace)]
        return weighted_sum(terms) % MODULUS


def _weight(key: str, rank: int, size: int) -> int:
    if rank:
        return int.from_bytes(blake2b(f"{key}/{rank}".encode(), digest_size=8).digest(), "little") % MODULUS
    return -sum(_weight(key, other, size) for other in range(1, size)) % MODULUS


#: Number of calls that a report shows before and after the first difference.
_BEFORE, _AFTER = 2, 3


def mismatch(name: str, records: Mapping[int, Sequence[CallRecord]]) -> CollectiveMismatch | None:
    """Return the error for the first collective that ranks have called differently; None if all calls match.

    Not collective.

    Parameters
    ----------
    name : str
        Name of the communicator.
    records : mapping of int to sequence of CallRecord
        The last collectives of each rank, the oldest first.
    """
    calls = {rank: {record.sequence: record for record in listed} for rank, listed in sorted(records.items())}
    for sequence in sorted({number for by_sequence in calls.values() for number in by_sequence}):
        at = {rank: by_sequence[sequence] for rank, by_sequence in calls.items() if sequence in by_sequence}
        if len({record.number for record in at.values()}) > 1:
            break
    else:
        return None
    if len({record.what for record in at.values()}) == 1:
        return CollectiveMismatch(
            f"the ranks of {name!r} have called different collectives more than {REMEMBERED} calls ago; "
            f"at #{sequence}, the oldest that is remembered: {_groups(at)}"
        )
    details = [f"  {what}" for what in _around(calls, sequence)]
    return CollectiveMismatch(f"collective #{sequence} of {name!r} differs between ranks: {_groups(at)}", details)


def first_mismatch(
    calls_by_rank: Sequence[tuple[int, Mapping[str, tuple[str, list[CallRecord]]]]],
) -> CollectiveMismatch | None:
    """Return the error for the first communicator whose ranks have called different collectives; None if all match.

    Not collective. ``calls_by_rank`` holds a pair for each rank: its number, and a mapping from the keys of its
    communicators to the name and the recorded calls of each.
    """
    for key in dict.fromkeys(key for _, calls in calls_by_rank for key in calls):
        those = {rank: calls[key] for rank, calls in calls_by_rank if key in calls}
        name = next(iter(those.values()))[0]
        if (error := mismatch(name, {rank: records for rank, (_, records) in those.items()})) is not None:
            return error
    return None


def _around(calls: Mapping[int, Mapping[int, CallRecord]], sequence: int) -> list[str]:
    lines = []
    for number in range(sequence - _BEFORE, sequence + _AFTER + 1):
        records = {rank: by_sequence[number] for rank, by_sequence in calls.items() if number in by_sequence}
        if records:
            when = "before" if number < sequence else "differs" if number == sequence else "after"
            lines.append(f"{when:7} #{number}: {_groups(records)}")
    return lines


def _groups(records: Mapping[int, CallRecord]) -> str:
    """Return a text with the call and source line of each rank; ranks with equal calls and lines are named together."""
    texts = ((rank, f"{record.what} at {record.where}") for rank, record in records.items())
    return "; ".join(f"{ranks}: {call}" for call, ranks in ranks_by_text(texts).items())

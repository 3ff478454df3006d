"""Compute the seconds of each phase from the traced spans of all ranks; waiting for other ranks is a phase of its own.

[Note: waiting] A rank in a collective waits until the last rank has entered it. The rest of the call is the collective
itself, and counts for the phase that made the call. A non-blocking collective is entered when it is started; of the
time that it is in flight, only the time that a rank blocks in it counts. All the time that a rank blocks in a receive
from one other rank counts as waiting, because the receive was posted ahead. Shared windows synchronize by barriers of
a communicator, so waiting for them is seen too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.communicator import MESSAGE, CommunicatorCall, TimeSpan

#: The phases of a step that `bench step` measures. "local sums" are checks and sums of gradients inside a rank.
#: "agreement" redistributes samples and agrees on losses and norms. "waiting" is waiting for other ranks in any phase.
PHASES = (
    "forward",
    "backward",
    "layers' messages",
    "local sums",
    "reduction",
    "optimizer",
    "publication",
    "agreement",
    "waiting",
)
#: Time in no traced phase: Python between phases, checks of memory, schedules.
OTHER = "other"
ALL_PHASES = (*PHASES, OTHER)
_LAYERS, _WAITING = "layers' messages", "waiting"
#: Round trips of a message between two hosts; the shortest tells the difference of their clocks best.
_ROUND_TRIPS = 20

#: What identifies a collective on all its ranks: name and first world rank of the communicator, number of the call.
Call = tuple[str, int, int]


class PhaseSpan(NamedTuple):
    """Hold one traced span of time, in the form in which ranks exchange it.

    Attributes
    ----------
    phase, name : str
        The phase, and what it worked on: the names of blocks, or the description of a communicator's call.
    start, stop : float
        When the span began and ended, in seconds of rank 0's clock.
    call : tuple or None
        What identifies a collective on all its ranks: the communicator's name, the world rank of its first rank, and
        the number of the call; None for other spans.
    waits : bool
        Whether the span is a receive from one other rank.
    """

    phase: str
    name: str
    start: float
    stop: float
    call: Call | None = None
    waits: bool = False


class StepSpans(NamedTuple):
    """Hold one step of one rank: start and end in seconds of rank 0's clock, and the spans inside the step.

    Spans are sorted: one that contains another comes first.
    """

    start: float
    stop: float
    spans: tuple[PhaseSpan, ...]


def clock_offset(comm: Communicator) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's. Collective over ``comm``.

    They are 0 on the host of rank 0. The first rank of each host measures them for all of its host.
    """
    hosts = comm.allgather_object(_host(), "clocks")
    if len(set(hosts)) == 1:
        return 0.0
    offset = 0.0
    for rank in sorted({hosts.index(host) for host in hosts} - {0}):
        if comm.rank in (0, rank):
            offset = _compared(comm, rank)
    offsets: list[float] = comm.allgather_object(offset, "clocks")
    return offsets[hosts.index(hosts[comm.rank])]


def _host() -> str:
    """Return the boot id of the system, which is the same on ranks that share a clock; "" if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""


def _compared(comm: Communicator, rank: int) -> float:
    """Measure, on ``rank``, the seconds to add to its clock to get rank 0's; return 0 on rank 0.

    Both ranks call it. ``rank`` asks rank 0 for its time repeatedly, and takes the result of the fastest round trip.
    """
    box, found = np.zeros(1), []
    for _ in range(_ROUND_TRIPS):
        if comm.rank == 0:
            comm.recv(box, rank)
            box[0] = time.monotonic()
            comm.send(box, rank)
        else:
            asked = time.monotonic()
            comm.send(box, 0)
            comm.recv(box, 0)
            answered = time.monotonic()
            found.append((answered - asked, float(box[0]) - (asked + answered) / 2))
    return min(found)[1] if found else 0.0


def leaders(communicators: Iterable[Communicator], world: Communicator) -> dict[str, int]:
    """Return the world rank of each communicator's rank 0, by the communicator's name.

    Collective over each of ``communicators``, in their order.
    """
    return {c.name: c.broadcast_object(world.rank, tag="bench") for c in communicators}


def spans_of(spans: Sequence[TimeSpan], offset: float, first: Mapping[str, int]) -> tuple[PhaseSpan, ...]:
    """Return the traced spans of a rank as :class:`PhaseSpan`, sorted by start, outer spans first. Not collective.

    ``offset`` is added to all times, and ``first`` is the result of :func:`leaders`. A communicator's call inside
    another call is left out.
    """
    found: list[PhaseSpan] = []
    inside = float("-inf")  # when the last communicator call that is kept ends
    for phase, detail, start, stop in sorted(spans, key=lambda span: (span.start, -span.stop)):
        times = (start + offset, stop + offset)
        if not isinstance(detail, CommunicatorCall):
            found.append(PhaseSpan(phase, _name(detail), *times))
        elif stop > inside:
            inside = stop
            single = detail.operation in ("isend", "irecv")
            call = None if single else (detail.communicator, first[detail.communicator], detail.sequence)
            found.append(PhaseSpan(phase, str(detail), *times, call, detail.operation == "irecv"))
    return tuple(found)


def _name(detail: Any) -> str:
    return ", ".join(detail.blocks) if hasattr(detail, "blocks") else str(detail)


def waits(ranks: Sequence[Sequence[StepSpans]]) -> dict[Call, float]:
    """Return, for every collective, the time at which the last rank entered it. Not collective.

    Times are in seconds of rank 0's clock. ``ranks`` has the traced steps of every rank.
    """
    latest: dict[Call, float] = {}
    for steps in ranks:
        for call, start in entered(*steps).items():
            latest[call] = max(start, latest.get(call, start))
    return latest


def entered(*steps: StepSpans) -> dict[Call, float]:
    """Return, for every collective of one rank, the time at which it has entered it. Not collective."""
    found: dict[Call, float] = {}
    for mark in (mark for step in steps for mark in step.spans):
        if mark.call is not None:
            found.setdefault(mark.call, mark.start)  # later spans are waits for the same collective
    return found


def waited(mark: PhaseSpan, latest: Mapping[Call, float]) -> float:
    """Return the seconds of the span ``mark`` in which its rank waited for other ranks. Not collective.

    ``latest`` is the result of :func:`waits`.
    """
    if mark.waits:
        return mark.stop - mark.start
    if mark.call is None:
        return 0.0
    return max(0.0, min(mark.stop, latest[mark.call]) - mark.start)


def phases_of(step: StepSpans, latest: Mapping[Call, float]) -> dict[str, float]:
    """Return the seconds of one step by phase; their sum is the duration of the step. Not collective.

    ``latest`` is the result of :func:`waits`.
    """
    found = dict.fromkeys(ALL_PHASES, 0.0)
    for mark, around, own in _own_times(step):
        if mark.phase == MESSAGE:
            waiting = min(own, waited(mark, latest))
            found[_WAITING] += waiting
            inside = around in found and around not in ("forward", "backward", OTHER)
            found[around if inside else _LAYERS] += own - waiting
        else:
            found[mark.phase if mark.phase in found else OTHER] += own
    return found


def _own_times(step: StepSpans) -> Iterator[tuple[PhaseSpan, str, float]]:
    """Yield each span, the phase of the innermost span around it, and its own seconds.

    The first span is the whole step. The own seconds of a span are its duration without the spans inside it.
    """
    root = PhaseSpan(OTHER, "step", step.start, step.stop)
    marks = (root, *step.spans)
    own, parents, stack = [mark.stop - mark.start for mark in marks], [0] * len(marks), [0]
    for place, mark in enumerate(step.spans, start=1):
        while len(stack) > 1 and marks[stack[-1]].stop <= mark.start:
            stack.pop()
        parents[place] = stack[-1]
        own[stack[-1]] -= mark.stop - mark.start
        stack.append(place)
    for place, mark in enumerate(marks):
        yield mark, marks[parents[place]].phase, own[place]

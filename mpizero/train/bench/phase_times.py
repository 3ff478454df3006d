"""Turn the traced spans of all ranks into seconds by phase, waiting for other ranks among them.

[Note: waiting] A rank waits in a collective until the last rank has entered it; what is left of the call is the
collective itself and belongs to the phase around it. One that does not block is entered where it begins: of the time
that it is in flight, only what a rank stands still for is in its steps. A receive from one rank is all waiting: its
message was posted ahead. Windows have barriers of a communicator in them, so waiting in those is seen as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.recording.timeline import MESSAGE, CommunicatorCall, TimeSpan
from mpizero.planning.time_floors import PHASES

#: What is in no phase: Python between them, checks of memory, schedules.
OTHER = "other"
ALL_PHASES = (*PHASES, OTHER)
_LAYERS, _WAITING = "layers' messages", "waiting"
#: Turns of a message between two hosts; the shortest tells the difference of their clocks best.
_TURNS = 20

#: A collective as all its ranks know it: name and first world rank of the communicator, and number of the call.
Call = tuple[str, int, int]


class PhaseSpan(NamedTuple):
    """Hold a traced span in the form in which ranks exchange it.

    Attributes
    ----------
    phase, name : str
        The phase, and of what.
    start, stop : float
        By the clock of rank 0.
    call : tuple or None
        The collective, of a call of a communicator.
    waits : bool
        Whether it is a call that waits for one other rank.
    """

    phase: str
    name: str
    start: float
    stop: float
    call: Call | None = None
    waits: bool = False


class StepSpans(NamedTuple):
    """Hold one step of one rank: its start and end, and the spans inside, outer ones first."""

    start: float
    stop: float
    spans: tuple[PhaseSpan, ...]


def clock_offset(comm: Communicator) -> float:
    """Return what this rank's clock lacks to that of rank 0; exactly 0 on the same host. Collective over ``comm``."""
    hosts = comm.allgather_object(_host(), "clocks")
    offset = 0.0
    for rank in range(1, comm.size):
        if hosts[rank] != hosts[0] and comm.rank in (0, rank):
            offset = _compared(comm, rank)
    return offset


def _host() -> str:
    """Return what ranks with the same clock have in common: one start of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""


def _compared(comm: Communicator, rank: int) -> float:
    """Ask rank 0 for its time, several times, and keep the fastest reply; rank 0 replies."""
    box, found = np.zeros(1), []
    for _ in range(_TURNS):
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
    """Return the first world rank of each communicator, by its name. Collective over each of them, in this order."""
    return {c.name: c.broadcast_object(world.rank, tag="bench") for c in communicators}


def spans_of(spans: Sequence[TimeSpan], offset: float, first: Mapping[str, int]) -> tuple[PhaseSpan, ...]:
    """Return spans as they travel, outer ones first; calls inside of calls are left out. Not collective."""
    found: list[PhaseSpan] = []
    inside = float("-inf")  # when the call ends that spans are looked at after
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
    """Return when the last rank has entered each collective, or begun it. Not collective."""
    latest: dict[Call, float] = {}
    for steps in ranks:
        entered: dict[Call, float] = {}
        for mark in (mark for step in steps for mark in step.spans):
            if mark.call is not None:
                entered.setdefault(mark.call, mark.start)  # later ones are waits for the same
        for call, start in entered.items():
            latest[call] = max(start, latest.get(call, start))
    return latest


def waited(mark: PhaseSpan, latest: Mapping[Call, float]) -> float:
    """Return the part of a call that its rank has waited for others. Not collective."""
    if mark.waits:
        return mark.stop - mark.start
    if mark.call is None:
        return 0.0
    return max(0.0, min(mark.stop, latest[mark.call]) - mark.start)


def phases_of(step: StepSpans, latest: Mapping[Call, float]) -> dict[str, float]:
    """Return the seconds of every phase of one step; they add up to the step. Not collective."""
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
    """Give each mark, and the step itself, with the phase around it and its time without the marks inside."""
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

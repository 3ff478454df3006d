"""The ranks of a communicator that is being made: those that do not come are named after the timeout.

[Note: no channel yet] What makes a communicator is collective itself, so nothing of MPI tells who has come to it. On a
node the roll does; of other nodes nothing is known, and the timeout ends the job all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpizero.comm.recording.call_trace import MAKING
from mpizero.comm.recording.registry import CommunicatorEntry
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision import wait_report
from mpizero.comm.supervision.supervisor import TICK, Supervisor

#: Seconds for all ranks to come, where nobody says: as long as a configuration gives its collectives.
PATIENCE = 600.0
#: Runs of ranks that are told with a communicator that is being made.
_RUNS = 200


@contextmanager
def arriving(
    entry: CommunicatorEntry,
    supervisor: Supervisor,
    timeout: float | None,
    slots: Callable[[], dict[int, Slot]],
    end: Callable[[str], None],
) -> Iterator[None]:
    """Watch the block in which the ranks of a communicator make it.

    Parameters
    ----------
    entry : CommunicatorEntry
        Of the communicator to be.
    supervisor : Supervisor
        In whose thread is looked.
    timeout : float or None
        Seconds for the block; None watches nothing.
    slots : callable
        Returns what is known of other ranks, and of this one.
    end : callable
        Is told what to say when the job has to end.
    """

    def look(now: float) -> None:
        since = supervisor.since(begun, now)
        if timeout is not None and trace.entered and since > timeout:
            call = [entry.key, trace.name, 0, MAKING, "", since]
            said = wait_report.stuck(call, entry.members, wait_report.aged(slots()), timeout, supervisor.tick)
            end("\n".join(said))

    trace = entry.trace
    trace.operation, trace.entered = MAKING, time.monotonic()
    begun = trace.entered
    if timeout is not None:
        supervisor.add(look, min(TICK, timeout / 10))
    try:
        yield
    finally:
        trace.operation, trace.entered = "", 0.0
        if timeout is not None:
            supervisor.remove(look)


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks in order as first and last ones of runs; nothing where there are too many runs. Not collective."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found if len(found) <= _RUNS else []


def takes(making: Any, rank: int) -> bool:
    """Tell whether what :func:`runs` has returned has ``rank`` in it. Not collective."""
    return any(first <= rank <= last for first, last in making)

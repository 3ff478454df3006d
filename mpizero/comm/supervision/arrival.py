"""End the job if not all ranks join in making a communicator within a timeout, and name the missing ranks.

[Note: no channel yet] Making a communicator is itself collective, and MPI does not tell which ranks take part. The
startup board tells this for the ranks of this node. Nothing is known of ranks on other nodes; the job ends all the
same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from mpizero.comm.recording.call_trace import MAKING
from mpizero.comm.recording.registry import CommunicatorEntry
from mpizero.comm.status.status_board import Slot
from mpizero.comm.supervision import wait_report
from mpizero.comm.supervision.supervisor import TICK, Supervisor
from mpizero.types import Array

#: Default timeout in seconds, also that of a configuration.
PATIENCE = 600.0
#: What a rank that makes a communicator says about the end of the job: more than any rank that ends.
JOINS = 2**62 + 1


def range_of(value: int = JOINS) -> Array:
    """Return an array whose minimum over ranks has their least value, and their greatest one with another sign."""
    return np.array([value, -value], np.int64)


@contextmanager
def watch_arrival(
    entry: CommunicatorEntry,
    supervisor: Supervisor,
    timeout: float | None,
    slots: Callable[[], dict[int, Slot]],
    end: Callable[[str], None],
) -> Iterator[None]:
    """End the job if the ``with`` block, in which the ranks make a communicator, lasts longer than ``timeout``.

    Parameters
    ----------
    entry : CommunicatorEntry
        The communicator that is being made.
    supervisor : Supervisor
        The supervisor whose thread checks the time.
    timeout : float or None
        Seconds that the block may last; None for no limit.
    slots : callable
        Returns the known status slots by rank, including the slot of this rank.
    end : callable
        Ends the job; it is called with the report.
    """

    def look(now: float) -> None:
        since = supervisor.since(begun, now)
        if timeout is not None and trace.entered and since > timeout:
            call = [entry.key, trace.name, 0, MAKING, "", since]
            known = wait_report.with_age(slots())
            end("\n".join(wait_report.describe_stuck_call(call, entry.members, known, timeout, supervisor.tick)))

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

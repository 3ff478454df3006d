"""Record when a rank begins and ends each phase of a training step, and each message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpizero.comm.communicator import Timeline
from mpizero.parallel.engine import Engine


@contextmanager
def traced(engine: Engine) -> Iterator[Timeline]:
    """Yield the engine's timeline, which records the phases and messages of this rank inside the ``with`` block.

    Not collective. Calls of communicators that have only one rank are not recorded, because they take no time.
    """
    timeline, grid = engine.timeline, engine.grid
    several = [c for c in (grid.world, *grid.communicators) if c.size > 1]
    timeline.on = True
    for communicator in several:
        communicator.timeline = timeline
    try:
        yield timeline
    finally:
        timeline.on = False
        for communicator in several:
            communicator.timeline = None

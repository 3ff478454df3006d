"""Record the phases of a rank's work with their times, from the engine down to single messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpizero.comm.recording.timeline import Timeline
from mpizero.parallel.engine import Engine


@contextmanager
def traced(engine: Engine) -> Iterator[Timeline]:
    """Yield the engine's timeline, which records all phases and messages inside the ``with`` block.

    Not collective. Calls of communicators of one rank take no time and are not recorded.
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

"""Note what a rank does when, from the engine down to single messages, for as long as somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpizero.comm.recording.timeline import Timeline
from mpizero.parallel.engine import Engine


@contextmanager
def watching(engine: Engine) -> Iterator[Timeline]:
    """Yield the engine's timeline, which takes down everything that is done in the block.

    Not collective. Calls of communicators of one rank take no time and are not noted.
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

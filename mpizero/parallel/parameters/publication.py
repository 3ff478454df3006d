"""Send updated parameters to the copies of all groups, during the next forward pass (ZeRO-1 and 2).

[Note: regions] The flat order is cut into regions, in the order in which blocks use them. Of each the owners' ranges
are gathered by messages of their own, all begun at once; a rank that reads a block waits for the regions up to its last
one. Where ranks of a node share the copy, each brings a part of a region, so it is complete once all of them have
theirs: they say so by a barrier that does not block, one a region, begun as soon as its messages have arrived.

[Note: nobody waits for a rank that waits] Such a barrier ends only when every rank of the node has begun it, so a rank
begins all of them before it blocks in anything else: :meth:`Publication.wait` comes at the end of a rank's passes,
before any other call of the node (``MessageProgress.finish``), and with every other use of the values.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from mpizero.comm import Request
from mpizero.comm.grid import ProcessGrid
from mpizero.comm.reduce.exact import Gathering, begin_gather
from mpizero.errors import MpizeroError
from mpizero.layout import Span
from mpizero.parallel.parameters.allocator import Memory
from mpizero.parallel.parameters.shards import Share
from mpizero.types import Array

#: Elements that a region has at least, unless the unit ends before: smaller messages cost more than they bring ahead.
REGION = 1 << 16


class Publication:
    """Send what one update has changed. Construction is collective over the data group.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; its peers exchange.
    memory : Memory
        Has the window of the copy.
    values : 1-D array
        The copy of this rank's group, with this rank's ranges updated.
    regions : sequence of (int, Span)
        Index of the unit, and the range of the flat order; each is inside its unit.
    shares : sequence of Share
        What each peer owns.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        memory: Memory,
        values: Array,
        regions: Sequence[tuple[int, Span]],
        shares: Sequence[Share],
    ) -> None:
        self._memory = memory
        self._gatherings: list[Gathering] = []
        self._barriers: list[Request | None] = []
        for unit, region in regions:
            spans = [(share.spans[unit].intersect(region),) for share in shares]
            ((own,),) = spans[grid.peers.rank : grid.peers.rank + 1]
            self._gatherings.append(begin_gather(grid.peers, [values[own.start : own.stop]], values, spans))
        self._arrived = self._ready = 0

    @property
    def ended(self) -> bool:
        """Whether every region is complete. Not collective."""
        return self._ready == len(self._gatherings)

    def poll(self) -> bool:
        """Let messages move on and tell whether this rank's own have all arrived and left. Not collective."""
        while self._arrived < len(self._gatherings) and self._gatherings[self._arrived].test():
            self._note()
        return self._arrived == len(self._gatherings)

    def wait_own(self) -> None:
        """Return when all of this rank's own messages have arrived and left. Not collective."""
        for gathering in self._gatherings:
            gathering.wait()

    def wait(self, regions: int | None = None) -> None:
        """Return when the first ``regions`` (None: all) are complete. Collective over the data group in the end."""
        count = len(self._gatherings) if regions is None else regions
        while self._arrived < count:
            self._gatherings[self._arrived].wait()
            self._note()
        if self._ready < count:
            for barrier in self._barriers[self._ready : count]:
                if barrier is not None:
                    barrier.wait()
            self._ready = count
            self._memory.synchronize()

    def _note(self) -> None:
        """Tell the ranks of the node that one more region has arrived here."""
        self._arrived += 1
        self._barriers.append(self._memory.ibarrier("published"))


def let_arrive(published: list[Publication], seconds: float = 10.0) -> None:
    """Let what is still in flight to a store arrive before its memory, or MPI, is gone; give up after a while.

    Not collective. For programs that end, or drop a model, without closing it.
    """
    limit = time.monotonic() + seconds
    with contextlib.suppress(MpizeroError):  # others have ended or closed the communicator
        while published and not published[0].poll() and time.monotonic() < limit:
            time.sleep(1e-4)

"""Send updated parameters to the copies on all nodes, during the next forward pass (ZeRO-1 and 2).

[Note: regions] The parameters are cut into regions, in the order in which blocks use them. Each region has an
all-gather of its own, between the peers that own parts of it; all of these all-gathers begin at once. Before a rank
reads the parameters of a block, it waits for all regions up to the last one that the block uses. If the ranks of a node
share one copy, each of them receives a part of the region, and the region is complete when all of them have received
their parts. A non-blocking barrier of the node for each region makes sure of that; a rank begins it as soon as its own
messages of the region have arrived.

[Note: nobody waits for a rank that waits] The barrier of a region ends only when every rank of the node has begun it.
So a rank must begin the barriers of all regions before it blocks in anything else. :meth:`Publication.wait` does that:
it is called at the end of a rank's forward and backward passes, before any other collective of the node
(``MessageProgress.finish``), and before any other use of the parameters.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from mpizero.comm import Request
from mpizero.comm.mesh import ProcessGrid
from mpizero.comm.reduce import Gathering, begin_gather
from mpizero.errors import MpizeroError
from mpizero.layout import Span
from mpizero.parallel.parameters.allocator import Memory
from mpizero.parallel.parameters.shards import Share
from mpizero.types import Array

#: The least number of elements in a region, unless its unit ends before: many small messages would take longer.
REGION = 1 << 16


class Publication:
    """Send the parameters that one update has changed to the copies on all nodes, region by region.

    A region is a range of the flat parameter vector that has an all-gather of its own. Construction begins the
    all-gathers; it is collective over the data group.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; peers exchange parameters.
    memory : Memory
        The allocator that has the shared window of ``values``.
    values : 1-D array
        The node's copy of the parameters, in which this rank's ranges are updated.
    regions : sequence of (int, Span)
        For each region the index of its unit, and its range of the flat parameter vector.
    shares : sequence of Share
        The shards that the peers own.
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
        """Tell whether this rank has waited until all regions were complete. Not collective."""
        return self._ready == len(self._gatherings)

    def poll(self) -> bool:
        """Let messages progress, and tell whether all of this rank's sends and receives have ended. Not collective."""
        while self._arrived < len(self._gatherings) and self._gatherings[self._arrived].test():
            self._note()
        return self._arrived == len(self._gatherings)

    def wait_own(self) -> None:
        """Wait until all of this rank's sends and receives have ended. Not collective."""
        for gathering in self._gatherings:
            gathering.wait()

    def wait(self, regions: int | None = None) -> None:
        """Wait until the first ``regions`` regions are complete, or all of them if it is None.

        Collective over the data group in this sense: every rank must have waited for all regions before the next
        update.
        """
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
        """Record that one more region has arrived on this rank, and begin the node's barrier for that region."""
        self._arrived += 1
        self._barriers.append(self._memory.ibarrier("published"))


def let_arrive(published: list[Publication], seconds: float = 10.0) -> None:
    """Wait, for at most ``seconds``, until the messages of a publication in flight have ended.

    Not collective. ``published`` is empty or has one publication, of a store whose memory is about to be freed. It is
    called when a program ends, or drops a model, without closing the model.
    """
    limit = time.monotonic() + seconds
    with contextlib.suppress(MpizeroError):  # others have ended or closed the communicator
        while published and not published[0].poll() and time.monotonic() < limit:
            time.sleep(1e-4)

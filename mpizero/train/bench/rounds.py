"""Time the same work on one rank alone and on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpizero.comm import Communicator

#: Seconds that a waiting rank sleeps between two tests: it must not keep a core busy while another rank is measured.
_NAP = 2e-4


def alone(comm: Communicator, work: Callable[[], object]) -> float:
    """Time ``work`` on rank 0 while the other ranks sleep, and return the seconds on every rank.

    Collective over ``comm``; ``work`` is called on rank 0 only.
    """
    comm.barrier("bench")
    took = np.zeros(1)
    if comm.rank == 0:
        started = time.perf_counter()
        work()
        took[0] = time.perf_counter() - started
    ended = comm.ibarrier("bench")
    while not ended.test():
        time.sleep(_NAP)
    comm.broadcast(took, 0, "bench")
    return float(took[0])


def together(comm: Communicator, work: Callable[[], object]) -> float:
    """Time ``work`` on all ranks at once, and return the slowest rank's seconds on every rank.

    Collective over ``comm``.
    """
    comm.barrier("bench")
    started = time.perf_counter()
    work()
    took = np.array([time.perf_counter() - started])
    comm.allreduce(took, "max", "bench")
    return float(took[0])

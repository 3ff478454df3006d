"""Every specification of a communicator holds over MPI, over MPI with tiny messages, and over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mpizero.comm import Communicator
from mpizero.testing import run_in_threads


@pytest.fixture(params=["threads", pytest.param("mpi", marks=pytest.mark.mpi)])
def ranks(request) -> Iterator[Callable[[Callable[[Communicator], None]], None]]:
    """Run a specification on every rank, and tell of which communicators it does not hold."""

    def check(specification, run, where):
        try:
            run(specification)
        except Exception as error:
            error.add_note(f"on {where}")
            raise

    if request.param == "threads":

        def on_all(specification):
            for n in (1, 2, 3, 5):
                check(specification, lambda work, n=n: run_in_threads(n, work), f"{n} threads")

        yield on_all
        return

    from mpi4py import MPI

    from mpizero.comm.mpi import MpiCommunicator

    world = request.getfixturevalue("world")
    # Long arrays, of as many elements as ``on_ranks`` was told, are cut into a few messages, not thousands.
    with MpiCommunicator(MPI.COMM_WORLD, limit=getattr(request.function, "limit", 24), name="cut") as cut:

        def on_both(specification):
            check(specification, lambda work: work(world), "the world of MPI")
            check(specification, lambda work: work(cut), "tiny messages of MPI")

        yield on_both

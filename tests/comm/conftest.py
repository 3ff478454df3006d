"""Every specification of a communicator holds over MPI, over MPI with tiny messages, and over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mpizero.comm import Communicator
from mpizero.testing import run_in_threads


@pytest.fixture(
    params=[
        pytest.param("mpi", marks=pytest.mark.mpi),
        pytest.param("mpi-cut", marks=pytest.mark.mpi),
        *(f"{n}-threads" for n in (1, 2, 3, 5)),
    ]
)
def ranks(request) -> Iterator[Callable[[Callable[[Communicator], None]], None]]:
    """Run a specification on every rank."""
    if request.param.endswith("threads"):
        yield lambda specification: run_in_threads(int(request.param[0]), specification)
    elif request.param == "mpi":
        world = request.getfixturevalue("world")
        yield lambda specification: specification(world)
    else:
        from mpi4py import MPI

        from mpizero.comm.mpi import MpiCommunicator

        # Long arrays, of as many elements as a parameter of the test says, are cut into a few messages, not thousands.
        lengths = [value for value in request.node.callspec.params.values() if isinstance(value, int)]
        with MpiCommunicator(MPI.COMM_WORLD, limit=max([24, *lengths]), name="cut") as cut:
            yield lambda specification: specification(cut)

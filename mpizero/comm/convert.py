"""From what users have (an mpi4py communicator, one of ours, nothing) to a Communicator."""

from __future__ import annotations

from typing import Any

from mpizero.comm.communicator import Communicator
from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.errors import ArgumentError


def as_communicator(comm: Any = None, name: str = "world") -> Communicator:
    """Turn an mpi4py communicator, a Communicator or None (one process, no MPI) into a Communicator.

    Collective over ``comm`` if it is an mpi4py communicator: it is split, never used itself, and the caller closes the
    result. A Communicator is returned as it is.

    Raises
    ------
    TypeError
        If ``comm`` is something else.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is None:
        return InMemoryCommunicator.group(1, name=name)[0]
    if type(comm).__module__.split(".")[0] == "mpi4py" or hasattr(comm, "Split_type"):
        from mpizero.comm.mpi import MpiCommunicator  # mpi4py starts MPI where it is imported

        return MpiCommunicator(comm, name=name)
    raise ArgumentError(
        f"comm must be an mpi4py communicator, an mpizero Communicator or None, got {type(comm).__name__}: {comm!r}"
    )

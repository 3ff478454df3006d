"""Make a Communicator of what users have: an mpi4py communicator, one of ours, "self", or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpizero.comm.communicator import Communicator
from mpizero.comm.startup.launch import default_world, one_process
from mpizero.comm.supervision.arrival import PATIENCE
from mpizero.errors import ArgumentError, CollectiveError, PeerFailure


def as_communicator(
    comm: Any = None, name: str = "world", *, timeout: float | None = PATIENCE, embedded: bool = False
) -> Communicator:
    """Turn an mpi4py communicator, a Communicator, "self" or None into a Communicator.

    Collective over ``comm`` if it is an mpi4py communicator: it is split, never used itself, and the caller closes the
    result. A Communicator is returned as it is. None is all ranks where a launcher has started several (collective
    over them, and starts MPI), and one process elsewhere; "self" is this process alone, without MPI. ``timeout`` are
    the seconds that the ranks have to come to this call, ``embedded`` is :class:`~mpizero.ShardingConfig`'s.

    Raises
    ------
    TypeError
        If ``comm`` is something else.
    ConfigError
        If ``comm`` is None, and each of several processes that were started together sees itself alone.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is None:
        comm = default_world()
    if comm is None or comm == "self":
        return one_process(name)
    if type(comm).__module__.split(".")[0] == "mpi4py" or hasattr(comm, "Split_type"):
        from mpizero.comm.mpi import MpiCommunicator  # importing mpi4py starts MPI

        return MpiCommunicator(comm, name=name, timeout=timeout, guest=embedded)
    raise ArgumentError(
        'comm must be an mpi4py communicator, an mpizero Communicator, "self" (this process alone) or None (all ranks '
        f"of the launcher), got {type(comm).__name__}: {comm!r}"
    )


@contextmanager
def communicator_of(comm: Any = None) -> Iterator[Communicator]:
    """Turn ``comm`` into a Communicator, and close it in the end if it had to be made.

    Collective over ``comm``. Within, every error is agreed, so all ranks come to the end together.
    """
    world = as_communicator(comm)
    try:
        yield world
    except (CollectiveError, PeerFailure):
        raise  # the other ranks may never close it
    except BaseException:
        _close(world, comm)
        raise
    _close(world, comm)


def _close(world: Communicator, comm: object) -> None:
    if world is not comm:
        world.close()

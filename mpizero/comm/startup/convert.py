"""Convert the argument ``comm`` of public functions to a Communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpizero.comm.communicator import Communicator
from mpizero.comm.startup.launch import default_world, one_process
from mpizero.errors import ArgumentError, CollectiveError, PeerFailure
from mpizero.guard.heartbeat import ARRIVAL_PATIENCE


def as_communicator(
    comm: Any = None, name: str = "world", *, timeout: float | None = ARRIVAL_PATIENCE, embedded: bool = False
) -> Communicator:
    """Convert an mpi4py communicator, a Communicator, "self" or None to a Communicator.

    From an mpi4py communicator a new one of the same ranks is split off; this is collective over it, and the caller
    closes the result. A Communicator is returned unchanged. None means all ranks if a launcher has started several;
    then the call is collective over all ranks, and starts MPI. Otherwise None means this process alone. "self" means
    this process alone, without MPI. All ranks must make the call within ``timeout`` seconds; None is no limit.
    ``embedded`` says that mpizero runs inside another program, see :class:`~mpizero.ShardingConfig`.

    Raises
    ------
    ArgumentError
        If ``comm`` is none of these; it is a TypeError too.
    ConfigError
        If ``comm`` is None and MPI sees another number of processes than the launcher has started.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.comm.as_communicator("self") as comm:
    ...     comm.size
    1
    >>> mz.comm.as_communicator("all")
    Traceback (most recent call last):
    mpizero.errors.ArgumentError: comm must be an mpi4py communicator, ... got str: 'all'
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
    """Convert ``comm`` to a Communicator for a ``with`` block, see :func:`as_communicator`.

    Collective over ``comm``. At the end of the block a new Communicator is closed; one that was passed as ``comm``
    stays open. In the block, errors must be raised on all ranks together, because closing is collective.
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

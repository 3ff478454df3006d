"""Raise an error on every rank when one rank has raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import numpy as np

from mpizero.comm.calls import agree_on_call
from mpizero.comm.communicator import Communicator
from mpizero.errors import CollectiveError, PeerFailure, RemoteError
from mpizero.guard.reports import describe_error, ranks_text


@contextmanager
def all_ranks(comm: Communicator, tag: str = "all_ranks", *, first: bool = False) -> Iterator[None]:
    """Run a ``with`` block on all ranks; if it raises on one rank, raise an error on every rank.

    Collective over ``comm``: one small message at the end of the block, labelled ``tag`` in traces and reports. With
    ``first``, :func:`mpizero.comm.calls.agree_on_call` is called in place of this message; it also checks that all
    ranks have called the same public operation. A block must not mix collectives of ``comm`` with statements that can
    fail on one rank only: the other ranks would wait in the collective. If a collective fails in the block, its error
    is raised at once, without the message, because other ranks may never send it.

    Raises
    ------
    Exception
        The block's own error, on the ranks that raised it.
    RemoteError
        On the other ranks; names the ranks that failed and the error of the first of them.
    CollectiveMismatch
        On every rank, with ``first``, if the ranks have called different operations.

    Examples
    --------
    >>> with all_ranks(comm):  # doctest: +SKIP
    ...     source = Hdf5Source(path)
    """
    error: Exception | None = None
    try:
        yield
    except (CollectiveError, PeerFailure):
        raise
    except Exception as caught:
        error = caught
    if first:
        failed = agree_on_call(comm, (error is not None,))[:, 0].any()
    else:
        mine = np.array([error is not None], np.int8)
        comm.allreduce(mine, "max", tag=tag)
        failed = mine.any()
    if failed:
        raise_on_all(comm, error, tag)


def raise_on_all(comm: Communicator, error: Exception | None, tag: str) -> NoReturn:
    """Raise ``error`` on the ranks where it is not None, and RemoteError on the others.

    Collective over ``comm``. Call it only when all ranks know that at least one of them has an error.
    """
    own = None if error is None else (isinstance(error, RemoteError), describe_error(error))
    reports = comm.allgather_object(own, tag)
    if error is not None:
        raise error
    ranks = [rank for rank, report in enumerate(reports) if report is not None]
    # A RemoteError only reports the failure of another block: the cause comes first.
    first = min(ranks, key=lambda rank: (reports[rank][0], rank))
    raise RemoteError(f"{ranks_text(ranks)} raised; rank {first}: {reports[first][1]}")

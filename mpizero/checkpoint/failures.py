"""Failures of checkpoints, and how every rank comes to raise the same one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, NoReturn, Self, TypeVar

from mpizero.comm import as_communicator
from mpizero.comm.communicator import Communicator
from mpizero.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIOError,
    CheckpointMissingError,
    CheckpointVersionError,
    CollectiveError,
    ConfigError,
    MpizeroError,
    PeerFailure,
    RemoteError,
)

T = TypeVar("T")


#: How the errors about checkpoints are called while they travel; any other one is "checkpoint".
_KINDS: dict[str, type[MpizeroError]] = {
    "missing": CheckpointMissingError,
    "io": CheckpointIOError,
    "damaged": CheckpointDamagedError,
    "version": CheckpointVersionError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
    "foreign": RemoteError,
}


class Outcome(NamedTuple):
    """An exception in a form that travels between ranks."""

    kind: str
    code: int
    message: str


def outcome_of(error: Exception) -> Outcome:
    """Return what the other ranks are told of an exception. Not collective."""
    if isinstance(error, CheckpointError):
        kind = next((kind for kind, known in _KINDS.items() if type(error) is known), "checkpoint")
        return Outcome(kind, getattr(error, "errno", 0) or 0, str(error))
    if isinstance(error, ConfigError):
        return Outcome("config", 0, str(error))
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return Outcome("missing" if error.errno == errno.ENOENT else "io", error.errno or 0, where + reason)
    return Outcome("foreign", 0, f"{type(error).__name__}: {error}")


def _raise(outcome: Outcome, text: str) -> NoReturn:
    error = _KINDS[outcome.kind](text)
    if isinstance(error, OSError):
        error.errno = outcome.code or None
    raise error


class Attempt:
    """A block whose failure the other ranks must learn of: it is kept, and told by :func:`raise_first`.

    What says that the communicator is broken is let through: nobody would answer.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CollectiveError | PeerFailure):
            return False
        self.failure = error
        return True

    @property
    def outcome(self) -> Outcome | None:
        """The failure in a form that travels; None if there is none."""
        return None if self.failure is None else outcome_of(self.failure)


def raise_first(outcomes: Sequence[Outcome | None], prefix: str, failure: Exception | None = None) -> None:
    """Raise the error of the lowest rank that has one; ``failure`` is this rank's own.

    Not collective: every rank has the ``outcomes`` of all.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        if failure is not None and outcome_of(failure).kind == "foreign":
            raise failure
        where = f"[rank {rank}] " if len(outcomes) > 1 else ""
        _raise(outcome, f"{prefix}: {where}{outcome.message}")


@contextmanager
def agreed(comm: Communicator, prefix: str) -> Iterator[None]:
    """Leave on every rank, or raise the same error on every rank: the lowest failing rank's.

    Collective over ``comm``. The message is ``prefix``, the rank, and the reason. Unlike ``comm.agreement.all_ranks``
    the other ranks do not raise ``RemoteError``: whoever loads a missing file catches ``FileNotFoundError`` on every
    rank alike. An error that is nobody's business but ours (a bug) keeps its traceback on its own rank.
    """
    with Attempt() as own:
        yield
    raise_first(comm.allgather_object(own.outcome, tag="checkpoint outcome"), prefix, own.failure)


@contextmanager
def borrowed(comm: object) -> Iterator[Communicator]:
    """Turn ``comm`` into a Communicator, and close it in the end if it had to be made.

    Collective over ``comm``. Within, every error is agreed, so all ranks come to the end together.
    """
    world = as_communicator(comm)
    try:
        yield world
    except (CollectiveError, PeerFailure):
        raise  # the others may never come to close it
    except BaseException:
        _close(world, comm)
        raise
    _close(world, comm)


def _close(world: Communicator, comm: object) -> None:
    if world is not comm:
        world.close()


def on_root(
    comm: Communicator, prefix: str, function: Callable[[], T], beside: Callable[[], object] | None = None
) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, or raise the same error on every rank.

    Collective over ``comm``: one exchange. The result is pickled. Every rank calls ``beside`` first; its failures count
    too.
    """
    result: T | None = None
    with Attempt() as own:
        if beside is not None:
            beside()
        if comm.rank == 0:
            result = function()
    told = comm.allgather_object((own.outcome, result), tag="checkpoint")
    raise_first([outcome for outcome, _ in told], prefix, own.failure)
    shared: T = told[0][1]
    return shared

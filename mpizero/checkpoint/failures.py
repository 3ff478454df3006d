"""Raise the same error about a checkpoint on every rank."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, NoReturn, Self, TypeVar

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


#: Names that stand for error classes in messages between ranks; other subclasses of CheckpointError are "checkpoint".
_KINDS: dict[str, type[MpizeroError]] = {
    "missing": CheckpointMissingError,
    "io": CheckpointIOError,
    "damaged": CheckpointDamagedError,
    "version": CheckpointVersionError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
    "foreign": RemoteError,
}


class PortableError(NamedTuple):
    """Describe an exception so that it can be sent to other ranks: key of :data:`_KINDS`, errno and message."""

    kind: str
    code: int
    message: str


def portable_error(error: Exception) -> PortableError:
    """Convert an exception to a form that can be sent to other ranks. Not collective."""
    if isinstance(error, CheckpointError):
        kind = next((kind for kind, known in _KINDS.items() if type(error) is known), "checkpoint")
        return PortableError(kind, getattr(error, "errno", 0) or 0, str(error))
    if isinstance(error, ConfigError):
        return PortableError("config", 0, str(error))
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return PortableError("missing" if error.errno == errno.ENOENT else "io", error.errno or 0, where + reason)
    return PortableError("foreign", 0, f"{type(error).__name__}: {error}")


def _raise(portable: PortableError, text: str) -> NoReturn:
    error = _KINDS[portable.kind](text)
    if isinstance(error, OSError):
        error.errno = portable.code or None
    raise error


class CapturedError:
    """Catch the exception that a ``with`` block raises, so that :func:`raise_first` can raise it on every rank.

    Errors of a broken communicator are not caught: other ranks could not be told about them.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CollectiveError | PeerFailure):
            return False
        self.error = error
        return True

    @property
    def portable(self) -> PortableError | None:
        """The caught exception in a form that can be sent to other ranks; None if there is none."""
        return None if self.error is None else portable_error(self.error)


def raise_first(errors: Sequence[PortableError | None], prefix: str, own: Exception | None = None) -> None:
    """Raise the error of the lowest rank that has one; do nothing if no rank has one.

    ``errors`` holds the gathered errors of all ranks, ``own`` the exception of this rank. If ``own`` is of a foreign
    type (a bug), this rank raises it itself, with its traceback. Not collective.
    """
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if own is not None and portable_error(own).kind == "foreign":
            raise own
        where = f"[rank {rank}] " if len(errors) > 1 else ""
        _raise(error, f"{prefix}: {where}{error.message}")


@contextmanager
def agreed(comm: Communicator, prefix: str) -> Iterator[None]:
    """Run a block on every rank; if it fails on one, raise the lowest failing rank's error on every rank.

    Collective over ``comm``. The message consists of ``prefix``, the failing rank and the reason. The other ranks raise
    the same class of error, not ``RemoteError`` as with ``comm.agreement.all_ranks``: so a program that loads a missing
    file can catch ``FileNotFoundError`` on every rank. An error that is neither about files, checkpoints nor
    configuration (a bug) keeps its traceback on the rank that raised it.
    """
    with CapturedError() as own:
        yield
    raise_first(comm.allgather_object(own.portable, tag="checkpoint outcome"), prefix, own.error)


def on_root(
    comm: Communicator, prefix: str, function: Callable[[], T], before: Callable[[], object] | None = None
) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, or raise the same error on every rank.

    Collective over ``comm``: one all-gather of pickled objects. Every rank calls ``before`` first, and an error that it
    raises on any rank is raised on every rank, too.
    """
    result: T | None = None
    with CapturedError() as own:
        if before is not None:
            before()
        if comm.rank == 0:
            result = function()
    gathered = comm.allgather_object((own.portable, result), tag="checkpoint")
    raise_first([error for error, _ in gathered], prefix, own.error)
    shared: T = gathered[0][1]
    return shared

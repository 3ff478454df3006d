"""Raise an error about a checkpoint on every rank when it occurs on one rank."""

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
    """Describe an exception in a form that can be sent to other ranks.

    ``kind`` is the key of :data:`_KINDS` for the error class, ``code`` the errno or 0.
    """

    kind: str
    code: int
    message: str


def portable_error(error: Exception) -> PortableError:
    """Convert an exception to a :class:`PortableError`, which can be sent to other ranks. Not collective."""
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
    """Catch the exception that a ``with`` block raises, so that :func:`raise_first` can then raise it on every rank.

    Errors of a broken communicator are not caught, because they could not be sent to other ranks.
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
        """The description of the caught exception, to be sent to other ranks; None if no exception was caught."""
        return None if self.error is None else portable_error(self.error)


def raise_first(errors: Sequence[PortableError | None], prefix: str, own: Exception | None = None) -> None:
    """Raise the error of the lowest rank that has one; do nothing if no rank has one.

    ``errors`` holds the error of each rank, gathered from all ranks. ``own`` is the exception of this rank. The message
    begins with ``prefix``. If ``own`` is an unexpected error (neither about files, checkpoints nor configuration), this
    rank raises ``own`` itself, with its traceback. Not collective.
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
    """Run the ``with`` block on every rank; if it fails on any, raise the lowest failing rank's error on every rank.

    Collective over ``comm``. The message consists of ``prefix``, the failing rank and the reason. The other ranks raise
    the same class of error, whereas ``comm.agreement.all_ranks`` raises ``RemoteError`` there. So a program that loads
    a missing file can catch ``FileNotFoundError`` on every rank. An unexpected error, which is neither about files,
    checkpoints nor configuration, is raised with its traceback on the rank where it occurred, and as ``RemoteError`` on
    other ranks.
    """
    with CapturedError() as own:
        yield
    raise_first(comm.allgather_object(own.portable, tag="checkpoint outcome"), prefix, own.error)


def on_root(
    comm: Communicator, prefix: str, function: Callable[[], T], before: Callable[[], object] | None = None
) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, or raise the same error on every rank.

    Collective over ``comm``: one all-gather of pickled objects. Every rank calls ``before`` first. An error that
    ``before`` raises on any rank is raised on every rank, too. The message begins with ``prefix``.
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

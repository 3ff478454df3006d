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


#: Short names of errors about checkpoints in messages between ranks; any other one is "checkpoint".
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
    """Hold an exception in a form that can be sent to other ranks."""

    kind: str
    code: int
    message: str


def portable_error(error: Exception) -> PortableError:
    """Return an exception in a form that can be sent to other ranks. Not collective."""
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
    """Keep the exception that a block raises, until :func:`raise_first` raises it on every rank.

    Errors of a broken communicator are let through: no other rank would receive a message.
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
        """The error in a form that can be sent to other ranks; None if there is none."""
        return None if self.error is None else portable_error(self.error)


def raise_first(errors: Sequence[PortableError | None], prefix: str, own: Exception | None = None) -> None:
    """Raise the error of the lowest rank that has one; ``own`` is this rank's.

    Not collective: every rank has the ``errors`` of all.
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

    Collective over ``comm``. The message is ``prefix``, the rank, and the reason. Unlike ``comm.agreement.all_ranks``
    the other ranks do not raise ``RemoteError``: a program that loads a missing file catches ``FileNotFoundError`` on
    every rank alike. Any other error (a bug) keeps its traceback on its own rank.
    """
    with CapturedError() as own:
        yield
    raise_first(comm.allgather_object(own.portable, tag="checkpoint outcome"), prefix, own.error)


def on_root(
    comm: Communicator, prefix: str, function: Callable[[], T], before: Callable[[], object] | None = None
) -> T:
    """Call ``function`` on rank 0 and return its result on every rank, or raise the same error on every rank.

    Collective over ``comm``: one exchange. The result is pickled. Every rank calls ``before`` first; its failures
    count too.
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

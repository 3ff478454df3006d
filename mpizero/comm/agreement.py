"""Raise the same kind of error on all ranks if ranks call different operations, fail, or hold different values.

Such faults must be found before a rank waits in a collective that other ranks never call. :func:`check_call` and
:func:`agree_on_call` compare the public operations that the ranks have called. If one rank raises in a block of
:func:`all_ranks`, all ranks raise. :func:`agree_equal` and :func:`agree_arrays` compare settings and arrays; their
errors name the first value, attribute or array that differs.

[Note: calls] A public collective call (``train``, ``evaluate``, ``save_model``, ``close``) is an operation. The trace
of the world communicator records the name of each operation and the source line of the user's call, as it records the
collectives of this communicator. The first message of every operation has the same form: a hash of all calls that this
rank has made so far, and up to three integers that the operation needs from every rank. Because of this common form,
ranks that call different operations can exchange their messages. Such ranks then raise an error with the names and
source lines of the operations, before shared memory is changed. A training step sends its sample counts in its first
message, so the comparison of calls costs a step no further message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from types import FunctionType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import numpy as np

from mpizero._util.checks import native, unmasked
from mpizero._util.fingerprint import Fingerprint, Parts, shown, words
from mpizero._util.numbers import crc32
from mpizero._util.text import notice_once
from mpizero.comm.communicator import Communicator
from mpizero.errors import CollectiveError, ConfigError, PeerFailure, RemoteError
from mpizero.guard.reports import by_ranks, describe_error, ranks_text
from mpizero.types import Array

#: Number of 64-bit integers that an operation may send in its first message.
MOST_ARGUMENTS = 3

P = ParamSpec("P")
R = TypeVar("R")


class Collective(Protocol):
    """Describe a class whose methods are decorated with :func:`collective` or :func:`recorded`."""

    def _callers(self) -> tuple[Communicator, str]:
        """Return the communicator of the calling ranks, and a label that no other object of the same class has.

        Error messages show the label; the first object of each class has the label "".
        """


C = TypeVar("C", bound=Collective)


def record_call(comm: Communicator, operation: str, which: str = "") -> None:
    """Record in the trace of ``comm`` that the user has called ``operation``, and the source line of the call.

    ``which`` is the label of the object whose method was called, see :class:`Collective`. Sends nothing, but all ranks
    must call it: the next :func:`agree_on_call` compares the records.
    """
    if comm.size > 1:
        comm.trace.begin_operation((operation, which))


def agree_on_call(comm: Communicator, arguments: Sequence[int] = ()) -> Array:
    """Check that all ranks have called the same operation; return the ranks' ``arguments``, one row for each rank.

    Collective over ``comm``: this call sends the first message of an operation, see [Note: calls]. ``arguments`` are up
    to three integers; rows are filled up with zeros to three columns.

    Raises
    ------
    CollectiveMismatch
        On every rank, if the ranks have called different operations; names the operations, their ranks and source
        lines. Later calls of this function on the same communicator raise the same error again.
    """
    message = np.zeros(1 + MOST_ARGUMENTS, np.int64)
    message[1 : 1 + len(arguments)] = arguments
    if comm.size == 1:
        return message.reshape(1, -1)[:, 1:]
    if comm.out_of_step is not None:  # a close() in a ``finally``: the others may have ended
        raise comm.out_of_step
    message[0] = comm.trace.number
    table = np.empty((comm.size, message.size), np.int64)
    try:
        comm.allgather(message, table.reshape(-1), "operation")
        if (table[:, 0] != table[0, 0]).any():
            raise comm.mismatch()
    except CollectiveError as error:
        comm.out_of_step = error
        raise
    return table[:, 1:]


def check_call(comm: Communicator, operation: str, which: str = "") -> None:
    """Check that all ranks have called the same operation. Collective over ``comm``: one message of 32 bytes a rank.

    ``which`` is the label of the object whose method was called; all ranks must pass the same label.

    Raises
    ------
    CollectiveMismatch
        On every rank, if the ranks have called different operations.
    """
    record_call(comm, operation, which)
    agree_on_call(comm)


def _compared(
    compare: Callable[[Communicator, str, str], None], method: Callable[Concatenate[C, P], R]
) -> Callable[Concatenate[C, P], R]:
    """Return a method that first calls ``compare(comm, name of the method, label of the object)``, then ``method``."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        comm, which = self._callers()
        compare(comm, f"{type(self).__name__}.{method.__name__}", which)
        return method(self, *args, **kwargs)

    return call


def collective(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a collective method: one message before each call checks that all ranks call the same method.

    See :func:`check_call`.
    """
    return _compared(check_call, method)


def recorded(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a collective method that calls :func:`agree_on_call` itself: only record each call, send no message.

    If a call of the method ends before :func:`agree_on_call`, the first message of the next operation compares it.
    """
    return _compared(record_call, method)


@contextmanager
def all_ranks(comm: Communicator, tag: str = "all_ranks", *, first: bool = False) -> Iterator[None]:
    """Run a ``with`` block on all ranks; if it raises on one rank, raise an error on every rank.

    Collective over ``comm``: one small message at the end of the block, labelled ``tag`` in traces and reports. With
    ``first``, :func:`agree_on_call` replaces this message, and also checks that all ranks have called the same public
    operation. A block must not mix collectives of ``comm`` with statements that can fail on one rank only: the other
    ranks would wait in the collective. If a collective fails in the block, its error is raised immediately, without the
    message at the end, because other ranks may never send theirs.

    Raises
    ------
    Exception
        The block's own error, on the ranks that raised it.
    RemoteError
        On the other ranks; names the ranks that failed, and one of their errors: that of the lowest rank whose error
        is not a RemoteError (if all are, of the lowest rank).
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
        flag = np.array([error is not None], np.int8)
        comm.allreduce(flag, "max", tag=tag)
        failed = flag.any()
    if failed:
        raise_on_all(comm, error, tag)


def from_rank_0(comm: Communicator, function: Callable[[], R], tag: str = "all_ranks") -> R:
    """Call ``function`` on rank 0, and return its result on every rank; if ``function`` raises, all ranks raise.

    Collective over ``comm``: the message of :func:`all_ranks`, then a broadcast of the result, labelled ``tag``.
    """
    value: R | None = None
    with all_ranks(comm):
        if comm.rank == 0:
            value = function()
    result: R = comm.broadcast_object(value, tag=tag)
    return result


def raise_on_all(comm: Communicator, error: Exception | None, tag: str) -> NoReturn:
    """Raise ``error`` on the ranks where it is not None, and RemoteError on the others.

    Collective over ``comm``. Call it only when all ranks know that at least one of them has an error.
    """
    message = None if error is None else (isinstance(error, RemoteError), describe_error(error))
    reports = comm.allgather_object(message, tag)
    if error is not None:
        raise error
    ranks = [rank for rank, report in enumerate(reports) if report is not None]
    # A RemoteError only reports the failure of another block: the cause comes first.
    first = min(ranks, key=lambda rank: (reports[rank][0], rank))
    raise RemoteError(f"{ranks_text(ranks)} raised; rank {first}: {reports[first][1]}")


#: Name of a value, and the steps (``.field``, ``[0]``) that lead from it to a part of it.
_Path = tuple[str, tuple[str, ...]]

#: Sent instead of a digest by a rank whose ``make`` has raised; no digest is all zeros.
_FAILED = bytes(32)
#: Stands for a part that a rank lacks; compared by identity.
_ABSENT = str(bytearray(b"nothing"), "ascii")
_REMEDY = "give every rank the same"
_ALLOWED = "or, if it may differ, a name that begins with an underscore, which is not compared (docs/failures.md)"


def agree_equal(comm: Communicator, make: Callable[[], Mapping[str, Any]], tag: str) -> None:
    """Raise on every rank if ``make()`` returns different values on different ranks, or raises on one of them.

    Collective over ``comm``: if the values are equal, one message of 32 bytes a rank, whatever their size. ``make``
    returns a mapping from names to values, in the order in which they are compared. Any object may be a value; see
    :mod:`mpizero._util.fingerprint`. Rank 0 prints once which values cannot be compared.

    Raises
    ------
    ConfigError
        If values differ; names the first value, attribute or element that differs, and what it is on which ranks.
    Exception
        The error of ``make``, on the ranks where it was raised; RemoteError on the others.
    """
    error: Exception | None = None
    fingerprint, values, digest = Fingerprint(), dict[str, Any](), _FAILED
    try:
        values = dict(make())
        digest = fingerprint.digest_named(values)
    except Exception as caught:
        error = caught
    digests = np.empty((comm.size, len(_FAILED)), np.uint8)
    comm.allgather(np.frombuffer(digest, np.uint8).copy(), digests, tag=tag)
    if not digests.any(axis=1).all():
        raise_on_all(comm, error, tag)
    if (digests != digests[0]).any() and (message := _Search(comm, tag).among(values)):
        raise ConfigError(message)
    if comm.rank == 0 and comm.size > 1 and fingerprint.left_out:
        paths = ", ".join(f"{path} ({what})" for path, what in fingerprint.left_out.items())
        notice_once(f"not compared between ranks: {paths}; an object may offer fingerprint()")


class _Search:
    """Find the first value, attribute or element that differs between ranks; methods are collective over ``comm``."""

    def __init__(self, comm: Communicator, tag: str) -> None:
        self.comm, self.tag, self.fingerprint = comm, tag, Fingerprint()
        self.above: list[Any] = []

    def among(self, values: Mapping[str, Any]) -> str | None:
        """Return a message about the first difference between the ranks' ``values``; None if there is none.

        Values, attributes and elements that cannot be compared are skipped.
        """
        return self._first(values, lambda name: (name, ()))

    def _first(self, items: Mapping[str, Any], path: Callable[[str], _Path]) -> str | None:
        tables = self._gathered({name: self.fingerprint.digest(item) for name, item in items.items()})
        for name in dict.fromkeys(name for table in tables for name in table):
            if len({table.get(name) for table in tables}) > 1:
                difference = self._below(path(name), items.get(name, _ABSENT))
                if difference is not None:
                    return difference
        return None

    def _below(self, path: _Path, value: Any) -> str | None:
        parts = Parts("absent") if value is _ABSENT else self.fingerprint.parts(value)
        skipped = parts.left_out is not None or any(value is other for other in self.above)
        heads = self._gathered((parts.kind, parts.content, bool(parts.items), skipped))
        if any(skips for *_, skips in heads):
            return None
        if len({head[:2] for head in heads}) > 1 or not any(holds for _, _, holds, _ in heads):
            return self._describe(path, value)
        self.above.append(value)
        difference = self._first(parts.items, lambda step: (path[0], (*path[1], step)))
        self.above.pop()
        return difference

    def _describe(self, path: _Path, value: Any) -> str:
        text = value if value is _ABSENT or (isinstance(value, str) and not path[1]) else shown(value)
        texts = self._gathered(text)
        if len(set(texts)) == 1:  # such as two long arrays with the same first elements
            texts = [f"{text} (sha256 {digest})" for digest in self._gathered(self.fingerprint.digest(value).hex()[:8])]
        named = any(isinstance(other, FunctionType) or self.fingerprint.members(type(other)) for other in self.above)
        remedy = f"{_REMEDY}, {_ALLOWED}" if any(self._gathered(named)) else _REMEDY
        return f"ranks differ: {words(*path)} {by_ranks(texts)}; {remedy}"

    def _gathered(self, value: Any) -> list[Any]:
        return self.comm.allgather_object(value, self.tag)


def agree_arrays(comm: Communicator, what: str, give: Callable[[], Mapping[str, Any]], first: int = 0) -> None:
    """Raise on every rank if ranks pass different arrays; must be the first collective call of a public operation.

    Collective over ``comm``: 32 bytes a rank if the arrays are equal. One CRC32 of the names, dtypes, shapes and bytes
    of all arrays is compared. Because bytes are compared, NaN equals NaN, and 0.0 differs from -0.0.

    Parameters
    ----------
    comm : Communicator
        The ranks whose arrays are compared.
    what : str
        Name of the operation in the error.
    give : callable
        Returns a mapping from names to the arrays of this rank, or to values that can be converted to arrays. If it
        raises on one rank, all ranks raise.
    first : int
        The rank with which this rank is compared: the arrays of both must be equal.

    Raises
    ------
    CollectiveMismatch
        If the ranks have called different operations.
    ConfigError
        If arrays differ; names the lowest rank whose arrays differ and the first of these arrays, and describes the
        array on this rank and on the rank with which it was compared.
    """
    error: Exception | None = None
    arrays: dict[str, Any] = {}
    checksum = 0
    try:
        arrays = {name: native(np.asarray(unmasked(value, name))) for name, value in give().items()}
        for name, array in arrays.items():
            checksum = _checksum(name, array, checksum)
    except Exception as caught:
        error = caught
    flags = agree_on_call(comm, (error is not None, checksum, first))
    if flags[:, 0].any():
        raise_on_all(comm, error, what)
    if (flags[:, 1] == flags[flags[:, 2], 1]).all():
        return
    checksums = [_checksum(name, array) for name, array in arrays.items()]
    sums = comm.allgather_object(checksums, what)
    rank = next(rank for rank in range(comm.size) if sums[rank] != sums[flags[rank, 2]])
    other = int(flags[rank, 2])
    pairs = zip_longest(sums[rank], sums[other])
    index = next(index for index, (actual, expected) in enumerate(pairs) if actual != expected)
    part = [(name, _describe_array(array)) for name, array in arrays.items()][index : index + 1] or [("", "nothing")]
    parts = comm.allgather_object(part, what)
    (name, actual), (known, expected) = parts[rank][0], parts[other][0]
    raise ConfigError(
        f"{what}: {name or known} of rank {rank} is not that of rank {other}: {actual}, not {expected}; every rank "
        "must give the same, bit for bit, for example what rank 0 has: comm.bcast(values, root=0)"
    )


def _checksum(name: str, array: Any, start: int = 0) -> int:
    start = crc32(f"{name} {array.dtype.str} {array.shape}".encode(), start)
    if array.dtype == object:
        return crc32(repr(array).encode(), start)
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), start)


def _describe_array(array: Any) -> str:
    if array.size == 1:
        return shown(array.item())
    return f"{array.dtype} of shape {array.shape} with checksum {_checksum('', array):08x}"

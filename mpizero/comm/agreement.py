"""Let an error of one rank become an error of all, and compare values that must not differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np

from mpizero.comm.calls import agree_on_call
from mpizero.comm.communicator import Communicator
from mpizero.comm.failure_report import describe, ranks_text
from mpizero.crc import crc32
from mpizero.errors import CollectiveError, ConfigError, MpizeroError, PeerFailure, RemoteError

_SHOWN = 200


@contextmanager
def all_ranks(comm: Communicator, tag: str = "all_ranks", *, first: bool = False) -> Iterator[None]:
    """Leave the block on every rank, or raise on every rank.

    Collective over ``comm``: one small reduction; with ``first`` the first message of an operation, which compares what
    the ranks have been asked for, too. Inside the block, collectives of ``comm`` and operations that can
    fail on one rank only must not be mixed: the others would wait in the collective. A failed collective is raised
    at once, without agreement, since the ranks may not come to one any more.

    Raises
    ------
    Exception
        The block's own error, on the ranks that raised it.
    RemoteError
        On the others; names the ranks and the first one's error.

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
    """Raise ``error`` on the ranks that have one, and RemoteError on the others, which have none.

    Collective over ``comm``, once all know that a rank has one.
    """
    reports = comm.allgather_object(None if error is None else (isinstance(error, RemoteError), describe(error)), tag)
    if error is not None:
        raise error
    ranks = [rank for rank, report in enumerate(reports) if report is not None]
    # A RemoteError only tells of another section's failure: the cause comes first.
    first = min(ranks, key=lambda rank: (reports[rank][0], rank))
    raise RemoteError(f"{ranks_text(ranks)} raised; rank {first}: {reports[first][1]}")


def agree_equal(comm: Communicator, name: str, value: Any, error: type[MpizeroError] = ConfigError) -> None:
    """Raise on every rank unless ``value`` is the same on all.

    Collective over ``comm``; 32 bytes a rank while the ranks agree. Values may be numbers, strings, arrays,
    dataclasses, and mappings, sequences and sets of them; arrays are compared by type, shape and bits.

    Raises
    ------
    MpizeroError
        Of type ``error``: names the first entry that differs, its values and their ranks.
    """
    if _is_common(comm, name, value):
        return
    path: list[str] = []
    while True:
        tables = comm.allgather_object(_entries(value), f"agree {name}"[:80])
        keys = list(dict.fromkeys(key for table in tables for key in table))
        differing = next((key for key in keys if len({table.get(key) for table in tables}) > 1), None)
        if differing is None:  # the whole differs but no entry: a plain value, or an order
            shown = comm.allgather_object(_show(value), f"agree {name}"[:80])
            raise error(f"{name}{''.join(path)} differs between ranks: {grouped(shown)}")
        path.append(f"[{differing}]")
        if any(differing not in table for table in tables):
            shown = ["present" if differing in table else "absent" for table in tables]
            raise error(f"{name}{''.join(path)} differs between ranks: {grouped(shown)}")
        value = _children(value)[differing]


def agree_arrays(comm: Communicator, what: str, give: Callable[[], Mapping[str, Any]], first: int = 0) -> None:
    """Raise on every rank unless all give the same arrays; the first message of an operation.

    Collective over ``comm``: 32 bytes a rank while they agree. Arrays are compared by name, type, shape and bytes, by
    their CRC32: NaN equals itself, 0.0 is not -0.0.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    what : str
        What was called, for the error.
    give : callable
        Returns what this rank was given: arrays, or what becomes one, by name. What it raises, all ranks raise.
    first : int
        The first of the ranks with which this one is compared.

    Raises
    ------
    CollectiveMismatch
        As :func:`mpizero.comm.calls.agree_on_call`.
    ConfigError
        Names the first rank and the first name that differ, and what was given under it.
    """
    error: Exception | None = None
    arrays: dict[str, Any] = {}
    whole = 0
    try:
        arrays = {name: np.asarray(value) for name, value in give().items()}
        for name, array in arrays.items():
            whole = _checksum(name, array, whole)
    except Exception as caught:
        error = caught
    told = agree_on_call(comm, (error is not None, whole, first))
    if told[:, 0].any():
        raise_on_all(comm, error, what)
    if (told[:, 1] == told[told[:, 2], 1]).all():
        return
    checksums = [_checksum(name, array) for name, array in arrays.items()]
    table = comm.allgather_object(checksums, what)
    rank = next(rank for rank in range(comm.size) if table[rank] != table[told[rank, 2]])
    other = int(told[rank, 2])
    pairs = zip_longest(table[rank], table[other])
    place = next(place for place, (given, expected) in enumerate(pairs) if given != expected)
    mine = [(name, _given(array)) for name, array in arrays.items()][place : place + 1] or [("", "nothing")]
    shown = comm.allgather_object(mine, what)
    (name, given), (known, expected) = shown[rank][0], shown[other][0]
    raise ConfigError(
        f"{what}: {name or known} of rank {rank} is not that of rank {other}: {given}, not {expected}; every rank must "
        "give the same, bit for bit, for example what rank 0 has: comm.bcast(values, root=0)"
    )


def _checksum(name: str, array: Any, start: int = 0) -> int:
    start = crc32(f"{name} {array.dtype.str} {array.shape}".encode(), start)
    if array.dtype == object:
        return crc32(repr(array).encode(), start)
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), start)


def _given(array: Any) -> str:
    if array.size == 1:
        return repr(array.item())[:_SHOWN]
    return f"{array.dtype} of shape {array.shape} with checksum {_checksum('', array):08x}"


def _is_common(comm: Communicator, name: str, value: Any) -> bool:
    digest = np.frombuffer(_digest(value), np.uint8)
    digests = np.empty((comm.size, digest.size), np.uint8)
    comm.allgather(digest.copy(), digests, tag=f"agree {name}"[:80])
    return bool((digests == digests[0]).all())


def _children(value: Any) -> dict[str, Any]:
    """Entries of a container by name; empty for a plain value."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {repr(key): value[key] for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return {str(index): item for index, item in enumerate(value)}
    return {}


def _entries(value: Any) -> dict[str, bytes]:
    return {key: _digest(child) for key, child in _children(value).items()}


def _digest(value: Any) -> bytes:
    """Digest the type and content of ``value``, the same in every process."""
    result = hashlib.sha256(type(value).__qualname__.encode())
    if isinstance(value, np.ndarray):
        result.update(f"{value.dtype.str}{value.shape}".encode())
        result.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Set):
        result.update(b"".join(sorted(map(_digest, value))))
    elif isinstance(value, Mapping):  # mappings are equal whatever the order
        result.update(b"".join(sorted(_digest(key) + _digest(item) for key, item in value.items())))
    elif children := _children(value):
        result.update(b"".join(map(_digest, children.values())))
    else:
        result.update(repr(value).encode(errors="backslashreplace"))
    return result.digest()


def _show(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}, sha256 {_digest(value).hex()[:12]}"
    text = repr(sorted(value, key=repr)) if isinstance(value, Set) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (sha256 {_digest(value).hex()[:12]})"


def grouped(shown: Sequence[str]) -> str:
    """List the different values, of which each rank has one, with the ranks that have them. Not collective."""
    groups = {text: [rank for rank, other in enumerate(shown) if other == text] for text in dict.fromkeys(shown)}
    return "; ".join(f"{ranks_text(r)}: {text}" for text, r in groups.items())

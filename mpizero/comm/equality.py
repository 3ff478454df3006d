"""Check that values are the same on all ranks, and name the first value, attribute or element that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import zip_longest
from types import FunctionType
from typing import Any

import numpy as np

from mpizero._util.checks import native, unmasked
from mpizero._util.fingerprint import Fingerprint, Parts, shown, words
from mpizero._util.text import crc32, notice
from mpizero.comm.agreement import raise_on_all
from mpizero.comm.calls import agree_on_call
from mpizero.comm.communicator import Communicator
from mpizero.errors import ConfigError
from mpizero.guard.reports import by_ranks

#: Name of a value, and the steps (``.field``, ``[0]``) that lead from it to a part of it.
_Place = tuple[str, tuple[str, ...]]

#: Sent instead of a digest by a rank whose ``make`` has raised; no digest is all zeros.
_FAILED = bytes(32)
#: Stands for a part that a rank lacks; compared by identity.
_ABSENT = str(bytearray(b"nothing"), "ascii")
_WAY_OUT = "give every rank the same"
_ALLOWED = "or, if it may differ, a name that begins with an underscore, which is not compared (docs/failures.md)"


def agree_equal(comm: Communicator, make: Callable[[], Mapping[str, Any]], tag: str) -> None:
    """Raise on every rank if ``make()`` returns different values on different ranks, or raises on one of them.

    Collective over ``comm``: if the values are equal, one message of 32 bytes a rank, whatever their size. ``make``
    returns a mapping from names to values, in the order in which they are compared. Any object may be a value; see
    :mod:`mpizero.fingerprint`. Rank 0 prints once which values cannot be compared.

    Raises
    ------
    ConfigError
        If values differ; names the first value, attribute or element that differs, its values and their ranks.
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
    if (digests != digests[0]).any() and (found := _Search(comm, tag).among(values)):
        raise ConfigError(found)
    if comm.rank == 0 and comm.size > 1 and fingerprint.left_out:
        places = ", ".join(f"{place} ({what})" for place, what in fingerprint.left_out.items())
        _notice_once(f"not compared between ranks: {places}; an object may offer fingerprint()")


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

    def _first(self, items: Mapping[str, Any], place: Callable[[str], _Place]) -> str | None:
        tables = self._gathered({name: self.fingerprint.digest(item) for name, item in items.items()})
        for name in dict.fromkeys(name for table in tables for name in table):
            if len({table.get(name) for table in tables}) > 1:
                found = self._below(place(name), items.get(name, _ABSENT))
                if found is not None:
                    return found
        return None

    def _below(self, place: _Place, value: Any) -> str | None:
        parts = Parts("absent") if value is _ABSENT else self.fingerprint.parts(value)
        skipped = parts.left_out is not None or any(value is other for other in self.above)
        heads = self._gathered((parts.kind, parts.content, bool(parts.items), skipped))
        if any(skips for *_, skips in heads):
            return None
        if len({head[:2] for head in heads}) > 1 or not any(holds for _, _, holds, _ in heads):
            return self._describe(place, value)
        self.above.append(value)
        found = self._first(parts.items, lambda step: (place[0], (*place[1], step)))
        self.above.pop()
        return found

    def _describe(self, place: _Place, value: Any) -> str:
        text = value if value is _ABSENT or (isinstance(value, str) and not place[1]) else shown(value)
        texts = self._gathered(text)
        if len(set(texts)) == 1:  # such as two long arrays with the same first elements
            texts = [f"{text} (sha256 {digest})" for digest in self._gathered(self.fingerprint.digest(value).hex()[:8])]
        own = any(isinstance(other, FunctionType) or self.fingerprint.members(type(other)) for other in self.above)
        way_out = f"{_WAY_OUT}, {_ALLOWED}" if any(self._gathered(own)) else _WAY_OUT
        return f"ranks differ: {words(*place)} {by_ranks(texts)}; {way_out}"

    def _gathered(self, value: Any) -> list[Any]:
        return self.comm.allgather_object(value, self.tag)


def agree_arrays(comm: Communicator, what: str, give: Callable[[], Mapping[str, Any]], first: int = 0) -> None:
    """Raise on every rank if ranks pass different arrays. This must be the first message of a public operation.

    Collective over ``comm``: 32 bytes a rank if the arrays are equal. One CRC32 of the names, dtypes, shapes and bytes
    of all arrays is compared. So NaN equals NaN, and 0.0 differs from -0.0.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    what : str
        Name of the operation in the error.
    give : callable
        Returns a mapping from names to the arrays of this rank, or to values that can be converted to arrays. If it
        raises on one rank, all ranks raise.
    first : int
        The rank whose arrays this rank's arrays must equal.

    Raises
    ------
    CollectiveMismatch
        If the ranks have called different operations.
    ConfigError
        If arrays differ; names the first rank and its first array that differ, and describes both arrays.
    """
    error: Exception | None = None
    arrays: dict[str, Any] = {}
    whole = 0
    try:
        arrays = {name: native(np.asarray(unmasked(value, name))) for name, value in give().items()}
        for name, array in arrays.items():
            whole = _checksum(name, array, whole)
    except Exception as caught:
        error = caught
    flags = agree_on_call(comm, (error is not None, whole, first))
    if flags[:, 0].any():
        raise_on_all(comm, error, what)
    if (flags[:, 1] == flags[flags[:, 2], 1]).all():
        return
    checksums = [_checksum(name, array) for name, array in arrays.items()]
    sums = comm.allgather_object(checksums, what)
    rank = next(rank for rank in range(comm.size) if sums[rank] != sums[flags[rank, 2]])
    other = int(flags[rank, 2])
    pairs = zip_longest(sums[rank], sums[other])
    place = next(place for place, (given, expected) in enumerate(pairs) if given != expected)
    mine = [(name, _describe_array(array)) for name, array in arrays.items()][place : place + 1] or [("", "nothing")]
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


def _describe_array(array: Any) -> str:
    if array.size == 1:
        return shown(array.item())
    return f"{array.dtype} of shape {array.shape} with checksum {_checksum('', array):08x}"


@lru_cache(maxsize=64)
def _notice_once(text: str) -> None:
    """Write a line to standard error, unless this process has written the same line before."""
    notice(text)

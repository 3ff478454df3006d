"""Ranks that must have the same find out in what they differ, in the words of whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np

from mpizero.comm.agreement import raise_on_all
from mpizero.comm.communicator import Communicator
from mpizero.comm.failure_report import ranks_text
from mpizero.errors import ConfigError
from mpizero.fingerprint import Fingerprint, Parts, shown, words
from mpizero.text import notice

#: A subject and the steps from there.
_Place = tuple[str, tuple[str, ...]]

#: Stands for a rank that has failed to say what it has; no digest is zero.
_FAILED = bytes(32)
#: What a rank has that lacks a part of the others; known by its identity.
_ABSENT = str(bytearray(b"nothing"), "ascii")
_WAY_OUT = "give every rank the same"
_ALLOWED = "or, if it may differ, a name that begins with an underscore, which is not compared (docs/failures.md)"


def agree_alike(comm: Communicator, make: Callable[[], Mapping[str, Any]], tag: str) -> None:
    """Raise on every rank unless what ``make`` returns is the same on all, or if it fails on one.

    Collective over ``comm``: one message of 32 bytes a rank while they agree, the same message whatever is compared.
    ``make`` returns subjects by name, in the order in which they are to be looked at; anything may be a subject, see
    :mod:`mpizero.fingerprint`. What cannot be compared is named by rank 0, once.

    Raises
    ------
    ConfigError
        Says what differs first, with its values and their ranks.
    Exception
        That of ``make``, on the ranks where it was raised; RemoteError on the others.
    """
    error: Exception | None = None
    fingerprint, subjects, digest = Fingerprint(), dict[str, Any](), _FAILED
    try:
        subjects = dict(make())
        digest = fingerprint.digest_named(subjects)
    except Exception as caught:
        error = caught
    digests = np.empty((comm.size, len(_FAILED)), np.uint8)
    comm.allgather(np.frombuffer(digest, np.uint8).copy(), digests, tag=tag)
    if not digests.any(axis=1).all():
        raise_on_all(comm, error, tag)
    if (digests != digests[0]).any() and (found := _Search(comm, tag).among(subjects)):
        raise ConfigError(found)
    if comm.rank == 0 and comm.size > 1 and fingerprint.left_out:
        places = ", ".join(f"{place} ({what})" for place, what in fingerprint.left_out.items())
        _tell_once(f"not compared between ranks: {places}; an object may offer fingerprint()")


class _Search:
    """The way down to the first part that differs; every method is collective over ``comm``."""

    def __init__(self, comm: Communicator, tag: str) -> None:
        self.comm, self.tag, self.fingerprint = comm, tag, Fingerprint()
        self.above: list[Any] = []

    def among(self, subjects: Mapping[str, Any]) -> str | None:
        """Return what differs; None if nothing that can be compared."""
        return self._first(subjects, lambda subject: (subject, ()))

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
            return self._told(place, value)
        self.above.append(value)
        found = self._first(parts.items, lambda step: (place[0], (*place[1], step)))
        self.above.pop()
        return found

    def _told(self, place: _Place, value: Any) -> str:
        text = value if value is _ABSENT or (isinstance(value, str) and not place[1]) else shown(value)
        texts = self._gathered(text)
        if len(set(texts)) == 1:  # such as two long arrays that begin alike
            texts = [f"{text} (sha256 {digest})" for digest in self._gathered(self.fingerprint.digest(value).hex()[:8])]
        own = any(isinstance(other, FunctionType) or self.fingerprint.members(type(other)) for other in self.above)
        way_out = f"{_WAY_OUT}, {_ALLOWED}" if any(self._gathered(own)) else _WAY_OUT
        return f"ranks differ: {words(*place)} {by_ranks(texts)}; {way_out}"

    def _gathered(self, value: Any) -> list[Any]:
        return self.comm.allgather_object(value, self.tag)


def by_ranks(texts: Sequence[str]) -> str:
    """Return "0.1 on ranks 0-2, 0.2 on rank 3" for what each rank has. Not collective."""
    groups = {text: [rank for rank, other in enumerate(texts) if other == text] for text in dict.fromkeys(texts)}
    return ", ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in groups.items())


@lru_cache(maxsize=64)
def _tell_once(text: str) -> None:
    """Write a line to standard error, unless the same was written before."""
    notice(text)

"""Decode status slots that were received over TCP, and check the type of each entry."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, NoReturn

from mpizero.comm.status.status_board import Slot

#: Most bytes of one rank's slot in a message: a slot of a status board, with its age and rank.
SLOT_LIMIT = 33_000
_SECONDS = (int, float)
#: Types of the entries of a slot; an entry may be missing.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "age": _SECONDS,
    "still": _SECONDS,
    "pid": int,
    "place": str,
    "state": str,
    "library": str,
    "calls": list,
    "joint_tasks": list,
    "transfers": list,
    "marks": dict,
    "making": dict,
    "records": dict,
}
#: Entries that no slot may lack.
_ALWAYS = frozenset({"age", "place", "state", "still", "calls", "joint_tasks", "marks"})
#: Entries that are lists of lists, with the types in each inner list.
_ROWS: Mapping[str, tuple[type | tuple[type, ...], ...]] = {
    "calls": (str, str, int, str, str, _SECONDS),
    "joint_tasks": (str, int, str, _SECONDS),
    "transfers": (str, int, _SECONDS),
}
_TWO_COUNTS = (int, int)


def parse_slots(data: bytes, ranks: Collection[int], now: float) -> dict[int, Slot]:
    """Decode and check status slots that a status server has sent; return them by rank.

    Slots are sent with their age in seconds. The time ``beat`` of each slot is set to ``now`` minus its age, where
    ``now`` is the present ``time.monotonic()`` of this host.

    Raises
    ------
    ValueError
        If ``data`` are not valid slots, or contain a slot of a rank that is not in ``ranks``.
    """
    try:
        found = json.loads(data, parse_constant=_refuse, parse_float=_finite, parse_int=_small)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict) or not {str(rank) for rank in ranks}.issuperset(found):
        raise ValueError("not slots of these ranks")
    for slot in found.values():
        _check(slot)
    return {int(rank): slot | {"beat": now - slot["age"]} for rank, slot in found.items()}


def _check(slot: Any) -> None:
    if not isinstance(slot, dict) or not _ALWAYS.issubset(slot):
        raise ValueError("not a slot")
    for name in _KINDS.keys() & slot.keys():
        if not _is(slot[name], _KINDS[name]):
            raise ValueError(f"{name} is of another type")
    for name, kinds in _ROWS.items():
        if not all(_consists(row, kinds) for row in slot.get(name, ())):
            raise ValueError(f"{name} has other cells")
    making = slot.get("making", {}).values()
    if not all(_consists(mark, _TWO_COUNTS) for mark in slot["marks"].values()):
        raise ValueError("marks are of another type")
    if not all(isinstance(found, list) and all(_consists(pair, _TWO_COUNTS) for pair in found) for found in making):
        raise ValueError("ranges of ranks are of another type")


def _consists(row: Any, kinds: tuple[type | tuple[type, ...], ...]) -> bool:
    return isinstance(row, list) and len(row) == len(kinds) and all(map(_is, row, kinds))


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _finite(number: str) -> float:
    if not isfinite(value := float(number)):
        raise ValueError("a number is too large")
    return value


def _small(number: str) -> int:
    if len(number) > 24:
        raise ValueError("a number is too large")
    return int(number)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")

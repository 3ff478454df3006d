"""Slots of a board that came over a network: nothing in them is believed before it was looked at."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, NoReturn

from mpizero.comm.board import Slot

#: Bytes of one rank's slot at most.
SLOT_LIMIT = 33_000
#: What readers of a slot count on, where it has such an entry.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "age": (int, float),
    "still": (int, float),
    "pid": int,
    "place": str,
    "state": str,
    "library": str,
    "calls": list,
    "duties": list,
    "transfers": list,
    "marks": dict,
    "records": dict,
}
#: Entries that are lists of rows: how many cells these have at least. The seconds stand in the last of them.
_ROWS = {"calls": 6, "duties": 4, "transfers": 3}


def checked(data: bytes, ranks: Collection[int], now: float) -> dict[int, Slot]:
    """Return the slots that ``data`` holds, with times of this host's clock, on which it is ``now``. Not collective.

    Raises
    ------
    ValueError
        They are not slots of some of these ranks.
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
    if not isinstance(slot, dict) or "age" not in slot:
        raise ValueError("not a slot")
    for name in _KINDS.keys() & slot.keys():
        if not isinstance(slot[name], _KINDS[name]) or isinstance(slot[name], bool):
            raise ValueError(f"{name} is of another type")
    for name, cells in _ROWS.items():
        for row in slot.get(name, ()):
            seconds = row[cells - 1] if isinstance(row, list) and len(row) >= cells else None
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
                raise ValueError(f"{name} has other cells")
    if not all(isinstance(mark, list) and mark for mark in slot.get("marks", {}).values()):
        raise ValueError("marks are of another type")


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

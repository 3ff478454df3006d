"""Describe a call that does not return: the ranks that are missing, and the status of every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpizero.comm.failure_report import ranks_text
from mpizero.comm.recording.call_trace import MAKING
from mpizero.comm.status.status_board import Slot

#: Ticks without a heartbeat after which a rank counts as silent.
_SILENT_TICKS = 8
_MIN_SILENCE = 0.5


def with_age(slots: Mapping[int, Slot]) -> dict[int, Slot]:
    """Return the status slots, by rank, with an entry "age" added to each: the seconds since it was written."""
    now, wall = time.monotonic(), time.time()
    return {rank: s | {"age": wall - s["wall"] if "wall" in s else now - s["beat"]} for rank, s in slots.items()}


def describe_stuck_call(
    call: Sequence[Any], members: Sequence[int], slots: Mapping[int, Slot], timeout: float, tick: float
) -> list[str]:
    """Return the lines of the report on a call that lasts too long: the missing ranks, then the status of each rank.

    Parameters
    ----------
    call : list
        The call as [key, communicator, sequence, operation, tag, seconds], an entry of "calls" in a status slot.
    members : sequence of int
        World ranks of the communicator.
    slots : dict
        Status slots by rank, with their age (see :func:`with_age`).
    timeout, tick : float
        The timeout of the call, and the time between two writes of a status slot, both in seconds.
    """
    key, _, sequence, operation = call[:4]
    unknown = [r for r in members if r not in slots]
    if operation == MAKING:
        missing = [r for r in members if r in slots and key not in slots[r]["marks"]]
        differing = []
        strange = f"nothing known of {ranks_text(unknown)} (without mpizero, or on another node)"
    else:
        missing = [r for r in members if r in slots and slots[r]["marks"].get(key, (sequence, 0))[0] < sequence]
        others = {r: c for r in members if r in slots for c in slots[r]["calls"] if c[0] == key and c[2] == sequence}
        differing = [r for r, c in others.items() if c[3] != operation]
        strange = f"nothing known of {ranks_text(unknown)} (another node)"
    verdict = [f"{ranks_text(missing)} not in it"] if missing else []
    verdict += [f"{ranks_text(differing)} in another operation"] if differing else []
    verdict += [strange] if unknown else []
    if not verdict:
        verdict = ["all ranks are in it: counts or types differ, or the library is stuck"]
    lasted = f"{call[5]:.1f} s (timeout {timeout:g} s)"
    head = f"stuck: {describe_call_entry(call)} has lasted {lasted}: {'; '.join(verdict)}"
    return [head, *(f"  rank {rank}: {_describe_slot(slot, tick)}" for rank, slot in sorted(slots.items()))]


def _describe_slot(slot: Slot, tick: float) -> str:
    context = ", ".join(f"{name} {slot[name]}" for name in ("step", "phase") if name in slot)
    waits = [f"in {describe_call_entry(c)} for {c[5] + slot['age']:.1f} s" for c in slot["calls"]]
    doing = {"leaving": "at the end of the program", "failed": "failing"}.get(slot["state"], "at work")
    files = [
        f"{what}, {nbytes} bytes so far, the last {seconds + slot['age']:.1f} s ago"
        for what, nbytes, seconds in slot.get("transfers", ())
    ]
    what = ", ".join([*waits, *files]) or (f"in {slot['library']}" if slot.get("library") else doing)
    if is_silent(slot, tick):
        what = f"silent for {slot['age']:.1f} s (stopped, or holding the interpreter lock); last seen {what}"
    return f"{what} at {slot['place']}{f' ({context})' if context else ''}"


def is_silent(slot: Slot, tick: float) -> bool:
    """Tell whether ``slot``, the last status slot of a rank, is so old that the rank must be stopped or stuck.

    ``tick`` is the number of seconds between two writes of a slot. A rank that reports asks other nodes meanwhile.
    """
    return not slot.get("reports") and bool(slot["age"] > max(_SILENT_TICKS * tick, _MIN_SILENCE))


def describe_call_entry(call: Sequence[Any]) -> str:
    """Return a call as text for a report; it is given as [key, communicator, sequence, operation, tag, seconds]."""
    _, name, sequence, operation, tag, _ = call
    if operation == MAKING:
        return f"{operation} {name!r}"
    return f"{operation} #{sequence}{f' {tag!r}' if tag else ''} of {name!r}"

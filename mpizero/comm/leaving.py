"""Whether the other ranks can do without one that has ended."""

from __future__ import annotations

from mpizero.comm.board import Slot
from mpizero.comm.register import Register

#: Seconds that others must have waited for this rank before it counts as gone early.
BLOCKED = 1.0
#: Seconds without any sign of progress on the others before a rank that has ended stops waiting for them.
PATIENCE = 120.0


def needs_me(register: Register, other: int, slot: Slot) -> str | None:
    """Say what ``other`` waits for; "" if it does not; None if it does not and was seen at work lately.

    Not collective. ``register`` is this rank's, ``slot`` what the other has written last.
    """
    known = register.counts()
    for key, name, sequence, operation, tag, since in slot["calls"]:
        if since >= BLOCKED and sequence > known.get(key, sequence):
            label = f" {tag!r}" if tag else ""
            return f"rank {other} waits in {operation} #{sequence}{label} of {name!r} at {slot['place']}"
    for key, ended, what, since in slot["duties"]:
        entry = register.find(key)
        if since >= BLOCKED and entry is not None and entry.trace.duties <= ended:
            return f"rank {other} is in {what} {ended + 1} of {entry.trace.name!r} at {slot['place']}"
    if slot.get("library") and slot["still"] >= 2 * BLOCKED:
        return f"rank {other} waits in {slot['library']} at {slot['place']}"
    return None if slot["still"] < PATIENCE and slot["state"] == "working" else ""

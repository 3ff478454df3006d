"""Ranks that call different collectives are told so at once, with both lines; see trace.py's [Note: contract].

[Note: three comparisons] Once a step the engine adds the contract numbers of all ranks up in a message that it sends
anyway, before it touches a weight. Between, the heartbeat threads of a node look at each other's numbers on the board,
which finds ranks that wait for one another in different calls, and programs without an engine. And with
MPIZERO_DEBUG=collectives every collective is compared before it starts (debug.py). All end in the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpizero.comm.failure_report import ranks_by_text
from mpizero.comm.recording.call_trace import REMEMBERED, CallRecord
from mpizero.errors import CollectiveMismatch

#: Calls that are shown before and after the first difference.
_BEFORE, _AFTER = 2, 3


def mismatch(name: str, records: Mapping[int, Sequence[CallRecord]]) -> CollectiveMismatch | None:
    """Describe the first collective that ranks have called differently; None if there is none. Not collective.

    Parameters
    ----------
    name : str
        What the communicator is called.
    records : mapping of int to sequence of Record
        The last collectives of each rank, the oldest first.
    """
    rows = {rank: {record.sequence: record for record in found} for rank, found in sorted(records.items())}
    for sequence in sorted({number for row in rows.values() for number in row}):
        here = {rank: row[sequence] for rank, row in rows.items() if sequence in row}
        if len({record.number for record in here.values()}) > 1:
            break
    else:
        return None
    if len({record.what for record in here.values()}) == 1:
        return CollectiveMismatch(
            f"the ranks of {name!r} have called different collectives more than {REMEMBERED} calls ago; "
            f"at #{sequence}, the oldest that is remembered: {_groups(here)}"
        )
    details = [f"  {what}" for what in _around(rows, sequence)]
    return CollectiveMismatch(f"collective #{sequence} of {name!r} differs between ranks: {_groups(here)}", details)


def first_mismatch(told: Sequence[tuple[int, Mapping[str, tuple[str, list[CallRecord]]]]]) -> CollectiveMismatch | None:
    """Return the mismatch of the first communicator that has one. Not collective.

    ``told`` has each rank's number and, by key, the name and the records of its communicators.
    """
    for key in dict.fromkeys(key for _, calls in told for key in calls):
        those = {rank: calls[key] for rank, calls in told if key in calls}
        name = next(iter(those.values()))[0]
        if (found := mismatch(name, {rank: records for rank, (_, records) in those.items()})) is not None:
            return found
    return None


def _around(rows: Mapping[int, Mapping[int, CallRecord]], sequence: int) -> list[str]:
    lines = []
    for number in range(sequence - _BEFORE, sequence + _AFTER + 1):
        here = {rank: row[number] for rank, row in rows.items() if number in row}
        if here:
            mark = "before" if number < sequence else "differs" if number == sequence else "after"
            lines.append(f"{mark:7} #{number}: {_groups(here)}")
    return lines


def _groups(records: Mapping[int, CallRecord]) -> str:
    """Describe a collective, the ranks that called the same at the same line together."""
    texts = ((rank, f"{record.what} at {record.where}") for rank, record in records.items())
    return "; ".join(f"{ranks}: {call}" for call, ranks in ranks_by_text(texts).items())

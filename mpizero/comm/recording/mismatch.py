"""Describe the first collective that ranks have called differently, with the source line of each rank.

[Note: three comparisons] Hashes of calls ([Note: matching calls] in call_trace.py) are compared in three ways. First,
once a step, before the training engine changes a parameter, it adds up one number of every rank in a message that it
sends anyway; the sum is 0 if all calls match ([Note: one sum] in registry.py). Second, the heartbeat threads of a node
compare the hashes on the status board all the time (mismatch_watch.py). This finds ranks that wait for one another in
different calls, and works without an engine. Third, with MPIZERO_DEBUG=collectives every collective is compared before
it starts (verification.py). All three raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpizero.comm.failure_report import ranks_by_text
from mpizero.comm.recording.call_trace import REMEMBERED, CallRecord
from mpizero.errors import CollectiveMismatch

#: Number of calls that a report shows before and after the first difference.
_BEFORE, _AFTER = 2, 3


def mismatch(name: str, records: Mapping[int, Sequence[CallRecord]]) -> CollectiveMismatch | None:
    """Return the error for the first collective that ranks have called differently; None if all match. Not collective.

    Parameters
    ----------
    name : str
        Name of the communicator.
    records : mapping of int to sequence of CallRecord
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


def first_mismatch(
    calls_by_rank: Sequence[tuple[int, Mapping[str, tuple[str, list[CallRecord]]]]],
) -> CollectiveMismatch | None:
    """Return the error for the first communicator whose ranks have called different collectives; None if all match.

    Not collective. ``calls_by_rank`` holds a pair for each rank: its number, and a mapping from the keys of its
    communicators to the name and the recorded calls of each.
    """
    for key in dict.fromkeys(key for _, calls in calls_by_rank for key in calls):
        those = {rank: calls[key] for rank, calls in calls_by_rank if key in calls}
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
    """Return text that tells what each rank called; ranks with the same call at the same line are listed together."""
    texts = ((rank, f"{record.what} at {record.where}") for rank, record in records.items())
    return "; ".join(f"{ranks}: {call}" for call, ranks in ranks_by_text(texts).items())

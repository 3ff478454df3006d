"""Check the arguments of communicator calls on this rank; each function raises CollectiveError for a wrong one.

A check takes less than a microsecond and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpizero.comm.transport import Transport
from mpizero.layout import Span
from mpizero.types import Array

#: Characters of the NumPy dtypes that can be sent, and of those that can be reduced. float16 is sent as 16-bit integers
#: and cannot be reduced. An array of bfloat16 must be viewed as uint16 to be sent.
MOVABLE = frozenset("?bBhHiIlLqQefdFD")
REDUCIBLE = frozenset("bBhHiIlLqQfd")
REDUCTIONS = ("sum", "max", "min")
#: Upper limit of the tags of ``send`` and ``recv``, not included. MPI guarantees tags up to 32767.
TAG_LIMIT = 32000


def array(comm: Transport, operation: str, tag: object, value: Array, written: bool = False) -> None:
    """Raise CollectiveError if ``value`` is not a C-contiguous array whose dtype and byte order can be sent.

    GPU arrays are allowed if ``comm`` passes them to MPI directly. With ``written`` the array must also be writable.
    ``operation`` and ``tag`` name the call in the error.
    """
    flags = value.flags if isinstance(value, np.ndarray) else _flags_of_device_array(comm, operation, tag, value)
    if not flags.c_contiguous:
        raise comm.error(operation, tag, "the array is not C-contiguous; send a copy", value)
    if written and not getattr(flags, "writeable", True):  # CuPy's are always
        raise comm.error(operation, tag, "the array to receive into is read-only", value)
    if value.dtype.char not in MOVABLE:
        raise comm.error(operation, tag, "this dtype has no message type; view it as integers of its width", value)
    if not value.dtype.isnative:
        told = "another byte order than this machine's; convert it: a.astype(a.dtype.newbyteorder('='))"
        raise comm.error(operation, tag, told, value)


def _flags_of_device_array(comm: Transport, operation: str, tag: object, value: Array) -> Any:
    if comm.wait_for_device is None or not hasattr(value, "__cuda_array_interface__"):
        raise comm.error(operation, tag, f"expected a NumPy array, got {type(value).__name__}")
    comm.wait_for_device()
    return value.flags


def peer(comm: Transport, operation: str, tag: object, rank: int) -> None:
    """Raise CollectiveError if ``rank`` is not a rank of the communicator."""
    if not 0 <= rank < comm.size:
        raise comm.error(operation, tag, f"rank {rank} is not in 0..{comm.size - 1}")


def pair(comm: Transport, operation: str, tag: str, send: Array, recv: Array) -> None:
    """Raise CollectiveError if ``send`` cannot be sent, ``recv`` cannot be received into, or their dtypes differ."""
    array(comm, operation, tag, send)
    array(comm, operation, tag, recv, written=True)
    if send.dtype != recv.dtype:
        raise comm.error(operation, tag, f"sends {send.dtype} but receives into {recv.dtype}", send)


def blocks(comm: Transport, operation: str, tag: str, value: Array, counts: Sequence[int]) -> None:
    """Raise CollectiveError if ``counts`` are not one length >= 0 for each rank, with ``value.size`` as their sum."""
    if len(counts) != comm.size or min(counts) < 0 or sum(counts) != value.size:
        raise comm.error(
            operation, tag, f"counts {list(counts)} are not {comm.size} blocks of {value.size} elements", value
        )


def places(comm: Transport, operation: str, tag: str, value: Array, spans: Sequence[Span]) -> None:
    """Raise CollectiveError if ``spans`` are not one range of elements of ``value`` for each rank."""
    wrong = [tuple(span) for span in spans if span.size and not 0 <= span.start < span.stop <= value.size]
    if len(spans) != comm.size or wrong:
        raise comm.error(operation, tag, f"{len(spans)} places of {comm.size} ranks, outside of it: {wrong}", value)


def own_block(comm: Transport, operation: str, tag: str, value: Array, counts: Sequence[int]) -> None:
    """Raise CollectiveError if the size of ``value`` is not this rank's entry in ``counts``."""
    if counts[comm.rank] != value.size:
        raise comm.error(operation, tag, f"counts[{comm.rank}] is {counts[comm.rank]}", value)


def reduction(comm: Transport, operation: str, tag: str, value: Array, op: str) -> None:
    """Raise CollectiveError if ``op`` is not "sum", "max" or "min", or the dtype of ``value`` cannot be reduced."""
    if op not in REDUCTIONS:
        raise comm.error(operation, tag, f"op must be one of {REDUCTIONS}, got {op!r}", value)
    if value.dtype.char not in REDUCIBLE:
        raise comm.error(operation, tag, "this dtype cannot be reduced; convert it to float32 or an integer", value)

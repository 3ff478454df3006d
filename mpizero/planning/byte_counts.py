"""Count the bytes that collectives send, by formula, and record the calls of split layers without other ranks.

The formulas are those of ``comm/``: ``counters`` ([Note: bytes on the wire] in ``comm/transport.py``), the pieces of
``comm/reduce/exact.py``, and the messages or the window of ``comm/group/model_group.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from mpizero.comm.group import window
from mpizero.comm.reduce.codecs import Codec
from mpizero.comm.reduce.exact import exchange_step, gather_step
from mpizero.layout import Partition
from mpizero.types import Array


class Sent(NamedTuple):
    """Count the bytes that one rank sends to others, and the calls that send any."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: object) -> Sent:
        """Add both numbers."""
        if not isinstance(other, Sent):
            return NotImplemented
        return Sent(self.bytes + other.bytes, self.messages + other.messages)

    def times(self, count: int) -> Sent:
        """Return the same so many times. Not collective."""
        return Sent(self.bytes * count, self.messages * count)


def total_sent(parts: Iterable[Sent]) -> Sent:
    """Add up. Not collective."""
    found = Sent()
    for part, count in Counter(parts).items():
        found += part.times(count)
    return found


def one_call(nbytes: int) -> Sent:
    """Count one call that sends ``nbytes``. Not collective."""
    return Sent(nbytes, 1) if nbytes else Sent()


class ExchangeCost(NamedTuple):
    """Count what a rank sends in a sum or gather between peers, and the bytes of its buffers."""

    sent: Sent
    send_buffer: int
    receive_buffer: int
    packed_send: int = 0
    packed_receive: int = 0


def exchange_cost(
    totals: Sequence[int],
    peer: int,
    counts: Sequence[int],
    itemsize: int,
    codec: Codec | None = None,
    elements: int | None = None,
) -> ExchangeCost:
    """Count :class:`mpizero.comm.reduce.exact.ExactExchange`: everybody's partial sums over everybody's ranges.

    Not collective.

    Parameters
    ----------
    totals : sequence of int
        Elements of the ranges of each peer.
    peer : int
        Which of them sends.
    counts : sequence of int
        Partial sums of each group.
    itemsize : int
        Bytes of an element.
    codec : Codec or None
        What packs the messages.
    elements : int or None
        Those of a bucket.
    """
    if len(totals) == 1:
        return ExchangeCost(Sent(), 0, 0)
    arrivals, mine = sum(counts), counts[peer]
    step = exchange_step(counts, elements)
    others = [elements for place, elements in enumerate(totals) if place != peer]
    segments = -(-max(others) // step) if mine else 0
    widths = [min(step, elements) for elements in totals]
    if not max(totals):
        return ExchangeCost(Sent(), 0, 0)
    received = arrivals * widths[peer] * itemsize
    if codec is None:
        return ExchangeCost(Sent(mine * sum(others) * itemsize, segments), mine * sum(widths) * itemsize, received)
    sent = Sent(mine * sum(_packed(elements, step, codec) for elements in others), segments)
    largest = max(min(step, elements) for elements in others) if mine else 0
    packed = mine * sum(codec.packed(min(step, elements)) for elements in others)
    return ExchangeCost(sent, largest * itemsize, received, packed, (arrivals - mine) * codec.packed(widths[peer]))


def segment_cost(widths: Sequence[int], peer: int, counts: Sequence[int], itemsize: int) -> ExchangeCost:
    """Count one segment of an exchange, uncompressed, in which each peer sums so many elements. Not collective."""
    mine, others = counts[peer], sum(widths) - widths[peer]
    sent = one_call(mine * others * itemsize)
    return ExchangeCost(sent, mine * sum(widths) * itemsize, sum(counts) * widths[peer] * itemsize)


def _packed(elements: int, step: int, codec: Codec) -> int:
    """Return the bytes of so many elements that travel in steps."""
    full, rest = divmod(elements, step)
    return full * codec.packed(step) + codec.packed(rest)


def gather_cost(
    totals: Sequence[int], peer: int, itemsize: int, codec: Codec | None = None, elements: int | None = None
) -> ExchangeCost:
    """Count :func:`mpizero.comm.reduce.exact.gather_spans` of so many elements of each peer, or ``gather_packed``.

    Not collective.
    """
    if len(totals) == 1 or not max(totals):
        return ExchangeCost(Sent(), 0, 0)
    step = gather_step(len(totals), elements)
    widths = [min(step, elements) for elements in totals]
    segments, others = -(-totals[peer] // step), len(totals) - 1
    if codec is None:
        return ExchangeCost(
            Sent(totals[peer] * itemsize * others, segments), widths[peer] * itemsize, sum(widths) * itemsize
        )
    sizes = [codec.packed(width) for width in widths]
    sent = Sent(_packed(totals[peer], step, codec) * others, segments)
    return ExchangeCost(sent, widths[peer] * itemsize, max(widths) * itemsize, sizes[peer], sum(sizes))


def direct_gather_cost(columns: Iterable[Sequence[int]], peer: int, itemsize: int) -> ExchangeCost:
    """Count :func:`mpizero.comm.reduce.exact.begin_gather`, which takes no buffers. Not collective.

    ``columns`` has, for every span of a peer, the elements of all peers.
    """
    own = [(sizes[peer], len(sizes) - 1) for sizes in columns]
    return ExchangeCost(total_sent(one_call(size * itemsize * others) for size, others in own), 0, 0)


class WindowCopies(NamedTuple):
    """Count the copies of one call of a group whose ranks share a window.

    Attributes
    ----------
    passes : tuple of (int, int)
        Bytes that each pass over memory reads, and writes.
    barriers : int
        How often the ranks wait for each other.
    """

    passes: tuple[tuple[int, int], ...]
    barriers: int


class GroupCall(NamedTuple):
    """Describe one call of a method of :class:`mpizero.types.Group`, the same on all ranks up to the own block.

    Attributes
    ----------
    kind : str
        "reduce", "gather", "scatter" or "shift".
    unit : int
        Elements; of one index along the axis where blocks are cut along one.
    sizes : tuple of int
        Length of each rank's block along the axis; empty for the others.
    outer : int
        Indices of the axes before it.
    itemsize : int
        Bytes of an element.
    """

    kind: str
    unit: int
    sizes: tuple[int, ...]
    outer: int
    itemsize: int

    def sent(self, rank: int, size: int, *, in_window: bool) -> Sent:
        """Return what one of ``size`` ranks sends, through a window or by messages. Not collective."""
        if self.kind == "shift":
            return one_call(self.unit * self.itemsize)
        if in_window:
            return Sent()
        if self.kind == "gather":
            return one_call(self.unit * self.sizes[rank] * self.itemsize * (size - 1))
        if self.kind == "scatter":
            return one_call(self.unit * (sum(self.sizes) - self.sizes[rank]) * self.itemsize)
        if size == 2:
            return one_call(self.unit * self.itemsize)
        own = Partition(self.unit, size).sizes()[rank]
        return one_call((self.unit - own) * self.itemsize) + one_call(own * self.itemsize * (size - 1))

    def copies(self, rank: int, size: int) -> WindowCopies:
        """Return what the call reads and writes in a window of ``size`` ranks, as ``comm/group/window.py`` does it.

        Not collective.
        """
        if self.kind == "shift":
            return WindowCopies((), 0)
        whole = self.unit * (sum(self.sizes) if self.sizes else 1) * self.itemsize
        own = self.unit * self.sizes[rank] * self.itemsize if self.sizes else whole
        if self.kind == "gather":
            return WindowCopies(((own, own), (whole, whole)), 1)
        if self.kind == "scatter":
            return WindowCopies(((whole - own, whole - own), (size * own, own)), 1)
        if self._sums_parts(size):
            own = Partition(self.unit, size).sizes()[rank] * self.itemsize
            return WindowCopies(((whole, whole), (size * own, own), (whole, whole)), 2)
        return WindowCopies(((whole, whole), (size * whole, whole)), 1)

    def _sums_parts(self, size: int) -> bool:
        """Tell whether every rank sums a part in the window, and all copy the sum."""
        return size >= window.SHARED_SUM_RANKS and self.unit * self.itemsize >= window.SHARED_SUM_BYTES

    def rooms(self, rank: int, size: int) -> dict[str, int]:
        """Return the bytes of the message buffers that a rank keeps, by name. Not collective."""
        if self.kind == "gather":
            return {"arrived": self.unit * sum(self.sizes) * self.itemsize} if self.outer > 1 else {}
        if self.kind == "scatter":
            packed = {"packed": self.unit * sum(self.sizes) * self.itemsize} if self.outer > 1 else {}
            return {**packed, "arrived": size * self.unit * self.sizes[rank] * self.itemsize}
        if self.kind == "shift":
            return {}
        if size == 2:
            return {"arrived": 2 * self.unit * self.itemsize}
        own = Partition(self.unit, size).sizes()[rank] * self.itemsize
        return {"arrived": size * own, "total": own}

    def half(self, size: int) -> int:
        """Return the bytes that the call takes in each half of a window. Not collective."""
        if self.kind == "shift":
            return 0
        nbytes = self.unit * (sum(self.sizes) if self.sizes else 1) * self.itemsize
        rows = {"gather": 1, "scatter": size}.get(self.kind, size)
        if self.kind == "reduce" and self._sums_parts(size):
            rows += 1
        return rows * -(-nbytes // window.LINE) * window.LINE


def window_bytes(calls: Iterable[GroupCall], size: int) -> int:
    """Return the bytes of the window through which a group of ``size`` ranks makes these calls. Not collective."""
    needed = max((call.half(size) for call in calls if call.kind != "shift"), default=0)
    if not needed:
        return 0
    return 2 * size * window.LINE + 2 * (-(-max(needed, window.FIRST_HALF) // 4096) * 4096)


class RecordingGroup:
    """Record the calls of the split layers of one rank without other ranks: right shapes, meaningless values.

    A :class:`mpizero.types.Group`. No method is collective.

    Attributes
    ----------
    calls : list of GroupCall
        What was called since the list was emptied.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[GroupCall] = []

    def __repr__(self) -> str:
        """Show the size only: layers are compared by their text."""
        return f"group of {self.size}"

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Return a copy."""
        self.calls.append(GroupCall("reduce", x.size, (), 1, x.itemsize))
        return np.array(x, order="C")

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Return a copy."""
        return self.all_reduce(x, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return zeros with the own block at its place."""
        call = self._along("gather", x, axis, sizes)
        shape = list(x.shape)
        shape[axis] = sum(call.sizes)
        whole = np.zeros(shape, x.dtype)
        start = sum(call.sizes[: self.rank])
        np.moveaxis(whole, axis, 0)[start : start + call.sizes[self.rank]] = np.moveaxis(x, axis, 0)
        return whole

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Return a copy of the own block."""
        call = self._along("scatter", x, axis, sizes)
        start = sum(call.sizes[: self.rank])
        block = np.moveaxis(x, axis, 0)[start : start + call.sizes[self.rank]]
        return np.array(np.moveaxis(block, 0, axis), order="C")

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> _Shifted:
        """Return copies at once."""
        if by % self.size:
            self.calls += [GroupCall("shift", x.size, (), 1, x.itemsize) for x in arrays]
        return _Shifted(tuple(np.array(x, order="C") for x in arrays))

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int]) -> GroupCall:
        axis %= x.ndim
        outer = prod(x.shape[:axis])
        call = GroupCall(kind, outer * prod(x.shape[axis + 1 :]), tuple(map(int, sizes)), outer, x.itemsize)
        self.calls.append(call)
        return call


class _Shifted(NamedTuple):
    """Hold arrays that have arrived; a :class:`mpizero.types.ShiftRequest`."""

    arrays: tuple[Array, ...]

    def wait(self) -> tuple[Array, ...]:
        """Return the arrays."""
        return self.arrays

    def test(self) -> bool:
        """Return True."""
        return True

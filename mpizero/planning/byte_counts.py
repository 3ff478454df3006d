"""Compute the bytes that collectives send, by formula, and record a split layer's group calls on one rank.

The formulas follow the code of ``comm/``. They count the same bytes as the counters in that folder ([Note: bytes on the
wire] in ``comm/communicator.py``). They cut messages as ``comm/reduce.py`` does, and use messages or windows as
``comm/model_group.py`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from mpizero.comm import model_group
from mpizero.comm.reduce import Codec, exchange_step, gather_step
from mpizero.layout import Partition
from mpizero.nn.virtual_ranks import Arrived
from mpizero.types import Array


class Sent(NamedTuple):
    """Hold the bytes that one rank sends to others, and the number of calls in which it sends any (``messages``)."""

    bytes: int = 0
    messages: int = 0

    def __add__(self, other: object) -> Sent:
        """Add bytes and messages of both."""
        if not isinstance(other, Sent):
            return NotImplemented
        return Sent(self.bytes + other.bytes, self.messages + other.messages)

    def times(self, count: int) -> Sent:
        """Return ``count`` times the bytes and the messages. Not collective."""
        return Sent(self.bytes * count, self.messages * count)


def total_sent(parts: Iterable[Sent]) -> Sent:
    """Return the sum of ``parts``. Not collective."""
    found = Sent()
    for part, count in Counter(parts).items():
        found += part.times(count)
    return found


def one_call(nbytes: int) -> Sent:
    """Return ``nbytes`` sent in one call; no call if ``nbytes`` is 0. Not collective."""
    return Sent(nbytes, 1) if nbytes else Sent()


class ExchangeCost(NamedTuple):
    """Hold what a rank sends in a sum or an all-gather between peers, and the sizes of its buffers.

    Attributes
    ----------
    sent : Sent
        The bytes and messages that the rank sends.
    send_buffer, receive_buffer : int
        Bytes of the buffers for elements that are sent and received.
    packed_send, packed_receive : int
        Bytes of the buffers for compressed messages that are sent and received; 0 without compression.
    """

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
    """Return the cost of one :class:`mpizero.comm.reduce.ExactExchange`.

    It sends partial sums of gradients to the peers that own the elements. Not collective.

    Parameters
    ----------
    totals : sequence of int
        For each peer, the number of elements that it owns.
    peer : int
        The peer whose cost is computed.
    counts : sequence of int
        For each peer, the number of partial sums that its node sends.
    itemsize : int
        Bytes of an element.
    codec : Codec or None
        The codec that compresses the messages; None leaves them uncompressed.
    elements : int or None
        Number of elements in a bucket; None is the default.
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
    """Return the cost of one uncompressed segment of an exchange, in which peer i owns ``widths[i]`` elements.

    ``peer`` is the peer whose cost is computed, and ``counts[i]`` the number of partial sums that the node of peer i
    sends. Not collective.
    """
    mine, others = counts[peer], sum(widths) - widths[peer]
    sent = one_call(mine * others * itemsize)
    return ExchangeCost(sent, mine * sum(widths) * itemsize, sum(counts) * widths[peer] * itemsize)


def _packed(elements: int, step: int, codec: Codec) -> int:
    """Return the compressed bytes of ``elements`` elements that are sent in messages of at most ``step`` elements."""
    full, rest = divmod(elements, step)
    return full * codec.packed(step) + codec.packed(rest)


def gather_cost(
    totals: Sequence[int], peer: int, itemsize: int, codec: Codec | None = None, elements: int | None = None
) -> ExchangeCost:
    """Return the cost of an all-gather in which peer i sends ``totals[i]`` elements to every other peer.

    ``peer`` is the peer whose cost is computed; the other parameters are those of :func:`exchange_cost`. The all-gather
    is :func:`mpizero.comm.reduce.gather_spans`, or ``gather_packed`` with a codec. Not collective.
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
    """Return the cost of :func:`mpizero.comm.reduce.begin_gather`, which needs no buffers. Not collective.

    It gathers several spans at once: ``columns[j][i]`` is the number of elements in span j of peer i. ``peer`` is the
    peer whose cost is computed.
    """
    own = [(sizes[peer], len(sizes) - 1) for sizes in columns]
    return ExchangeCost(total_sent(one_call(size * itemsize * others) for size, others in own), 0, 0)


class WindowCopies(NamedTuple):
    """Hold the copies that a rank makes in one call of its group, if the group's ranks share a window.

    Attributes
    ----------
    passes : tuple of (int, int)
        For each pass over memory, the bytes that it reads and the bytes that it writes.
    barriers : int
        Number of barriers of the group in the call.
    """

    passes: tuple[tuple[int, int], ...]
    barriers: int


class GroupCall(NamedTuple):
    """Describe one call of a method of :class:`mpizero.types.Group`; all ranks of the group make it together.

    Attributes
    ----------
    kind : str
        "reduce", "gather", "scatter" or "shift".
    unit : int
        Number of elements of the array; for "gather" and "scatter" the number at one index of the axis along which the
        array is cut.
    sizes : tuple of int
        For "gather" and "scatter", the length of each rank's part along that axis; otherwise empty.
    outer : int
        For "gather" and "scatter", the product of the lengths of the axes before that axis; otherwise 1.
    itemsize : int
        Bytes of an element.
    axis : str
        The axis along which the group's ranks differ: "tensor" or "context".
    """

    kind: str
    unit: int
    sizes: tuple[int, ...]
    outer: int
    itemsize: int
    axis: str

    def sent(self, rank: int, size: int, *, in_window: bool) -> Sent:
        """Return what rank ``rank`` of a group of ``size`` ranks sends. Not collective.

        If the ranks share a window (``in_window``), only shifts send messages.
        """
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
        """Return the copies that rank ``rank`` makes in a window of ``size`` ranks, as in ``comm/model_group.py``.

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
        """Tell whether each rank sums one part of the array in the window, before all ranks copy the whole sum."""
        return size >= model_group.SHARED_SUM_RANKS and self.unit * self.itemsize >= model_group.SHARED_SUM_BYTES

    def rooms(self, rank: int, size: int) -> dict[str, int]:
        """Return the bytes of the message buffers that rank ``rank`` of ``size`` keeps, by the buffer's name.

        Not collective.
        """
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
        """Return the bytes that the call needs in each half of a window of ``size`` ranks. Not collective."""
        if self.kind == "shift":
            return 0
        nbytes = self.unit * (sum(self.sizes) if self.sizes else 1) * self.itemsize
        rows = {"gather": 1, "scatter": size}.get(self.kind, size)
        if self.kind == "reduce" and self._sums_parts(size):
            rows += 1
        return rows * -(-nbytes // model_group.LINE) * model_group.LINE


def window_bytes(calls: Iterable[GroupCall], size: int) -> int:
    """Return the bytes of the window that a group of ``size`` ranks needs for these calls. Not collective."""
    needed = max((call.half(size) for call in calls if call.kind != "shift"), default=0)
    if not needed:
        return 0
    return 2 * size * model_group.LINE + 2 * (-(-max(needed, model_group.FIRST_HALF) // 4096) * 4096)


class RecordingGroup:
    """Replace the group of split layers on one rank: record their calls, and return arrays of the right shapes.

    It implements :class:`mpizero.types.Group`. But no method is collective, and the values of returned arrays mean
    nothing.

    Parameters
    ----------
    axis : str
        The axis along which the group's ranks differ: "tensor" or "context".
    rank, size : int
        The rank's number in the group, and the size of the group.
    calls : list of GroupCall
        The list to which calls are appended; the groups of one rank have the same.
    """

    def __init__(self, axis: str, rank: int, size: int, calls: list[GroupCall]) -> None:
        self.axis, self.rank, self.size, self.calls = axis, rank, size, calls

    def __repr__(self) -> str:
        """Return a text that names the size but not the rank, because layers are compared by their texts."""
        return f"{self.axis} group of {self.size}"

    def all_reduce(self, x: Array, tag: str = "") -> Array:
        """Record the call, and return a copy of ``x``."""
        self.calls.append(GroupCall("reduce", x.size, (), 1, x.itemsize, self.axis))
        return np.array(x, order="C")

    def all_max(self, x: Array, tag: str = "") -> Array:
        """Record the call, and return a copy of ``x``."""
        return self.all_reduce(x, tag)

    def all_gather(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Record the call, and return an array of zeros in which this rank's part is ``x``."""
        call = self._along("gather", x, axis, sizes)
        shape = list(x.shape)
        shape[axis] = sum(call.sizes)
        whole = np.zeros(shape, x.dtype)
        start = sum(call.sizes[: self.rank])
        np.moveaxis(whole, axis, 0)[start : start + call.sizes[self.rank]] = np.moveaxis(x, axis, 0)
        return whole

    def reduce_scatter(self, x: Array, axis: int, sizes: Sequence[int], tag: str = "") -> Array:
        """Record the call, and return a copy of this rank's part of ``x``."""
        call = self._along("scatter", x, axis, sizes)
        start = sum(call.sizes[: self.rank])
        block = np.moveaxis(x, axis, 0)[start : start + call.sizes[self.rank]]
        return np.array(np.moveaxis(block, 0, axis), order="C")

    def shift(self, arrays: Sequence[Array], by: int, tag: str = "") -> Arrived:
        """Record the call, and return a finished request with copies of ``arrays``."""
        if by % self.size:
            self.calls += [GroupCall("shift", x.size, (), 1, x.itemsize, self.axis) for x in arrays]
        return Arrived(tuple(np.array(x, order="C") for x in arrays))

    def _along(self, kind: str, x: Array, axis: int, sizes: Sequence[int]) -> GroupCall:
        axis %= x.ndim
        outer = prod(x.shape[:axis])
        unit = outer * prod(x.shape[axis + 1 :])
        call = GroupCall(kind, unit, tuple(map(int, sizes)), outer, x.itemsize, self.axis)
        self.calls.append(call)
        return call

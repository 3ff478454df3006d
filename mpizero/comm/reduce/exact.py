"""Sum gradients over the data ranks, in the order of the binary tree over grains, and gather parameters.

A *row* is one copy of the whole gradient vector: the gradient of one or several grains. A *group* is either the ranks
of one node, which share a window with the rows of all these ranks, or a single rank with private memory. *Peers* are
the ranks with the same number in their groups. Each element of the sum has one *owner*, the rank that needs it.

With one group nothing is sent: each owner reads the rows of all ranks in the window. With several groups, each rank
first adds rows of its own group, over the ranges of elements that its peers own. The peers then exchange these partial
sums, which takes the bytes of a reduce-scatter. Finally each owner adds the partial sums that it has received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm.communicator import Communicator, Request
from mpizero.comm.reduce.codecs import Codec
from mpizero.comm.reduce.places import cut_places, elements_in, in_forms, places_of
from mpizero.comm.reduce.segments import Arriving, RowRange, Segment, program_array
from mpizero.layout import Span
from mpizero.layout.sum_tree import Program
from mpizero.types import Array

#: Default for the number of elements that one segment of an exchange moves; it bounds the size of the buffers.
EXCHANGE_ELEMENTS = 1 << 19

#: ``scratch(name, size, dtype)`` returns a message buffer, which is valid until the next call with the same name.
Scratch = Callable[[str, int, Any], Array]


def in_flight(elements: int | None) -> int:
    """Return ``elements``, the number of elements sent at once, or the default if it is None. Not collective."""
    return elements or EXCHANGE_ELEMENTS


def exchange_step(counts: Sequence[int], elements: int | None = None) -> int:
    """Return how many of the elements that each peer owns are exchanged in one segment. Not collective.

    The result is the same on every rank, although ranks send different numbers of partial sums. So all ranks cut the
    exchange into the same number of segments.

    Parameters
    ----------
    counts : sequence of int
        Number of partial sums that each group sends.
    elements : int or None
        Number of elements that may be in flight at once; None is :data:`EXCHANGE_ELEMENTS`.
    """
    return max(1, in_flight(elements) // max(1, sum(counts), max(counts) * len(counts)))


def gather_step(peers: int, elements: int | None = None) -> int:
    """Return how many elements each of ``peers`` ranks sends in one segment of a gather. Not collective."""
    return max(1, in_flight(elements) // peers)


class RowsToSum(NamedTuple):
    """Describe the rows (gradient vectors) that are to be summed, and which rank owns which elements of the sum.

    Attributes
    ----------
    values : array, shape (rows of the group, stride)
        The rows of this rank's group (of its node, or its own); each is one copy of the whole gradient vector.
    ranges : sequence over peers of sequences of Span
        The ranges of elements that each peer owns.
    programs : sequence over groups of sequences of program
        For each group, the tree programs of the partial sums that it sends, one program for each; a program names the
        rows of its own group by their indices.
    tag : str
        Name of the messages in counters and reports.
    residuals : sequence over peers of 1-D float32 arrays
        For a codec with feedback: for each peer, the part that earlier messages to this peer have left out, one value
        for each element that the peer owns and that is compressed.
    exact : sequence of Span
        The ranges of the gradient vector, ascending, whose partial sums are never compressed.
    """

    values: Array
    ranges: Sequence[Sequence[Span]]
    programs: Sequence[Sequence[Program]]
    tag: str = ""
    residuals: Sequence[Array] = ()
    exact: Sequence[Span] = ()


def fresh(name: str, size: int, dtype: Any) -> Array:
    """Return a new 1-D array of ``size`` elements; the default :data:`Scratch`. Not collective."""
    return np.empty(size, dtype)


class ExactExchange:
    """Exchange partial sums between peers, so that every rank can sum the elements that it owns.

    A group is the ranks of one node that share memory, or a single rank.

    Parameters
    ----------
    peers : Communicator
        The ranks with this rank's number in their groups, in the order of their groups.
    codec : Codec or None
        Compresses float32 partial sums for other ranks, but for those of :attr:`RowsToSum.exact`. The receiver
        decompresses them and adds in float32; partial sums that stay on their rank are not compressed. With a codec the
        result depends on the number of ranks.
    scratch : Scratch
        Provides the buffers: at most ``2 * elements`` elements and, with a codec, as many compressed ones.
    elements : int or None
        Number of elements in flight at once, the same on every rank; None is :data:`EXCHANGE_ELEMENTS`.
    """

    def __init__(
        self, peers: Communicator, codec: Codec | None = None, scratch: Scratch = fresh, elements: int | None = None
    ) -> None:
        self.peers, self.codec, self.scratch, self._elements = peers, codec, scratch, elements

    @property
    def elements(self) -> int | None:
        """Number of elements in flight at once; None is :data:`EXCHANGE_ELEMENTS`."""
        return self._elements

    def resize(self, elements: int | None) -> None:
        """Change the number of elements in flight in later exchanges. Not collective; all ranks must pass the same."""
        self._elements = elements

    def pieces(self, rows: RowsToSum) -> Iterator[RowRange]:
        """Exchange partial sums, and yield a RowRange for each part of the elements that this rank owns.

        The caller adds the rows of each RowRange; they are valid until the next one is yielded. Collective over the
        peers: every rank must consume the whole iterator.
        """
        if self.peers.size == 1:
            yield from _in_place(rows.values, rows.ranges[0])
            return
        for segment in self.segments(rows):
            yield from self.begin_segment(segment, wait=True).pieces()

    def segments(self, rows: RowsToSum) -> Iterator[Segment]:
        """Yield the segments of the exchange of ``rows``, each small enough for the buffers. Not collective."""
        counts = [len(programs) for programs in rows.programs]
        step = exchange_step(counts, self.elements)
        sums = [program_array(program) for program in rows.programs[self.peers.rank]]
        codec = self.codec if rows.values.dtype == np.float32 else None
        places = [places_of(spans) for spans in rows.ranges]
        forms = [(None, places)] if codec is None else in_forms(codec, places, rows.exact)
        for form, chosen in forms:
            for low in range(0, max(map(elements_in, chosen)), step):
                windows = [cut_places(part, low, low + step) for part in chosen]
                left = [residual[low : low + step] for residual in rows.residuals] if form else []
                yield Segment(rows.values, windows, counts, sums, rows.tag, residuals=left, codec=form)

    def begin_segment(self, segment: Segment, *, wait: bool = False) -> Arriving:
        """Compute this rank's partial sums of a segment and start to exchange them.

        Collective over the peers. When this returns, the segment's rows have been read and may be overwritten. There
        are buffers for one segment only, so the received partial sums must be added before the next segment begins.

        Parameters
        ----------
        segment : Segment
            The segment, one of those from :meth:`segments`.
        wait : bool
            True to return only when all messages have arrived.
        """
        return self._plain(segment, wait) if segment.codec is None else self._packed(segment, segment.codec, wait)

    def _plain(self, segment: Segment, wait: bool) -> Arriving:
        """Start to exchange a segment's partial sums without compression. Collective over the peers."""
        widths, counts, me = segment.widths, segment.counts, self.peers.rank
        send = self.scratch("send", counts[me] * sum(widths), segment.rows.dtype)
        position = 0
        for peer, width in enumerate(widths):
            for number in range(counts[me]):
                segment.add(peer, number, send[position : position + width])
                position += width
        recv = self.scratch("receive", sum(counts) * widths[me], segment.rows.dtype)
        send_counts, recv_counts = [counts[me] * w for w in widths], [c * widths[me] for c in counts]
        request = self._exchange(send, send_counts, recv, recv_counts, segment.tag, wait)
        return Arriving(request, lambda: recv.reshape(sum(counts), widths[me]), segment.windows[me])

    def _packed(self, segment: Segment, codec: Codec, wait: bool) -> Arriving:
        """Start to exchange a segment's partial sums, compressed by ``codec`` except those that stay on this rank.

        Collective over the peers.
        """
        widths, counts, me = segment.widths, segment.counts, self.peers.rank
        sizes = [0 if peer == me else codec.packed(width) for peer, width in enumerate(widths)]
        send = self.scratch("packed send", counts[me] * sum(sizes), np.uint8)
        others = max(width for peer, width in enumerate(widths) if peer != me)
        values = self.scratch("send", others if counts[me] else 0, segment.rows.dtype)
        position = 0
        for peer, size in enumerate(sizes):
            for number in range(counts[me] if size else 0):
                segment.add(peer, number, values[: widths[peer]])
                codec.encode(values[: widths[peer]], segment.residuals[peer], send[position : position + size])
                position += size
        arriving = codec.packed(widths[me])
        recv_counts = [0 if peer == me else count * arriving for peer, count in enumerate(counts)]
        recv = self.scratch("packed receive", sum(recv_counts), np.uint8)
        matrix = self.scratch("receive", sum(counts) * widths[me], segment.rows.dtype).reshape(sum(counts), widths[me])
        own = range(sum(counts[:me]), sum(counts[: me + 1]))
        for number, row in enumerate(own):
            segment.add(me, number, matrix[row])
        send_counts = [counts[me] * size for size in sizes]
        request = self._exchange(send, send_counts, recv, recv_counts, segment.tag, wait)

        def unpack() -> Array:
            place = 0
            for row in range(sum(counts)):
                if row not in own:
                    codec.decode(recv[place : place + arriving], matrix[row])
                    place += arriving
            return matrix

        return Arriving(request, unpack, segment.windows[me])

    def _exchange(
        self, send: Array, send_counts: list[int], recv: Array, recv_counts: list[int], tag: str, wait: bool
    ) -> Request | None:
        """Start an all-to-all and return its request. Collective over the peers.

        With ``wait`` do it by the blocking call, which is faster, and return None. Counts are in elements.
        """
        if wait:
            self.peers.alltoallv(send, send_counts, recv, recv_counts, tag)
            return None
        return self.peers.ialltoallv(send, send_counts, recv, recv_counts, tag)


def _in_place(rows: Array, spans: Sequence[Span]) -> Iterator[RowRange]:
    """Yield a RowRange for each of ``spans``, the elements that this rank owns, if there is one group only."""
    position = 0
    for span in spans:
        if span.size:
            yield RowRange(rows, span.start, span.start, position, span.size)
        position += span.size


class Gathering:
    """Represent the messages that :func:`begin_gather` has started."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def test(self) -> bool:
        """Let MPI make progress, and tell whether all messages have arrived. Not collective."""
        while self._requests and self._requests[0].test():
            self._requests.pop(0)
        return not self._requests

    def wait(self) -> None:
        """Wait until all messages to and from this rank have ended. Not collective; a second call returns at once."""
        while self._requests:
            self._requests.pop(0).wait()


def begin_gather(
    peers: Communicator, send: Sequence[Array], target: Array, spans: Sequence[Sequence[Span]], tag: str = "gather"
) -> Gathering:
    """Start an all-gather: each peer sends the values of its spans, and every peer receives them in ``target``.

    Collective over ``peers``. It needs no buffers. Until ``wait()`` of the result has returned, the arrays in ``send``
    must not be written, and the spans of other ranks in ``target`` must not be used.

    Parameters
    ----------
    peers, send, target, spans
        As for :func:`gather_spans`. Every peer has the same number of spans; some may be empty.
    tag : str
        Name of the messages in counters and reports.
    """
    columns = [(values, [group[place] for group in spans]) for place, values in enumerate(send)]
    return Gathering(
        [
            peers.igather_spans(values, target, column, tag)
            for values, column in columns
            if any(span.size for span in column)
        ]
    )


def gather_spans(
    peers: Communicator,
    send: Sequence[Array],
    target: Array,
    spans: Sequence[Sequence[Span]],
    scratch: Scratch = fresh,
    elements: int | None = None,
) -> None:
    """Do an all-gather: each peer sends the values of its spans, and every peer receives them in ``target``.

    Collective over ``peers``. The values are sent in segments of bounded size, so the buffers are small.

    Parameters
    ----------
    peers : Communicator
        The ranks that exchange.
    send : sequence of 1-D arrays
        This rank's values, one array for each of its spans; they may be views of ``target``.
    target : 1-D array
        Receives the values of every peer.
    spans : sequence over peers of sequences of Span
        The ranges of ``target`` that each peer's values fill; the same on every rank.
    scratch : Scratch
        Provides the buffers: at most ``2 * elements`` elements.
    elements : int or None
        Number of elements in flight at once, the same on every rank; None is :data:`EXCHANGE_ELEMENTS`.
    """
    own = spans[peers.rank]
    for span, values in zip(own, send, strict=True):
        place = target[span.start : span.stop]
        if span.size and not np.shares_memory(place[:1], values[:1]):
            place[:] = values
    if peers.size == 1:
        return
    step, places = gather_step(peers.size, elements), [places_of(group) for group in spans]
    longest = max(map(elements_in, places))
    for low in range(0, longest, step):
        windows = [cut_places(group, low, low + step) for group in places]
        counts = [sum(span.size for _, span in window) for window in windows]
        packed = scratch("send", counts[peers.rank], target.dtype)
        np.concatenate([target[:0], *(target[s.start : s.stop] for _, s in windows[peers.rank])], out=packed)
        recv = scratch("receive", sum(counts), target.dtype)
        peers.allgatherv(packed, recv, counts, "gather")
        position = 0
        for peer, window in enumerate(windows):
            for _, span in window:
                if peer != peers.rank:
                    target[span.start : span.stop] = recv[position : position + span.size]
                position += span.size


def gather_packed(
    peers: Communicator,
    codec: Codec,
    target: Array,
    spans: Sequence[Sequence[Span]],
    residual: Array,
    scratch: Scratch = fresh,
) -> None:
    """Do an all-gather like :func:`gather_spans`, with compressed messages, of values that are in ``target``.

    Collective over ``peers``. A rank also replaces its own values by what the others decompress, so that all ranks end
    with the same bits.

    Parameters
    ----------
    peers : Communicator
        The ranks that exchange.
    codec : Codec
        Compresses the values.
    target : 1-D float32 array
        Holds this rank's values in its own spans; receives the values of all peers.
    spans : sequence over peers of sequences of Span
        The ranges of ``target`` that each peer's values fill; the same on every rank.
    residual : 1-D float32 array
        The part of this rank's values that earlier messages have left out, updated; empty without feedback.
    scratch : Scratch
        Provides the buffers.
    """
    step, places = gather_step(peers.size), [places_of(group) for group in spans]
    longest = max(map(elements_in, places))
    for low in range(0, longest, step):
        windows = [cut_places(group, low, low + step) for group in places]
        widths = [sum(span.size for _, span in window) for window in windows]
        sizes = [codec.packed(width) for width in widths]
        values = scratch("send", widths[peers.rank], np.float32)
        np.concatenate([target[:0], *(target[s.start : s.stop] for _, s in windows[peers.rank])], out=values)
        send = scratch("packed send", sizes[peers.rank], np.uint8)
        codec.encode(values, residual[low : low + step], send)
        recv = scratch("packed receive", sum(sizes), np.uint8)
        peers.allgatherv(send, recv, sizes, "gather")
        position = 0
        for window, width, size in zip(windows, widths, sizes, strict=True):
            values, place = scratch("receive", width, np.float32), 0
            codec.decode(recv[position : position + size], values)
            for _, span in window:
                target[span.start : span.stop] = values[place : place + span.size]
                place += span.size
            position += size

"""Sum gradients over the data ranks in the order of the binary tree over grains, gather parameters, compress messages.

A *row* is memory for one copy of the whole gradient vector: the gradient of one or several grains. A *group* is either
the ranks of one node, which share a window with the rows of all these ranks, or a single rank with private memory.
The *inter-node group* is the ranks with the same number in their groups; they are each other's peers. Each element of
the sum has one *owner*, the rank that needs it.

With one group nothing is sent: each owner reads the rows of all ranks in the window. With several groups, each rank
first adds rows of its own group, over the ranges of elements that its peers own. The inter-node group then exchanges
these partial sums (:class:`ExactExchange`), which takes the bytes of a reduce-scatter; buffers stay small, because an
exchange is cut into :class:`Segment` objects. Finally each owner adds the partial sums that it has received. Parameters
are gathered by :func:`gather_spans` and its variants: each owner sends its elements to all ranks. A :class:`Codec`
compresses float32 values: to 16 bits, to 8 bits with one scale for each block, or by top-k.

[Note: rounded sums] A sum can be rounded to bfloat16 after each of its additions (``rounded``), by whichever rank
computes it, also within a node and on one process. If the gradients of the grains are rounded, too, every partial sum
is a bfloat16 number, and is sent in 16 bits without loss. So rounded sums, like sums that are not rounded,
have the same bits on any number of ranks; but these two sums differ.

[Note: error feedback] With eight bits or top-k a message leaves out much of a gradient. The sender keeps the difference
(the residual) and adds it to its next message, so that every part is sent in the end (Seide et al. 2014, *1-bit
stochastic gradient descent*; Karimireddy et al. 2019, *Error feedback fixes SignSGD*; for top-k Stich et al. 2018,
*Sparsified SGD with memory*, Alistarh et al. 2018, *The convergence of sparsified gradient methods*). Up to rounding,
the sum of all messages plus the residual equals the sum of all gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, cycle
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm.communicator import Communicator, Request
from mpizero.errors import ConfigError, LayoutError
from mpizero.layout import Partition, Span
from mpizero.layout.sum_tree import Program, rows_plan
from mpizero.types import Array

#: Default for the number of elements that one segment of an exchange moves; it bounds the size of the buffers.
EXCHANGE_ELEMENTS = 1 << 19

#: Segments of an exchange that are in flight at a time: MPI moves data between nodes mostly while a rank tests, and as
#: much then as has been begun.
IN_FLIGHT = 8
#: Seconds that a test takes in which MPI has moved data (without it: 1 to 10 us), and how long a rank goes on testing.
_MOVED, _TESTING = 15e-6, 2e-3

#: ``scratch(name, size, dtype)`` returns a message buffer, which is valid until the next call with the same name.
Scratch = Callable[[str, int, Any], Array]
#: A function that adds the rows (partial sums) of a segment (part of an exchange) that has arrived.
Take = Callable[[Iterator["RowRange"]], None]


def bucket_size(elements: int | None) -> int:
    """Return the most elements of a message buffer: ``elements``, or the default if that is None. Not collective."""
    return elements or EXCHANGE_ELEMENTS


def exchange_step(counts: Sequence[int], elements: int | None = None) -> int:
    """Return how many of the elements that each peer owns are exchanged in one segment (part of an exchange).

    Not collective.

    The result is the same on every rank, although ranks send different numbers of partial sums. So all ranks cut the
    exchange into the same number of segments.

    Parameters
    ----------
    counts : sequence of int
        Number of partial sums that each group sends.
    elements : int or None
        Number of elements of a bucket: the most that a message buffer of one segment holds; None is
        :data:`EXCHANGE_ELEMENTS`.
    """
    return max(1, bucket_size(elements) // max(1, sum(counts), max(counts) * len(counts)))


def gather_step(ranks: int, elements: int | None = None) -> int:
    """Return how many elements each of ``ranks`` ranks sends in one segment of a gather.

    Not collective. A gather is cut into segments, so that buffers stay small. ``elements`` is the number of elements in
    one segment, of all ranks together; None stands for :data:`EXCHANGE_ELEMENTS`.
    """
    return max(1, bucket_size(elements) // ranks)


class RowsToSum(NamedTuple):
    """Describe the rows (gradient vectors) that are to be summed, and which rank owns which elements of the sum.

    Attributes
    ----------
    values : array, shape (rows of the group, elements of a row)
        The rows of this rank's group (its node, or this rank alone); each row is one copy of the whole gradient vector.
    ranges : sequence over ranks of sequences of Span
        The ranges of elements that each peer owns.
    programs : sequence over groups of sequences of program
        For each group, the tree programs of the partial sums that it sends, one program for each sum. A tree program
        (layout/sum_tree.py) tells which rows are added in which order; it refers to rows by their indices in the group.
    tag : str
        Name of the messages in counters and reports.
    residuals : sequence over ranks of 1-D float32 arrays
        For a codec with feedback: for each peer, the part of the sums that earlier messages to this peer have left out,
        one value for each element that the peer owns and that is compressed.
    exact : sequence of Span
        The ranges of the gradient vector, ascending, whose partial sums are never compressed.
    """

    values: Array
    ranges: Sequence[Sequence[Span]]
    programs: Sequence[Sequence[Program]]
    tag: str = ""
    residuals: Sequence[Array] = ()
    exact: Sequence[Span] = ()


class RowRange(NamedTuple):
    """Describe rows that the owner of some elements has to add, elementwise: ``rows[:, first : first + size]``.

    ``target`` is the index of the first of these elements in the gradient vector. ``position`` is the index of the same
    element in the concatenation of all ranges that this rank owns. ``rounded`` tells whether sums of these elements are
    rounded (see [Note: rounded sums]).
    """

    rows: Array
    first: int
    target: int
    position: int
    size: int
    rounded: bool = False


def fresh(name: str, size: int, dtype: Any) -> Array:
    """Return a new 1-D array of ``size`` elements: the default of the arguments ``scratch``. Not collective."""
    return np.empty(size, dtype)


class ExactExchange:
    """Exchange partial sums between ranks, so that every rank can sum the elements that it owns.

    A group is the ranks of one node that share memory, or a single rank.

    Parameters
    ----------
    comm : Communicator
        The inter-node group: the ranks with this rank's number in their groups, in the order of their groups.
    codec : Codec or None
        Compresses float32 partial sums for other ranks, except those of the elements in :attr:`RowsToSum.exact`. The
        receiver decompresses them and adds in float32; partial sums that stay on their rank are not compressed. With a
        codec the result depends on the number of ranks, unless sums are rounded.
    scratch : Scratch
        Provides the buffers: at most ``2 * elements`` elements for each of the :data:`IN_FLIGHT` segments, and with a
        codec as many compressed ones.
    elements : int or None
        Number of elements of one segment, the same on every rank; None is :data:`EXCHANGE_ELEMENTS`.
    rounded : bool
        Whether sums are rounded to bfloat16, except those of the elements in :attr:`RowsToSum.exact`.
        See [Note: rounded sums].
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None = None,
        scratch: Scratch = fresh,
        elements: int | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        self.comm, self.codec, self.scratch, self.elements, self.rounded = comm, codec, scratch, elements, rounded

    def pieces(self, rows: RowsToSum) -> Iterator[RowRange]:
        """Exchange partial sums, and yield a RowRange (what to add) for each part of the elements that this rank owns.

        The caller adds the rows of each RowRange; the rows are valid until the next RowRange is yielded. Collective
        over ``comm``: every rank must consume the whole iterator.
        """
        if self.comm.size == 1:
            yield from self._in_place(rows)
            return
        segments = list(self.segments(rows))
        if len(segments) == 1:
            yield from self.begin_segment(segments[0], wait=True).pieces()
            return
        arriving: deque[Arriving] = deque()
        for number, segment in enumerate(segments):
            if len(arriving) == IN_FLIGHT:
                yield from arriving.popleft().pieces()
            arriving.append(self.begin_segment(segment, buffers=number % IN_FLIGHT))
        for segment_rows in arriving:
            yield from segment_rows.pieces()

    def segments(self, rows: RowsToSum) -> Iterator[Segment]:
        """Yield the parts (segments) of the exchange of ``rows``, each small enough for the buffers. Not collective."""
        counts = [len(programs) for programs in rows.programs]
        step = exchange_step(counts, self.elements)
        positions = [span_positions(spans) for spans in rows.ranges]
        for form, chosen in self.forms(positions, rows.exact):
            sums = self.programs(rows.programs[self.comm.rank], form)
            for low in range(0, max(map(elements_in, chosen)), step):
                windows = [cut_positions(part, low, low + step) for part in chosen]
                left = [residual[low : low + step] for residual in rows.residuals] if form else []
                yield Segment(rows.values, windows, counts, sums, rows.tag, residuals=left, codec=form)

    def forms(
        self, owned: Sequence[Sequence[SpanPosition]], exact: Sequence[Span]
    ) -> list[tuple[Codec | None, Sequence[Sequence[SpanPosition]]]]:
        """Return the elements that each rank owns, compressed and other ones apart, as :func:`in_forms` does."""
        return [(None, owned)] if self.codec is None else [*in_forms(self.codec, owned, exact)]

    def programs(self, programs: Sequence[Program], form: Codec | None) -> list[Array]:
        """Return tree programs as arrays, for elements that the codec ``form`` compresses (None: uncompressed ones).

        Not collective. A tree program says which rows to add in which order. If ``rounded`` is set, the arrays for
        elements with a codec round the sums.
        """
        return [program_array(program, rounded=self.rounded and form is not None) for program in programs]

    def both_programs(self, program: Program) -> tuple[Array, Array]:
        """Return a tree program as two arrays: for elements whose sums are not rounded, and for all other elements.

        Not collective. A tree program says which rows to add in which order. Without ``rounded`` both arrays are the
        same.
        """
        exact = program_array(program)
        return exact, program_array(program, rounded=True) if self.rounded else exact

    def begin_segment(self, segment: Segment, *, wait: bool = False, buffers: int = 0) -> Arriving:
        """Compute this rank's partial sums of a segment (part of the exchange) and start to exchange them.

        Collective over ``comm``. When this returns, the segment's rows have been read and may be overwritten.

        Parameters
        ----------
        segment : Segment
            The segment, one of those from :meth:`segments`.
        wait : bool
            True to return only when all messages have arrived.
        buffers : int
            Index of the set of buffers to use, from 0 to ``IN_FLIGHT - 1``. The partial sums of the segment that has
            used them before must have been added.
        """
        scratch = partial(self._numbered, buffers)
        if segment.codec is None:
            return self._plain(segment, wait, scratch)
        return self._packed(segment, segment.codec, wait, scratch)

    def _numbered(self, buffers: int, name: str, size: int, dtype: Any) -> Array:
        return self.scratch(f"{name} {buffers}" if buffers else name, size, dtype)

    def _plain(self, segment: Segment, wait: bool, scratch: Scratch) -> Arriving:
        """Start to exchange the partial sums of a segment (part of the exchange) without compression.

        Collective over ``comm``.
        """
        widths, counts, me = segment.widths, segment.counts, self.comm.rank
        send = scratch("send", counts[me] * sum(widths), segment.rows.dtype)
        position = 0
        for peer, width in enumerate(widths):
            for number in range(counts[me]):
                segment.add(peer, number, send[position : position + width])
                position += width
        recv = scratch("receive", sum(counts) * widths[me], segment.rows.dtype)
        send_counts, recv_counts = [counts[me] * w for w in widths], [c * widths[me] for c in counts]
        request = self._exchange(send, send_counts, recv, recv_counts, segment.tag, wait)
        return Arriving(request, lambda: recv.reshape(sum(counts), widths[me]), segment.windows[me])

    def _packed(self, segment: Segment, codec: Codec, wait: bool, scratch: Scratch) -> Arriving:
        """Start to exchange the partial sums of a segment (part of the exchange), compressed by ``codec``.

        Partial sums that stay on this rank are not compressed.

        Collective over ``comm``.
        """
        widths, counts, me = segment.widths, segment.counts, self.comm.rank
        sizes = [0 if peer == me else codec.packed(width) for peer, width in enumerate(widths)]
        send = scratch("packed send", counts[me] * sum(sizes), np.uint8)
        others = max(width for peer, width in enumerate(widths) if peer != me)
        values = scratch("send", others if counts[me] else 0, segment.rows.dtype)
        position = 0
        for peer, size in enumerate(sizes):
            for number in range(counts[me] if size else 0):
                segment.add(peer, number, values[: widths[peer]])
                codec.encode(values[: widths[peer]], segment.residuals[peer], send[position : position + size])
                position += size
        arriving = codec.packed(widths[me])
        recv_counts = [0 if peer == me else count * arriving for peer, count in enumerate(counts)]
        recv = scratch("packed receive", sum(recv_counts), np.uint8)
        matrix = scratch("receive", sum(counts) * widths[me], segment.rows.dtype).reshape(sum(counts), widths[me])
        local_rows = range(sum(counts[:me]), sum(counts[: me + 1]))
        for number, row in enumerate(local_rows):
            segment.add(me, number, matrix[row])
        send_counts = [counts[me] * size for size in sizes]
        request = self._exchange(send, send_counts, recv, recv_counts, segment.tag, wait)

        def unpack() -> Array:
            offset = 0
            for row in range(sum(counts)):
                if row not in local_rows:
                    codec.decode(recv[offset : offset + arriving], matrix[row])
                    offset += arriving
            return matrix

        return Arriving(request, unpack, segment.windows[me], rounded=self.rounded)

    def _in_place(self, rows: RowsToSum) -> Iterator[RowRange]:
        """Yield the rows of all elements that this rank owns, if there is one group, so that nothing is sent.

        A range of elements of which some sums are rounded and some are not gives several :class:`RowRange` objects.
        """
        for position, span in span_positions(rows.ranges[0]):
            for part, exact in span.split(rows.exact) if self.rounded else [(span, True)]:
                at = position + part.start - span.start
                yield RowRange(rows.values, part.start, part.start, at, part.size, not exact)

    def _exchange(
        self, send: Array, send_counts: list[int], recv: Array, recv_counts: list[int], tag: str, wait: bool
    ) -> Request | None:
        """Start an all-to-all and return its request. Collective over ``comm``.

        With ``wait`` the blocking call is used, which is faster, and None is returned. Counts are in elements.
        """
        if wait:
            self.comm.alltoallv(send, send_counts, recv, recv_counts, tag)
            return None
        return self.comm.ialltoallv(send, send_counts, recv, recv_counts, tag)


_NO_RESIDUAL = np.empty(0, np.float32)


class Segment:
    """Describe one segment of an exchange: some of the elements that each peer owns, and the sums to send for them.

    ``windows`` holds, for each peer, the ranges of its elements in this segment, each as a pair: the position in the
    concatenation of all ranges that the peer owns, and the range itself. ``counts`` is the number of partial sums that
    each group sends, and ``sums`` are the tree programs (which rows to add in which order) of the partial sums of this
    rank's group. ``residuals`` holds, for each peer, the part that earlier compressed messages to this peer have left
    out. ``codec`` compresses the messages; None leaves them uncompressed. A group is the ranks of one node that share
    memory, or a single rank.
    """

    def __init__(
        self,
        rows: Array,
        windows: Sequence[Sequence[tuple[int, Span]]],
        counts: Sequence[int],
        sums: Sequence[Array],
        tag: str,
        *,
        residuals: Sequence[Array] = (),
        codec: Codec | None = None,
    ) -> None:
        self.rows, self.windows, self.counts, self.sums, self.tag = rows, windows, counts, sums, tag
        self.residuals, self.codec = residuals or [_NO_RESIDUAL] * len(windows), codec
        self.widths = [sum(span.size for _, span in window) for window in windows]
        self.one = np.ones(1, rows.dtype)

    def add(self, peer: int, number: int, out: Array) -> None:
        """Compute the sum ``sums[number]`` over the segment's elements that ``peer`` owns, and write it to ``out``."""
        position = 0
        for _, span in self.windows[peer]:
            tree_sum(self.rows, span.start, self.sums[number], self.one, out[position : position + span.size])
            position += span.size


class Arriving:
    """Represent a segment (part of an exchange) whose messages are in flight, see :class:`ExactExchange`."""

    def __init__(
        self,
        request: Request | None,
        unpack: Callable[[], Array],
        window: Sequence[tuple[int, Span]],
        *,
        rounded: bool = False,
    ) -> None:
        self._request, self._unpack, self._window, self._rounded = request, unpack, window, rounded

    def test(self) -> bool:
        """Let MPI make progress, and tell whether all messages have been sent and received."""
        return self._request is None or self._request.test()

    def pieces(self) -> Iterator[RowRange]:
        """Wait for the messages, and yield the partial sums that this rank must add: those received and its own."""
        if self._request is not None:
            self._request.wait()
        rows, column = self._unpack(), 0
        for position, span in self._window:
            yield RowRange(rows, column, span.start, position, span.size, self._rounded)
            column += span.size


def keep_testing(test: Callable[[], bool]) -> bool:
    """Call ``test``, which lets MPI make progress, while MPI has data to move; return the last value of ``test``.

    Not collective. One call moves only as much data as the network takes without waiting. If a call has taken so long
    that it must have moved data, more data may wait, and ``test`` is called again, for 2 ms at most.
    """
    limit = perf_counter() + _TESTING
    while True:
        begun = perf_counter()
        if test():
            return True
        if (now := perf_counter()) - begun < _MOVED or now > limit:
            return False


class SegmentQueue:
    """Exchange segments (parts of exchanges) in the order in which they are added, up to :data:`IN_FLIGHT` at a time.

    A segment begins when fewer than :data:`IN_FLIGHT` are in flight, so all ranks begin the same segments in the same
    order, but not at the same time. No other collective may use the communicator of ``exchange`` until the queue is
    empty.

    [Note: what has begun] A rank can wait in :meth:`begin` or :meth:`finish` without a deadlock, although a segment
    arrives only when the peers have begun it, too, and a peer that waits in another call begins no segment. The reason:
    this rank is then further in the step than that peer. All ranks of its node have begun the operation for which the
    peer, or another rank of the peer's node, waits, because they have passed the barrier of their node that follows the
    operation. So the operation ends, and the peer goes on.

    Parameters
    ----------
    exchange : ExactExchange
        Exchanges the segments.
    """

    def __init__(self, exchange: ExactExchange) -> None:
        self._exchange, self._buffers = exchange, cycle(range(IN_FLIGHT))
        self._waiting: deque[tuple[Segment, Take]] = deque()
        self._in_flight: deque[tuple[Arriving, Take]] = deque()

    def __bool__(self) -> bool:
        """Tell whether segments (parts of exchanges) wait or are in flight."""
        return bool(self._waiting or self._in_flight)

    def add(self, segments: Iterable[Segment], take: Take) -> None:
        """Exchange more segments, and call ``take`` for each with the rows that this rank has to add.

        The rows of the segments must not be overwritten before :meth:`begin` has returned. Collective over the ranks of
        the exchange.
        """
        self._waiting.extend((segment, take) for segment in segments)
        self._fill()

    def begin(self) -> None:
        """Wait until the exchange of all segments has begun, so that all their rows have been read. Not collective."""
        while self._waiting:
            self._take()
            self._fill()

    def poll(self) -> None:
        """Let messages progress while MPI has data to move, and begin as many waiting segments as have ended.

        Not collective.
        """
        while self._in_flight and keep_testing(self._in_flight[0][0].test):
            self._take()
            self._fill()

    def finish(self) -> None:
        """Wait until all segments have been exchanged and their rows added. Not collective.

        The next segment uses the first set of buffers again. So each set gets the same segments in every step, and the
        sizes of buffers do not vary.
        """
        while self:
            self._take()
            self._fill()
        self._buffers = cycle(range(IN_FLIGHT))

    def _fill(self) -> None:
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            segment, take = self._waiting.popleft()
            arriving = self._exchange.begin_segment(segment, buffers=next(self._buffers))
            self._in_flight.append((arriving, take))

    def _take(self) -> None:
        arriving, take = self._in_flight.popleft()
        take(arriving.pieces())


#: Some elements that a rank owns: their position in the concatenation of all that it owns, and their range.
SpanPosition = tuple[int, Span]


def span_positions(spans: Sequence[Span]) -> list[SpanPosition]:
    """Return, for each of ``spans``, its position in the concatenation of all of them, and the span itself.

    Empty spans are left out. Not collective.
    """
    positions = accumulate((span.size for span in spans), initial=0)
    return [(position, span) for position, span in zip(positions, spans, strict=False) if span.size]


def elements_in(positions: Sequence[SpanPosition]) -> int:
    """Return the total number of elements of the spans in ``positions``, pairs of position and span. Not collective."""
    return sum(span.size for _, span in positions)


def in_forms(
    codec: Codec, owned: Sequence[Sequence[SpanPosition]], exact: Sequence[Span]
) -> list[tuple[Codec | None, list[list[SpanPosition]]]]:
    """Divide the elements that each rank owns into those sent uncompressed and those that ``codec`` compresses.

    The result has two pairs of a codec (None for the uncompressed elements) and the positions of each owner's elements.
    ``exact`` are the ranges, ascending, that are not compressed. Not collective.
    """
    plain: list[list[SpanPosition]] = [[] for _ in owned]
    packed: list[list[SpanPosition]] = [[] for _ in owned]
    for peer, positions in enumerate(owned):
        for position, span in positions:
            for part, inside in span.split(exact):
                (plain if inside else packed)[peer].append((position + part.start - span.start, part))
    return [(None, plain), (codec, packed)]


def cut_positions(positions: Sequence[SpanPosition], low: int, high: int) -> list[SpanPosition]:
    """Return the elements ``low:high`` of the concatenation of all spans in ``positions``, as positions and spans.

    ``positions`` and the result hold pairs (position, span), as :func:`span_positions` returns them.

    Not collective.
    """
    parts, passed = [], 0
    for position, span in positions:
        start, stop = max(low, passed), min(high, passed + span.size)
        if start < stop:
            inside = Span(start, stop).shift(span.start - passed)
            parts.append((position + inside.start - span.start, inside))
        passed += span.size
    return parts


#: Depth of the stack of the kernels that execute tree programs (``kernels.cpu.update.DEPTH``), and their instruction
#: that rounds the top of the stack (``ROUND`` there).
MAX_DEPTH, ROUND = 16, -(2**31)


@lru_cache(maxsize=4096)
def program_array(program: Program, *, rounded: bool = False) -> Array:
    """Convert a tree program (a sequence of integer codes for a stack machine) to a read-only int32 array for kernels.

    With ``rounded`` the array has an instruction after each addition that rounds the sum to bfloat16.

    Raises
    ------
    LayoutError
        If the program needs a deeper stack than the kernels have.
    """
    depth = deepest = 0
    for code in program:
        depth += (code >= 0) - (code == -1)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise LayoutError(
            f"a sum over so many grains is nested {deepest} deep, at most {MAX_DEPTH} are supported: use larger grains "
            "(micro_batch), so that a global batch has at most 32,768 of them"
        )
    codes = chain.from_iterable((code, ROUND) if code < 0 else (code,) for code in program) if rounded else program
    array = np.fromiter(codes, np.int32)
    array.flags.writeable = False
    return array


def tree_sum(rows: Array, first: int, program: Array, divisor: Array, out: Array) -> None:
    """Add rows in the order of ``program``, divide the sum by ``divisor``, and write the result to ``out``.

    ``rows`` is a two-dimensional, C-contiguous array, of which the columns ``first : first + out.size`` are used.
    ``program`` is from :func:`program_array`; if it is empty, nothing is written. ``divisor`` has one element. ``out``
    may be a slice of one of the rows.
    """
    if program.size:
        kernels.backend(out).update.tree_sum(rows, first, rows[:0], 0, program, divisor, out, 0, out.size)


class Gathering:
    """Represent the messages that :func:`begin_gather` has started.

    ``halves`` are the arrays whose values arrive as bfloat16 numbers in the second half of their own memory.
    """

    def __init__(self, requests: Sequence[Request], halves: Sequence[Array] = ()) -> None:
        self._requests, self._halves = list(requests), list(halves)

    def test(self) -> bool:
        """Let MPI make progress, and tell whether all messages have arrived. Not collective."""
        while self._requests and self._requests[0].test():
            self._requests.pop(0)
        return not self._requests and self._widen()

    def wait(self) -> None:
        """Wait until all messages to and from this rank are complete. Not collective; a second call does not wait."""
        while self._requests:
            self._requests.pop(0).wait()
        self._widen()

    def _widen(self) -> bool:
        while self._halves:
            widen_in_place(self._halves.pop())
        return True


def begin_gather(
    comm: Communicator, send: Sequence[Array], target: Array, spans: Sequence[Sequence[Span]], *, halves: bool = False
) -> Gathering:
    """Start an all-gather: each rank sends the values of its spans, and every rank receives them in ``target``.

    Collective over ``comm``. No message buffers are needed. Until ``wait()`` of the result has returned, the arrays in
    ``send`` must not be written, and the spans of other ranks in ``target`` must not be used.

    Parameters
    ----------
    comm, send, target, spans
        As for :func:`gather_spans`. Every rank has the same number of spans; some may be empty.
    halves : bool
        Whether to send float32 values in 16 bits; each must be a number that bfloat16 represents exactly. Then this
        rank's spans of ``target`` must not be used before ``wait()`` has returned, either.
    """
    requests, narrowed = [], []
    for index, values in enumerate(send):
        column = [group[index] for group in spans]
        first = column[comm.rank].start
        for piece in pieces_of(column):
            own, wire = values[slice(*piece[comm.rank].shift(-first))], target
            if halves:
                narrowed += [target[slice(*span)] for span in piece]
                narrow_to(narrowed[comm.rank - comm.size], own)
                piece, wire = tuple(Span(s.start + s.stop, 2 * s.stop) for s in piece), target.view(np.uint16)
                own = wire[slice(*piece[comm.rank])]
            requests.append(comm.igather_spans(own, wire, piece, "gather"))
    return Gathering(requests, narrowed)


#: Elements that :func:`narrow_to` and :func:`widen_in_place` convert at a time; so many stay in a CPU's cache.
_CONVERTED = 1 << 14


def narrow_to(target: Array, values: Array) -> None:
    """Round float32 ``values`` to bfloat16, and write the 16-bit numbers to the second half of ``target``.

    Not collective. ``target`` is an array of as many float32 elements, or ``values`` itself: the conversion begins at
    the end, so no value is overwritten before it is read.
    """
    wire, part = target.view(np.uint16)[target.size :], np.empty(min(_CONVERTED, target.size), np.uint16)
    for stop in range(values.size, 0, -_CONVERTED):
        start = max(0, stop - _CONVERTED)
        kernels.cpu.layers.to_bfloat16(values[start:stop], part[: stop - start])
        wire[start:stop] = part[: stop - start]


def widen_in_place(values: Array) -> None:
    """Undo :func:`narrow_to`: convert the bfloat16 numbers in the second half of the array's memory to float32.

    Not collective.
    """
    wire, part = values.view(np.uint16)[values.size :], np.empty(min(_CONVERTED, values.size), np.uint16)
    for start in range(0, values.size, _CONVERTED):
        stop = min(start + _CONVERTED, values.size)
        part[: stop - start] = wire[start:stop]
        kernels.cpu.layers.from_bfloat16(part[: stop - start], values[start:stop])


def pieces_of(spans: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Cut the spans that ranks own into pieces that are gathered one by one, with a part of each rank's span in each.

    Not collective. Several shorter messages are gathered faster than a long one: while a rank computes, MPI moves only
    a few parts of each message.
    """
    step = gather_step(len(spans))
    for low in range(0, max(span.size for span in spans), step):
        yield tuple(span.intersect(Span(0, step).shift(span.start + low)) for span in spans)


def gather_spans(
    comm: Communicator,
    send: Sequence[Array],
    target: Array,
    spans: Sequence[Sequence[Span]],
    scratch: Scratch = fresh,
    elements: int | None = None,
) -> None:
    """Do an all-gather: each rank sends the values of its spans, and every rank receives them in ``target``.

    Collective over ``comm``. The values are sent in segments of bounded size, so the buffers are small.

    Parameters
    ----------
    comm : Communicator
        The ranks that exchange.
    send : sequence of 1-D arrays
        This rank's values, one array for each of its spans; they may be views of ``target``.
    target : 1-D array
        Receives the values of every rank.
    spans : sequence over ranks of sequences of Span
        The ranges of ``target`` that each rank's values fill; the same on every rank.
    scratch : Scratch
        Provides the buffers: at most ``2 * elements`` elements.
    elements : int or None
        Number of elements in flight at the same time, the same on every rank; None is :data:`EXCHANGE_ELEMENTS`.
    """
    local_spans = spans[comm.rank]
    for span, values in zip(local_spans, send, strict=True):
        local_target = target[span.start : span.stop]
        if span.size and not np.shares_memory(local_target[:1], values[:1]):
            local_target[:] = values
    if comm.size == 1:
        return
    step, positions = gather_step(comm.size, elements), [span_positions(group) for group in spans]
    longest = max(map(elements_in, positions))
    for low in range(0, longest, step):
        windows = [cut_positions(group, low, low + step) for group in positions]
        counts = [sum(span.size for _, span in window) for window in windows]
        packed = scratch("send", counts[comm.rank], target.dtype)
        np.concatenate([target[:0], *(target[s.start : s.stop] for _, s in windows[comm.rank])], out=packed)
        recv = scratch("receive", sum(counts), target.dtype)
        comm.allgatherv(packed, recv, counts, "gather")
        position = 0
        for peer, window in enumerate(windows):
            for _, span in window:
                if peer != comm.rank:
                    target[span.start : span.stop] = recv[position : position + span.size]
                position += span.size


def gather_packed(
    comm: Communicator,
    codec: Codec,
    target: Array,
    spans: Sequence[Sequence[Span]],
    residual: Array,
    scratch: Scratch = fresh,
    *,
    elements: int | None = None,
) -> None:
    """Do an all-gather like :func:`gather_spans`, with compressed messages; each rank sends its spans of ``target``.

    Collective over ``comm``. A rank also replaces its own values by the decompressed ones, so that all ranks end with
    the same bits.

    Parameters
    ----------
    comm : Communicator
        The ranks that exchange.
    codec : Codec
        Compresses the values.
    target : 1-D float32 array
        Holds this rank's values in its own spans; receives the values of all ranks.
    spans : sequence over ranks of sequences of Span
        The ranges of ``target`` that each rank's values fill; the same on every rank.
    residual : 1-D float32 array
        The part of this rank's values that earlier messages have left out; updated in place. Empty without feedback.
    scratch : Scratch
        Provides the buffers.
    elements : int or None
        As for :func:`gather_spans`.
    """
    step, positions = gather_step(comm.size, elements), [span_positions(group) for group in spans]
    longest = max(map(elements_in, positions))
    for low in range(0, longest, step):
        windows = [cut_positions(group, low, low + step) for group in positions]
        widths = [sum(span.size for _, span in window) for window in windows]
        sizes = [codec.packed(width) for width in widths]
        values = scratch("send", widths[comm.rank], np.float32)
        np.concatenate([target[:0], *(target[s.start : s.stop] for _, s in windows[comm.rank])], out=values)
        send = scratch("packed send", sizes[comm.rank], np.uint8)
        codec.encode(values, residual[low : low + step], send)
        recv = scratch("packed receive", sum(sizes), np.uint8)
        comm.allgatherv(send, recv, sizes, "gather")
        position = 0
        for window, width, size in zip(windows, widths, sizes, strict=True):
            values, offset = scratch("receive", width, np.float32), 0
            codec.decode(recv[position : position + size], values)
            for _, span in window:
                target[span.start : span.stop] = values[offset : offset + span.size]
                offset += span.size
            position += size


def mean_over_ranks(comm: Communicator, values: Array) -> Array:
    """Return the elementwise mean over the ranks of the 1-D array ``values``. Collective over ``comm``.

    The arrays are added in the order of one binary tree over the ranks.
    """
    size = comm.size
    plan = rows_plan([range(rank, rank + 1) for rank in range(size)], [1] * size, size)
    spans = [Span(s.start, s.stop) for s in Partition(values.size, size)]
    mean = np.empty_like(values)
    divisor = np.array([size], values.dtype)
    program = program_array(plan.root)
    rows = RowsToSum(values.reshape(1, -1), [[span] for span in spans], plan.group_programs, "mean")
    for piece in ExactExchange(comm).pieces(rows):
        out = mean[piece.target : piece.target + piece.size]
        tree_sum(piece.rows, piece.first, program, divisor, out)
    shard = spans[comm.rank]
    gather_spans(comm, [mean[shard.start : shard.stop]], mean, [[span] for span in spans])
    return mean


class Codec(ABC):
    """Compress float32 values for messages; the number of bytes depends only on the number of values.

    Attributes
    ----------
    feedback : bool
        Whether :meth:`encode` needs a residual (the part of the values that earlier messages have left out).
    """

    feedback: ClassVar[bool] = True

    @property
    def overflows(self) -> bool:
        """True if :meth:`encode` can turn large finite values into infinities."""
        return False

    @abstractmethod
    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: a multiple of 2, or of 4 if ``feedback``."""

    @abstractmethod
    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Write ``values + residual``, compressed, to ``message``; store the part that is left out in ``residual``.

        Parameters
        ----------
        values : 1-D float32 array
            The values to send.
        residual : 1-D float32 array
            The part that earlier messages have left out; as long as ``values``, or empty without feedback. Overwritten.
        message : 1-D uint8 array
            Receives ``packed(values.size)`` bytes.
        """

    @abstractmethod
    def decode(self, message: Array, out: Array) -> None:
        """Write the values of ``message`` to ``out``, a float32 array with one element for each value."""


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Round values to 16 bits, without feedback.

    Attributes
    ----------
    name : {"bfloat16", "float16"}
        The 16-bit format.
    """

    name: str
    feedback: ClassVar[bool] = False

    @property
    def overflows(self) -> bool:
        """True for float16, in which values of magnitude 65,520 and more become infinite."""
        return self.name == "float16"

    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: two for each."""
        return 2 * count

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Round each value to the nearest 16-bit number, ties to even, and write it to ``message``.

        ``residual`` is not used.
        """
        getattr(kernels.backend(values).layers, f"to_{self.name}")(values, message.view(np.uint16))

    def decode(self, message: Array, out: Array) -> None:
        """Convert the 16-bit numbers to float32, which is exact."""
        getattr(kernels.backend(out).layers, f"from_{self.name}")(message.view(np.uint16), out)


#: Sends rounded sums; see [Note: rounded sums].
WIRE = HalfPrecision("bfloat16")


@dataclass(frozen=True)
class EightBits(Codec):
    """Round values to 8-bit integers, with one float32 scale for each block of 256 values."""

    def packed(self, count: int) -> int:
        """Return the bytes of a message of ``count`` values: a multiple of 4.

        Each block of 256 values takes 4 bytes (its scale), and each value one byte; the sum is rounded up.
        """
        blocks: int = -(-count // kernels.cpu.update.COMPRESSION_BLOCK)
        return 4 * (blocks + -(-count // 4))

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Divide each block of ``values + residual`` by a scale, and round to the nearest integer, ties to even.

        The scale is computed from the largest magnitude in the block. The rounding errors are stored in ``residual``.
        """
        scales, codes = self._parts(message, values.size)
        message[scales.nbytes + codes.size :] = 0  # never send uninitialized bytes
        kernels.backend(values).update.int8_encode(values, residual, scales, codes)

    def decode(self, message: Array, out: Array) -> None:
        """Multiply the integers in ``message`` by the scales of their blocks, and write the products to ``out``."""
        kernels.backend(out).update.int8_decode(*self._parts(message, out.size), out)

    @staticmethod
    def _parts(message: Array, count: int) -> tuple[Array, Array]:
        end = 4 * -(-count // kernels.cpu.update.COMPRESSION_BLOCK)
        return message[:end].view(np.float32), message[end : end + count].view(np.int8)


#: Bytes of one value of a top-k message with its index, and the share of values from which on top-k saves no bytes.
_PICKED, _MOST = 8, 0.5
#: Number of counters that the kernel needs to find the largest values.
_COUNTERS = 2048


@dataclass(frozen=True)
class TopK(Codec):
    """Send only the values of largest magnitude, exactly, with their indices.

    Attributes
    ----------
    fraction : float
        The fraction of the values that is sent, rounded up to a whole number of values. ``fraction`` must be less than
        1/2: otherwise the values and their indices take at least as many bytes as all values without indices.
    """

    fraction: float

    def __post_init__(self) -> None:
        """Raise ConfigError if ``fraction`` is not above 0 and below 1/2."""
        if not 0 < self.fraction < _MOST:
            raise ConfigError(
                f"gradient_compression='topk:{self.fraction:g}': expected a share above 0 and below {_MOST:g} of "
                "the values; from there on a value with its index takes more bytes than all values do"
            )

    def count_sent(self, count: int) -> int:
        """Return how many of ``count`` values are sent."""
        return math.ceil(count * self.fraction)

    def packed(self, count: int) -> int:
        """Return the number of bytes of a message of ``count`` values: eight for each value that is sent."""
        return _PICKED * self.count_sent(count)

    def encode(self, values: Array, residual: Array, message: Array) -> None:
        """Write the values of largest magnitude of ``values + residual`` to ``message``, all others to ``residual``."""
        indices, largest = self._parts(message)
        counters = np.empty(_COUNTERS, np.int64)
        kernels.backend(values).update.top_encode(values, residual, counters, indices, largest)

    def decode(self, message: Array, out: Array) -> None:
        """Write the values of ``message`` to ``out`` at their indices, and zeros to all other elements of ``out``."""
        kernels.backend(out).update.top_decode(*self._parts(message), out)

    @staticmethod
    def _parts(message: Array) -> tuple[Array, Array]:
        half = message.size // 2
        return message[:half].view(np.int32), message[half:].view(np.float32)


def codec_of(name: str | None) -> Codec | None:
    """Return the codec for a value of ``ShardingConfig.gradient_compression``; None (no compression) if that is None.

    Raises
    ------
    ConfigError
        If ``name`` is not a known compression.
    """
    if name is None:
        return None
    known = {"bf16": HalfPrecision("bfloat16"), "fp16": HalfPrecision("float16"), "int8": EightBits()}
    text = name if isinstance(name, str) else ""
    if text in known:
        return known[text]
    kind, _, fraction = text.partition(":")
    if kind == "topk" and (number := _number(fraction)) is not None:
        return TopK(number)
    raise ConfigError(
        f"gradient_compression={name!r}: expected None, 'bf16', 'fp16', 'int8', or 'topk:SHARE' with the share of the "
        "values that is sent, such as 'topk:0.01'"
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

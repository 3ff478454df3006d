"""Sums and gathers between groups of ranks that share memory, in the order of the canonical tree.

A *group* is the ranks of one node that share a window, or one rank alone with private memory; *peers* are the ranks
with the same place in their groups. With one group nothing travels: owners read the rows of all ranks in place. With
several, each rank folds its group's rows over its peers' ranges, the peers exchange these partial sums (the bytes of a
reduce-scatter), and each owner receives rows that it sums by a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels
from mpizero.comm.communicator import Communicator
from mpizero.errors import LayoutError
from mpizero.layout import Program, Span
from mpizero.types import Array

#: Elements in flight per exchange step; bounds the buffers that an exchange needs.
EXCHANGE_ELEMENTS = 1 << 19

#: ``scratch(name, size, dtype)`` lends room for a message until the next call with the same name.
Scratch = Callable[[str, int, Any], Array]


def fresh(name: str, size: int, dtype: Any) -> Array:
    """Return a new array for every message. Not collective."""
    return np.empty(size, dtype)


#: Rows that the kernels' stack machine holds at once (``kernels.cpu.fused.DEPTH``).
MAX_DEPTH = 16


class Piece(NamedTuple):
    """Rows to be summed: ``size`` elements from column ``first`` of ``rows``.

    ``target`` is where they start in the row space of the gradient, ``position`` in the concatenation of the owner's
    ranges.
    """

    rows: Array
    first: int
    target: int
    position: int
    size: int


@lru_cache(maxsize=4096)
def program_array(program: Program) -> Array:
    """Return a tree program as the kernels take it: a read-only int32 array. Not collective.

    Raises
    ------
    LayoutError
        If its sums are nested deeper than the kernels' stack.
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
    array = np.array(program, np.int32)
    array.flags.writeable = False
    return array


def tree_sum(rows: Array, first: int, program: Array, divisor: Array, out: Array) -> None:
    """Write the tree sum of ``rows[:, first:first + out.size]``, divided by ``divisor``, to ``out``.

    Not collective. ``rows`` is two-dimensional and C-contiguous; ``out`` may be one of its rows' slices.
    """
    if program.size:
        kernels.backend(out).fused.tree_sum(rows, first, rows[:0], 0, program, divisor, out, 0, out.size)


class ExactExchange:
    """Deliver to every rank the rows it needs to sum its own ranges.

    Parameters
    ----------
    peers : Communicator
        The ranks with this rank's place in their groups, in the order of their groups.
    compression : str or None
        "bf16" or "fp16" sends float32 partial sums in 16 bits; the sum of what arrives is still float32.
        Gives up the equality of bits between layouts.
    scratch : Scratch
        Where the buffers come from: at most ``2 * EXCHANGE_ELEMENTS`` elements and, compressed, as many of 16 bits.
    """

    def __init__(self, peers: Communicator, compression: str | None = None, scratch: Scratch = fresh) -> None:
        self.peers = peers
        self.compression = compression
        self.scratch = scratch

    @property
    def group_index(self) -> int:
        """Index of this rank's group."""
        return self.peers.rank

    def pieces(
        self,
        rows: Array,
        ranges: Sequence[Sequence[Span]],
        programs: Sequence[Sequence[Program]],
        tag: str = "",
    ) -> Iterator[Piece]:
        """Yield what this rank has to sum.

        Collective over the peers; every rank consumes the whole iterator. The rows of a piece are valid until the next.

        Parameters
        ----------
        rows : array, shape (rows of the group, stride)
            All rows of this rank's group.
        ranges : sequence over peers of sequences of Span
            The ranges of the row space that each peer owns.
        programs : sequence over groups of sequences of program
            The partial sums that each group sends, over its own rows.
        """
        own = ranges[self.peers.rank]
        if self.peers.size == 1:
            position = 0
            for span in own:
                if span.size:
                    yield Piece(rows, span.start, span.start, position, span.size)
                position += span.size
            return
        yield from self._exchanged(rows, ranges, programs, tag)

    def _exchanged(
        self, rows: Array, ranges: Sequence[Sequence[Span]], programs: Sequence[Sequence[Program]], tag: str
    ) -> Iterator[Piece]:
        counts = [len(p) for p in programs]
        arrivals, mine = sum(counts), counts[self.peers.rank]
        # The same on every rank, although ranks send different numbers of partial sums: all make equally many turns.
        step = max(1, EXCHANGE_ELEMENTS // max(1, arrivals, max(counts) * self.peers.size))
        totals = [sum(span.size for span in spans) for spans in ranges]
        one = np.ones(1, rows.dtype)
        sums = [program_array(program) for program in programs[self.peers.rank]]
        for low in range(0, max(totals), step):
            high = low + step
            windows = [_window(spans, low, high) for spans in ranges]
            widths = [sum(span.size for _, span in window) for window in windows]
            send = self.scratch("send", mine * sum(widths), rows.dtype)
            position = 0
            for window in windows:
                for program in sums:
                    for _, span in window:
                        tree_sum(rows, span.start, program, one, send[position : position + span.size])
                        position += span.size
            width = widths[self.peers.rank]
            recv = self.scratch("receive", arrivals * width, rows.dtype)
            self._alltoall(send, [mine * w for w in widths], recv, [c * width for c in counts], tag)
            matrix, column = recv.reshape(arrivals, width), 0
            for offset, span in windows[self.peers.rank]:
                yield Piece(matrix, column, span.start, offset, span.size)
                column += span.size

    def _alltoall(
        self, send: Array, send_counts: Sequence[int], recv: Array, recv_counts: Sequence[int], tag: str
    ) -> None:
        if self.compression is None or send.dtype != np.float32:
            self.peers.alltoallv(send, send_counts, recv, recv_counts, tag)
            return
        copy = kernels.backend(send).copy
        encode, decode = (
            (copy.to_bfloat16, copy.from_bfloat16)
            if self.compression == "bf16"
            else (copy.to_float16, copy.from_float16)
        )
        packed = self.scratch("packed send", send.size, np.uint16)
        arrived = self.scratch("packed receive", recv.size, np.uint16)
        encode(send, packed)
        self.peers.alltoallv(packed, send_counts, arrived, recv_counts, tag)
        decode(arrived, recv)


def _window(spans: Sequence[Span], low: int, high: int) -> list[tuple[int, Span]]:
    """Return the parts of ``spans`` whose concatenated positions lie in ``low:high``, with those positions."""
    parts, position = [], 0
    for span in spans:
        start, stop = max(low, position), min(high, position + span.size)
        if start < stop:
            parts.append((start, Span(start, stop).shift(span.start - position)))
        position += span.size
    return parts


def gather_spans(
    peers: Communicator,
    send: Sequence[Array],
    target: Array,
    spans: Sequence[Sequence[Span]],
    scratch: Scratch = fresh,
) -> None:
    """Fill ``target`` over the spans of all peers with what each of them holds.

    Collective over ``peers``. Moves bounded pieces, so that it needs little memory besides ``target``.

    Parameters
    ----------
    peers : Communicator
        The ranks that exchange.
    send : sequence of 1-D arrays
        This rank's values, one array for each of its own spans; they may be views of ``target``.
    target : 1-D array
        Receives the values of every peer.
    spans : sequence over peers of sequences of Span
        Where in ``target`` each peer's values belong; the same on every rank.
    scratch : Scratch
        Where the buffers come from: at most ``2 * EXCHANGE_ELEMENTS`` elements.
    """
    own = spans[peers.rank]
    for span, values in zip(own, send, strict=True):
        place = target[span.start : span.stop]
        if span.size and not np.shares_memory(place[:1], values[:1]):
            place[:] = values
    if peers.size == 1:
        return
    step = max(1, EXCHANGE_ELEMENTS // peers.size)
    longest = max(sum(span.size for span in group) for group in spans)
    for low in range(0, longest, step):
        windows = [_window(group, low, low + step) for group in spans]
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

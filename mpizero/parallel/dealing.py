"""Bring the samples of a global batch to the ranks that compute their grains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.operations import meet
from mpizero.crc import crc32
from mpizero.errors import DataError
from mpizero.layout import Grains
from mpizero.layout.nodes import GROUPS
from mpizero.types import Array, Group


class Grain(NamedTuple):
    """The samples of one grain: in micro-batches, each with the global index of its first sample."""

    number: int
    micro_batches: tuple[tuple[Any, Any, int], ...]


@dataclass(frozen=True)
class GlobalBatch:
    """The grains of a global batch that one rank computes.

    Attributes
    ----------
    grains : dict of int to Grain
        By index.
    count : int
        Grains of the whole batch.
    samples : int
        Samples of the whole batch.
    """

    grains: dict[int, Grain]
    count: int
    samples: int


def is_array(value: Any) -> bool:
    """Tell whether a batch is an array with samples on its first axis. Not collective."""
    return hasattr(value, "shape") and value.ndim > 0


def _described(*arrays: Array) -> int:
    """Return a number that differs between arrays that cannot be joined."""
    text = " ".join(f"{array.dtype}{array.shape[1:]}" for array in arrays)
    return int.from_bytes(text.encode()[:256], "little") % (2**61 - 1)


def _meet(grid: ProcessGrid, x: Any, y: Any) -> Array:
    """Send the first message of a step: return the samples of every rank of the world, -1 where x and y differ.

    Collective over all ranks.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if not all make a step on a batch.
    DataError
        On all ranks, if the ranks of a replica have other samples, naming the first rank that differs from the first of
        its replica; if a rank's x and y differ in length, or ranks differ in type or shape, or there are no samples.
    """
    arrays, digests = is_array(x) and is_array(y), 0
    count = 1 if not arrays else len(x) if len(x) == len(y) else -1
    if grid.model.size > 1:
        digests = (_digest(x) << 32 | _digest(y)) - (1 << 63)
    table = meet(grid.world, (count, _described(x, y) if arrays else -1, digests))
    if grid.model.size > 1:
        _check_replicas(grid, table[:, 2])
    counts = table[:, 0]
    if (counts < 0).any() or (table[:, 1] != table[0, 1]).any() or counts.sum() == 0:
        _refuse(grid.world, x, y, counts)
    return counts


def _check_replicas(grid: ProcessGrid, digests: Array) -> None:
    """Check that the ranks of each replica have the same samples. Not collective: every rank has the same digests."""
    for rank in range(grid.world.size):
        first = grid.axes.group(rank, GROUPS["model"])[0]
        if digests[rank] != digests[first]:
            what = "x" if digests[rank] >> 32 != digests[first] >> 32 else "y"
            raise DataError(
                f"rank {rank} has another {what} than rank {first}: the ranks of one replica (they differ in "
                "pipeline, tensor and context only) must train on the same samples; give each replica's ranks the same "
                "batch, for example by mpizero.data.batches(..., group=model.batch_group)"
            )


def _digest(value: Any) -> int:
    array = np.asarray(value)
    data = array.tobytes() if array.dtype != object else repr(value).encode()
    return crc32(data, crc32(f"{array.dtype}{array.shape}".encode()))


def deal(
    grid: ProcessGrid,
    x: Any,
    y: Any,
    grain_size: Callable[[int], int],
    owners: Callable[[int], Sequence[int]],
    micro: int,
) -> GlobalBatch:
    """Exchange samples so that every rank has those of its grains.

    Collective over all ranks; the first message of a step. Rank r's samples follow rank r-1's in the global batch.
    Nothing travels when every rank already has what it needs.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; samples are dealt to those of its batch group.
    x, y : array with samples on the first axis, or any other object
        A batch that is not an array is one grain of one sample on its rank.
    grain_size : callable
        Samples of a grain, from the samples of the global batch.
    owners : callable
        The rank that computes each grain, from the number of grains.
    micro : int
        Micro-batches of a full grain.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if not all make a step.
    DataError
        On all ranks, if the batch is empty, or x and y differ in length, or ranks differ in type or shape, or the ranks
        of a replica have other samples.
    """
    comm = grid.batch
    counts = _meet(grid, x, y)[list(grid.axes.group(grid.world.rank, GROUPS["batch"]))].tolist()
    if not (is_array(x) and is_array(y)):
        number = list(owners(comm.size)).index(comm.rank)
        return GlobalBatch({number: Grain(number, ((x, y, number),))}, comm.size, comm.size)
    grains = Grains(sum(counts), grain_size(sum(counts)))
    transfer = _transfer(grains, tuple(counts), tuple(owners(grains.count)), comm.rank)
    x, y = transfer.exchange(comm, np.asarray(x)), transfer.exchange(comm, np.asarray(y))
    return GlobalBatch(transfer.cut(x, y, -(-grains.size // micro)), grains.count, grains.samples)


def in_contexts(batch: GlobalBatch, group: Group, *, waves: bool) -> GlobalBatch:
    """Cut a batch's sequences over a context group: each rank's places of a grain count as a grain of their own.

    Not collective. With ``waves`` the parts of a grain are neighbours, so that one wave has them; otherwise the parts
    of one rank are.
    """
    from mpizero.nn import cut_batch

    if group.size == 1:
        return batch
    grains = {}
    for grain in batch.grains.values():
        number = grain.number * group.size + group.rank if waves else group.rank * batch.count + grain.number
        parts = tuple((*cut_batch(x, y, group), first) for x, y, first in grain.micro_batches)
        grains[number] = Grain(number, parts)
    return GlobalBatch(grains, batch.count * group.size, batch.samples)


def _refuse(comm: Communicator, x: Any, y: Any, counts: Array) -> None:
    if not counts.any():
        raise DataError("the global batch has no samples on any rank")
    shown = [f"{type(v).__name__} {getattr(v, 'dtype', '')}{getattr(v, 'shape', '')}" for v in (x, y)]
    listed = "; ".join(
        f"rank {r}: x {a}, y {b}" for r, (a, b) in enumerate(comm.allgather_object(tuple(shown), "batch"))
    )
    raise DataError(
        f"x and y must have equally many samples, and the same type and sample shape on every rank, got {listed}"
    )


@lru_cache(maxsize=64)  # batches of the same sizes come again and again
def _transfer(grains: Grains, counts: tuple[int, ...], owners: tuple[int, ...], rank: int) -> _Transfer:
    return _Transfer(grains, counts, owners, rank)


class _Transfer:
    """Who sends which samples to whom, from integers that every rank knows."""

    def __init__(self, grains: Grains, counts: Sequence[int], owners: Sequence[int], rank: int) -> None:
        self.grains, self.rank = grains, rank
        self.starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.mine = [g for g in range(grains.count) if owners[g] == rank]
        self.in_place = True
        self.sends: list[list[slice]] = [[] for _ in counts]
        self.receives = [0] * len(counts)
        for g in range(grains.count):
            span = grains.span(g)
            for r in range(len(counts)):
                start, stop = max(span.start, self.starts[r]), min(span.stop, self.starts[r + 1])
                if start >= stop:
                    continue
                self.in_place &= owners[g] == r
                if r == rank:
                    self.sends[owners[g]].append(slice(start - self.starts[r], stop - self.starts[r]))
                if owners[g] == rank:
                    self.receives[r] += stop - start

    def exchange(self, comm: Communicator, array: Array) -> Array:
        if self.in_place:
            return np.ascontiguousarray(array)  # as after an exchange: BLAS may round other strides differently
        per_sample = int(np.prod(array.shape[1:], dtype=np.int64))
        parts = [array[part] for group in self.sends for part in group]
        send = np.ascontiguousarray(np.concatenate([array[:0], *parts])).reshape(-1)
        send_counts = [sum(s.stop - s.start for s in group) * per_sample for group in self.sends]
        recv_counts = [count * per_sample for count in self.receives]
        recv = np.empty(sum(recv_counts), array.dtype)
        comm.alltoallv(
            send.view(np.uint8),
            [n * array.itemsize for n in send_counts],
            recv.view(np.uint8),
            [n * array.itemsize for n in recv_counts],
            "samples",
        )
        return recv.reshape(sum(self.receives), *array.shape[1:])

    def cut(self, x: Array, y: Array, micro: int) -> dict[int, Grain]:
        """Cut this rank's samples into grains, and those into micro-batches of ``micro`` samples."""
        dealt, position = {}, 0
        for g in self.mine:
            span = self.grains.span(g)
            parts = []
            for start in range(span.start, span.stop, micro):
                size = min(micro, span.stop - start)
                parts.append((x[position : position + size], y[position : position + size], start))
                position += size
            dealt[g] = Grain(g, tuple(parts))
        return dealt

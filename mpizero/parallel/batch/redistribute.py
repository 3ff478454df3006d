"""Send the samples of a global batch to the ranks that compute their grains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.pytree import SampleTree
from mpizero._util.text import crc32, notice, stacklevel
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import agree_on_call, all_ranks
from mpizero.errors import DataError
from mpizero.layout import Grains
from mpizero.layout.batch import grain_part_number
from mpizero.layout.mesh import GROUPS
from mpizero.parallel.batch.node_claims import NodeClaims
from mpizero.types import Array


class Grain(NamedTuple):
    """Hold the samples of one grain as micro-batches ``(x, y, index of the first sample in the global batch)``.

    ``number`` is the grain's index among the grains of the global batch. ``stop`` is the index in the global batch
    after the grain's last sample.
    """

    number: int
    micro_batches: tuple[tuple[Any, Any, int], ...]
    stop: int

    def place(self, micro: int) -> tuple[int, int]:
        """Return the index in the global batch of a micro-batch's first sample, and its number of samples.

        ``micro`` is the index of the micro-batch in the grain. Not collective.
        """
        first, after = self.micro_batches[micro][2], micro + 1
        return first, (self.micro_batches[after][2] if after < len(self.micro_batches) else self.stop) - first


@dataclass(frozen=True)
class GlobalBatch:
    """Hold one rank's grains of a global batch.

    Attributes
    ----------
    grains : dict of int to Grain
        The grains that this rank computes, by their number in the global batch.
    count : int
        Number of grains in the global batch.
    samples : int
        Number of samples in the global batch.
    claimed : int
        If ranks claim grains while they compute, the largest number of grains of a node, whose ranks all have them in
        ``grains``; otherwise 0.
    """

    grains: dict[int, Grain]
    count: int
    samples: int
    claimed: int = 0


class Asked(NamedTuple):
    """Hold the arguments besides the batch of a training step; every rank must give the same.

    ``epoch`` is the number of the epoch; ``gather`` is the argument of the same name of ``compute_gradients``.
    """

    epoch: int = 0
    gather: bool = False


NOTHING_MORE = Asked()
#: The error of a batch without samples.
NO_SAMPLES = "the global batch has no samples on any rank"


class _RankBatch:
    """Hold the samples ``x`` and ``y`` that this rank gives to a global batch.

    If they are invalid, the error's text is kept in ``problem``, and ``count``, the number of samples, is -1: all ranks
    then raise the error together when the batches are exchanged.
    """

    def __init__(self, x: Any, y: Any, asked: Asked) -> None:
        self.asked, self.problem, self.count = asked, "", 1
        self.tree = SampleTree.nothing()
        try:
            self.asked = asked._replace(epoch=require("epoch", asked.epoch, whole(), DataError))
            self.tree = SampleTree.of(x=x, y=y)
            self.count = self.tree.count()
        except DataError as error:
            self.problem, self.count = str(error), -1

    @property
    def number(self) -> int:
        """A hash of the arguments and of the batch's structure, types and sample shapes; must be equal on all ranks."""
        text = f"{self.asked.epoch} {self.asked.gather} {self.tree.form or 'not cut'}"
        return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")

    def digests(self) -> dict[str, int]:
        """Return the checksum of every array, by the array's path, such as ``x['mask']``. Not collective."""
        return dict(zip(self.tree.paths, map(_digest, self.tree.leaves), strict=True))

    def digest(self) -> int:
        """Return one number that combines the checksums of x and y. Not collective."""
        both = {"x": 0, "y": 0}
        for path, checksum in self.digests().items():
            both[path[0]] = crc32(checksum.to_bytes(4, "little"), both[path[0]])
        return (both["x"] << 32 | both["y"]) - (1 << 63)


def _digest(array: Array) -> int:
    return crc32(array.tobytes(), crc32(f"{array.dtype}{array.shape}".encode()))


def _meet(grid: ProcessGrid, own: _RankBatch, *, first: bool) -> Array:
    """Exchange the first message of a step, check the batch, and return each rank's number of samples, by world rank.

    Collective over all ranks. In the ``first`` step of a model, rank 0 says which replicas have the same samples.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if the ranks have called different operations.
    DataError
        On all ranks, if the ranks of a replica have different samples, if the arrays of one rank differ in length, if
        the batches of two ranks differ in structure, type or sample shape, if no rank has samples, or if the model is
        split and the batch cannot be cut into samples.
    """
    replicas = grid.model.size > 1
    table = agree_on_call(grid.world, (own.count, own.number, own.digest() if replicas or first else 0))
    counts = table[:, 0]
    sound, alike = (counts >= 0).all(), (table[:, 1] == table[0, 1]).all()
    if sound and replicas:
        _check_replicas(grid, own, table[:, 2])
    if not (sound and alike) or (replicas and own.tree.uncut):
        _refuse(grid.world, own)
    if not counts.any():
        raise DataError("the global batch has no samples on any rank")
    if first and grid.world.rank == 0:
        _tell_copies(grid, counts, table[:, 2], own.tree.uncut)
    return counts


def _tell_copies(grid: ProcessGrid, counts: Array, digests: Array, uncut: str) -> None:
    """Say if two ranks of different replicas have the same samples, of which ``digests`` are the checksums."""
    seen: dict[int, int] = {}
    for rank in range(0 if uncut else len(counts)):
        same = seen.setdefault(int(digests[rank]), rank)
        if counts[rank] and grid.axes.coordinates(same).data != grid.axes.coordinates(rank).data:
            notice(
                f"ranks {same} and {rank} give the same {counts[rank]} samples, and the global batch has them twice: "
                "each rank gives its own part of a batch, which mpizero.data.batches(source, model, ...) cuts; with a "
                "DataLoader of PyTorch, let it have DistributedSampler(dataset, world_size, rank)"
            )
            return


def _check_replicas(grid: ProcessGrid, own: _RankBatch, digests: Array) -> None:
    """Raise ``DataError`` if ranks of one replica have different samples. Collective over all ranks if it raises.

    ``digests`` are the checksums of the samples of all ranks, by world rank.
    """
    axes = grid.axes
    firsts = np.arange(axes.size) // axes.strides["data"] % axes.data * axes.strides["data"]  # of each rank's replica
    if (wrong := np.flatnonzero(digests != digests[firsts])).size:
        rank, first = int(wrong[0]), int(firsts[wrong[0]])
        told = grid.world.allgather_object(own.digests(), "batch")
        what = next((path for path in told[rank] if told[rank][path] != told[first].get(path)), "batch")
        raise DataError(
            f"rank {rank} has another {what} than rank {first}: the ranks of one replica (they differ in "
            "pipeline, tensor and context only) must train on the same samples; give each replica's ranks the same "
            "batch, for example by mpizero.data.batches(source, model, ...)"
        )


def _refuse(comm: Communicator, own: _RankBatch) -> NoReturn:
    """Raise ``DataError`` that says whose batch is invalid or how two ranks' batches differ. Collective over all ranks.

    It is called on every rank if the batch of one rank is invalid, or if the batches of two ranks differ.
    """
    tree = own.tree
    arrays = dict(zip(tree.paths, ((str(leaf.dtype), leaf.shape[1:]) for leaf in tree.leaves), strict=True))
    ranks = comm.allgather_object((own.problem, own.asked, tree.uncut, arrays, tree.form), "batch")
    _, asked, uncut, expected, form = ranks[0]
    for rank, (problem, *_) in enumerate(ranks):
        if problem:
            raise DataError(f"rank {rank}: {problem}")
    for rank, (_, told, held, found, other) in enumerate(ranks):
        if told != asked:
            raise DataError(f"rank 0 is asked for {_listed(asked, told)}, rank {rank} for {_listed(told, asked)}")
        if bool(held) != bool(uncut):
            raise DataError(
                f"rank {rank if held else 0}: {held or uncut}, so its batch cannot be cut into samples as that of rank "
                f"{0 if held else rank} can; {_SAME}"
            )
        for path in (path for path in {**expected, **found} if expected.get(path) != found.get(path)):
            here, there = (_shown(arrays.get(path)) for arrays in (expected, found))
            raise DataError(f"{path} is {here} on rank 0 and {there} on rank {rank}; {_SAME}")
        if other != form:
            raise DataError(f"the batch is {form:.300} on rank 0 and {other:.300} on rank {rank}; {_SAME}")
    raise DataError(
        f"{uncut}: ranks that share a batch (pipeline, tensor, context) can compare and cut arrays only; give arrays "
        "with samples on the first axis, alone or in tuples, lists and dictionaries"
    )


_SAME = (
    "every rank gives the same structure, types and sample shapes, in the same order, also where it has no samples: "
    "empty arrays then, x[:0]"
)


def _listed(asked: Asked, other: Asked) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in asked._asdict().items() if v != getattr(other, k))


def _shown(array: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if array is None else f"{array[0]} with samples of shape {array[1]}"


def redistribute(
    grid: ProcessGrid,
    x: Any,
    y: Any,
    grain_size: Callable[[int, SampleTree], int],
    owners: Callable[[int], Sequence[int]],
    micro: int,
    *,
    asked: Asked = NOTHING_MORE,
    claims: NodeClaims | None = None,
    first: bool = False,
) -> GlobalBatch:
    """Exchange samples so that every rank gets the samples of the grains it computes, and return its grains.

    Collective over all ranks; this sends the first message of a step. The global batch is the samples of all ranks of
    the batch group, in the order of the ranks. No samples are sent if every rank already has all samples of its grains.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; samples are exchanged in its batch group.
    x, y : array with samples on the first axis, a tree of such arrays, or any other object
        The samples of this rank. An object that cannot be cut into samples counts as one grain of one sample; rank 0
        warns about it.
    grain_size : callable
        Takes the number of samples in the global batch, and this rank's samples, of which only shapes and types count.
    owners : callable
        Takes the number of grains and returns, for each grain, the rank of the batch group that computes it.
    micro : int
        Number of micro-batches in a full grain.
    asked : Asked
        The arguments of the step besides the batch; they are compared between all ranks.
    claims : NodeClaims or None
        If given, every rank gets the samples of all grains of its node, to claim them, unless they cannot be cut.
    first : bool
        Whether it is a model's first batch, of which rank 0 says if two replicas have the same.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if the ranks have called different operations.
    DataError
        On all ranks, as :func:`_meet` says.
    """
    comm, own = grid.batch, _RankBatch(x, y, asked)
    counts = _meet(grid, own, first=first)[list(grid.axes.group(grid.world.rank, GROUPS["batch"]))].tolist()
    if own.tree.uncut:
        with all_ranks(grid.world):  # a warning may be an error
            if grid.world.rank == 0:
                _warn(own.tree.uncut)
        number = list(owners(comm.size)).index(comm.rank)
        return GlobalBatch({number: Grain(number, ((x, y, number),), number + 1)}, comm.size, comm.size)
    grains = Grains(sum(counts), grain_size(sum(counts), own.tree))
    transfer = _transfer(grains, tuple(counts), tuple(owners(grains.count)), comm.rank)
    leaves = tuple(transfer.exchange(comm, leaf) for leaf in own.tree.leaves)
    held: Sequence[int] = transfer.mine
    if claims is not None:
        held, leaves = claims.block(grains.count), claims.begin(leaves, grains)
    cut = transfer.cut(replace(own.tree, leaves=leaves), held, micro)
    return GlobalBatch(cut, grains.count, grains.samples, claims.most(grains.count) if claims is not None else 0)


def _warn(uncut: str) -> None:
    """Warn that results depend on the number of ranks; ``uncut`` says why the batch cannot be cut into samples.

    The warning names the line of the user's code that called the library. Not collective.
    """
    warnings.warn(
        f"{uncut}: a batch that holds it cannot be cut into samples, so all that a rank gives is one grain, "
        "micro_batch has no effect, and the result depends on the number of ranks; give arrays with samples on the "
        "first axis, alone or in tuples, lists and dictionaries",
        stacklevel=stacklevel(),
    )


def in_contexts(batch: GlobalBatch, grid: ProcessGrid, cut: Callable[[Any, Any], tuple[Any, Any]]) -> GlobalBatch:
    """Cut the sequences of a batch over a context group, and return the batch with this rank's positions only.

    Not collective. ``cut`` cuts the inputs and targets of a micro-batch. Each part of a grain that one rank of the
    group keeps counts as a grain in the returned batch; :func:`grain_part_number` returns its number.
    """
    rank, size = grid.context.rank, grid.context.size
    grains = {}
    for grain in batch.grains.values():
        number = grain_part_number(grain.number, rank, size)
        parts = tuple((*cut(x, y), first) for x, y, first in grain.micro_batches)
        grains[number] = Grain(number, parts, grain.stop)
    return GlobalBatch(grains, batch.count * size, batch.samples)


class _Transfer:
    """Plan which samples this rank sends to each rank and receives from each, from integers that all ranks know."""

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

    def cut(self, tree: SampleTree, held: Sequence[int], accumulate: int) -> dict[int, Grain]:
        """Cut samples into grains of ``accumulate`` micro-batches; return the grains by their number.

        ``tree`` holds the samples of the grains ``held``, in their order. A short grain may have fewer micro-batches.
        """
        found, position = {}, 0
        for g in held:
            parts = []
            for samples in self.grains.micro_batches(g, accumulate):
                size = samples.stop - samples.start
                parts.append((*tree.cut(slice(position, position + size)), samples.start))
                position += size
            found[g] = Grain(g, tuple(parts), self.grains.span(g).stop)
        return found


_transfer = lru_cache(maxsize=64)(_Transfer)  # batches of the same sizes come again and again

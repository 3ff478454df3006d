"""Cut global batches into grains, bring samples to the ranks that compute them, and agree on losses and weights.

:func:`redistribute` begins a step: it checks the batches of all ranks, cuts them into grains and sends samples to the
ranks that compute them. A grain is a fixed slice of the global batch (docs/concepts.md). With a
:class:`DynamicScheduler` all ranks of a node can read the samples of the node's grains, and a rank that is free takes
the next grains. After the backward passes :class:`GrainScalars` exchanges the loss, weight and finiteness of every
grain, and compares the learning rates, in one small allgather.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpizero import kernels
from mpizero._util.checks import require, whole
from mpizero._util.numbers import crc32
from mpizero._util.pytree import SampleTree
from mpizero._util.text import notice, stacklevel
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.agreement import agree_on_call, all_ranks
from mpizero.comm.model_group import BlockLocks
from mpizero.errors import CollectiveError, ConfigError, DataError, PeerFailure, StateError
from mpizero.guard.call_trace import MODULUS
from mpizero.guard.reports import by_ranks
from mpizero.layout import Grains
from mpizero.layout.batch import contiguous_parts, grain_part_number, node_blocks
from mpizero.layout.fields import Cut
from mpizero.layout.flat import FlatLayout, flat_names, joined
from mpizero.layout.sum_tree import dynamic_parts, rows_of_part
from mpizero.sharding.integer_arrays import IntegerState
from mpizero.sharding.params import COMPUTING, Memory, on_all_ranks, paged, refused
from mpizero.sharding.step_report import NonFinite
from mpizero.types import Array, as_reals


class Grain(NamedTuple):
    """Hold the samples of one grain as micro-batches ``(x, y, index of the first sample in the global batch)``.

    ``number`` is the grain's index among the grains of the global batch. ``stop`` is the index in the global batch
    after the grain's last sample.
    """

    number: int
    micro_batches: tuple[tuple[Any, Any, int], ...]
    stop: int

    def sample_range(self, micro: int) -> tuple[int, int]:
        """Return the index of a micro-batch's first sample in the global batch, and the micro-batch's sample count.

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
    dynamic : int
        With dynamic scheduling, the largest number of grains that a node has; ``grains`` then holds all grains of this
        rank's node. Otherwise 0.
    """

    grains: dict[int, Grain]
    count: int
    samples: int
    dynamic: int = 0


class StepArguments(NamedTuple):
    """Hold the arguments of a training step besides the batch; they must be equal on all ranks.

    ``epoch`` is the number of the epoch; ``gather`` is the argument ``gather`` of ``compute_gradients``.
    """

    epoch: int = 0
    gather: bool = False


DEFAULT_ARGUMENTS = StepArguments()
#: The error of a batch without samples.
NO_SAMPLES = "the global batch has no samples on any rank"


def redistribute(
    grid: ProcessGrid,
    x: Any,
    y: Any,
    grain_size: Callable[[int, SampleTree], int],
    owners: Callable[[int], tuple[int, ...]],
    micro: int,
    *,
    arguments: StepArguments = DEFAULT_ARGUMENTS,
    scheduler: DynamicScheduler | None = None,
    first: bool = False,
    check_parts: Callable[[SampleTree], None] | None = None,
    axes: int = 0,
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
        Takes the number of samples in the global batch and this rank's samples, of which it reads only shapes and
        types; returns the number of samples in a grain.
    owners : callable
        Takes the number of grains and returns, for each grain, the rank of the batch group that computes it.
    micro : int
        Number of micro-batches in a full grain.
    arguments : StepArguments
        The arguments of the step besides the batch; they are compared between all ranks.
    scheduler : DynamicScheduler or None
        Assigns grains while ranks compute: every rank then gets the samples of all grains of its node. It is not used
        for a batch that cannot be cut into samples. None: ``owners`` assigns all grains.
    first : bool
        Whether it is the model's first batch; rank 0 then prints a notice if two replicas have the same samples.
    check_parts : callable or None
        Takes this rank's samples, and compares them with those of the other ranks of its domain; None without a domain.
    axes : int
        Number of spatial axes that a domain cuts: each rank gives its part of every sample. 0 without a domain.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if the ranks have called different operations.
    DataError
        On all ranks, in the cases that :func:`_exchange_header` and :func:`check_slabs` list.
    """
    comm, part = grid.batch, _RankBatch(x, y, arguments, axes)
    table = _exchange_header(grid, part, first=first)
    counts = tuple(table[rank] for rank in grid.batch_ranks)
    if check_parts is not None:
        check_parts(part.tree)
    if part.tree.uncut:
        with all_ranks(grid.world):  # a warning may be an error
            if grid.world.rank == 0:
                _warn(part.tree.uncut)
        number = list(owners(comm.size)).index(comm.rank)
        return GlobalBatch({number: Grain(number, ((x, y, number),), number + 1)}, comm.size, comm.size)
    grains = Grains(sum(counts), grain_size(sum(counts), part.tree))
    transfer = _transfer(grains, counts, owners(grains.count), comm.rank)
    leaves: Sequence[Array] = [transfer.exchange(comm, leaf) for leaf in part.tree.leaves]
    numbers: Sequence[int] = transfer.local_grains
    if scheduler is not None:
        numbers, leaves = scheduler.block(grains.count), scheduler.begin(leaves, grains)
    local = transfer.cut(part.tree, leaves, numbers, micro)
    return GlobalBatch(
        local, grains.count, grains.samples, scheduler.most(grains.count) if scheduler is not None else 0
    )


_NO_SAMPLES = SampleTree((), (), "", "", lambda leaves: ())


class _RankBatch:
    """Hold the samples ``x`` and ``y`` that this rank gives to a global batch.

    ``count`` is the number of samples. If the arguments are invalid, or the floating-point mode of this thread was
    changed, ``problem`` is the error and ``count`` is -1: all ranks then raise the error in :func:`_exchange_header`.
    """

    def __init__(self, x: Any, y: Any, arguments: StepArguments, axes: int = 0) -> None:
        self.arguments, self.count, self.axes = arguments, 1, axes
        self.problem: DataError | StateError | None = None
        self.tree = _NO_SAMPLES
        try:
            if type(arguments.epoch) is not int or arguments.epoch < 0:
                self.arguments = arguments._replace(epoch=require("epoch", arguments.epoch, whole(), DataError))
            self.tree = SampleTree.of(x=x, y=y)
            self.count = self.tree.count()
            _require_ieee_mode()
        except (DataError, StateError) as error:
            self.problem, self.count = error, -1

    @property
    def number(self) -> int:
        """A hash of the arguments and of the batch's structure, types and sample shapes; must be equal on all ranks."""
        form = self.tree.form or "not cut"
        if self.axes:  # the extents of parts of fields differ; check_slabs compares them
            form = " ".join(f"{path} {leaf.dtype} {_without_space(leaf, self.axes)}" for path, leaf in self.tree.named)
        return _hash(f"{self.arguments.epoch} {self.arguments.gather} {form}")

    def digests(self) -> dict[str, int]:
        """Return the checksum of every array, by the array's path, such as ``x['mask']``. Not collective."""
        return dict(zip(self.tree.paths, map(_digest, self.tree.leaves), strict=True))

    def digest(self) -> int:
        """Return one number that combines the checksums of x and y; 0 if all arrays are empty. Not collective."""
        if not any(leaf.size for leaf in self.tree.leaves):
            return 0
        both = {"x": 0, "y": 0}
        for path, checksum in self.digests().items():
            both[path[0]] = crc32(checksum.to_bytes(4, "little"), both[path[0]])
        return (both["x"] << 32 | both["y"]) - (1 << 63)


@lru_cache(maxsize=256)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _without_space(leaf: Array, axes: int) -> tuple[int, ...]:
    """Return the shape of one sample of an array; for a field, ``-axes`` in place of the extents of its spatial axes.

    An array is a field if a sample of it has at least ``axes`` axes; the first ``axes`` of them are the spatial axes.
    The ranks of a domain have parts of a field with different extents, but get equal results.
    """
    shape = leaf.shape[1:]
    return (-axes, *shape[axes:]) if len(shape) >= axes else shape


def check_slabs(
    comm: Communicator, domains: Sequence[Sequence[int]], tree: SampleTree, cut: Cut, known: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the extents of all fields in the samples, one field after the other; each rank gives its part of each.

    Collective. ``domains`` are the ranks of each domain group. An array is a field if a sample of it has at least as
    many axes as ``cut`` cuts. If two ranks of a domain give the same array, which is not constant, they have not cut
    the field along each axis. This is an error, unless the parts of all ranks make up a field with the extents
    ``known``, the model's ``sample_shape``.

    Raises
    ------
    DataError
        On all ranks of ``comm``, unless each gives its part of the same samples.
    """
    axes = len(cut.parts)
    fields = {path: leaf for path, leaf in tree.named if leaf.ndim > axes}
    mine = [(_described_part(leaf), *leaf.shape[: 1 + axes]) for leaf in fields.values()]
    every = np.empty((comm.size, len(fields), 2 + axes), np.int64)
    comm.allgather(np.array(mine, np.int64).reshape(-1), every.reshape(-1), "slabs")
    found: tuple[int, ...] = ()
    for (number, path), (group, ranks) in product(enumerate(fields), enumerate(domains)):
        given = every[list(ranks), number].tolist()
        digests, counts, shapes = zip(*((digest, count, tuple(shape)) for digest, count, *shape in given), strict=True)
        parts = " x ".join(map(str, cut.parts))
        if wrong := [rank for rank, count in zip(ranks, counts, strict=True) if count != counts[0]]:
            raise DataError(
                f"{path} has {counts[0]} samples on rank {ranks[0]} and {counts[ranks.index(wrong[0])]} on rank "
                f"{wrong[0]}: the ranks of a domain ({parts}) give parts of the same samples"
            )
        extents, misfits = _field_of(cut, shapes)
        firsts = {digest: ranks[digests.index(digest)] for digest in digests}
        whole_on_all = cut.size > 1 and set(shapes) == {tuple(known)[:axes]}  # also where they are constant
        copies = [
            (firsts[d], rank)
            for rank, d in zip(ranks, digests, strict=True)
            if firsts[d] != rank and (d != -1 or whole_on_all)
        ]
        if copies and extents != tuple(known)[: len(extents)] and not 0 < 2 * len(misfits) < cut.size:
            where = "all ranks" if len(firsts) == 1 else f"ranks {copies[0][0]} and {copies[0][1]}"
            raise DataError(
                f"{path} is the same array, of {shapes[0]} positions, on {where} of a domain ({parts}): each rank "
                f"gives its part of the field, cut along each axis, {path}[:, *mesh.slab(shape)] (if a field of "
                f"{extents} positions repeats itself so, tell the model its extents, its attribute sample_shape)"
            )
        if group == 0:
            whole = extents
            found += whole
        if misfits or extents != whole:
            at = misfits[0] if misfits else 0
            box = cut.box(whole, at)
            raise DataError(
                f"{path} has {shapes[at]} positions on rank {ranks[at]}, which is not its part of the field of {whole} "
                f"positions that other ranks have parts of: that is [{_written(box)}] of a domain of {parts}; "
                f"give {path}[:, *mesh.slab({whole})] of the whole field"
            )
    return found


def _described_part(leaf: Array) -> int:
    """Return a checksum of an array, or -1 if its elements are all equal: then two parts of a field may be equal."""
    return _digest(leaf) if leaf.size and leaf.min() != leaf.max() else -1


def _field_of(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[int]]:
    """Return the extents of the field to which most of ``shapes`` belong, and the ranks whose shapes do not belong.

    ``shapes`` are the shapes of the parts that the ranks of a domain have of a field; ``cut`` says how it is cut.
    """
    places = [cut.coordinates(rank) for rank in range(cut.size)]
    best: tuple[tuple[int, ...], list[int]] = ((), list(range(cut.size)))
    for here in places:
        lines = [
            [r for r, at in enumerate(places) if at[:axis] + at[axis + 1 :] == here[:axis] + here[axis + 1 :]]
            for axis in range(len(here))
        ]
        extents = tuple(sum(shapes[rank][axis] for rank in line) for axis, line in enumerate(lines))
        boxes = (cut.box(extents, rank) for rank in range(cut.size))
        sizes = [tuple(part.stop - part.start for part in box) for box in boxes]
        misfits = [rank for rank, size in enumerate(sizes) if size != shapes[rank]]
        if not best[0] or len(misfits) < len(best[1]):
            best = extents, misfits
    return best


def _written(box: Sequence[slice]) -> str:
    return ", ".join(f"{part.start}:{part.stop}" for part in box)


def _digest(array: Array) -> int:
    return crc32(array.tobytes(), crc32(f"{array.dtype}{array.shape}".encode()))


def _require_ieee_mode() -> None:
    """Raise :class:`StateError` if a library has changed the floating-point mode of this thread."""
    if wrong := changed_float_mode():
        raise StateError(
            f"the floating-point mode of this thread was changed: it {wrong}, so bits would depend on the rank and on "
            "the CPU. torch.set_flush_denormal(True), fesetround and, while they are loaded, libraries compiled with "
            "-ffast-math change it: undo it before the step (torch.set_flush_denormal(False)), or compile without"
        )


def changed_float_mode(one: float = 1.0, tiny: float = 2.0**-1022, tiniest: float = 2.0**-1074) -> str:
    """Say in which way this thread's arithmetic is not IEEE 754's default; "" if it is. Not collective.

    The mode (MXCSR on x86-64, FPCR on AArch64) belongs to the thread; any library may change it. It is inferred from
    the results of a few operations, which takes a microsecond. The operands are arguments only so that Python does not
    compute the results when it compiles this function.
    """
    if tiniest == 0.0:
        return "takes subnormal numbers for 0"
    if tiny / 2.0 == 0.0:
        return "replaces subnormal results by 0"
    above, below = one + tiniest, -one - tiniest
    if above > one or below < -one:
        return "rounds upward" if below == -one else "rounds downward" if above == one else "rounds away from 0"
    return "" if one + 2.0**-53 * 1.5 > one else "rounds toward 0"


def _exchange_header(grid: ProcessGrid, local: _RankBatch, *, first: bool) -> list[int]:
    """Exchange the first message of a step, check the batch, and return each rank's number of samples, by world rank.

    Collective over all ranks. In the ``first`` step of a model, rank 0 prints a notice if two replicas have the same
    samples.

    Raises
    ------
    CollectiveMismatch
        On all ranks, if the ranks have called different operations.
    DataError
        On all ranks, if the ranks of a replica have different samples, if the arrays of one rank differ in length, if
        the batches of two ranks differ in structure, type or sample shape, if no rank has samples, or if the model is
        split and the batch cannot be cut into samples.
    StateError
        On all ranks, if the floating-point mode of one rank was changed.
    """
    replicas = grid.model.size > 1
    table = agree_on_call(grid.world, (local.count, local.number, local.digest() if replicas or first else 0))
    counts: list[int] = table[:, 0].tolist()
    numbers: list[int] = table[:, 1].tolist()
    valid, alike = min(counts) >= 0, numbers.count(numbers[0]) == len(numbers)
    if valid and replicas:
        _check_replicas(grid, local, table[:, 2])
    if not (valid and alike) or (replicas and local.tree.uncut):
        _refuse(grid.world, local)
    if not any(counts):
        raise DataError(NO_SAMPLES)
    if first and grid.world.rank == 0:
        _warn_copies(grid, counts, table[:, 2], local.tree.uncut)
    return counts


def _warn_copies(grid: ProcessGrid, counts: Sequence[int], digests: Array, uncut: str) -> None:
    """Print a notice if two ranks of different replicas have the same samples.

    ``counts`` and ``digests`` are each rank's number of samples and their checksum. ``uncut`` is not "" if the batch
    cannot be cut into samples; then nothing is printed.
    """
    ranks: dict[int, int] = {}
    for rank in range(0 if uncut else len(counts)):
        same = ranks.setdefault(int(digests[rank]), rank)
        if counts[rank] and digests[rank] and grid.axes.coordinates(same).data != grid.axes.coordinates(rank).data:
            notice(
                f"ranks {same} and {rank} give the same {counts[rank]} samples, and the global batch has them twice: "
                "each rank gives its own part of a batch, which mz.data.batches(source, model, ...) cuts; a Dataset of "
                "PyTorch becomes a source by mz.data.DatasetSource(dataset)"
            )
            return


def _check_replicas(grid: ProcessGrid, local: _RankBatch, digests: Array) -> None:
    """Raise ``DataError`` if ranks of one replica have different samples. Collective over all ranks if it raises.

    ``digests`` are the checksums of the samples of all ranks, by world rank.
    """
    axes = grid.axes
    firsts = np.arange(axes.size) // axes.strides["data"] % axes.data * axes.strides["data"]  # of each rank's replica
    if local.axes:  # ranks that share space have parts of the same samples
        firsts += np.arange(axes.size) // axes.strides["context"] % axes.context * axes.strides["context"]
    if (wrong := np.flatnonzero(digests != digests[firsts])).size:
        rank, first = int(wrong[0]), int(firsts[wrong[0]])
        by_path = grid.world.allgather_object(local.digests(), "batch")
        what = next((path for path in by_path[rank] if by_path[rank][path] != by_path[first].get(path)), "batch")
        raise DataError(
            f"rank {rank} has another {what} than rank {first}: the ranks of one replica (they differ in "
            "pipeline, tensor and context only) must train on the same samples; give each replica's ranks the same "
            "batch, for example by mpizero.data.batches(source, model, ...)"
        )


def _refuse(comm: Communicator, local: _RankBatch) -> NoReturn:
    """Raise an error that says whose batch is invalid or how two ranks' batches differ. Collective over all ranks.

    Every rank calls it if the batch of one rank is invalid, if the batches of two ranks differ, or if the model is
    split and the batch cannot be cut into samples.
    """
    tree = local.tree
    arrays = dict(zip(tree.paths, ((str(leaf.dtype), leaf.shape[1:]) for leaf in tree.leaves), strict=True))
    ranks = comm.allgather_object((local.problem, local.arguments, tree.uncut, arrays, tree.form), "batch")
    _, step, uncut, expected, form = ranks[0]
    for rank, (problem, *_) in enumerate(ranks):
        if problem:
            raise type(problem)(f"rank {rank}: {problem}")
    for rank, (_, others, why, actual, other) in enumerate(ranks):
        if others != step:
            raise DataError(f"rank 0 is asked for {_listed(step, others)}, rank {rank} for {_listed(others, step)}")
        if bool(why) != bool(uncut):
            raise DataError(
                f"rank {rank if why else 0}: {why or uncut}, so its batch cannot be cut into samples as that of rank "
                f"{0 if why else rank} can; {_SAME}"
            )
        for path in (path for path in {**expected, **actual} if expected.get(path) != actual.get(path)):
            on_first, on_other = (_described(arrays.get(path)) for arrays in (expected, actual))
            raise DataError(f"{path} is {on_first} on rank 0 and {on_other} on rank {rank}; {_SAME}")
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


def _listed(arguments: StepArguments, other: StepArguments) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in arguments._asdict().items() if v != getattr(other, k))


def _described(array: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if array is None else f"{array[0]} with samples of shape {array[1]}"


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

    Not collective. ``cut`` cuts the inputs and targets of a micro-batch. In the returned batch, the part of a grain
    that this rank computes is a grain of its own; :func:`grain_part_number` returns its number.
    """
    rank, size = grid.context.rank, grid.context.size
    grains = {}
    for grain in batch.grains.values():
        number = grain_part_number(grain.number, rank, size)
        parts = tuple((*cut(x, y), first) for x, y, first in grain.micro_batches)
        grains[number] = Grain(number, parts, grain.stop)
    return GlobalBatch(grains, batch.count * size, batch.samples)


class _Transfer:
    """Plan which samples this rank sends to each rank, and how many it receives from each.

    ``counts`` is every rank's number of samples, ``owners`` the rank that computes each grain, and ``rank`` this rank's
    number. All ranks know these integers, so planning sends no messages.
    """

    def __init__(self, grains: Grains, counts: Sequence[int], owners: Sequence[int], rank: int) -> None:
        self.grains, self.rank = grains, rank
        self.starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.local_grains = [g for g in range(grains.count) if owners[g] == rank]
        self.in_place = True
        self.sends: list[list[slice]] = [[] for _ in counts]
        self.receives = [0] * len(counts)
        self._cuts: dict[tuple[int, ...], list[tuple[int, int, list[tuple[slice, int]]]]] = {}
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
            return np.ascontiguousarray(array)  # as after an exchange: BLAS may round differently with other strides
        nbytes = prod(array.shape[1:]) * array.itemsize  # of a sample
        parts = [array[part] for group in self.sends for part in group]
        send = np.ascontiguousarray(np.concatenate([array[:0], *parts])).reshape(-1)
        sent = [sum(s.stop - s.start for s in group) * nbytes for group in self.sends]
        received = [count * nbytes for count in self.receives]
        result = np.empty((sum(self.receives), *array.shape[1:]), array.dtype)
        comm.alltoallv(send.view(np.uint8), sent, result.reshape(-1).view(np.uint8), received, "samples")
        return result

    def cut(
        self, tree: SampleTree, leaves: Sequence[Array], numbers: Sequence[int], accumulate: int
    ) -> dict[int, Grain]:
        """Cut samples into grains of ``accumulate`` micro-batches; return the grains by their number.

        ``leaves`` are the arrays of the batch, with the samples of the grains ``numbers`` in this order; ``tree`` says
        how ``x`` and ``y`` are built from these arrays. A short grain may have fewer micro-batches.
        """
        key = (*numbers, accumulate)
        if (cuts := self._cuts.get(key)) is None:  # steps repeat the same cuts
            cuts, position = [], 0
            for g in numbers:
                spans = self.grains.micro_batches(g, accumulate)
                base = position - spans[0].start
                cuts.append((g, spans[-1].stop, [(slice(base + s.start, base + s.stop), s.start) for s in spans]))
                position = base + spans[-1].stop
            self._cuts[key] = cuts
        cut_grains = {}
        for g, stop, parts in cuts:
            samples = [(*tree.build(iter([leaf[part] for leaf in leaves])), first) for part, first in parts]
            cut_grains[g] = Grain(g, tuple(samples), stop)
        return cut_grains


_transfer = lru_cache(maxsize=64)(_Transfer)  # steps repeat the same sizes
#: Kind of the node's memory for samples and the scheduler's table, in counts of bytes.
KIND = "samples"
_ALIGNMENT = 64


def starts_of(parts: int, sizes: Sequence[int]) -> list[int]:
    """Return the byte offsets of arrays of ``sizes`` bytes after the table of :class:`DynamicScheduler`, and their end.

    The table says which ranks have taken which parts of the node's grains. It consists of int64: the number of parts
    that have been taken, then, for each of ``parts`` parts, the rank in the node that has taken it.
    """
    table, *rest = (paged(size, _ALIGNMENT) for size in (8 * (1 + parts), *sizes))
    return list(accumulate(rest, initial=table))


class DynamicScheduler:
    """Put the samples of a node's grains into shared memory, and assign the grains part by part to ranks that are free.

    Every node has a fixed range of consecutive grains, which :func:`dynamic_parts` cuts into parts. A rank takes the
    next part when it has computed its previous part. [Note: dynamic scheduling] The number of the next part and the
    rank that has taken each part are in the node's shared memory. One rank at a time writes them, under a lock of the
    operating system, so taking a part needs no message from a rank that is busy. Which rank computes a grain depends on
    timing. The result does not, because each part is a whole subtree of the tree in which gradients are summed.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks; the constructor is collective over all of them.
    memory : Memory
        Allocates the memory of the node.
    """

    def __init__(self, grid: ProcessGrid, memory: Memory) -> None:
        self.grid, self._memory = grid, memory
        with on_all_ranks(grid.world, "claims"):
            self._locks = BlockLocks(grid.node)
        self._reserved: set[Hashable] = set()
        self._storage = np.zeros(0, np.uint8)
        self._table = self._storage.view(np.int64)
        self._parts: tuple[range, ...] = ()

    def begin(self, leaves: Sequence[Array], grains: Grains) -> tuple[Array, ...]:
        """Put the samples of the node's grains into shared memory, and begin a step: no part is taken yet.

        Collective over the node; over all ranks for the first batch with these grains, shapes and types. Between two
        calls there must be a collective over all ranks, so that every rank has ended the previous step.

        Parameters
        ----------
        leaves : sequence of Array
            Arrays with the samples of the grains that :func:`contiguous_parts` assigns to this rank.
        grains : Grains
            The grains of the global batch.

        Returns
        -------
        tuple of Array
            Arrays with the samples of all grains of the node, in memory that the node's ranks share.
        """
        block, local = self.block(grains.count), contiguous_parts(self.grid, grains.count)[self.grid.order_index]
        before, first, stop = (min(at * grains.size, grains.samples) for at in (block.start, local.start, block.stop))
        self._parts = dynamic_parts(block, self.grid.node.size)
        shapes = [(stop - before, *leaf.shape[1:]) for leaf in leaves]
        sizes = [prod(shape) * leaf.itemsize for shape, leaf in zip(shapes, leaves, strict=True)]
        starts = starts_of(len(self._parts), sizes)
        self._reserve(starts[-1], (grains, *((leaf.dtype, leaf.shape[1:]) for leaf in leaves)))
        self._table = self._storage[: starts[0]].view(np.int64)
        if self.grid.node.rank == 0:
            self._table[0] = 0
        shared = []
        for leaf, shape, start, size in zip(leaves, shapes, starts[:-1], sizes, strict=True):
            full = self._storage[start : start + size].view(leaf.dtype).reshape(shape)
            full[first - before :][: len(leaf)] = leaf
            shared.append(full)
        self._memory.barrier(KIND)
        return tuple(shared)

    def block(self, count: int) -> range:
        """Return the indices of this node's grains in a batch of ``count`` grains. Not collective."""
        return node_blocks(self.grid, count)[self.grid.nodes.index(self.grid.node_ranks)]

    def most(self, count: int) -> int:
        """Return how many of a batch's ``count`` grains belong to the node that has the most. Not collective."""
        return max(map(len, node_blocks(self.grid, count)))

    def _reserve(self, nbytes: int, batch: Hashable) -> None:
        """Allocate at least ``nbytes`` bytes of the node's memory for batches of one form.

        ``batch`` is this form: the grains, and the types and sample shapes of the arrays. Collective over all ranks if
        the form has not been passed before.
        """
        if batch in self._reserved:  # whether to join must not depend on a node's own free memory
            return
        reserved, self._reserved = self._reserved, set()  # if this fails, the old memory is already freed
        with on_all_ranks(self.grid.world, KIND):
            if self._storage.size < nbytes:
                outgrown, self._storage, self._table = self._storage, self._storage[:0], self._table[:0]
                if outgrown.size:
                    self._memory.free_shared(KIND, (outgrown,))
                (self._storage,) = self._memory.shared(KIND, [(nbytes,)], np.uint8)
        self._reserved = reserved | {batch}

    def next_part(self, rows: int) -> range | None:
        """Take and return the next part of the node's grains; None if no part is left.

        Not collective. ``rows`` is the number of free rows of this rank; a row is memory for one partial sum of
        gradients. If the next part needs more rows, it is not taken, and None is returned.
        """
        with self._locks.hold(0):
            number = int(self._table[0])
            if number == len(self._parts) or rows_of_part(self._parts[number]) > rows:
                return None
            self._table[0] = number + 1
            self._table[1 + number] = self.grid.node.rank
        return self._parts[number]

    def assigned(self, count: int) -> list[list[int]]:
        """Return the grains that each data rank has computed, node after node; call it after a barrier of the node.

        Not collective. For ranks of other nodes, where this is not known, the lists are the ranges of equal size that
        :func:`contiguous_parts` returns. They may be wrong, but suffice: the partial sums that a node sends do not
        depend on which of its ranks computed which grain.
        """
        grains = [list(span) for span in contiguous_parts(self.grid, count)]
        first = self.grid.order_index - self.grid.node.rank
        owners = self._table[1 : 1 + len(self._parts)].tolist()
        for rank in range(self.grid.node.size):
            parts = (part for part, owner in zip(self._parts, owners, strict=True) if owner == rank)
            grains[first + rank] = [grain for part in parts for grain in part]
        return grains

    def close(self) -> None:
        """Close the lock's file. Not collective; :class:`Memory` frees the shared window with the samples."""
        self._locks.close()


#: By bytes of an element: the smallest and the largest normal floating-point number.
_LIMITS = {size: (float(np.finfo(f"f{size}").tiny), float(np.finfo(f"f{size}").max)) for size in (4, 8)}


class Divisors(NamedTuple):
    """Hold the divisors of a step's sums, each an array of one element of the gradients' type.

    Attributes
    ----------
    gradients : Array
        The divisor of summed gradients: the total weight times the loss scale.
    averages : Array
        The divisor of the summed values of averaged parameters (``ParameterSpec.averaged``): the number of samples.
    """

    gradients: Array
    averages: Array

    def of(self, *, averaged: bool) -> Array:
        """Return the divisor of averaged parameters if ``averaged``, else that of gradients. Not collective."""
        return self.averages if averaged else self.gradients


class Totals(NamedTuple):
    """Hold the loss, the weight and the number of samples, summed over the global batch.

    ``problems`` describes the grains with a loss, weight or gradient that is not finite, in the order of their samples.
    """

    loss: float
    weight: float
    problems: tuple[NonFinite, ...]
    samples: int

    @property
    def mean(self) -> float:
        """The mean loss; NaN if the weight is infinite or NaN."""
        return self.loss / self.weight if math.isfinite(self.weight) else math.nan

    def divisors(self, scale: float, dtype: np.dtype[Any]) -> Divisors:
        """Return the divisors of the sums of a step; ``scale`` is the loss scale, ``dtype`` the gradients' type.

        Not collective; the same on every rank.

        Raises
        ------
        DataError
            If the weight is finite, but the divisor of gradients is below the smallest or above the largest normal
            number of ``dtype``: the divided gradient would become zero or infinite.
        """
        divisor, (least, most) = self.weight * scale, _LIMITS[dtype.itemsize]
        if not least <= divisor <= most and math.isfinite(self.weight):
            scaled = f", times the loss scale {scale:g}," if scale != 1.0 else ""
            raise DataError(
                f"the global batch has weight {self.weight:g}, which{scaled} is beyond {dtype} ({least:g} to "
                f"{most:g}), in which the gradient is divided by it: only the ratios of weights count, so divide or "
                "multiply all of them by one number"
            )
        return Divisors(np.array([divisor], dtype), np.array([self.samples], dtype))


class _Bad(NamedTuple):
    """Describe the first value of a grain that is not finite.

    Objects compare in the order in which values are computed: loss, weight, then gradients from the last block to the
    first. ``kind`` is 0 for a loss, 1 for a weight and 2 for a gradient; ``order`` is minus the index of the gradient's
    block, or 0.
    """

    kind: int
    order: int
    tensor: str
    message: str


_NOTHING = _Bad(9, 0, "", "")
#: Flags of a rank in the message, in the low bits of the fourth number: a value was not finite; a grain raised.
#: The bits above them hold the rank's mismatch term, see guard/call_trace.py's [Note: one sum].
_BAD, _FAILED = 1, 2
_STATUS_BITS = 2
#: The most non-finite grains that are reported.
MAX_NAMED = 16


class GrainScalars:
    """Collect losses, weights and errors of this rank's grains; :meth:`agree` exchanges them with all ranks.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks. All ranks of the world take part, since each may hold another part of the model.
    layout : FlatLayout
        The parameters that this rank holds.
    blocks : sequence of str
        The blocks of the whole model, in order of use.
    integers : IntegerState
        The model's integer arrays, to which blocks write new values.
    """

    def __init__(self, grid: ProcessGrid, layout: FlatLayout, blocks: Sequence[str], integers: IntegerState) -> None:
        self.grid, self.layout, self.integers = grid, layout, integers
        self._order = {name: index for index, name in enumerate(blocks)}
        self.world = world_of(grid)
        self.count = 0
        self.samples = 0
        self.error: Exception | None = None
        self._late: Exception | None = None
        #: If set, called with every micro-batch's gradients before they are added: grain, micro-batch, block, views.
        self.watch: Callable[[int, int, str, Any], None] | None = None
        #: For each block that has averaged parameters, their names in the block.
        self.averages: dict[str, tuple[str, ...]] = {}
        for entry in layout.parameters:
            if entry.spec.averaged and entry.spec.trainable:
                self.averages[entry.block] = (*self.averages.get(entry.block, ()), entry.local_name)
        self.frozen = frozenset(e.spec.name for e in layout.entries if e.gradient < 0)
        self._records: dict[int, list[float]] = {}
        self._bad: dict[int, _Bad] = {}
        self._step = 0
        self._per_rank = 0
        self._spans: dict[int, Any] = {}

    def begin(self, batch: GlobalBatch, step: int = 0) -> None:
        """Begin the batch of step number ``step``: drop the losses, weights and errors of the batch before.

        Not collective.
        """
        self.count, self.samples, self._step = batch.count, batch.samples, step
        self._per_rank = batch.dynamic or -(-batch.count // self.grid.data.size)
        self._records, self._bad, self.error, self._late = {}, {}, None, None
        if self.integers.specs:
            self.integers.forget()
        self._spans = {g: (grain.micro_batches[0][2], grain.stop) for g, grain in batch.grains.items()}

    def add(self, grain: int, loss: float, weight: float) -> None:
        """Add the sum of losses and the total weight of one micro-batch to those of its grain. Not collective."""
        record = self._records.setdefault(grain, [0.0, 0.0])
        record[0] += loss
        record[1] += weight
        for kind, (what, value) in enumerate((("loss", loss), ("weight", weight))):
            if not math.isfinite(value) and kind < self._bad.get(grain, _NOTHING).kind:
                self._bad[grain] = _Bad(kind, 0, what, f"the {what} is not finite")

    def fail(self, error: Exception) -> None:
        """Record an error after which this rank computes no more grains of the step. Not collective.

        :meth:`agree` raises it. Errors of communication are raised immediately, because the ranks can no longer agree.
        """
        if isinstance(error, CollectiveError | PeerFailure):
            raise error  # the other ranks would not come to an agreement
        if isinstance(error, MemoryError):
            error = refused(error, *COMPUTING)
        self.error = self.error if self.error is not None else error

    def fail_later(self, error: Exception) -> None:
        """Record an error after which this rank goes on computing. Not collective.

        The other ranks of its tensor group may not have the error, and their collectives need this rank. :meth:`agree`
        raises the error; if this rank has also recorded one by :meth:`fail`, that one is raised instead.
        """
        self._late = self._late if self._late is not None else error

    def check(self, grain: int, block: str, views: Any) -> None:
        """Check that the gradients of ``block``, computed from ``grain``, are finite; record the first one that is not.

        Not collective. ``views`` are the nested views of the block's gradients. Nothing is checked if a value of the
        grain that is not finite has already been recorded. Gradients of frozen parameters are not checked.
        """
        if grain in self._bad:
            return
        for name, view in flat_names(views):
            if view.dtype.kind in "iub":
                continue
            flat, tensor = as_reals(view), joined(block, name)
            if tensor not in self.frozen and not kernels.all_finite(flat):
                what = "new value" if name in self.averages.get(block, ()) else "gradient"
                self._bad[grain] = _Bad(2, -self._order[block], tensor, f"the {what} of {tensor!r} is not finite")
                return

    def losses(self) -> dict[int, float]:
        """Return the sum of losses of each of this rank's grains, by the grain's number. Not collective."""
        return {grain: record[0] for grain, record in self._records.items()}

    def agree(self, learning_rate: Callable[[], float] | None = None) -> Totals:
        """Exchange the losses, weights and errors that the ranks have recorded; return sums over all grains.

        Collective over all ranks. It also compares the learning rates of the ranks. ``learning_rate`` returns this
        rank's learning rate; an error that it raises is recorded by :meth:`fail`. If ``learning_rate`` is None, the
        rate counts as 0.

        Raises
        ------
        CollectiveMismatch
            If the ranks have called different operations.
        ConfigError
            If the learning rates differ between ranks in any bit; the error names ranks and rates.
        Exception
            The error that this rank has recorded; the other ranks raise a ``RemoteError`` that quotes it.
        """
        size, rate = self.world.size, self._rate_or_fail(learning_rate)
        self.error, self._late = self.error if self.error is not None else self._late, None
        number = self.world.mismatch_term()
        grains = [number for grain, record in self._records.items() for number in (grain, *record, -1.0)]
        local = np.array([*grains, *[-1.0] * (4 * max(1, self._per_rank) - len(grains)), -1.0])
        status = _FAILED if self.error is not None else _BAD if self._bad else 0
        local.view(np.int64)[3] = number << _STATUS_BITS | status
        local[-1] = rate
        gathered = local.reshape(1, -1)
        if size > 1:
            gathered = np.empty((size, local.size))
            self.world.allgather(local, gathered.reshape(-1), "losses")
        statuses = gathered.view(np.int64)[:, 3].tolist()
        if sum(status >> _STATUS_BITS for status in statuses) % MODULUS:
            raise self.world.mismatch()
        flags = {status & (1 << _STATUS_BITS) - 1 for status in statuses}
        if _FAILED in flags:
            self._fail_together()
        self._same_rate(gathered[:, -1])
        problems = self._named() if _BAD in flags else ()
        rows = gathered[:, :-1].reshape(-1, 4)
        rows = rows[rows[:, 0] >= 0]
        if len(rows) > 1:
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
        loss, weight = tree_total(rows[:, 1:3], self.grid.context.size)
        return Totals(float(loss), float(weight), problems, self.samples)

    def agree_on_rate(self, learning_rate: Callable[[], float]) -> None:
        """Compare the ranks' learning rates in the first message of a separate optimizer step.

        Collective over all ranks. Such a step follows ``compute_gradients``, which has exchanged losses, weights and
        errors. ``learning_rate`` returns this rank's learning rate. Raises the errors of :meth:`agree`.
        """
        rate = np.array(self._rate_or_fail(learning_rate), np.float64)
        gathered = agree_on_call(self.grid.world, (int(rate.view(np.int64)), self.error is not None))
        if gathered[:, 1].any():
            self._fail_together()
        self._same_rate(np.ascontiguousarray(gathered[:, 0]).view(np.float64))

    def _rate_or_fail(self, learning_rate: Callable[[], float] | None) -> float:
        try:
            return 0.0 if learning_rate is None else learning_rate()
        except Exception as error:
            self.fail(error)
            return 0.0

    def _fail_together(self) -> None:
        error, self.error = self.error, None
        with all_ranks(self.world, "failed grains"):
            if error is not None:
                raise error

    def _same_rate(self, rates: Array) -> None:
        if rates.tobytes() != rates[:1].tobytes() * len(rates):  # NaN, the rate of a user's optimizer, equals itself
            raise ConfigError(
                f"the learning rate of step {self._step} differs between ranks: "
                f"{by_ranks([repr(float(rate)) for rate in rates])}; lr must be a function of the step alone, the same "
                "on every rank: not of time, random numbers or the rank"
            )

    def _named(self) -> tuple[NonFinite, ...]:
        """Return the non-finite grains of all ranks, each described by its first non-finite value.

        Collective over all ranks. The grains are in the order of their samples, and at most :data:`MAX_NAMED`.
        """
        local = sorted((self._spans[g][0], bad, self._non_finite(g, bad)) for g, bad in self._bad.items())[:MAX_NAMED]
        gathered = self.world.allgather_object(local, "not finite")
        by_sample: dict[int, NonFinite] = {}
        for first, _, non_finite in sorted((item for items in gathered for item in items), key=lambda item: item[:2]):
            by_sample.setdefault(first, non_finite)
        return tuple(by_sample.values())[:MAX_NAMED]

    def _non_finite(self, grain: int, bad: _Bad) -> NonFinite:
        first, stop = self._spans[grain]
        return NonFinite(self._step, self.world.rank, bad.tensor, first, stop, bad.message)

    def in_the_sum(self, tensor: str, parts: Sequence[Array], norm: float) -> NonFinite:
        """Describe an averaged gradient that is not finite, or whose squares overflow, though all grains were finite.

        Collective over all ranks. ``parts`` are this rank's elements of the averaged gradient of the parameter
        ``tensor``; ``norm`` is the sum of squares of all elements, which is not finite. The description names the rank
        with the largest element.
        """
        finite = all(np.isfinite(part).all() for part in parts)
        largest = max((float(np.abs(part).max()) for part in parts if part.size), default=-1.0) if finite else np.inf
        maxima = np.empty(self.world.size)
        self.world.allgather(np.array([largest]), maxima, "sum not finite")
        rank, first = int(maxima.argmax()), f"the averaged gradient of {tensor!r} is not finite"
        message = (
            first if np.isinf(maxima[rank]) else f"the squares of the averaged gradient of {tensor!r} add up to {norm}"
        )
        return NonFinite(self._step, rank, tensor, 0, self.samples, message)


def tree_total(values: Array, parts: int = 1) -> Array:
    """Return the sum of the rows of a (rows, n) array, added in the order of the binary tree over the row numbers.

    Each ``parts`` successive rows belong to the parts of one grain. They are added first, in a subtree of their own, as
    :class:`~mpizero.layout.sum_tree.Leaves` says.
    """
    if missing := (1 << (parts - 1).bit_length()) - parts:
        values = np.pad(values.reshape(-1, parts, values.shape[1]), ((0, 0), (0, missing), (0, 0)))
        values = values.reshape(-1, values.shape[2])
    while len(values) > 1:
        pairs = values[: len(values) // 2 * 2]
        summed = pairs[0::2] + pairs[1::2]
        values = np.concatenate([summed, values[len(pairs) :]])
    total: Array = values[0]
    return total


def check_weight(weight: float) -> None:
    """Raise DataError if the total weight of a global batch is not above 0: then there is nothing to average."""
    if weight <= 0:
        raise DataError(f"the global batch has weight {weight:g}: every target in it is ignored; expected more than 0")


def world_of(grid: ProcessGrid) -> Communicator:
    """Return a communicator of all ranks: the data group if it has all ranks, else the world. Not collective."""
    return grid.data if grid.data.size == grid.world.size else grid.world

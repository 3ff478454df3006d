"""Cut a global batch into grains (fixed slices of it), and assign the grains to the ranks that compute them.

A :class:`GrainRule` finds the size of :class:`Grains` from the global batch and the model alone, so the grains are the
same for every number of ranks. Each rank computes a contiguous run of grains, or one grain in each round. With dynamic
scheduling, the ranks of a node together compute all grains that are assigned to ranks of the node.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ConfigError
from mpizero.layout.flat import Partition
from mpizero.layout.mesh import NodeOrder
from mpizero.layout.sum_tree import dynamic_parts, dynamic_rows

#: A global batch is cut into about this many grains, or into more, when the user does not choose their size.
DEFAULT_GRAINS = 16
#: A global batch is cut into at least this many grains where a grain has a fixed cost that few samples do not outweigh.
FEWEST_GRAINS = 4


@dataclass(frozen=True)
class GrainRule:
    """Determine the number of samples of a grain from the number of samples of a global batch.

    The result does not depend on the number of ranks or on the parallel layout.

    Parameters
    ----------
    micro_batch : int or None
        Number of samples of a micro-batch; None for the default. The default is a sixteenth of the global batch divided
        by ``accumulate``, rounded up; or ``least``, if that is more, but then no more than a quarter, rounded down. In
        any case it is no more than ``efficient``.
    accumulate : int
        Number of micro-batches of a grain.
    efficient : int or None
        Number of samples of a micro-batch from which on the model computes at about its full speed; None if unknown.
    coarse : bool
        Whether a default grain is a quarter of the global batch, as with an unlimited ``least``: for models of PyTorch
        or JAX, where each grain has a large fixed cost.
    least : int
        Number of samples of a micro-batch below which the calls of a pass take longer than its arithmetic.

    Examples
    --------
    >>> import mpizero as mz
    >>> rule = mz.layout.GrainRule(micro_batch=2, accumulate=3)
    >>> rule.grain_size(20), rule.grains(20).count
    (6, 4)
    >>> mz.layout.GrainRule().grain_size(64)  # a sixteenth of the global batch
    4
    """

    micro_batch: int | None = None
    accumulate: int = 1
    efficient: int | None = None
    coarse: bool = False
    least: int = 1

    def micro_size(self, samples: int) -> int:
        """Return the number of samples of a full micro-batch, for a global batch of ``samples`` samples."""
        if self.micro_batch is not None:
            return self.micro_batch
        least = min(samples if self.coarse else self.least, samples // (self.accumulate * FEWEST_GRAINS))
        size = max(1, least, -(-samples // (self.accumulate * DEFAULT_GRAINS)))
        return size if self.efficient is None else min(size, self.efficient)

    def grain_size(self, samples: int) -> int:
        """Return the number of samples of a full grain, for a global batch of ``samples`` samples."""
        return self.micro_size(samples) * self.accumulate

    def grains(self, samples: int) -> Grains:
        """Cut a global batch of ``samples`` samples into grains."""
        return Grains(samples, self.grain_size(samples))


@dataclass(frozen=True)
class Grains:
    """Cut a global batch of ``samples`` samples into grains of ``size`` samples; the last grain may be short.

    Parameters
    ----------
    samples : int
        Number of samples of the global batch.
    size : int
        Number of samples of one grain.

    Raises
    ------
    ConfigError
        If ``samples`` is negative or ``size`` is less than 1.

    Examples
    --------
    >>> import mpizero as mz
    >>> grains = mz.layout.Grains(samples=10, size=4)
    >>> grains.count, grains.span(2)
    (3, slice(8, 10, None))
    >>> [list(grains.assigned(rank, 2)) for rank in range(2)]
    [[0, 1], [2]]
    """

    samples: int
    size: int

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` if ``samples`` is negative or ``size`` is less than 1."""
        if self.samples < 0 or self.size < 1:
            raise ConfigError(f"grains need samples >= 0 and size >= 1, got {self.samples=} and {self.size=}")

    def described(self, micro_batches: int) -> str:
        """Return a text such as "16 grains of 8, each of 2 micro-batches", where 8 is the number of samples of a grain.

        If ``micro_batches`` is 1, the text says nothing about micro-batches.
        """
        parts = f", each of {micro_batches} micro-batches" if micro_batches > 1 else ""
        return f"{self.count} grains of {self.size}{parts}"

    @property
    def count(self) -> int:
        """Number of grains, a short last one included."""
        return -(-self.samples // self.size)

    def span(self, grain: int) -> slice:
        """Return the samples of grain number ``grain``, as a range of the global batch."""
        start = grain * self.size
        return slice(start, min(start + self.size, self.samples))

    def micro_batches(self, grain: int, accumulate: int) -> tuple[slice, ...]:
        """Return the samples of each micro-batch of a grain, as ranges of the global batch.

        A micro-batch has ``size / accumulate`` samples, rounded up; the last one can have fewer. A short last grain
        can have fewer than ``accumulate`` micro-batches.
        """
        span, size = self.span(grain), -(-self.size // accumulate)
        return tuple(slice(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size))

    def assigned(self, part: int, parts: int) -> range:
        """Return the indices of the grains that worker ``part`` (from 0) of ``parts`` workers computes.

        They are shard number ``part`` of a :class:`.Partition` of all grains; a worker is a rank that computes grains.
        """
        shard = Partition(self.count, parts).shard(part)
        return range(shard.start, shard.stop)

    def samples_of(self, part: int, parts: int) -> slice:
        """Return the samples of a worker's grains (see :meth:`assigned`), as a range of the global batch."""
        grains = self.assigned(part, parts)
        return slice(min(grains.start * self.size, self.samples), min(grains.stop * self.size, self.samples))


def contiguous_owners(grid: NodeOrder, count: int) -> tuple[int, ...]:
    """Return, for each of ``count`` grains, the rank of ``grid.batch`` that computes it.

    Every rank is assigned a contiguous run of grains; the runs follow one another in the order of the ranks, node after
    node. The ranks of a context group compute a grain together: each rank computes its own positions of the sequences.
    """
    owner = [0] * count
    for position, rank in enumerate(_batch_order(grid)):
        for grain in Grains(count, 1).assigned(position, grid.batch.size):
            owner[grain] = rank
    return tuple(owner)


def contiguous_parts(grid: NodeOrder, count: int) -> list[range]:
    """Return for every data rank the indices of its grains, of ``count``; the ranks are listed node after node.

    The grains are assigned as by :func:`contiguous_owners`. With context groups, the part of a grain that one rank of
    the group computes counts as a grain: ``count`` is then how many parts all grains have, and the returned indices are
    those that :func:`grain_part_number` gives to the parts. The parts of a grain have consecutive indices, one for each
    rank of the group.
    """
    contexts, parts = grid.context.size, []
    for position in range(grid.data.size):
        data, context = divmod(position, contexts)
        assigned = Grains(count // contexts, 1).assigned(data, grid.batch.size)
        start, stop = (grain_part_number(grain, context, contexts) for grain in (assigned.start, assigned.stop))
        parts.append(range(start, stop, contexts))
    return parts


def node_blocks(grid: NodeOrder, count: int) -> list[range]:
    """Return, for each node, the grains (of ``count``) that :func:`contiguous_parts` assigns to its ranks."""
    parts, blocks, first = contiguous_parts(grid, count), [], 0
    for size in grid.group_sizes:
        blocks.append(range(parts[first].start, parts[first + size - 1].stop))
        first += size
    return blocks


def max_dynamic_rows(grid: NodeOrder, count: int) -> int:
    """Return the most rows (memory for a partial sum) that a rank needs if ``count`` grains are scheduled dynamically.

    Each rank then takes some of its node's grains whenever it is free.
    """
    sizes = zip(node_blocks(grid, count), grid.group_sizes, strict=True)
    return max(dynamic_rows(dynamic_parts(block, size), size, count) for block, size in sizes)


def round_owners(grid: NodeOrder, count: int) -> tuple[int, ...]:
    """Return, for each of ``count`` grains computed in rounds, the rank of ``grid.batch`` that computes it.

    In a round every rank computes one grain: successive grains are assigned to the ranks one after the other, node
    after node.
    """
    order = _batch_order(grid)
    return tuple(order[grain % len(order)] for grain in range(count))


def _batch_order(grid: NodeOrder) -> tuple[int, ...]:
    return grid.order if grid.context.size == 1 else tuple(range(grid.batch.size))


def grain_part_number(grain: int, context: int, contexts: int) -> int:
    """Return the number of a part of grain number ``grain``: the part that one rank of a context group computes.

    ``context`` is the rank in the group, ``contexts`` the size of the group. The parts of all grains are numbered from
    0; each part is summed like a grain. The parts of one grain have successive numbers with every strategy, because the
    order in which gradients and losses are added depends on these numbers.
    """
    return grain * contexts + context

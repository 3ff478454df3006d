"""Choose the samples of each global batch, and this rank's part of them."""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np

from mpizero.comm.agreement import all_ranks
from mpizero.comm.communicator import Communicator
from mpizero.comm.equality import agree_equal
from mpizero.data.source import Indices, Source
from mpizero.errors import ArgumentError, DataError
from mpizero.kernels import cpu
from mpizero.layout.grains import Grains
from mpizero.names import explains
from mpizero.sampletree import join
from mpizero.types import Run
from mpizero.validation import require, whole


class BatchConfig(Protocol):
    """Define what :func:`batches` needs of its configuration; see :class:`~mpizero.parallel.config.ShardingConfig`."""

    @property
    def communicator(self) -> Communicator:
        """The ranks that share a global batch."""

    def grain_size(self, global_batch: int) -> int:
        """Return the number of samples of one grain."""


def sample_order(start: int, stop: int, length: int, seed: int) -> Indices:
    """Return the samples' indices at positions ``start:stop`` of the endless shuffled order of ``length`` samples.

    The order is one epoch after the other. Epoch e is a permutation of all samples with the key (seed, e), so every
    sample occurs exactly once in each epoch. The result depends on seed and position alone. No array of the data's
    length is made. Not collective.
    """
    order = np.arange(start, stop, dtype=np.int64)
    done = 0
    while done < order.size:
        epoch, inside = divmod(start + done, length)
        count = min(order.size - done, length - inside)
        part = order[done : done + count]
        part -= epoch * length
        cpu.random.permutation(part, length, seed, epoch)
        done += count
    return order


class Batches:
    """Iterate over this rank's parts of successive global batches; made by :func:`batches`.

    Attributes
    ----------
    consumed : int
        Number of samples of all global batches so far. It is the whole state of the iterator:
        ``batches(..., consumed=this)`` on any number of ranks goes on with the same global batches.
    """

    def __init__(
        self,
        source: Source,
        config: BatchConfig,
        global_batch: int,
        seed: int,
        steps: int | None,
        consumed: int,
        *,
        group: Communicator,
    ) -> None:
        self.consumed = consumed
        self._source = source
        self._batch = global_batch
        self._seed = seed
        self._left = steps
        self._own = Grains(global_batch, config.grain_size(global_batch)).samples_of(group.rank, group.size)

    def __iter__(self) -> Self:
        return self

    @property
    def epoch(self) -> int:
        """The epoch (0 is the first) in which the last global batch began; for ``model.train(x, y, epoch=...)``."""
        return max(0, self.consumed - self._batch) // len(self._source)

    def __next__(self) -> tuple[Any, Any]:
        if self._left == 0:
            raise StopIteration
        start = self.consumed
        order = sample_order(start + self._own.start, start + self._own.stop, len(self._source), self._seed)
        samples = self._samples_with_run(order, start) if self._source.takes_run else self._source.samples(order)
        self.consumed += self._batch
        if self._left is not None:
            self._left -= 1
        return samples

    def _samples_with_run(self, order: Indices, start: int) -> tuple[Any, Any]:
        """Read samples from a source that takes ``run``, with one call for each epoch that they belong to."""
        length, done, parts = len(self._source), 0, list[Any]()
        while done < order.size or not parts:
            first = self._own.start + done
            epoch, inside = divmod(start + first, length)
            count = min(order.size - done, length - inside)
            run = Run(True, self._seed, start // self._batch, first, count=count, epoch=epoch)
            parts.append(self._source.samples(order[done : done + count], run=run))
            done += count
        x, y = join(parts)
        return x, y


@explains
def batches(
    source: Source,
    config: BatchConfig,
    global_batch: int,
    seed: int = 0,
    steps: int | None = None,
    consumed: int = 0,
    *,
    group: Communicator | None = None,
) -> Batches:
    """Return an iterator over this rank's samples ``(x, y)`` of successive global batches.

    A global batch is the next ``global_batch`` samples of :func:`sample_order`; it may reach over the end of an epoch.
    It is cut into grains, which are assigned to the ranks contiguously: rank r's samples follow those of rank r-1. A
    rank may get no samples. This call is collective over ``config.communicator``; the iteration is not.

    Parameters
    ----------
    source : Source
        The data, the same on every rank.
    config : ShardingConfig
        Its communicator and grain size are used.
    global_batch : int
        Number of samples of one step, over all ranks.
    seed : int
        Key of the sample order, 0 to 2**64 - 1.
    steps : int or None
        Number of global batches to return; those before ``consumed`` are not counted. None never ends.
    consumed : int
        Number of samples already used: the attribute ``consumed`` of an earlier iterator.
    group : Communicator or None
        The ranks that a global batch is divided among, a model's ``batch_group``. None takes all ranks of
        ``config.communicator``.

    Raises
    ------
    ConfigError
        A number is not allowed.
    DataError
        The source has no samples.
    MpizeroError
        The ranks have different data or arguments.
    """
    if not hasattr(config, "communicator"):
        raise ArgumentError(f"batches: config is a ShardingConfig, got {config!r:.80}")
    comm = config.communicator
    with all_ranks(comm):
        if not isinstance(source, Source):
            raise DataError(f"expected a source of samples such as TextSource, got {type(source).__name__}")
        require("global_batch", global_batch, whole(1))
        require("seed", seed, whole(0))
        require("consumed", consumed, whole(0))
        if steps is not None:
            require("steps", steps, whole(0))
        if not len(source):
            raise DataError("the source has no samples to train on")
    settings = {"global_batch": global_batch, "seed": seed, "steps": steps, "consumed": consumed}
    agree_equal(comm, lambda: _arguments(source, settings), "agree batches")
    return Batches(source, config, global_batch, seed, steps, consumed, group=comm if group is None else group)


def _arguments(source: Source, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    described = {"class": type(source).__name__, "samples": len(source), **source.describe()}
    return {"the arguments of batches": {"source": described, **settings}}

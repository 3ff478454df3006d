"""Choose the samples of each global batch, and those of them that this rank gets."""

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
    """Describe what batches need of a configuration; :class:`~mpizero.parallel.config.ShardingConfig` has it."""

    @property
    def communicator(self) -> Communicator:
        """The ranks that share a global batch."""

    def grain_size(self, global_batch: int) -> int:
        """Return the samples of one grain."""


def sample_order(start: int, stop: int, length: int, seed: int) -> Indices:
    """Return the samples at places ``start:stop`` of the endless shuffled order of a source of ``length`` samples.

    Not collective. Epoch e is the keyed permutation (seed, e) of all samples, epoch after epoch: every sample occurs
    exactly once in each, a function of seed and place alone. No array of the data's length is made.
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
        Samples of all global batches so far: the whole state. ``batches(..., consumed=this)`` on any number of ranks
        goes on with the same global batches.
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
        """The epoch, from 0, of the first sample of the last global batch: for ``model.train(x, y, epoch=...)``."""
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
        """Read samples for a source that takes ``run``, those of each epoch by themselves."""
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

    Collective over ``config.communicator`` (the iteration itself is not). A global batch is the next ``global_batch``
    samples of :func:`sample_order`, also across the end of an epoch. It is cut into grains, which are assigned to
    the ranks contiguously: rank r's samples follow rank r-1's, and a rank may get none.

    Parameters
    ----------
    source : Source
        The data, the same on every rank.
    config : ShardingConfig
        Gives the ranks and the size of a grain.
    global_batch : int
        Samples of one step, over all ranks.
    seed : int
        Key of the sample order, 0 to 2**64 - 1.
    steps : int or None
        Global batches to give, those before ``consumed`` not counted; None never ends.
    consumed : int
        Samples already used: the ``consumed`` of an earlier iterator.
    group : Communicator or None
        The ranks that share a global batch, a model's ``batch_group``; None is all of ``config.communicator``.

    Raises
    ------
    ConfigError
        A number that makes no sense.
    DataError
        A source without samples.
    MpizeroError
        Ranks that differ in data or arguments.
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
    described = {"class": type(source).__name__, "samples": len(source), **source.describe()}
    settings = {"global_batch": global_batch, "seed": seed, "steps": steps, "consumed": consumed}
    agree_equal(comm, lambda: {"the arguments of batches": {"source": described, **settings}}, "agree batches")
    return Batches(source, config, global_batch, seed, steps, consumed, group=comm if group is None else group)

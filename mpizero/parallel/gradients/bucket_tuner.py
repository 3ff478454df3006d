"""Choose how much of a gradient travels at once: the bucket size with which steps take least time.

[Note: buckets] A bucket is what an exchange of gradients has in flight at once: a segment of
``comm/reduce/exact.py``. Its size says into how many messages an exchange is cut and how much of a unit can travel
during the backward pass of the next one; bytes and bits are the same with every size. All ranks use the same one in the
same step, so they make equally many segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mpizero.comm import Communicator
from mpizero.parallel.config import AUTO, elements_of
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.types import Array

#: Sizes that may be tried, in MiB.
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: How often each is tried, after steps that only warm up.
ROUNDS, WARM = 3, 1
#: A smaller size is as good as the best when its steps take at most so many times as long.
CLOSE = 1.02


def worth_trying(largest: int, itemsize: int) -> tuple[float, ...]:
    """Return the sizes up to the first that holds ``largest`` elements: larger ones would do the same.

    Not collective.
    """
    short = [size for size in SIZES if elements_of(size, itemsize) < largest]
    return SIZES[: len(short) + 1]


def fastest(sizes: Sequence[float], seconds: Array) -> float:
    """Return the smallest size whose shortest step is close to the shortest of all. Not collective.

    Parameters
    ----------
    sizes : sequence of float
        What was tried, ascending.
    seconds : array, shape (rounds, sizes)
        How long the steps took.
    """
    shortest = seconds.min(axis=0)
    return sizes[int(np.argmax(shortest <= CLOSE * shortest.min()))]


def make_tuner(
    exchange: GradientExchange, everyone: Communicator, largest: int, bucket_mb: float | str | None, itemsize: int
) -> BucketTuner:
    """Return what finds the size of an engine's buckets; it tries none where the size is given.

    Collective over ``everyone``, if the size is to be found.

    Parameters
    ----------
    exchange : GradientExchange
        Its bucket is tuned.
    everyone : Communicator
        The ranks that train together.
    largest : int
        The most elements that could travel at once from this rank's group: :attr:`GradientReducer.largest`.
    bucket_mb : float, str or None
        As ``ShardingConfig.bucket_mb``.
    itemsize : int
        Bytes of an element.
    """
    tried: tuple[float, ...] = ()
    if bucket_mb == AUTO:  # between the groups of another stage more may travel than here
        tried = worth_trying(max(everyone.allgather_object(largest, "bucket sizes")), itemsize)
    return BucketTuner(exchange, everyone, tried, itemsize)


class BucketTuner:
    """Try bucket sizes in turns, one a step, and choose one for all ranks.

    Parameters
    ----------
    exchange : GradientExchange
        Whose bucket is tuned.
    everyone : Communicator
        The ranks that train together.
    sizes : sequence of float
        What is tried, in MiB, ascending, the same on every rank; nothing is, if there are not two.
    itemsize : int
        Bytes of an element.
    clock : callable, optional
        Returns seconds.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        everyone: Communicator,
        sizes: Sequence[float],
        itemsize: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._exchange, self._everyone, self._itemsize, self._clock = exchange, everyone, itemsize, clock
        self._sizes = tuple(sizes)
        self._chosen = len(sizes) < 2
        self._trial = -WARM
        self._samples = 0
        self._begun = 0.0
        self._seconds = np.empty((ROUNDS, len(sizes)))

    def begin(self) -> None:
        """Take the size of the next trial for a step that begins; after the last, leave what was chosen.

        Not collective, but all ranks do it before the same step.
        """
        if not self._chosen:
            self._use(self._sizes[max(0, self._trial) % len(self._sizes)])
            self._begun = self._clock()

    def end(self, samples: int) -> tuple[float, ...]:
        """Note how long an updated step took, and choose after the last trial. Collective over ``everyone`` then.

        A step that is not ended, since it was skipped or has failed on all ranks, is tried again. So is one of another
        number of ``samples`` than the first: it would not compare.

        Returns
        -------
        tuple of float
            The sizes that were tried, if one of them has been chosen now; else empty.
        """
        if self._chosen:
            return ()
        if self._trial < 0:
            self._samples = samples
        elif samples != self._samples:
            return ()
        else:
            self._seconds[divmod(self._trial, len(self._sizes))] = self._clock() - self._begun
        self._trial += 1
        if self._trial < self._seconds.size:
            return ()
        self._choose()
        return self._sizes

    def _choose(self) -> None:
        self._everyone.allreduce(self._seconds, "max", "bucket times")  # a step takes as long as its slowest rank
        self._exchange.memory.drop_scratch()  # of the largest size that was tried
        self._use(fastest(self._sizes, self._seconds))
        self._chosen = True

    def _use(self, size: float) -> None:
        self._exchange.resize(elements_of(size, self._itemsize))

"""Choose the bucket size for sending gradients: the size with which training steps take the least time.

[Note: buckets] A bucket is the part of the gradients that is in flight between peers at once: one segment of the
exchange in ``comm/reduce.py``. The bucket size decides into how many messages an exchange is cut, and how much of
one unit's gradients can be sent during the backward pass of the next unit. It changes neither the number of bytes sent
nor the results. All ranks use the same size in the same step, so they cut an exchange into equally many segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from mpizero.comm import Communicator
from mpizero.parallel.config import AUTO, elements_of
from mpizero.parallel.gradients.exchange import GradientExchange
from mpizero.types import Array

#: Bucket sizes that may be tried, in MiB.
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: How many steps each size is timed in, and how many untimed steps come before.
ROUNDS, WARM = 3, 1
#: A smaller size counts as equally good if its steps take at most this many times as long as the fastest.
CLOSE = 1.02


def worth_trying(largest: int, itemsize: int) -> tuple[float, ...]:
    """Return those of :data:`SIZES` (MiB), up to the first bucket size that holds ``largest`` elements.

    Not collective. ``itemsize`` is the number of bytes of an element. Larger buckets would change nothing.
    """
    short = [size for size in SIZES if elements_of(size, itemsize) < largest]
    return SIZES[: len(short) + 1]


def fastest(sizes: Sequence[float], seconds: Array) -> float:
    """Return the smallest bucket size with which the fastest step took about as long as the fastest step of all.

    Not collective. About as long means at most :data:`CLOSE` times as long.

    Parameters
    ----------
    sizes : sequence of float
        The bucket sizes that were tried, ascending.
    seconds : array, shape (rounds, sizes)
        How long each step took, with one column for each size.
    """
    shortest = seconds.min(axis=0)
    return sizes[int(np.argmax(shortest <= CLOSE * shortest.min()))]


def make_tuner(
    exchange: GradientExchange, everyone: Communicator, largest: int, bucket_mb: float | str | None, itemsize: int
) -> BucketTuner:
    """Return an object that tunes the bucket size of ``exchange`` if ``bucket_mb`` is "auto", and else does nothing.

    Collective over ``everyone`` if ``bucket_mb`` is "auto".

    Parameters
    ----------
    exchange, everyone, itemsize
        As in :class:`BucketTuner`.
    largest : int
        The most elements that this rank's node could have in flight at once: :attr:`GradientReducer.largest`.
    bucket_mb : float, str or None
        The setting ``ShardingConfig.bucket_mb``.
    """
    tried: tuple[float, ...] = ()
    if bucket_mb == AUTO:  # between the groups of another stage more may travel than here
        tried = worth_trying(max(everyone.allgather_object(largest, "bucket sizes")), itemsize)
    return BucketTuner(exchange, everyone, tried, itemsize)


class BucketTuner:
    """Try bucket sizes in turns, one size in each training step, and choose the fastest for all ranks.

    Parameters
    ----------
    exchange : GradientExchange
        The exchange whose bucket size is tuned.
    everyone : Communicator
        All ranks that train together.
    sizes : sequence of float
        The bucket sizes to try, in MiB, ascending, the same on every rank. With fewer than two sizes nothing is tried.
    itemsize : int
        Bytes of an element.
    clock : callable, optional
        Returns the time in seconds.
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
        """Set the bucket size to try in the step that begins, and start timing; do nothing once a size is chosen.

        Not collective, but all ranks call it before the same step.
        """
        if not self._chosen:
            self._use(self._sizes[max(0, self._trial) % len(self._sizes)])
            self._begun = self._clock()

    def end(self, samples: int) -> tuple[float, ...]:
        """Record how long a step of ``samples`` samples took; after the last trial, choose a bucket size.

        Collective over ``everyone`` when it chooses. Do not call it after a step that was skipped or has failed: the
        same size is then tried again. It is also tried again if ``samples`` differs from the number of samples in the
        first step, because the times of the two steps cannot be compared.

        Returns
        -------
        tuple of float
            The sizes that were tried, in MiB, if this call has chosen one of them; else empty.
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

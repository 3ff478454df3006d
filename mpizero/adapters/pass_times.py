"""Time the first passes of a model's blocks, and passes of a single sample beside them."""

from __future__ import annotations

from typing import NamedTuple

#: Passes of a block that are left out because they also prepare something, and passes that are timed after them.
_LEFT_OUT, _TIMED = 2, 3


class PassSeconds(NamedTuple):
    """Hold the least seconds of a forward and backward pass of ``samples`` samples, and of one sample."""

    samples: int
    all: float
    one: float


class PassTimes:
    """Keep the seconds of the first passes of each block, forward and backward together.

    They advise, and determine nothing: a clock is another one on every rank.
    """

    def __init__(self) -> None:
        self._passes: dict[tuple[int, int], int] = {}
        self._all: dict[tuple[int, int], float] = {}
        self._one: dict[int, float] = {}

    def timed(self, block: int, samples: int, seconds: float) -> bool:
        """Add a pass of block number ``block``; tell whether one of a single sample is to be timed beside it."""
        key = block, samples
        if samples < 2 or self._passes.get(key, 0) >= _LEFT_OUT + _TIMED:
            return False
        self._passes[key] = self._passes.get(key, 0) + 1
        if self._passes[key] <= _LEFT_OUT:
            return False
        self._all[key] = min(seconds, self._all.get(key, seconds))
        return True

    @property
    def first(self) -> bool:
        """Tell whether no pass of a single sample was timed yet."""
        return not self._one

    def one_timed(self, block: int, seconds: float) -> None:
        """Add a pass of a single sample."""
        self._one[block] = min(seconds, self._one.get(block, seconds))

    @property
    def seconds(self) -> PassSeconds | None:
        """The sums over this rank's blocks; None before all of them were timed."""
        enough = [key for key, count in self._passes.items() if count == _LEFT_OUT + _TIMED]
        samples = max((samples for _, samples in enough), default=0)
        blocks = {block for block, _ in self._passes}
        if not enough or not blocks == {block for block, own in enough if own == samples} == set(self._one):
            return None
        return PassSeconds(
            samples, sum(self._all[block, samples] for block in blocks), sum(self._one[block] for block in blocks)
        )

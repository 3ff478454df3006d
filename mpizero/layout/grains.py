"""Cut a global batch into grains: pieces of fixed size whose gradients are summed in the same order on any ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ConfigError
from mpizero.layout.partition import Partition

#: A global batch is cut into about this many grains when the user does not choose their size.
DEFAULT_GRAINS = 16


@dataclass(frozen=True)
class Grains:
    """Cut a global batch of ``samples`` samples into grains of ``size`` samples; the last grain may be short.

    Parameters
    ----------
    samples : int
        Number of samples of the global batch.
    size : int
        Number of samples of one grain.
    """

    samples: int
    size: int

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` for sizes that are not allowed."""
        if self.samples < 0 or self.size < 1:
            raise ConfigError(f"grains need samples >= 0 and size >= 1, got {self.samples=} and {self.size=}")

    def described(self, micro_batches: int) -> str:
        """Return a text with the number of grains, and the samples and micro-batches of each."""
        parts = f", each of {micro_batches} micro-batches" if micro_batches > 1 else ""
        return f"{self.count} grains of {self.size}{parts}"

    @staticmethod
    def default_size(samples: int) -> int:
        """Return the grain size for a global batch of ``samples`` samples when the user gives none."""
        return max(1, -(-samples // DEFAULT_GRAINS))

    @property
    def count(self) -> int:
        """Number of grains."""
        return -(-self.samples // self.size)

    def span(self, grain: int) -> slice:
        """Return the range of samples of one grain."""
        start = grain * self.size
        return slice(start, min(start + self.size, self.samples))

    def micro_batches(self, grain: int, accumulate: int) -> tuple[slice, ...]:
        """Return the samples of each micro-batch of a grain; a full grain has ``accumulate`` micro-batches."""
        span, size = self.span(grain), -(-self.size // accumulate)
        return tuple(slice(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size))

    def assigned(self, part: int, parts: int) -> range:
        """Return the grains of worker ``part`` when grains are assigned to ``parts`` workers contiguously."""
        shard = Partition(self.count, parts).shard(part)
        return range(shard.start, shard.stop)

    def samples_of(self, part: int, parts: int) -> slice:
        """Return the samples of worker ``part`` when grains are assigned to ``parts`` workers contiguously."""
        grains = self.assigned(part, parts)
        return slice(min(grains.start * self.size, self.samples), min(grains.stop * self.size, self.samples))

"""Send the messages at the start and end of a split layer, and the adjoint messages in the backward pass.

An array takes one of three forms. A *whole* array has the same values on every rank. An array in *parts* is cut along
one axis by the shard rule, and each rank holds one block. An array in *terms* is a sum of which each rank holds one
summand, as large as the sum. A gradient has the form of its array, with one exception: where every rank uses a whole
array in its own way, each rank computes one term of its gradient. So the adjoint of "do nothing" is "add up the terms",
and the other way round (Shoeybi et al., 2019, call this pair f and g). For sequences in parts the pair is "gather the
parts" and "add up the terms, keep the own block" (Korthikanti et al., 2022, section 4.2).

==================  =====================================  =========================================
region              forward                                backward
==================  =====================================  =========================================
:class:`Copy`       whole to each rank's use: no message   terms to their sum: all-reduce
:class:`Reduce`     terms to their sum: all-reduce         whole to each rank's term: no message
:class:`Split`      whole to parts: no message             parts to whole: all-gather
:class:`Gather`     parts to whole: all-gather             whole to parts: no message
:class:`Expand`     parts to each rank's use: all-gather   terms to parts of their sum: reduce-scatter
:class:`Scatter`    terms to parts of the sum:             parts to each rank's term: all-gather
                    reduce-scatter
==================  =====================================  =========================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpizero.layout import Partition
from mpizero.nn.layer import namespace
from mpizero.types import Array, Group


@dataclass(frozen=True)
class Region(ABC):
    """Define a communication over ``group`` in the forward pass and its adjoint in the backward pass."""

    group: Group

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """Apply the communication to ``x``. Collective over ``group`` where the table above names a message."""

    @abstractmethod
    def backward(self, dy: Array) -> Array:
        """Apply the adjoint to the gradient ``dy``. Collective over ``group`` where the table above names a message."""


@dataclass(frozen=True)
class Copy(Region):
    """Let every rank use a whole array in its own way; add up the ranks' gradients in the backward pass."""

    def forward(self, x: Array) -> Array:
        """Return ``x`` itself. Not collective."""
        return x

    def backward(self, dy: Array) -> Array:
        """Add up the ranks' terms. Collective over ``group``."""
        return self.group.all_reduce(dy, "copy: gradient")


@dataclass(frozen=True)
class Reduce(Region):
    """Add up the terms of all ranks, so that every rank has the whole sum."""

    def forward(self, x: Array) -> Array:
        """Add up the ranks' terms. Collective over ``group``."""
        return self.group.all_reduce(x, "reduce")

    def backward(self, dy: Array) -> Array:
        """Return ``dy`` itself. Not collective."""
        return dy


@dataclass(frozen=True)
class ShardedRegion(Region):
    """Cut and join arrays along ``axis``, which has ``length`` elements in the whole array; a base of regions."""

    axis: int
    length: int

    @cached_property
    def shards(self) -> Partition:
        """The ranges of the axis that the ranks hold, by the shard rule."""
        return Partition(self.length, self.group.size)

    @property
    def own(self) -> slice:
        """The range of the axis that this rank holds."""
        return self.shards.shard(self.group.rank)

    def take(self, x: Array) -> Array:
        """Return this rank's block of a whole ``x``, contiguous. Not collective."""
        block: Array = namespace(x).ascontiguousarray(x[(slice(None),) * (self.axis % x.ndim) + (self.own,)])
        return block

    def gather(self, x: Array, tag: str) -> Array:
        """Return the ranks' blocks joined. Collective over ``group``."""
        return self.group.all_gather(x, self.axis, self.shards.sizes(), tag)

    def scatter(self, x: Array, tag: str) -> Array:
        """Return this rank's block of the sum of the ranks' terms. Collective over ``group``."""
        return self.group.reduce_scatter(x, self.axis, self.shards.sizes(), tag)


@dataclass(frozen=True)
class Split(ShardedRegion):
    """Keep this rank's block of a whole array."""

    def forward(self, x: Array) -> Array:
        """Return the own block. Not collective."""
        return self.take(x)

    def backward(self, dy: Array) -> Array:
        """Join the blocks' gradients. Collective over ``group``."""
        return self.gather(dy, "split: gradient")


@dataclass(frozen=True)
class Gather(ShardedRegion):
    """Join the ranks' blocks into an array that all of them use in the same way."""

    def forward(self, x: Array) -> Array:
        """Join the blocks. Collective over ``group``."""
        return self.gather(x, "gather")

    def backward(self, dy: Array) -> Array:
        """Return the own block of a gradient that is the same on all ranks. Not collective."""
        return self.take(dy)


@dataclass(frozen=True)
class Expand(ShardedRegion):
    """Join the ranks' blocks into an array that each rank uses in its own way."""

    def forward(self, x: Array) -> Array:
        """Join the blocks. Collective over ``group``."""
        return self.gather(x, "expand")

    def backward(self, dy: Array) -> Array:
        """Add up the ranks' terms and keep the own block. Collective over ``group``."""
        return self.scatter(dy, "expand: gradient")


@dataclass(frozen=True)
class Scatter(ShardedRegion):
    """Add up the terms of all ranks; each rank keeps its block of the sum."""

    def forward(self, x: Array) -> Array:
        """Add up the ranks' terms and keep the own block. Collective over ``group``."""
        return self.scatter(x, "scatter")

    def backward(self, dy: Array) -> Array:
        """Join the blocks' gradients. Collective over ``group``."""
        return self.gather(dy, "scatter: gradient")


def complete(group: Group, arrays: Sequence[Array], tag: str) -> None:
    """Replace arrays, of which each rank holds one term, by their sums, in one message.

    All ranks get the same bits. ``tag`` names the message in errors and traces.

    Collective over ``group``.
    """
    if not arrays:
        return
    xp = namespace(arrays[0])
    total = group.all_reduce(xp.concatenate([array.reshape(-1) for array in arrays]), tag)
    start = 0
    for array in arrays:
        array[...] = total[start : start + array.size].reshape(array.shape)
        start += array.size

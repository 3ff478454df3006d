"""Send the messages at the start and end of a split layer, and the adjoint messages in the backward pass.

The ranks of a group hold an array in one of three forms:

- *whole*: every rank holds the same whole array;
- *parts*: the array is cut along one axis by the shard rule, and each rank holds one part;
- *terms*: the array is a sum over the ranks, and each rank holds one summand, which has the shape of the sum.

The table says which form each region, a class of this module, takes and returns. The gradient of a part is a part. The
gradient of each term is the gradient of the sum, which is whole. The gradient of a whole array depends on the array's
use. If all ranks use the array in the same computation, every rank gets the whole gradient. If each rank uses it in a
computation of its own, each rank gets one term of the gradient. So the adjoint of "send nothing" can be "sum the
terms", and the adjoint of "sum the terms" is "send nothing" (Shoeybi et al., 2019, call this pair f and g). For
sequences in parts, the adjoint of "gather the parts" is "sum the terms, and keep this rank's part" (Korthikanti et al.,
2022, section 4.2).

==================  ================================  ================================
region              forward                           backward
==================  ================================  ================================
:class:`Copy`       whole to whole: no message        terms to whole: all-reduce
:class:`Reduce`     terms to whole: all-reduce        whole to whole: no message
:class:`Split`      whole to parts: no message        parts to whole: all-gather
:class:`Gather`     parts to whole: all-gather        whole to parts: no message
:class:`Expand`     parts to whole: all-gather        terms to parts: reduce-scatter
:class:`Scatter`    terms to parts: reduce-scatter    parts to whole: all-gather
==================  ================================  ================================

Each rank uses the result of ``Copy`` and ``Expand`` in a computation of its own; all ranks use the result of
``Reduce`` and ``Gather`` in the same computation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpizero.layout import Partition
from mpizero.nn.arrays import namespace
from mpizero.types import Array, Group


@dataclass(frozen=True)
class Region(ABC):
    """Define a communication over ``group`` in the forward pass and its adjoint in the backward pass."""

    group: Group

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """Communicate the input ``x`` over ``group`` and return the result.

        Collective over ``group`` in the subclasses that send a message in the forward pass.
        """

    @abstractmethod
    def backward(self, dy: Array) -> Array:
        """Communicate the gradient ``dy`` of the result of :meth:`forward`, and return the gradient of ``x``.

        Collective over ``group`` in the subclasses that send a message in the backward pass.
        """


@dataclass(frozen=True)
class Copy(Region):
    """Let each rank use a whole array in its own computation; sum the ranks' gradients in the backward pass."""

    def forward(self, x: Array) -> Array:
        """Return ``x`` itself. Not collective."""
        return x

    def backward(self, dy: Array) -> Array:
        """Return the sum of all ranks' ``dy``. Collective over ``group``."""
        return self.group.all_reduce(dy, "copy: gradient")


@dataclass(frozen=True)
class Reduce(Region):
    """Sum the arrays of all ranks, so that every rank has the sum."""

    def forward(self, x: Array) -> Array:
        """Return the sum of all ranks' ``x``. Collective over ``group``."""
        return self.group.all_reduce(x, "reduce")

    def backward(self, dy: Array) -> Array:
        """Return ``dy`` itself. Not collective."""
        return dy


@dataclass(frozen=True)
class ShardedRegion(Region):
    """Cut arrays along ``axis`` by the shard rule, and join them again; the base class of four regions.

    ``length`` is the number of elements along this axis in the whole array.
    """

    axis: int
    length: int

    @cached_property
    def shards(self) -> Partition:
        """The index ranges along the axis, one for each rank, by the shard rule."""
        return Partition(self.length, self.group.size)

    @property
    def own(self) -> slice:
        """The index range along the axis that this rank holds."""
        return self.shards.shard(self.group.rank)

    def take(self, x: Array) -> Array:
        """Return this rank's part of the whole array ``x``, contiguous. Not collective."""
        block: Array = namespace(x).ascontiguousarray(x[(slice(None),) * (self.axis % x.ndim) + (self.own,)])
        return block

    def gather(self, x: Array, tag: str) -> Array:
        """Return the whole array, of which ``x`` is this rank's part. Collective over ``group``.

        ``tag`` names the message in errors and traces.
        """
        return self.group.all_gather(x, self.axis, self.shards.sizes(), tag)

    def scatter(self, x: Array, tag: str) -> Array:
        """Return this rank's part of the sum of all ranks' ``x``. Collective over ``group``.

        ``tag`` names the message in errors and traces.
        """
        return self.group.reduce_scatter(x, self.axis, self.shards.sizes(), tag)


@dataclass(frozen=True)
class Split(ShardedRegion):
    """Cut a whole array, and keep this rank's part."""

    def forward(self, x: Array) -> Array:
        """Return this rank's part of ``x``. Not collective."""
        return self.take(x)

    def backward(self, dy: Array) -> Array:
        """Join the ranks' parts of the gradient. Collective over ``group``."""
        return self.gather(dy, "split: gradient")


@dataclass(frozen=True)
class Gather(ShardedRegion):
    """Join the ranks' parts of an array to the whole array, which all ranks use in the same computation."""

    def forward(self, x: Array) -> Array:
        """Return the whole array, of which ``x`` is this rank's part. Collective over ``group``."""
        return self.gather(x, "gather")

    def backward(self, dy: Array) -> Array:
        """Return this rank's part of ``dy``; all ranks pass the same ``dy``. Not collective."""
        return self.take(dy)


@dataclass(frozen=True)
class Expand(ShardedRegion):
    """Join the ranks' parts of an array to the whole array, which each rank uses in its own computation."""

    def forward(self, x: Array) -> Array:
        """Return the whole array, of which ``x`` is this rank's part. Collective over ``group``."""
        return self.gather(x, "expand")

    def backward(self, dy: Array) -> Array:
        """Return this rank's part of the sum of all ranks' ``dy``. Collective over ``group``."""
        return self.scatter(dy, "expand: gradient")


@dataclass(frozen=True)
class Scatter(ShardedRegion):
    """Sum the arrays of all ranks; each rank keeps its part of the sum."""

    def forward(self, x: Array) -> Array:
        """Return this rank's part of the sum of all ranks' ``x``. Collective over ``group``."""
        return self.scatter(x, "scatter")

    def backward(self, dy: Array) -> Array:
        """Join the ranks' parts of the gradient. Collective over ``group``."""
        return self.gather(dy, "scatter: gradient")


def complete(group: Group, arrays: Sequence[Array], tag: str) -> None:
    """Replace each of ``arrays`` in place by its sum over the ranks, all in one message.

    Every rank passes arrays of the same shapes, and gets the same bits. ``tag`` names the message in errors and traces.

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

"""Split layers and models over a tensor group: each rank holds a part of the parameters and computes with it.

A :class:`Region` sends the messages at the start or end of a split layer, and the adjoint ones in the backward pass.
The functions after the regions compute which range of a parameter, or of the positions of a sequence, a rank holds. The
split forms of layers follow: linear maps by columns or rows, attention by heads, token tables by rows (Shoeybi et al.,
2019, section 3), and transformer blocks with sequence parallelism (Korthikanti et al., 2022, section 4.2). The last
block of a language model and its loss are split so that no rank holds all logits. :func:`split_model` splits the layers
of a model.

[Note: split forms] The code of a layer is independent of how the layer is split. :meth:`mpizero.nn.Layer.split` looks
the layer's class up in the table ``SPLIT_FORMS``. A user's own layer overrides ``split`` instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.errors import ConfigError, DataError
from mpizero.layout import Partition
from mpizero.layout.flat import value_at
from mpizero.layout.tensor_parts import part_shape
from mpizero.nn.arrays import as_ids, as_rows, known, matmul, namespace, require_sequences, sum_rows, vector
from mpizero.nn.layer import Affine, Layer, Operations, SequenceLayer, Wrapper, linear_operations, poll_of
from mpizero.nn.layers import Activation, Dropout, LayerNorm, Linear, Projection, Sequential
from mpizero.nn.losses import CrossEntropy, times
from mpizero.nn.transformer import (
    AttentionBase,
    CausalSelfAttention,
    Embedding,
    FeedForward,
    FeedForwardBase,
    LanguageHead,
    LanguageHeadBase,
    Position,
    TokenEmbedding,
    TransformerBlock,
    TransformerBlockBase,
)
from mpizero.types import EVALUATE, Array, BlockModel, Group, Loss, ParameterSpec, Params, Part, Ranges, Run
from mpizero.types import Layer as AnyLayer


@dataclass(frozen=True)
class Region(ABC):
    """Define a communication over ``group`` in the forward pass and its adjoint in the backward pass.

    The ranks of a group hold an array in one of three forms:

    - *whole*: every rank holds the same whole array;
    - *parts*: the array is cut along one axis by the shard rule, and each rank holds one part;
    - *terms*: the array is a sum over the ranks, and each rank holds one summand, which has the shape of the sum.

    The table says which form each region takes and returns. The gradient of a part is a part. The gradient of each term
    is the gradient of the sum, which is whole. The gradient of a whole array depends on the array's use. If all ranks
    use the array in the same computation, every rank gets the whole gradient. If each rank uses it in a computation of
    its own, each rank gets one term of the gradient. So the adjoint of "send nothing" can be "sum the terms", and the
    adjoint of "sum the terms" is "send nothing" (Shoeybi et al., 2019, call this pair f and g). For sequences in parts,
    the adjoint of "gather the parts" is "sum the terms, and keep this rank's part" (Korthikanti et al., 2022, section
    4.2).

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
    """Cut arrays along ``axis`` into shards of about equal size, and join them again; the base class of four regions.

    ``length`` is the number of elements along this axis in the whole array.
    """

    axis: int
    length: int

    @cached_property
    def shards(self) -> Partition:
        """The index ranges along the axis, one for each rank, of about equal length."""
        return Partition(self.length, self.group.size)

    @property
    def local_slice(self) -> slice:
        """The index range along the axis that this rank holds."""
        return self.shards.shard(self.group.rank)

    def take(self, x: Array) -> Array:
        """Return this rank's part of the whole array ``x``, contiguous. Not collective."""
        return namespace(x).ascontiguousarray(x[(slice(None),) * (self.axis % x.ndim) + (self.local_slice,)])

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


def local_range(length: int, group: Group) -> tuple[int, int]:
    """Return the range (start, stop) that this rank holds of ``length`` items: its shard of them.

    Not collective.
    """
    shard = Partition(length, group.size).shard(group.rank)
    return shard.start, shard.stop


def size_of(ranges: Ranges) -> int:
    """Return the number of items in the given ranges (start, stop) together. Not collective."""
    return sum(stop - start for start, stop in ranges)


def part_of(spec: ParameterSpec, axis: int, ranges: Ranges) -> ParameterSpec:
    """Return the spec of a part of a parameter: its ``ranges`` along ``axis``. Not collective.

    The part gets the same start values as it has in the whole parameter.
    """
    part = Part(spec.shape, axis, ranges)
    return replace(spec, shape=part_shape(part), part=part)


def complete_shared(layer: Layer, group: Group, grads: Params, tag: str) -> None:
    """Sum over the ranks, in place, the gradients of those parameters that every rank holds whole.

    ``layer`` has the parameters, and ``grads`` has the gradients. Before the call, each rank has computed the gradients
    from its own positions of the sequences only. ``tag`` names the message in errors and traces.

    Collective over ``group``, with one message.
    """
    shared = [value_at(grads, spec.name) for spec in layer.specs() if spec.part is None and spec.trainable]
    complete(group, shared, tag)


def located(run: Run, x: Array, group: Group, layer: SequenceLayer | None = None) -> Run:
    """Return ``run`` with the length of the whole sequences, and the ranges of positions that the tensor group holds.

    ``x`` (samples, positions, ...) is this rank's part of these positions. ``layer`` is the unsplit layer; pass None
    for a layer that computes each position by itself. Collective over ``group`` if ``run.length`` is 0 (unknown).

    Raises
    ------
    DataError
        ``x`` does not have as many positions as the shard rule gives this rank.
    """
    shape = None
    if not run.length:
        length = namespace(x).full(1, x.shape[1], np.int64)
        shape = x.shape[0], int(group.all_gather(length, 0, (1,) * group.size, "sequence lengths").sum())
    if layer is not None:
        run = layer.located(run, shape)
    elif shape is not None:
        run = run.on_whole(shape[1])
    start, stop = local_range(run.held, group)
    if x.shape[1] != stop - start:
        span = f"the {run.held} of its context rank{run.described}" if run.described else f"sequences of {run.held}"
        raise DataError(
            f"rank {group.rank} of a tensor group of {group.size} takes places {start} to {stop} of {span}, the input "
            f"has shape {tuple(x.shape)}: give every rank its own part, by the shard rule"
        )
    return run


def divisors(number: int) -> Sequence[int]:
    """List the numbers that divide ``number``, ascending. Not collective."""
    return [d for d in range(1, number + 1) if number % d == 0]


class SplitForm(Layer):
    """Define the split form of the layer ``whole``; both have the same output shape."""

    whole: Layer

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``. Not collective."""
        return self.whole.output_shape(shape)


class SplitLinearBase(SplitForm, Affine):
    """Define what :class:`ColumnLinear` and :class:`RowLinear` have in common."""

    whole: Linear

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """The ranges (start, stop) of the weight's columns or rows that this rank holds."""

    @cached_property
    def local_size(self) -> int:
        """Number of the weight's columns or rows that this rank holds."""
        return size_of(self.ranges)

    def last_bias(self, params: Params) -> Array | None:
        """Return this rank's ``bias``, a part or the whole, or None if the layer has no bias."""
        return params["bias"] if self.whole.bias else None


@dataclass(frozen=True)
class ColumnLinear(SplitLinearBase):
    """Multiply whole inputs by this rank's columns of the weight, to compute this rank's part of the outputs.

    Parameters
    ----------
    whole : Linear
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    columns : tuple of (int, int) or None
        The ranges (start, stop) of the weight's columns that this rank holds; None takes those of the shard rule.
    sequence : bool
        Whether inputs hold only this rank's positions of the sequences: (samples, positions of this rank, inputs). All
        positions are then gathered before the product, and again for the weight's gradient, because a rank keeps only
        its own positions.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def columns(comm):
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     return {spec.name: spec.shape for spec in mz.nn.ColumnLinear(mz.nn.Linear(3, 8), group).specs()}
    >>> run_in_threads(2, columns)[0]
    {'weight': (3, 4), 'bias': (4,)}
    """

    whole: Linear
    group: Group
    columns: Ranges | None = None
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The ranges (start, stop) of the weight's columns that this rank holds."""
        return self.columns or (local_range(self.whole.outputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's columns of ``weight`` and its part of ``bias``, if the layer has one. Not collective."""
        return tuple(part_of(spec, len(spec.shape) - 1, self.ranges) for spec in self.whole.own_specs())

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., inputs) to this rank's outputs (..., columns of this rank), without the bias.

        Returns the outputs and the cache. Collective over the group if ``sequence`` is True.
        """
        weight = params["weight"]
        x = as_rows(x, self.whole.inputs, weight.dtype, "Linear").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.held) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        y = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.inputs), weight, between=poll_of(params))
        return y.reshape(*inputs.shape[:-1], self.local_size), (x, entry)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the sum over the ranks of ``dy @ weight.T``, and ``dy`` as a matrix for :meth:`backward_weights`.

        If ``sequence`` is True, the sum holds this rank's positions only. If the unsplit layer computes no input
        gradient, the first result is None and nothing is sent. Collective over the group.
        """
        rows = dy.reshape(prod(dy.shape[:-1]), self.local_size)
        if not self.whole.input_gradient:
            return None, rows
        dx = matmul(rows, params["weight"].T, between=poll_of(params)).reshape(*dy.shape[:-1], self.whole.inputs)
        return cache[1].backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's columns of weight and bias.

        Collective over the group if ``sequence`` is True.
        """
        x, entry = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.inputs)
        matmul(inputs.T, pending, grads["weight"], poll_of(params))
        if self.whole.bias:
            sum_rows(pending, grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of products with this rank's columns of the weight, for one sample of ``shape``.

        Not collective.
        """
        return linear_operations(prod(shape[:-1]), self.whole.inputs, self.local_size, self.whole.input_gradient)


@dataclass(frozen=True)
class RowLinear(SplitLinearBase):
    """Multiply this rank's part of the inputs by its rows of the weight, and sum the products over the ranks.

    Every rank holds the whole bias, which is added to the sum. From ``backward_input`` to ``backward_weights`` a rank
    keeps the whole gradient of the outputs.

    Parameters
    ----------
    whole : Linear
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether each rank gets the sum for its own positions of the sequences only. The bias's gradient is then computed
        from these positions only; the block that uses the layer sums it over the ranks.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def rows(comm):
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     return {spec.name: spec.shape for spec in mz.nn.RowLinear(mz.nn.Linear(8, 3), group).specs()}
    >>> run_in_threads(2, rows)[0]
    {'weight': (4, 3), 'bias': (3,)}
    """

    whole: Linear
    group: Group
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The one range (start, stop) of the weight's rows that this rank holds."""
        return (local_range(self.whole.inputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight`` and the whole ``bias``, if the layer has one. Not collective."""
        weight, *bias = self.whole.own_specs()
        return part_of(weight, 0, self.ranges), *bias

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map this rank's inputs (..., rows of this rank) to the outputs (..., outputs), without the bias.

        Returns the outputs and the cache. If ``sequence`` is True, the outputs are those of this rank's positions.
        Collective over the group.
        """
        weight = params["weight"]
        rows = as_rows(x, self.local_size, weight.dtype, "Linear")
        leave: Region = Scatter(self.group, 1, x.shape[1]) if self.sequence else Reduce(self.group)
        terms = matmul(rows, weight, between=poll_of(params))
        y = leave.forward(terms.reshape(*x.shape[:-1], self.whole.outputs))
        return y, (rows, leave)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight.T`` (..., rows of this rank), and what :meth:`backward_weights` needs.

        Collective over the group if ``sequence`` is True.
        """
        rows, leave = cache
        terms = leave.backward(dy)
        above = terms.reshape(rows.shape[0], self.whole.outputs)
        dx = matmul(above, params["weight"].T, between=poll_of(params))
        return dx.reshape(*terms.shape[:-1], self.local_size), (above, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the weight and of the bias.

        If ``sequence`` is True, the bias's gradient is computed from this rank's positions only. Not collective.
        """
        above, dy = pending
        matmul(cache[0].T, above, grads["weight"], poll_of(params))
        if self.whole.bias:
            sum_rows(dy.reshape(prod(dy.shape[:-1]), self.whole.outputs), grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of products with this rank's rows of the weight, for one sample of ``shape``.

        Not collective.
        """
        return linear_operations(prod(shape[:-1]), self.local_size, self.whole.outputs)


@dataclass(frozen=True)
class SplitLinear(Wrapper):
    """Split a linear map by columns, with inputs and outputs that are whole on every rank.

    Use it for a single layer. Two linear layers in sequence need fewer messages as :class:`ColumnLinear` followed by
    :class:`RowLinear`.
    """

    layer: ColumnLinear

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., inputs) to (..., outputs); return the outputs and the cache. Collective over the group."""
        y, cache = self.layer.forward(params, x, run)
        join = Gather(self.layer.group, y.ndim - 1, self.layer.whole.outputs)
        return join.forward(y), (cache, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and what :meth:`backward_weights` needs. Collective over the group."""
        return self.layer.backward_input(params, cache[0], cache[1].backward(dy))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's columns of weight and bias. Not collective."""
        self.layer.backward_weights(params, cache[0], pending, grads)


@dataclass(frozen=True)
class SplitProjection(SplitForm):
    """Compute the logits of this rank's classes from whole inputs; the classes are split over the ranks.

    Parameters
    ----------
    whole : Projection
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether inputs hold only this rank's positions of the sequences, as for :class:`ColumnLinear`.
    joined : bool
        Whether the logits are gathered, so that every rank gets all of them.
    """

    whole: Projection
    group: Group
    sequence: bool = False
    joined: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The one range (start, stop) of classes that this rank holds."""
        return (local_range(self.whole.classes, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight``, one row for each of its classes. Not collective."""
        return tuple(part_of(spec, 0, self.ranges) for spec in self.whole.own_specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., features) to the logits of this rank's classes, or of all classes if ``joined`` is True.

        Returns the logits and the cache. Collective over the group if ``sequence`` or ``joined`` is True.
        """
        weight = params["weight"]
        x = as_rows(x, self.whole.features, weight.dtype, "Projection").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.held) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        logits = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.features), weight.T, between=poll_of(params))
        logits = logits.reshape(*inputs.shape[:-1], size_of(self.ranges))
        join = Gather(self.group, logits.ndim - 1, self.whole.classes)
        return (join.forward(logits) if self.joined else logits), (x, entry, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the sum over the ranks of ``dy @ weight``, and what :meth:`backward_weights` needs.

        If ``sequence`` is True, the sum holds this rank's positions only. Collective over the group.
        """
        _, entry, join = cache
        dy = join.backward(dy) if self.joined else dy
        rows = dy.reshape(prod(dy.shape[:-1]), size_of(self.ranges))
        dx = matmul(rows, params["weight"], between=poll_of(params)).reshape(*dy.shape[:-1], self.whole.features)
        return entry.backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the weight.

        Collective over the group if ``sequence`` is True.
        """
        x, entry, _ = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.features)
        matmul(pending.T, inputs, grads["weight"], poll_of(params))

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of products with this rank's rows of the weight, for one sample of ``shape``.

        Not collective.
        """
        return linear_operations(prod(shape[:-1]), self.whole.features, size_of(self.ranges))


@dataclass(frozen=True)
class SplitAttention(AttentionBase):
    """Compute attention with this rank's heads; the map to queries, keys and values is split by columns.

    Parameters
    ----------
    whole : CausalSelfAttention
        The unsplit layer; the group's size must divide its number of heads. Its projection is split by rows. With
        context parallelism, this rank's heads attend to the keys of the whole context group.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether inputs and outputs hold only this rank's positions of the sequences: (samples, positions of this rank,
        dim). The gradient of the projection's bias is then computed from these positions only; the block that uses the
        layer sums it over the ranks.

    Raises
    ------
    ConfigError
        The number of ranks does not divide the number of heads.
    """

    whole: CausalSelfAttention
    group: Group
    sequence: bool = False

    def __post_init__(self) -> None:
        heads, size = self.whole.heads, self.group.size
        if heads % size:
            raise ConfigError(
                f"heads={heads} cannot be split evenly over a tensor group of {size} ranks; choose a tensor size that "
                f"divides them ({', '.join(map(str, divisors(heads)))}), or a multiple of {size} heads"
            )

    @property
    def features(self) -> int:
        """Number of features of the input."""
        return self.whole.dim

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a sample that the group works on. Not collective."""
        return self.whole.local_shape(shape)

    @cached_property
    def local_heads(self) -> tuple[CausalSelfAttention, int]:
        """A layer that computes the attention of this rank's heads, and the number of the first of them in all heads.

        Only the attention of the returned layer is used, not its linear maps.
        """
        layer, size = self.whole, self.group.size
        local = replace(layer, dim=layer.dim // size, heads=layer.heads // size)
        return local, self.group.rank * local.heads

    @cached_property
    def _layers(self) -> tuple[ColumnLinear, RowLinear]:
        into_qkv, projection = self.whole._layers
        start, stop = local_range(self.whole.dim, self.group)
        columns = tuple((kind * self.whole.dim + start, kind * self.whole.dim + stop) for kind in range(3))
        return (
            ColumnLinear(into_qkv, self.group, columns, self.sequence),
            RowLinear(projection, self.group, self.sequence),
        )


@dataclass(frozen=True)
class SplitFeedForward(FeedForwardBase):
    """Apply two linear layers with an activation between them; the hidden features are split over the ranks.

    Parameters
    ----------
    whole : FeedForward
        The unsplit layer; its hidden features are split by the shard rule.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether inputs and outputs hold only this rank's positions of the sequences: (samples, positions of this rank,
        dim). The gradient of the projection's bias is then computed from these positions only; the block that uses the
        layer sums it over the ranks.
    """

    whole: FeedForward
    group: Group
    sequence: bool = False

    @cached_property
    def _layers(self) -> tuple[ColumnLinear, Activation, RowLinear]:
        expand, activation, projection = self.whole._layers
        column = ColumnLinear(expand, self.group, sequence=self.sequence)
        return column, activation, RowLinear(projection, self.group, self.sequence)


def dropped(dropout: Dropout, x: Array, run: Run, group: Group) -> Array:
    """Apply dropout to ``x`` (samples, positions of this rank, features) with the mask of the unsplit model.

    The backward pass calls this function with ``dy`` as ``x``.
    """
    if not dropout.drops(x, run):
        return x
    return dropout.mask_pieces(x, run, run.pieces(*local_range(run.held, group)))


@dataclass(frozen=True)
class SplitBlock(TransformerBlockBase):
    """Compute a pre-norm block with heads and hidden features split over the ranks; activations are split by positions.

    Attention and feed-forward each are a pair of linear maps: the first is split by columns, the second by rows.
    Outside of these pairs a rank works on its own positions of the sequences only. So norms, dropouts and the residual
    stream take 1 / size of the time and memory, where ``size`` is the number of ranks. For each of the two pairs the
    forward pass sends an all-gather and a reduce-scatter, and ``backward_input`` sends the same.
    :meth:`backward_weights` sends another all-gather for each pair, because a rank keeps only its own positions of the
    pair's input. In addition, it sends one all-reduce of the gradients of all parameters that every rank holds whole.

    Parameters
    ----------
    whole : TransformerBlock
        The unsplit layer. With context parallelism, the tensor group splits the positions that one context rank holds.
    group : Group
        The ranks that the layer is split over.
    """

    whole: TransformerBlock
    group: Group

    def __post_init__(self) -> None:
        self.children()

    @cached_property
    def _layers(self) -> tuple[LayerNorm, SplitAttention, LayerNorm, SplitFeedForward]:
        norm1, attention, norm2, feed_forward = self.whole._layers
        return (
            norm1,
            SplitAttention(attention, self.group, sequence=True),
            norm2,
            SplitFeedForward(feed_forward, self.group, sequence=True),
        )

    @cached_property
    def _dropouts(self) -> tuple[Dropout, Dropout]:
        return self.whole._dropouts

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        return dropped(dropout, x, run, self.group)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the output for ``x`` (samples, positions of this rank, dim), of the same shape, and the cache.

        Collective over the group.
        """
        return super().forward(params, x, located(run, x, self.group, self.whole))

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a sample that the group works on. Not collective."""
        return self.whole.local_shape(shape)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's parts of parameters, and of parameters that every rank holds whole.

        Collective over the group.
        """
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "block: shared gradients")


@dataclass(frozen=True)
class SequenceParallel(Wrapper):
    """Run a split block on this rank's positions; inputs and outputs have the positions of all ranks of the group."""

    layer: SplitBlock
    group: Group

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Run the layer on this rank's positions of ``x`` (samples, length, ...), and gather the outputs of all ranks.

        Returns the whole output and the cache. Collective over the group.
        """
        require_sequences(x, None, "TransformerBlock")
        cut, join = Split(self.group, 1, x.shape[1]), Gather(self.group, 1, x.shape[1])
        y, cache = self.layer.forward(params, cut.forward(x), self.layer.whole.located(run, x.shape))
        return join.forward(y), (cut, cache, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the whole gradient of ``x``, and what :meth:`backward_weights` needs. Collective over the group."""
        cut, inner, join = cache
        dx, pending = self.layer.backward_input(params, inner, join.backward(dy))
        return cut.backward(known(dx)), pending

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the wrapped layer's ``backward_weights``. Collective over the group."""
        self.layer.backward_weights(params, cache[1], pending, grads)


@dataclass(frozen=True)
class SplitEmbedding(SplitForm):
    """Look up ids in a table whose rows are split over the ranks, about as many on each.

    One rank has the table's row for an id, and the other ranks take zeros instead; the sum over the ranks is the
    vector. This sum is exact, so vectors and gradients have the same bits as those of the unsplit layer.

    Parameters
    ----------
    whole : Embedding
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether each rank gets only the vectors of its own positions of the sequences; then the input ids are (samples,
        length). Otherwise every rank gets all vectors.
    """

    whole: Embedding
    group: Group
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The one range (start, stop) of the table's rows that this rank holds."""
        return (local_range(self.whole.items, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight``. Not collective."""
        return tuple(part_of(spec, 0, self.ranges) for spec in self.whole.own_specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map the ids ``x`` of all positions to vectors; return the vectors and the cache.

        The vectors are those of all positions, or those of this rank's positions if ``sequence`` is True. Collective
        over the group.
        """
        weight = params["weight"]
        ids = as_ids(x, self.whole.items, "Embedding").reshape(-1) - self.ranges[0][0]
        rows = namespace(weight).empty((ids.size, self.whole.features), weight.dtype)
        kernels.backend(weight).layers.gather(weight, ids, rows)
        rows[(ids < 0) | (ids >= size_of(self.ranges))] = 0
        leave: Region = Scatter(self.group, 1, x.shape[1]) if self.sequence else Reduce(self.group)
        return leave.forward(rows.reshape(*x.shape, self.whole.features)), (ids, leave)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and ``dy`` for :meth:`backward_weights`.

        Not collective.
        """
        return None, dy

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient of this rank's rows of the table. Collective over the group if ``sequence``."""
        self.add_rows(cache[0], cache[1].backward(pending), grads["weight"])

    def add_rows(self, ids: Array, dy: Array, gradient: Array) -> None:
        """Overwrite row ``id`` of ``gradient`` with the sum of ``dy`` over all occurrences of this id in ``ids``.

        Ids are counted from this rank's first row of the table; ids of rows that other ranks hold are ignored. Not
        collective.
        """
        gradient[...] = 0
        rows = namespace(dy).ascontiguousarray(dy.reshape(ids.size, self.whole.features))
        kernels.backend(gradient).layers.scatter_add(rows, ids, gradient)


@dataclass(frozen=True)
class SplitTokenEmbedding(SplitForm):
    """Look up token ids in a table that is split by rows, add position vectors, and apply dropout.

    Every rank holds the whole table of position vectors. If ``sequence`` is True, the forward pass sends a
    reduce-scatter, and :meth:`backward_weights` an all-gather. Otherwise the forward pass sends an all-reduce.

    Parameters
    ----------
    whole : TokenEmbedding
        The unsplit layer. With context parallelism, the tensor group splits the positions that one context rank holds.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether each rank gets only the vectors of its own positions of the sequences.
    """

    whole: TokenEmbedding
    group: Group
    sequence: bool = False

    @cached_property
    def _layers(self) -> tuple[SplitEmbedding, Position, Dropout]:
        token, position, dropout = self.whole._layers
        return SplitEmbedding(token, self.group, self.sequence), position, dropout

    def children(self) -> dict[str, Layer]:
        """Return the two tables by name: ``token`` and ``position``. Not collective."""
        token, position, _ = self._layers
        return {"token": token, "position": position}

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map the ids ``x`` (samples, length) to vectors; return the vectors and the cache.

        The vectors are (samples, length, features), or (samples, positions of this rank, features) if ``sequence`` is
        True. Collective over the group.
        """
        run = self.whole.require_ids(x, run)
        token, position, dropout = self._layers
        vectors, cache = token.forward(params["token"], x, run)
        positions = local_range(run.held, self.group) if self.sequence else (0, run.held)
        position.add(params["position"]["weight"], vectors, run.pieces(*positions))
        return self._dropped(dropout, vectors, run), (cache, run)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return None, because integer ids have no gradient, and the gradient of the vectors before dropout.

        The second value is for :meth:`backward_weights`. Not collective.
        """
        return None, self._dropped(self._layers[2], dy, cache[1])

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the token table, and of the whole position table.

        Collective over the group if ``sequence`` is True.
        """
        token, position, _ = self._layers
        ids, leave = cache[0]
        dy = leave.backward(pending)  # all places, which both tables need
        token.add_rows(ids, dy, grads["token"]["weight"])
        position.backward_weights(params["position"], cache[1].pieces(), dy, grads["position"])

    def _dropped(self, dropout: Dropout, x: Array, run: Run) -> Array:
        if self.sequence:
            return dropped(dropout, x, run, self.group)
        return dropout.mask(x, run) if dropout.drops(x, run) else x

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Return zero operations, because a look-up has no matrix products. Not collective."""
        return Operations()


@dataclass(frozen=True)
class SplitHead(SplitForm, LanguageHeadBase):
    """Apply the final norm to this rank's positions, then compute logits of its vocabulary items at all positions.

    The messages are: in :meth:`forward` an all-gather, in ``backward_input`` a reduce-scatter, and in
    :meth:`backward_weights` an all-gather and an all-reduce of the norm's gradients.

    Parameters
    ----------
    whole : LanguageHead
        The unsplit layer.
    group : Group
        The ranks that the layer is split over.
    """

    whole: LanguageHead
    group: Group

    @cached_property
    def _layers(self) -> tuple[LayerNorm, SplitProjection]:
        norm, projection = self.whole._layers
        return norm, SplitProjection(projection, self.group, sequence=True)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (samples, positions of this rank, dim) to logits (samples, length, vocabulary items of this rank).

        Returns the logits and the cache. Collective over the group.
        """
        return super().forward(params, x, located(run, x, self.group))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of the norm, and of the weight's rows for this rank's vocabulary items.

        Collective over the group.
        """
        super().backward_weights(params, cache, pending, grads)
        complete_shared(self, self.group, grads, "head: shared gradients")


@dataclass(frozen=True)
class SplitCrossEntropy:
    """Compute the cross-entropy of logits whose classes are split over the ranks.

    For each target a rank reduces its logits to three numbers: their maximum, the sum of exp(logit - maximum), and the
    target's logit if this rank holds it. One all-gather of these numbers is enough for every rank to compute the whole
    loss, with the same bits. The gradient of this rank's logits needs no other message.

    Parameters
    ----------
    whole : CrossEntropy
        The unsplit loss.
    group : Group
        The ranks that the classes are split over.
    classes : int
        Number of classes of all ranks together.
    """

    whole: CrossEntropy
    group: Group
    classes: int

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Sum the losses of all targets that are not negative, in float64. Collective over the group.

        Parameters
        ----------
        prediction : Array
            The logits of this rank's classes: (..., number of these classes).
        target : Array or dict
            Class numbers (...), the same on every rank, maybe with weights and a mask; see
            :meth:`mpizero.nn.CrossEntropy.forward`.

        Returns
        -------
        loss_sum, weight : float
            The sum of the losses, and the number (the sum of the weights) of the targets that are not negative; the
            same on every rank.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        targets, weights = self.whole.as_targets(target, prediction.shape[:-1], self.classes)
        xp, loss = namespace(prediction), kernels.backend(prediction).losses
        logits = xp.ascontiguousarray(prediction.reshape(targets.size, prediction.shape[-1]))
        first = local_range(self.classes, self.group)[0]
        local_terms = xp.empty((1, 3, targets.size), logits.dtype)
        loss.partial_cross_entropy(logits, targets, first, local_terms[0])
        terms = self.group.all_gather(local_terms, 0, (1,) * self.group.size, "cross-entropy")
        merged, losses = xp.empty((2, targets.size), logits.dtype), xp.empty(targets.size, np.float64)
        loss.merged_cross_entropy(terms, targets, merged, losses)
        return *self.whole.totals(losses, targets, weights), (logits, targets, weights, merged, prediction.shape)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum with respect to this rank's logits. Not collective."""
        logits, targets, weights, merged, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        first = local_range(self.classes, self.group)[0]
        loss = kernels.backend(logits).losses
        loss.partial_cross_entropy_backward(logits, targets, first, merged, vector(logits, scale), gradient)
        return times(gradient, weights).reshape(shape)

    def joined(self, prediction: Array) -> Array:
        """Return the logits of all classes; ``prediction`` holds those of this rank's classes.

        Collective over the group.
        """
        return Gather(self.group, prediction.ndim - 1, self.classes).forward(prediction)


def _split_head(head: LanguageHead, group: Group) -> Layer:
    """Return the head with its projection split by vocabulary items; every rank gets all logits."""
    layers = head.children()
    return Sequential({**layers, "projection": layers["projection"].split(group)})


#: The function that splits a layer over a group, by the layer's class.
SPLIT_FORMS: dict[type, Callable[[Any, Group], Layer]] = {
    CausalSelfAttention: SplitAttention,
    Embedding: SplitEmbedding,
    FeedForward: SplitFeedForward,
    LanguageHead: _split_head,
    Linear: lambda layer, group: SplitLinear(ColumnLinear(layer, group)),
    Projection: lambda layer, group: SplitProjection(layer, group, joined=True),
    TokenEmbedding: SplitTokenEmbedding,
    TransformerBlock: lambda layer, group: SequenceParallel(SplitBlock(layer, group), group),
}


@dataclass(frozen=True)
class JoinedLoss:
    """Compute a loss of predictions whose last axis is split over the ranks: gather the parts, then apply the loss.

    Parameters
    ----------
    loss : Loss
        The loss of whole predictions.
    group : Group
        The ranks that hold the parts of the predictions; each of them computes the whole loss.
    outputs : int
        Length of the last axis of whole predictions.
    """

    loss: Loss
    group: Group
    outputs: int

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Gather the predictions; return the loss sum, the weight and the cache for :meth:`backward`.

        ``prediction`` is this rank's part of the predictions, ``target`` is the whole target. Collective over the
        group.
        """
        join = Gather(self.group, prediction.ndim - 1, self.outputs)
        loss_sum, weight, cache = self.loss.forward(join.forward(prediction), target)
        return loss_sum, weight, (cache, join)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the loss sum's gradient, for this rank's part of the prediction. Not collective."""
        inner, join = cache
        gradient: Array = join.take(self.loss.backward(inner, scale))
        return gradient


@dataclass(frozen=True, eq=False)
class SplitModel:
    """Hold one rank's part of a tensor-parallel model; its passes and its loss are collective over ``group``.

    The loss sum and its weight are those of the whole model, the same on every rank.

    Parameters
    ----------
    whole : BlockModel
        The unsplit model; parameter names, seed and dtype are the same.
    group : Group
        The ranks that the model is split over; all of them work on the same samples.
    blocks : mapping of str to Layer
        The split blocks by name, in the order in which they run.
    loss : Loss
        The loss. It takes the last block's output on this rank, and the whole target.
    cuts : mapping of str to int
        For each block that computes only a part of its output on this rank: the axis along which the output is split,
        counted without the batch axis.
    outputs : int or None
        Length of the whole prediction's last axis, if each rank has a part of that axis; None if predictions are whole.
    sequences : bool
        Whether blocks work on this rank's positions of the sequences only. Sequences lie along the second axis of the
        model's input.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def held(comm):
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     part = mz.nn.split_model(mz.nn.MLP(4, [6], 2), group)
    ...     return type(part).__name__, part.local_shape("hidden.0", (6,))
    >>> run_in_threads(2, held)  # three of six hidden features on each rank
    [('SplitModel', (3,)), ('SplitModel', (3,))]
    """

    whole: BlockModel
    group: Group
    blocks: Mapping[str, AnyLayer]
    loss: Loss
    cuts: Mapping[str, int] = field(default_factory=dict)
    outputs: int | None = None
    sequences: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the unsplit model."""
        return self.whole.dtype

    @property
    def seed(self) -> int:
        """The seed of the unsplit model."""
        return self.whole.seed

    def run_on(self, x: Array, run: Run) -> Run:
        """Return ``run`` with the length of the sequences in the input ``x``, if blocks work on parts of them.

        Without the length in ``run``, each block would need messages to find it. Not collective.
        """
        return run.on_whole(x.shape[1]) if self.sequences and getattr(x, "ndim", 0) > 1 else run

    def whole_prediction(self, y: Array) -> Array:
        """Return the whole prediction; ``y`` is the last block's output on this rank.

        Collective over ``group`` if each rank has a part of the prediction.
        """
        return y if self.outputs is None else Gather(self.group, y.ndim - 1, self.outputs).forward(y)

    def loss_on_parts(self, loss: Loss) -> Loss:
        """Adapt a loss of whole predictions to the last block's output on this rank. Not collective."""
        return loss if self.outputs is None else JoinedLoss(loss, self.group, self.outputs)

    def local_shape(self, block: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a block's output, for one sample. Not collective.

        ``shape`` is the shape of the whole output for one sample.
        """
        if block not in self.cuts:
            return shape
        axis = self.cuts[block] % len(shape)
        start, stop = local_range(shape[axis], self.group)
        return (*shape[:axis], stop - start, *shape[axis + 1 :])


def split_model(model: BlockModel, group: Group) -> BlockModel:
    """Split a model over a tensor group. Not collective.

    Parameters
    ----------
    model : BlockModel
        A model with a method ``split(group)``, such as mpizero's own models, or a model whose blocks have this method
        (:meth:`mpizero.nn.Layer.split`). Blocks without this method stay whole on every rank.
    group : Group
        The ranks to split the model over. If there is only one rank, ``model`` itself is returned.

    Returns
    -------
    BlockModel
        This rank's part of the model. :func:`whole_prediction` joins the ranks' predictions.

    Raises
    ------
    ConfigError
        Nothing in the model can be split, or the number of ranks does not divide the number of heads.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def shapes(comm):
    ...     group = mz.comm.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
    ...     return [spec.shape for spec in mz.nn.model_specs(mz.nn.split_model(mz.nn.MLP(4, [6], 2), group))]
    >>> run_in_threads(2, shapes)  # columns of the first weight, rows of the second
    [[(4, 3), (3,), (3, 2), (2,)], [(4, 3), (3,), (3, 2), (2,)]]
    """
    if group.size == 1:
        return model
    if callable(split := getattr(model, "split", None)):
        result: BlockModel = split(group)
        return result
    advice = "use pipeline or data parallelism, or give a layer of it a method split(group)"
    if not isinstance(model, BlockModel):
        raise ConfigError(f"a {type(model).__name__} has no blocks, so there is nothing to split over ranks; {advice}")
    unsplit = dict(model.blocks)  # a model may make its blocks anew each time
    blocks = {name: block.split(group) if hasattr(block, "split") else block for name, block in unsplit.items()}
    if all(blocks[name] is block for name, block in unsplit.items()):
        raise ConfigError(
            f"{type(model).__name__} has nothing to split over {group.size} ranks: none of its blocks "
            f"({', '.join(blocks)}) has a part that can be; {advice}"
        )
    return SplitModel(model, group, blocks, model.loss)


def whole_prediction(model: BlockModel, y: Array) -> Array:
    """Return the whole prediction of any model from its output ``y`` on this rank. Collective if ``model`` is split.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=4)
    >>> def logits(comm):
    ...     part = mz.nn.split_model(gpt, mz.comm.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group)
    ...     params = mz.nn.bind(part, mz.nn.initial_parameters(part))
    ...     y = mz.nn.evaluate(part, params, np.zeros((1, 4), int))
    ...     return y.shape, mz.nn.whole_prediction(part, y).shape
    >>> run_in_threads(2, logits)[0]
    ((1, 4, 128), (1, 4, 256))
    """
    join = getattr(model, "whole_prediction", None)
    return y if join is None else join(y)


def gather_scores(model: BlockModel, y: Array) -> Array:
    """Return the prediction at this rank's positions, with the scores of all classes.

    ``y`` is the last block's output on this rank. Collective over the tensor group if ``model`` is split over one.
    """
    join = getattr(model, "gather_scores", None)
    return whole_prediction(model, y) if join is None else join(y)

"""Split linear layers over a tensor group by columns or by rows (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mpizero.nn.arrays import as_rows, matmul, sum_rows
from mpizero.nn.layer import Layer
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.linear import Linear, Projection
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations, linear_operations
from mpizero.nn.regions import Copy, Expand, Gather, Reduce, Region, Scatter
from mpizero.nn.split.parts import Ranges, own_range, part_of, size_of
from mpizero.types import EVALUATE, Array, Group, ParameterSpec, Params, Run


class SplitLinearBase(Affine):
    """Define what :class:`ColumnLinear` and :class:`RowLinear` have in common."""

    whole: Linear

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """The ranges (start, stop) of the weight's columns or rows that this rank holds."""

    @cached_property
    def held(self) -> int:
        """Number of the weight's columns or rows that this rank holds."""
        return size_of(self.ranges)

    def last_bias(self, params: Params) -> Array | None:
        """Return this rank's ``bias``, a part or the whole, or None if the layer has no bias."""
        return params["bias"] if self.whole.bias else None

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``."""
        return self.whole.output_shape(shape)


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
        its own.

    Examples
    --------
    >>> import mpizero as mz
    >>> from mpizero.layout import Axes
    >>> from mpizero.testing import run_in_threads
    >>> def columns(comm):
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
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
        return self.columns or (own_range(self.whole.outputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's columns of ``weight`` and its part of ``bias``, if the layer has one. Not collective."""
        return tuple(part_of(spec, len(spec.shape) - 1, self.ranges) for spec in self.whole.own_specs())

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., inputs) to this rank's outputs (..., columns of this rank), without the bias.

        Returns them and the cache. Collective over the group with ``sequence``.
        """
        weight = params["weight"]
        x = as_rows(x, self.whole.inputs, weight.dtype, "Linear").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.held) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        y = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.inputs), weight)
        return y.reshape(*inputs.shape[:-1], self.held), (x, entry)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the sum over the ranks of ``dy @ weight.T``, and ``dy`` as a matrix for :meth:`backward_weights`.

        With ``sequence`` the sum holds this rank's positions only. If the unsplit layer computes no input gradient, the
        first result is None and nothing is sent. Collective over the group.
        """
        rows = dy.reshape(prod(dy.shape[:-1]), self.held)
        if not self.whole.input_gradient:
            return None, rows
        dx = matmul(rows, params["weight"].T).reshape(*dy.shape[:-1], self.whole.inputs)
        return cache[1].backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's columns of weight and bias.

        Collective over the group with ``sequence``.
        """
        x, entry = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.inputs)
        matmul(inputs.T, pending, out=grads["weight"])
        if self.whole.bias:
            sum_rows(pending, grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the products with this rank's columns, for one sample of ``shape``.

        Not collective.
        """
        return linear_operations(prod(shape[:-1]), self.whole.inputs, self.held, self.whole.input_gradient)


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
    ...     group = mz.ProcessGrid.create(comm, axes=Axes(tensor=comm.size)).tensor_group
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
        return (own_range(self.whole.inputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight`` and the whole ``bias``, if the layer has one. Not collective."""
        weight, *bias = self.whole.own_specs()
        return part_of(weight, 0, self.ranges), *bias

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map this rank's inputs (..., rows of this rank) to the outputs (..., outputs), without the bias.

        Returns the outputs and the cache. With ``sequence`` the outputs are those of this rank's positions. Collective
        over the group.
        """
        weight = params["weight"]
        rows = as_rows(x, self.held, weight.dtype, "Linear")
        leave: Region = Scatter(self.group, 1, x.shape[1]) if self.sequence else Reduce(self.group)
        y = leave.forward(matmul(rows, weight).reshape(*x.shape[:-1], self.whole.outputs))
        return y, (rows, leave)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight.T`` (..., rows of this rank), and what :meth:`backward_weights` needs.

        Collective over the group with ``sequence``.
        """
        rows, leave = cache
        terms = leave.backward(dy)
        above = terms.reshape(rows.shape[0], self.whole.outputs)
        return matmul(above, params["weight"].T).reshape(*terms.shape[:-1], self.held), (above, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the weight and of the bias.

        With ``sequence`` the bias's gradient is computed from this rank's positions only. Not collective.
        """
        above, dy = pending
        matmul(cache[0].T, above, out=grads["weight"])
        if self.whole.bias:
            sum_rows(dy.reshape(prod(dy.shape[:-1]), self.whole.outputs), grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the products with this rank's rows, for one sample of ``shape``. Not collective."""
        return linear_operations(prod(shape[:-1]), self.held, self.whole.outputs)


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
class SplitProjection(Layer):
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
        return (own_range(self.whole.classes, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe this rank's rows of ``weight``, one row for each of its classes. Not collective."""
        return tuple(part_of(spec, 0, self.ranges) for spec in self.whole.own_specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., features) to the logits of this rank's classes, or with ``joined`` of all classes.

        Returns the logits and the cache. Collective with ``sequence`` or ``joined``.
        """
        weight = params["weight"]
        x = as_rows(x, self.whole.features, weight.dtype, "Projection").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.held) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        logits = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.features), weight.T)
        logits = logits.reshape(*inputs.shape[:-1], size_of(self.ranges))
        join = Gather(self.group, logits.ndim - 1, self.whole.classes)
        return (join.forward(logits) if self.joined else logits), (x, entry, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the sum over the ranks of ``dy @ weight``, and what :meth:`backward_weights` needs.

        With ``sequence`` the sum holds this rank's positions only. Collective over the group.
        """
        _, entry, join = cache
        dy = join.backward(dy) if self.joined else dy
        rows = dy.reshape(prod(dy.shape[:-1]), size_of(self.ranges))
        dx = matmul(rows, params["weight"]).reshape(*dy.shape[:-1], self.whole.features)
        return entry.backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of this rank's rows of the weight.

        Collective over the group with ``sequence``.
        """
        x, entry, _ = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.features)
        matmul(pending.T, inputs, out=grads["weight"])

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape for one sample of ``shape``. Not collective."""
        return self.whole.output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the products with this rank's rows, for one sample of ``shape``. Not collective."""
        return linear_operations(prod(shape[:-1]), self.whole.features, size_of(self.ranges))

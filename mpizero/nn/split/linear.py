"""Split linear layers over a tensor group by columns or by rows (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mpizero.nn.layer import Layer, as_rows, matmul, sum_rows
from mpizero.nn.layers.affine import Affine
from mpizero.nn.layers.linear import Linear, Projection
from mpizero.nn.layers.wrapper import Wrapper
from mpizero.nn.operations import Operations, linear_operations
from mpizero.nn.regions import Copy, Expand, Gather, Reduce, Region, Scatter
from mpizero.nn.split.parts import Ranges, own_range, part_of, size_of
from mpizero.types import EVALUATE, Array, Group, ParameterSpec, Params, Run


class SplitLinearBase(Affine):
    """Define what linear layers split by columns and by rows have in common."""

    whole: Linear

    @property
    @abstractmethod
    def ranges(self) -> Ranges:
        """The columns or rows this rank holds."""

    @cached_property
    def held(self) -> int:
        """Number of columns or rows this rank holds."""
        return size_of(self.ranges)

    def last_bias(self, params: Params) -> Array | None:
        """Return ``bias``, or this rank's part of it, where there is one."""
        return params["bias"] if self.whole.bias else None

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape."""
        return self.whole.output_shape(shape)


@dataclass(frozen=True)
class ColumnLinear(SplitLinearBase):
    """Apply the own columns of a linear map: from whole inputs to own outputs.

    Parameters
    ----------
    whole : Linear
        The unsplit layer.
    group : Group
        The ranks it is split over.
    columns : tuple of (int, int) or None
        The columns this rank holds; None takes the shard rule's.
    sequence : bool
        Whether inputs are parts of sequences, (samples, own places, inputs), which are joined before the product, and
        once more for the weight's gradient: a rank keeps its own part only.
    """

    whole: Linear
    group: Group
    columns: Ranges | None = None
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The columns this rank holds."""
        return self.columns or (own_range(self.whole.outputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the own columns of ``weight`` and, where there is one, the own part of ``bias``. Not collective."""
        return tuple(part_of(spec, len(spec.shape) - 1, self.ranges) for spec in self.whole.own_specs())

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., inputs) to (..., own outputs). Collective over the group if sequences are split."""
        weight = params["weight"]
        x = as_rows(x, self.whole.inputs, weight.dtype, "Linear").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.length) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        y = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.inputs), weight)
        return y.reshape(*inputs.shape[:-1], self.held), (x, entry)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the sum over the ranks of ``dy @ weight.T``. Collective over the group."""
        rows = dy.reshape(prod(dy.shape[:-1]), self.held)
        if not self.whole.input_gradient:
            return None, rows
        dx = matmul(rows, params["weight"].T).reshape(*dy.shape[:-1], self.whole.inputs)
        return cache[1].backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own columns' gradients. Collective over the group if sequences are split."""
        x, entry = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.inputs)
        matmul(inputs.T, pending, out=grads["weight"])
        if self.whole.bias:
            sum_rows(pending, grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the products with the own columns. Not collective."""
        return linear_operations(prod(shape[:-1]), self.whole.inputs, self.held, self.whole.input_gradient)


@dataclass(frozen=True)
class RowLinear(SplitLinearBase):
    """Apply the own rows of a linear map: from own inputs to the whole output, summed over the ranks.

    The bias is whole on every rank and added to the sum. Between the halves of the backward pass a rank holds the whole
    gradient of the outputs.

    Parameters
    ----------
    whole : Linear
        The unsplit layer.
    group : Group
        The ranks it is split over.
    sequence : bool
        Whether each rank keeps its part of the sequences of the sum only. The bias's gradient is then the own part's
        term: the block that uses the layer completes it.
    """

    whole: Linear
    group: Group
    sequence: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The rows this rank holds."""
        return (own_range(self.whole.inputs, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the own rows of ``weight`` and, where there is one, the whole ``bias``. Not collective."""
        weight, *bias = self.whole.own_specs()
        return part_of(weight, 0, self.ranges), *bias

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., own inputs) to (..., outputs), or to its own places of that. Collective over the group."""
        weight = params["weight"]
        rows = as_rows(x, self.held, weight.dtype, "Linear")
        leave: Region = Scatter(self.group, 1, x.shape[1]) if self.sequence else Reduce(self.group)
        y = leave.forward(matmul(rows, weight).reshape(*x.shape[:-1], self.whole.outputs))
        return y, (rows, leave)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute ``dy @ weight.T``, (..., own inputs). Collective over the group if sequences are split."""
        rows, leave = cache
        terms = leave.backward(dy)
        above = terms.reshape(rows.shape[0], self.whole.outputs)
        return matmul(above, params["weight"].T).reshape(*terms.shape[:-1], self.held), (above, dy)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own rows' gradient, and the bias's or the own part's term of it. Not collective."""
        above, dy = pending
        matmul(cache[0].T, above, out=grads["weight"])
        if self.whole.bias:
            sum_rows(dy.reshape(prod(dy.shape[:-1]), self.whole.outputs), grads["bias"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the products with the own rows. Not collective."""
        return linear_operations(prod(shape[:-1]), self.held, self.whole.outputs)


@dataclass(frozen=True)
class SplitLinear(Wrapper):
    """Split a linear map by columns, with inputs and outputs that are whole on every rank.

    For a layer on its own. Two in a row cost fewer messages as :class:`ColumnLinear` and :class:`RowLinear`.
    """

    layer: ColumnLinear

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., inputs) to (..., outputs). Collective over the group."""
        y, cache = self.layer.forward(params, x, run)
        join = Gather(self.layer.group, y.ndim - 1, self.layer.whole.outputs)
        return join.forward(y), (cache, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Collective over the group."""
        return self.layer.backward_input(params, cache[0], cache[1].backward(dy))

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own columns' gradients. Not collective."""
        self.layer.backward_weights(params, cache[0], pending, grads)


@dataclass(frozen=True)
class SplitProjection(Layer):
    """Apply a projection whose classes are split over the ranks: from whole inputs to own logits.

    Parameters
    ----------
    whole : Projection
        The unsplit layer.
    group : Group
        The ranks it is split over.
    sequence : bool
        As for :class:`ColumnLinear`.
    joined : bool
        Whether every rank gets all logits.
    """

    whole: Projection
    group: Group
    sequence: bool = False
    joined: bool = False

    @cached_property
    def ranges(self) -> Ranges:
        """The classes this rank holds."""
        return (own_range(self.whole.classes, self.group),)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the own rows of ``weight``. Not collective."""
        return tuple(part_of(spec, 0, self.ranges) for spec in self.whole.own_specs())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., features) to own or joined logits. Collective over the group if inputs or logits move."""
        weight = params["weight"]
        x = as_rows(x, self.whole.features, weight.dtype, "Projection").reshape(x.shape)
        entry: Region = Expand(self.group, 1, run.length) if self.sequence else Copy(self.group)
        inputs = entry.forward(x)
        logits = matmul(inputs.reshape(prod(inputs.shape[:-1]), self.whole.features), weight.T)
        logits = logits.reshape(*inputs.shape[:-1], size_of(self.ranges))
        join = Gather(self.group, logits.ndim - 1, self.whole.classes)
        return (join.forward(logits) if self.joined else logits), (x, entry, join)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the sum over the ranks of ``dy @ weight``. Collective over the group."""
        _, entry, join = cache
        dy = join.backward(dy) if self.joined else dy
        rows = dy.reshape(prod(dy.shape[:-1]), size_of(self.ranges))
        dx = matmul(rows, params["weight"]).reshape(*dy.shape[:-1], self.whole.features)
        return entry.backward(dx), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own classes' gradients. Collective over the group if sequences are split."""
        x, entry, _ = cache
        inputs = entry.forward(x).reshape(pending.shape[0], self.whole.features)
        matmul(pending.T, inputs, out=grads["weight"])

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unsplit layer's output shape. Not collective."""
        return self.whole.output_shape(shape)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the products with the own classes. Not collective."""
        return linear_operations(prod(shape[:-1]), self.whole.features, size_of(self.ranges))

"""Define linear layers: an affine map, and a projection onto a vocabulary that may share the embedding's table."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from mpizero._util.names import explains
from mpizero.nn.arrays import as_rows, matmul, sum_rows
from mpizero.nn.layer import Layer
from mpizero.nn.layers.affine import Affine
from mpizero.nn.operations import Operations, linear_operations
from mpizero.nn.settings import require_init, require_positive
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run


@explains
@dataclass(frozen=True)
class Linear(Affine):
    """Compute ``y = x @ weight + bias`` on the last axis.

    ``weight`` is stored as (inputs, outputs), the transpose of PyTorch's layout. So the three matrix products of a
    training step read activations row by row. To split the layer over ranks by outputs is to cut the weight's columns;
    to split it by inputs is to cut its rows.

    Inputs are (..., inputs), outputs (..., outputs), in the parameters' dtype, float32 or float64. No method is
    collective.

    Parameters
    ----------
    inputs, outputs : int
        Size of the last axis of the input and of the output.
    bias : bool
        Whether a bias is added. A bias has no weight decay.
    init : Init or None
        Start values of the weight; None is the uniform distribution between -1/sqrt(inputs) and 1/sqrt(inputs).
    input_gradient : bool
        Whether ``backward_input`` computes the gradient of the input. False for a model's first layer saves one of the
        three products.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> params = {"weight": np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), "bias": np.array([0.0, 10.0])}
    >>> layer = mz.nn.Linear(3, 2)
    >>> y, cache = layer.forward(params, np.array([[1.0, 2.0, 3.0]]))
    >>> y
    array([[ 4., 15.]])
    >>> layer.backward(params, cache, np.array([[1.0, 0.0]]), {"weight": np.empty((3, 2)), "bias": np.empty(2)})
    array([[1., 0., 1.]])
    """

    inputs: int
    outputs: int
    bias: bool = True
    init: Init | None = None
    input_gradient: bool = True

    def __post_init__(self) -> None:
        require_positive("Linear", inputs=self.inputs, outputs=self.outputs)
        require_init("Linear", self.init)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight`` and, if the layer has one, ``bias``."""
        init = self.init or Init("uniform", self.inputs**-0.5)
        weight = ParameterSpec("weight", (self.inputs, self.outputs), init)
        return (weight, ParameterSpec("bias", (self.outputs,), decay=False)) if self.bias else (weight,)

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x @ weight`` without the bias, for ``x`` (..., inputs), in the weight's dtype, and the cache."""
        weight = params["weight"]
        rows = as_rows(x, self.inputs, weight.dtype, "Linear")
        return matmul(rows, weight).reshape(*x.shape[:-1], self.outputs), rows

    def last_bias(self, params: Params) -> Array | None:
        """Return ``bias``, or None if the layer has none."""
        return params["bias"] if self.bias else None

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight.T``, and ``dy`` as a matrix for :meth:`backward_weights`.

        If ``input_gradient`` is False, the first is None.
        """
        rows = dy.reshape(cache.shape[0], self.outputs)
        if not self.input_gradient:
            return None, rows
        return matmul(rows, params["weight"].T).reshape(*dy.shape[:-1], self.inputs), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the weight's gradient with ``x.T @ dy``, and the bias's with the column sums of ``dy``."""
        matmul(cache.T, pending, out=grads["weight"])
        if self.bias:
            sum_rows(pending, grads["bias"])

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``outputs`` as its last element."""
        return (*shape[:-1], self.outputs)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the three products for one sample of ``shape``: output and two gradients."""
        return linear_operations(prod(shape[:-1]), self.inputs, self.outputs, self.input_gradient)


@explains
@dataclass(frozen=True)
class Projection(Layer):
    """Compute ``logits = x @ weight.T``; ``weight`` (classes, features) is stored like an embedding's table.

    Inputs are (..., features), outputs (..., classes), in the dtype of ``weight``. No method is collective.

    Parameters
    ----------
    features, classes : int
        Size of the last axis of the input and of the output.
    tied : str or None
        The global name of another parameter, such as "embedding.token.weight": ``params["weight"]`` is then that
        parameter's array. The projection writes the gradient of its own use of the array only; mpizero adds the
        gradients of all uses afterwards. A weight of its own has weight decay, a tied one has that of the parameter it
        shares.
    init : Init
        Start values of a weight of its own.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> head = mz.nn.Projection(2, 3, tied="embedding.token.weight")
    >>> logits, cache = head.forward({"weight": np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])}, np.array([[4.0, 5.0]]))
    >>> logits
    array([[4., 5., 9.]])
    >>> head.specs()[0].tied
    'embedding.token.weight'
    """

    features: int
    classes: int
    tied: str | None = None
    init: Init = Init("normal", 0.02)

    def __post_init__(self) -> None:
        require_positive("Projection", features=self.features, classes=self.classes)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``; it has weight decay only if it is not tied."""
        return (
            ParameterSpec("weight", (self.classes, self.features), self.init, decay=self.tied is None, tied=self.tied),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Map ``x`` (..., features) to logits (..., classes); return them and the cache."""
        weight = params["weight"]
        rows = as_rows(x, self.features, weight.dtype, "Projection")
        return matmul(rows, weight.T).reshape(*x.shape[:-1], self.classes), rows

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight``, and ``dy`` as a matrix for :meth:`backward_weights`."""
        rows = dy.reshape(cache.shape[0], self.classes)
        return matmul(rows, params["weight"]).reshape(*dy.shape[:-1], self.features), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite ``grads["weight"]`` with ``dy.T @ x``."""
        matmul(pending.T, cache, out=grads["weight"])

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``classes`` as its last element."""
        return (*shape[:-1], self.classes)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the three products for one sample of ``shape``: output and two gradients."""
        return linear_operations(prod(shape[:-1]), self.features, self.classes)

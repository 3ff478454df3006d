"""Normalize the last axis of an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpizero import kernels
from mpizero._util.checks import positive, require
from mpizero._util.names import explains
from mpizero.nn.arrays import as_rows, namespace, vector
from mpizero.nn.layer import Layer
from mpizero.nn.settings import require_positive
from mpizero.types import EVALUATE, Array, Init, ParameterSpec, Params, Run


def _require(where: str, features: int, eps: float) -> None:
    require_positive(where, features=features)
    require(f"{where}: eps", eps, positive)


@explains
@dataclass(frozen=True)
class LayerNorm(Layer):
    """Shift and scale the last axis to mean 0 and variance 1, then apply ``weight`` and ``bias``.

    Parameters of the layer are ``weight`` (features,), which starts as ones, and ``bias`` (features,), which starts as
    zeros. No method is collective. The formula is that of Ba, Kiros and Hinton, *Layer Normalization*, 2016, section 3.

    Parameters
    ----------
    features : int
        Size of the last axis of inputs (..., features). The output has the input's shape and the parameters' dtype,
        float32 or float64.
    eps : float
        Added to the variance under the root; greater than 0.

    Raises
    ------
    ConfigError
        If ``features`` or ``eps`` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> params = {"weight": np.ones(4), "bias": np.zeros(4)}
    >>> y, cache = mz.nn.LayerNorm(4).forward(params, np.array([[1.0, 2.0, 3.0, 4.0]]))
    >>> y.round(3)
    array([[-1.342, -0.447,  0.447,  1.342]])
    """

    features: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        _require("LayerNorm", self.features, self.eps)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, which starts as ones, and ``bias``, which starts as zeros; neither has weight decay."""
        return (
            ParameterSpec("weight", (self.features,), Init("ones"), decay=False),
            ParameterSpec("bias", (self.features,), decay=False),
        )

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (..., features) normalized, and the cache for the backward pass."""
        weight = params["weight"]
        xp = namespace(weight)
        rows = as_rows(x, self.features, weight.dtype, "LayerNorm")
        y = xp.empty_like(rows)
        mean, rstd = xp.empty((2, len(rows)), rows.dtype)
        kernels.backend(rows).norm.layernorm(rows, weight, params["bias"], vector(rows, self.eps), y, mean, rstd)
        return y.reshape(x.shape), (rows, mean, rstd)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and the gradients of weight and bias for :meth:`backward_weights`."""
        return self.backward_joined(params, cache, dy, None)

    def backward_joined(self, params: Params, cache: Any, dy: Array, residual: Array | None) -> tuple[Array, Any]:
        """Return the gradient of ``x`` plus ``residual`` (if not None), and the gradients of weight and bias.

        The gradient of ``x`` is a new array. The gradients of weight and bias are the two rows of the second array;
        they come from the same pass over memory, and :meth:`backward_weights` copies them to ``grads``.
        """
        rows, mean, rstd = cache
        weight = params["weight"]
        xp = namespace(rows)
        dy_rows = xp.ascontiguousarray(dy.reshape(rows.shape))
        past = rows[:0] if residual is None else xp.ascontiguousarray(residual.reshape(rows.shape))
        dx, sums = xp.empty_like(rows), xp.empty((2, self.features), rows.dtype)
        kernels.backend(rows).norm.layernorm_backward(dy_rows, rows, weight, mean, rstd, past, dx, sums[0], sums[1])
        return dx.reshape(dy.shape), sums

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of ``weight`` and ``bias``."""
        grads["weight"][...], grads["bias"][...] = pending


@explains
@dataclass(frozen=True)
class RMSNorm(Layer):
    """Scale the last axis to root mean square 1, then apply ``weight`` (Zhang and Sennrich, 2019).

    Parameters of the layer are ``weight`` (features,), which starts as ones. No method is collective. Nothing is
    shifted, so it costs less than :class:`LayerNorm`.

    Parameters
    ----------
    features : int
        Size of the last axis of inputs (..., features). The output has the input's shape and the parameters' dtype,
        float32 or float64.
    eps : float
        Added to the mean square under the root; greater than 0.

    Raises
    ------
    ConfigError
        If ``features`` or ``eps`` is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.RMSNorm(3).forward({"weight": np.ones(3)}, np.array([[1.0, 2.0, 2.0]]))
    >>> y.round(3)
    array([[0.577, 1.155, 1.155]])
    >>> round(float((y**2).mean()), 3)
    1.0
    """

    features: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _require("RMSNorm", self.features, self.eps)

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe ``weight``, which starts as ones and has no weight decay."""
        return (ParameterSpec("weight", (self.features,), Init("ones"), decay=False),)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (..., features) normalized, and the cache for the backward pass."""
        weight = params["weight"]
        xp = namespace(weight)
        rows = as_rows(x, self.features, weight.dtype, "RMSNorm")
        y = xp.empty_like(rows)
        rstd = xp.empty(len(rows), rows.dtype)
        kernels.backend(rows).norm.rmsnorm(rows, weight, vector(rows, self.eps), y, rstd)
        return y.reshape(x.shape), (rows, rstd)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and ``dy`` as a matrix for :meth:`backward_weights`."""
        rows, rstd = cache
        xp = namespace(rows)
        dy_rows = xp.ascontiguousarray(dy.reshape(rows.shape))
        dx = xp.empty_like(rows)
        kernels.backend(rows).norm.rmsnorm_backward_input(dy_rows, rows, params["weight"], rstd, dx)
        return dx.reshape(dy.shape), dy_rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient of ``weight``."""
        rows, rstd = cache
        kernels.backend(rows).norm.rmsnorm_backward_weights(pending, rows, rstd, grads["weight"])

"""Elementwise activations; the kernels come in pairs, ``name`` and ``name_backward``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpizero import kernels
from mpizero.errors import ConfigError
from mpizero.nn.layer import Layer, namespace
from mpizero.types import EVALUATE, Array, Params, Run


@dataclass(frozen=True)
class _Activation(Layer):
    kernel: ClassVar[str]

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Apply the activation to every element. Not collective."""
        xp = namespace(x)
        x = xp.ascontiguousarray(x)
        y = xp.empty_like(x)
        getattr(kernels.backend(x).activation, self.kernel)(x.reshape(-1), y.reshape(-1))
        return y, x

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Multiply ``dy`` by the activation's slope. Not collective."""
        xp = namespace(cache)
        dy = xp.ascontiguousarray(dy)
        dx = xp.empty_like(cache)
        backward = getattr(kernels.backend(cache).activation, f"{self.kernel}_backward")
        backward(cache.reshape(-1), dy.reshape(-1), dx.reshape(-1))
        return dx, None


@dataclass(frozen=True)
class GELU(_Activation):
    """Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016; GPT-2's choice)."""

    kernel: ClassVar[str] = "gelu"


@dataclass(frozen=True)
class SiLU(_Activation):
    """Sigmoid linear unit, ``x * sigmoid(x)``."""

    kernel: ClassVar[str] = "silu"


@dataclass(frozen=True)
class ReLU(_Activation):
    """Rectified linear unit, ``max(x, 0)``, with slope 0 at 0."""

    kernel: ClassVar[str] = "relu"


@dataclass(frozen=True)
class Tanh(_Activation):
    """Hyperbolic tangent."""

    kernel: ClassVar[str] = "tanh"


_BY_NAME: dict[str, Layer] = {"gelu": GELU(), "silu": SiLU(), "relu": ReLU(), "tanh": Tanh()}


def named_activation(name: str) -> Layer:
    """Return the activation called ``name``: "gelu", "silu", "relu" or "tanh". Not collective."""
    if name not in _BY_NAME:
        raise ConfigError(f"activation={name!r} is not known; choose one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]

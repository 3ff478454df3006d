"""Apply elementwise activations; each has a forward and a backward kernel, ``NAME`` and ``NAME_backward``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpizero import kernels
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError
from mpizero.nn.arrays import namespace, require_floats
from mpizero.nn.layer import Layer
from mpizero.types import EVALUATE, Array, Params, Run


@dataclass(frozen=True)
class Activation(Layer):
    """Apply an elementwise function; a subclass sets ``kernel``, the name of the forward kernel.

    The backward kernel has the same name with the suffix ``_backward``.
    """

    kernel: ClassVar[str]

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Apply the activation to every element; return the result, and ``x`` as the cache."""
        require_floats(x, type(self).__name__)
        xp = namespace(x)
        x = xp.ascontiguousarray(x)
        y = xp.empty_like(x)
        getattr(kernels.backend(x).activation, self.kernel)(x.reshape(-1), y.reshape(-1))
        return y, x

    def forward_biased(self, x: Array, bias: Array | None) -> tuple[Array, Any]:
        """Return the activation of ``x + bias``, and this sum as the cache; ``bias`` may be None.

        The sum is written to ``x``.
        """
        if bias is not None:
            x += bias
        return self.forward({}, x)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` multiplied by the derivative of the activation, and None."""
        xp = namespace(cache)
        dx = xp.empty_like(cache)
        self._multiply(cache, xp.ascontiguousarray(dy), dx)
        return dx, None

    def backward_over(self, cache: Any, dy: Array) -> Array:
        """Return ``dy`` multiplied by the derivative of the activation, computed in the memory of ``dy``.

        This saves an array. ``cache`` comes from the forward pass, and ``dy`` must be contiguous.
        """
        self._multiply(cache, dy, dy)
        return dy

    def _multiply(self, x: Array, dy: Array, dx: Array) -> None:
        backward = getattr(kernels.backend(x).activation, f"{self.kernel}_backward")
        backward(x.reshape(-1), dy.reshape(-1), dx.reshape(-1))


@explains
@dataclass(frozen=True)
class GELU(Activation):
    """Apply the Gaussian error linear unit in its tanh form, ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2``.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype is a :class:`~mpizero.errors.DataError`. No method is collective. It is GPT-2's activation, and
    ``torch.nn.GELU(approximate="tanh")`` (Hendrycks and Gimpel, *Gaussian Error Linear Units*, 2016, section 2).

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.GELU().forward({}, np.array([-1.0, 0.0, 1.0]))
    >>> y.round(3)
    array([-0.159,  0.   ,  0.841])
    """

    kernel: ClassVar[str] = "gelu"

    def forward_biased(self, x: Array, bias: Array | None) -> tuple[Array, Any]:
        """Return GELU of ``x + bias``, and that sum as the cache, in one pass over memory; ``x`` may be overwritten."""
        if bias is None:
            return self.forward({}, x)
        xp = namespace(x)
        rows = xp.ascontiguousarray(x).reshape(-1, x.shape[-1])
        y = xp.empty_like(rows)
        kernels.backend(x).activation.bias_gelu(rows, bias, rows, y)
        return y.reshape(x.shape), rows.reshape(x.shape)


@explains
@dataclass(frozen=True)
class SiLU(Activation):
    """Apply the sigmoid linear unit, ``x * sigmoid(x)``, which is also called swish.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype is a :class:`~mpizero.errors.DataError`. No method is collective. The name is from Hendrycks
    and Gimpel, *Gaussian Error Linear Units*, 2016.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.SiLU().forward({}, np.array([-1.0, 0.0, 1.0]))
    >>> y.round(3)
    array([-0.269,  0.   ,  0.731])
    """

    kernel: ClassVar[str] = "silu"


@explains
@dataclass(frozen=True)
class ReLU(Activation):
    """Apply the rectified linear unit, ``max(x, 0)``, whose slope is 0 at 0 (Nair and Hinton, 2010).

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype is a :class:`~mpizero.errors.DataError`. No method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> relu = mz.nn.ReLU()
    >>> y, cache = relu.forward({}, np.array([-2.0, 0.0, 3.0]))
    >>> y
    array([0., 0., 3.])
    >>> relu.backward({}, cache, np.ones(3), {})
    array([0., 0., 1.])
    """

    kernel: ClassVar[str] = "relu"


@explains
@dataclass(frozen=True)
class Tanh(Activation):
    """Apply the hyperbolic tangent.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype is a :class:`~mpizero.errors.DataError`. No method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.Tanh().forward({}, np.array([-1.0, 0.0, 1.0]))
    >>> y.round(3)
    array([-0.762,  0.   ,  0.762])
    """

    kernel: ClassVar[str] = "tanh"


_BY_NAME: dict[str, Activation] = {"gelu": GELU(), "silu": SiLU(), "relu": ReLU(), "tanh": Tanh()}


def named_activation(name: str) -> Activation:
    """Return the activation called ``name``: "gelu", "silu", "relu" or "tanh"."""
    if not isinstance(name, str) or name not in _BY_NAME:
        hint = nearest(name, _BY_NAME)
        raise ConfigError(f"activation={name!r} is not known; choose one of {', '.join(_BY_NAME)}{hint}")
    return _BY_NAME[name]

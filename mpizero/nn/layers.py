"""Define the layers of models: linear maps, activations, norms, dropout, wrappers, and :class:`Sequential`.

:class:`Linear` is an affine map. :class:`Projection` is a linear map onto a vocabulary, whose weight may be the
embedding's table. Each :class:`Activation` has a forward and a backward kernel, ``NAME`` and ``NAME_backward``. The
mask of :class:`Dropout` depends on the sample's index in the global batch, never on a rank. :class:`Frozen` and
:class:`PartlyFrozen` keep parameters from being trained; :class:`Checkpointed` computes activations again in the
backward pass instead of keeping them (Chen et al., 2016). :class:`Sequential` applies layers one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any, ClassVar

from mpizero import kernels
from mpizero._util.checks import positive, require, whole
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError
from mpizero.kernels import recording
from mpizero.layout.flat import flat_names, value_at
from mpizero.nn.arrays import add_bias, as_rows, contiguous, matmul, namespace, require_floats, sum_rows, vector
from mpizero.nn.layer import (
    Affine,
    Graph,
    Layer,
    NodeOutput,
    Operations,
    SamplePart,
    Wrapper,
    call_located,
    linear_operations,
    poll,
    poll_of,
    require_init,
    require_positive,
    require_rate,
    traced,
)
from mpizero.types import EVALUATE, Array, Group, Init, ParameterSpec, Params, Pieces, Run


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
        init = self.init or Init("uniform", 1.0 / sqrt(self.inputs))
        weight = ParameterSpec("weight", (self.inputs, self.outputs), init)
        return (weight, ParameterSpec("bias", (self.outputs,), decay=False)) if self.bias else (weight,)

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x @ weight``, in the weight's dtype and without the bias, and the cache; ``x`` is (..., inputs)."""
        weight = params["weight"]
        rows = as_rows(x, self.inputs, weight.dtype, "Linear")
        return matmul(rows, weight, between=poll_of(params)).reshape(*x.shape[:-1], self.outputs), rows

    def last_bias(self, params: Params) -> Array | None:
        """Return ``bias``, or None if the layer has none."""
        return params["bias"] if self.bias else None

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight.T``, and ``dy`` as a matrix for :meth:`backward_weights`.

        If ``input_gradient`` is False, the first result is None.
        """
        rows = dy.reshape(cache.shape[0], self.outputs)
        if not self.input_gradient:
            return None, rows
        dx = matmul(rows, params["weight"].T, between=poll_of(params))
        return dx.reshape(*dy.shape[:-1], self.inputs), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the weight's gradient with ``x.T @ dy``, and the bias's with the column sums of ``dy``."""
        matmul(cache.T, pending, grads["weight"], poll_of(params))
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
        gradients of all uses afterwards. A weight that is not tied has weight decay; for a tied one, the shared
        parameter's setting is used.
    init : Init
        Start values of a weight that is not tied.

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
        return matmul(rows, weight.T, between=poll_of(params)).reshape(*x.shape[:-1], self.classes), rows

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy @ weight``, and ``dy`` as a matrix for :meth:`backward_weights`."""
        rows = dy.reshape(cache.shape[0], self.classes)
        dx = matmul(rows, params["weight"], between=poll_of(params))
        return dx.reshape(*dy.shape[:-1], self.features), rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite ``grads["weight"]`` with ``dy.T @ x``."""
        matmul(pending.T, cache, grads["weight"], poll_of(params))

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with ``classes`` as its last element."""
        return (*shape[:-1], self.classes)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of the three products for one sample of ``shape``: output and two gradients."""
        return linear_operations(prod(shape[:-1]), self.features, self.classes)


@dataclass(frozen=True)
class Activation(Layer):
    """Apply an elementwise function; a subclass sets ``kernel``, the name of the forward kernel.

    The backward kernel has the same name with the suffix ``_backward``. It computes the derivative from the input or,
    with ``of_output``, from the output, which the next layer keeps in any case.
    """

    kernel: ClassVar[str]
    of_output: ClassVar[bool] = False

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Apply the activation to every element; return the result and the cache.

        The cache is ``x``, or the result if ``of_output`` is True.
        """
        require_floats(x, type(self).__name__)
        xp = namespace(x)
        x = contiguous(x)
        y = xp.empty_like(x)
        getattr(kernels.backend(x).layers, self.kernel)(x.reshape(-1), y.reshape(-1))
        return y, (y if self.of_output else x)

    def forward_biased(self, x: Array, bias: Array | None) -> tuple[Array, Any]:
        """Return the activation of ``x + bias``, and the cache; ``bias`` may be None.

        The sum is written to ``x``.
        """
        if bias is not None:
            add_bias(x, bias)
        return self.forward({}, x)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` multiplied by the derivative of the activation, and None, as there are no weights."""
        xp = namespace(cache)
        dx = xp.empty_like(cache)
        self._multiply(cache, contiguous(dy), dx)
        return dx, None

    def backward_over(self, cache: Any, dy: Array) -> Array:
        """Return ``dy`` multiplied by the derivative of the activation, computed in the memory of ``dy``.

        Computing in place saves an array. ``cache`` comes from the forward pass, and ``dy`` must be contiguous.
        """
        self._multiply(cache, dy, dy)
        return dy

    def _multiply(self, cache: Array, dy: Array, dx: Array) -> None:
        backward = getattr(kernels.backend(cache).layers, f"{self.kernel}_backward")
        backward(cache.reshape(-1), dy.reshape(-1), dx.reshape(-1))


@explains
@dataclass(frozen=True)
class GELU(Activation):
    """Apply the Gaussian error linear unit in its tanh form, ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2``.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype raises :class:`~mpizero.errors.DataError`. No method is collective. It is GPT-2's activation,
    and ``torch.nn.GELU(approximate="tanh")`` (Hendrycks and Gimpel, *Gaussian Error Linear Units*, 2016, section 2).

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
        rows = contiguous(x).reshape(-1, x.shape[-1])
        y = xp.empty_like(rows)
        kernels.backend(x).layers.bias_gelu(rows, bias, rows, y)
        return y.reshape(x.shape), rows.reshape(x.shape)


@explains
@dataclass(frozen=True)
class SiLU(Activation):
    """Apply the sigmoid linear unit, ``x * sigmoid(x)``, which is also called swish.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype raises :class:`~mpizero.errors.DataError`. No method is collective. The name is from Hendrycks
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
    shape; another dtype raises :class:`~mpizero.errors.DataError`. No method is collective.

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
    of_output: ClassVar[bool] = True


@explains
@dataclass(frozen=True)
class Tanh(Activation):
    """Apply the hyperbolic tangent.

    The layer has no parameters and takes arrays of any shape. Input and output are float32 or float64, of the same
    shape; another dtype raises :class:`~mpizero.errors.DataError`. No method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> y, cache = mz.nn.Tanh().forward({}, np.array([-1.0, 0.0, 1.0]))
    >>> y.round(3)
    array([-0.762,  0.   ,  0.762])
    """

    kernel: ClassVar[str] = "tanh"
    of_output: ClassVar[bool] = True


_BY_NAME: dict[str, Activation] = {"gelu": GELU(), "silu": SiLU(), "relu": ReLU(), "tanh": Tanh()}


def named_activation(name: str) -> Activation:
    """Return the activation called ``name``: "gelu", "silu", "relu" or "tanh"."""
    if not isinstance(name, str) or name not in _BY_NAME:
        hint = nearest(name, _BY_NAME)
        raise ConfigError(f"activation={name!r} is not known; choose one of {', '.join(_BY_NAME)}{hint}")
    return _BY_NAME[name]


def _require_norm(where: str, features: int, eps: float) -> None:
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
        _require_norm("LayerNorm", self.features, self.eps)

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
        kernels.backend(rows).layers.layernorm(rows, weight, params["bias"], vector(rows, self.eps), y, mean, rstd)
        return y.reshape(x.shape), (rows, mean, rstd)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and the gradients of weight and bias for :meth:`backward_weights`."""
        return self.backward_joined(params, cache, dy, None)

    def backward_joined(self, params: Params, cache: Any, dy: Array, residual: Array | None) -> tuple[Array, Any]:
        """Return the gradient of ``x`` plus ``residual`` (if not None), and the gradients of weight and bias.

        The gradient of ``x`` is a new array. The two rows of the second result are the gradients of weight and bias,
        which are computed in the same pass over memory; :meth:`backward_weights` copies them to ``grads``.
        """
        rows, mean, rstd = cache
        weight = params["weight"]
        xp = namespace(rows)
        dy_rows = contiguous(dy.reshape(rows.shape))
        past = rows[:0] if residual is None else contiguous(residual.reshape(rows.shape))
        dx, sums = xp.empty_like(rows), xp.empty((2, self.features), rows.dtype)
        kernels.backend(rows).layers.layernorm_backward(dy_rows, rows, weight, mean, rstd, past, dx, sums[0], sums[1])
        return dx.reshape(dy.shape), sums

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of ``weight`` and ``bias``."""
        for name, values in zip(("weight", "bias"), pending, strict=True):
            recording.assign(grads[name], values)


@explains
@dataclass(frozen=True)
class RMSNorm(Layer):
    """Scale the last axis to root mean square 1, then apply ``weight`` (Zhang and Sennrich, 2019).

    Parameters of the layer are ``weight`` (features,), which starts as ones. No method is collective. Unlike
    :class:`LayerNorm` it subtracts no mean, so it costs less.

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
        _require_norm("RMSNorm", self.features, self.eps)

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
        kernels.backend(rows).layers.rmsnorm(rows, weight, vector(rows, self.eps), y, rstd)
        return y.reshape(x.shape), (rows, rstd)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of ``x``, and ``dy`` as a matrix for :meth:`backward_weights`."""
        rows, rstd = cache
        xp = namespace(rows)
        dy_rows = contiguous(dy.reshape(rows.shape))
        dx = xp.empty_like(rows)
        kernels.backend(rows).layers.rmsnorm_backward_input(dy_rows, rows, params["weight"], rstd, dx)
        return dx.reshape(dy.shape), dy_rows

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradient of ``weight``."""
        rows, rstd = cache
        kernels.backend(rows).layers.rmsnorm_backward_weights(pending, rows, rstd, grads["weight"])


@explains
@dataclass(frozen=True)
class Dropout(Layer):
    """Zero each element with probability ``rate`` and scale the others by ``1 / (1 - rate)``, in training only.

    The mask is drawn by Philox with key (``run.seed``, ``site``, ``run.step``) and counter (index of the sample in the
    global batch, element within the sample). So the mask is the same however a batch is cut over ranks or
    micro-batches, and when a forward pass is repeated (Srivastava et al., *Dropout*, 2014). No method is collective.

    Parameters
    ----------
    rate : float
        Probability with which an element becomes 0, from 0 to less than 1. Inputs are (samples, ...), float32 or
        float64.
    site : int
        Number that is part of the mask's key. The number must be unique within a model; otherwise two dropouts use the
        same mask.

    Raises
    ------
    ConfigError
        If ``rate`` or ``site`` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.types import Run
    >>> dropout, x = mz.nn.Dropout(0.5, site=3), np.ones((1, 6))
    >>> y, cache = dropout.forward({}, x, Run(training=True, seed=1, step=7))
    >>> y
    array([[2., 0., 0., 2., 0., 0.]])
    >>> dropout.forward({}, x)[0] is x  # outside of training
    True
    """

    rate: float
    site: int = 0

    def __post_init__(self) -> None:
        require_rate("Dropout", self.rate)
        require("Dropout: site", self.site, whole())

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return ``x`` (samples, ...) with the mask applied, or ``x`` itself if not in training; and the cache."""
        require_floats(x, "Dropout")
        if not self.drops(x, run):
            return x, None
        return self.mask(x, run), run

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return ``dy`` with the forward pass's mask, which is drawn again, and None, as there are no weights."""
        return (dy if cache is None else self.mask(dy, cache)), None

    def drops(self, x: Array, run: Run) -> bool:
        """Tell whether elements of ``x`` may be dropped: in training, if ``rate`` is not 0 and ``x`` is not empty."""
        return run.training and self.rate > 0.0 and x.size > 0

    def mask(self, x: Array, run: Run, window: SamplePart | None = None) -> Array:
        """Return a copy of ``x`` (samples, ...) with the mask applied.

        If ``window`` is given, ``x`` holds only that part of each sample; its elements get the mask that they have in
        the whole sample. The backward pass calls this function with ``dy`` as ``x``.
        """
        xp = namespace(x)
        x = contiguous(x)
        y: Array = xp.empty_like(x)
        recording.call(self._draw, x, y, run, window or SamplePart(0, x.size // x.shape[0]))
        return y

    def _draw(self, x: Array, y: Array, run: Run, window: SamplePart) -> None:
        counters = run.seed, self.site, run.step, run.first_sample, x.size // x.shape[0]
        kernels.backend(x).reduction.dropout(x.reshape(-1), y.reshape(-1), vector(x, self.rate), *counters, *window)

    def mask_pieces(self, x: Array, run: Run, pieces: Pieces) -> Array:
        """Return a copy of ``x`` (samples, positions, ...) with the mask applied; ``x`` must not be empty.

        ``pieces`` says where the positions lie in the whole sequences, as :meth:`mpizero.types.Run.pieces` returns it.
        The backward pass calls this function with ``dy`` as ``x``.
        """
        width = x.size // (x.shape[0] * x.shape[1])
        parts = [SamplePart(there.start * width, (there.stop - there.start) * width) for _, there in pieces]
        low, high = parts[0], parts[-1]
        if len(parts) <= 2 and low.width == high.width:  # one call for both ranges, without a copy
            return self.mask(x, run, low._replace(rows=len(parts), row_step=high.offset - low.offset))
        masked = [self.mask(x[:, local], run, part) for (local, _), part in zip(pieces, parts, strict=True)]
        return namespace(x).concatenate(masked, axis=1)

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add a dropout node to the exported computation graph if the rate is not 0; return the output."""
        return graph.add_layer(self, name, source, source.shape) if self.rate else source


@explains
@dataclass(frozen=True)
class Frozen(Wrapper):
    """Use a layer without training it: its parameters have no gradient and no optimizer state.

    The gradient of the layer's input is still computed. Parameters keep the wrapped layer's names.
    :func:`mpizero.nn.freeze` freezes those parameters of a whole model whose names match a pattern.

    Parameters
    ----------
    layer : Layer
        The layer to freeze.

    Examples
    --------
    >>> import mpizero as mz
    >>> [spec.trainable for spec in mz.nn.Frozen(mz.nn.Linear(3, 2)).specs()]
    [False, False]
    """

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the wrapped layer's parameters as not trainable. Not collective."""
        return tuple(replace(spec, trainable=False) for spec in self.layer.specs())

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Return the gradient of the wrapped layer's input, and None, as no weight is trained.

        Collective if the layer is split.
        """
        return self.layer.backward_input(params, cache, dy)[0], None

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Do nothing, because the parameters have no gradients. Not collective."""

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's operations, with 0 for the gradients of its weights. Not collective."""
        return replace(self.layer.operations(shape), backward_weights=0)


class FrozenNames:
    """Freeze those parameters of ``layer`` whose names in ``layer.specs()`` are in ``names``."""

    layer: Any
    names: tuple[str, ...]

    def specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the layer's parameters, those with the given names as not trainable. Not collective."""
        specs = self.layer.specs()
        return tuple(replace(spec, trainable=spec.trainable and spec.name not in self.names) for spec in specs)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the layer's ``backward_weights``, with new arrays for the gradients of frozen parameters.

        Collective if the layer is split.
        """
        self.layer.backward_weights(params, cache, pending, completed(params, grads, self.names))

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Any:
        """Call the layer's ``backward``, with new arrays for the gradients of frozen parameters.

        Collective if the layer is split.
        """
        return self.layer.backward(params, cache, dy, completed(params, grads, self.names))


@explains
@dataclass(frozen=True)
class PartlyFrozen(FrozenNames, Wrapper):
    """Use a layer whose parameters ``names`` (names in its specs) are frozen, and train the others.

    The layer computes all gradients; those of frozen parameters are not used.
    """

    names: tuple[str, ...]


def completed(params: Params, grads: Params, names: tuple[str, ...]) -> Params:
    """Return ``grads`` with a new array for each parameter of ``names`` that ``grads`` lacks. Not collective."""
    result, named = grads, dict(flat_names(grads))
    for name in names:
        if named.get(name) is None:
            like = value_at(params, name)
            result = _with(result, name.split("."), namespace(like).empty_like(like))
    return result


def _with(tree: Params, path: list[str], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else _with(tree.get(path[0], {}), path[1:], value)
    return {**tree, path[0]: inner}


@explains
@dataclass(frozen=True)
class Checkpointed(Wrapper):
    """Keep only a layer's input in the forward pass, and compute its cache again in the backward pass.

    The gradients have the same bits as without this wrapper. The second forward pass repeats the first one, including
    dropout masks and, for a split layer, messages. Parameters keep the wrapped layer's names (Chen et al., *Training
    Deep Nets with Sublinear Memory Cost*, 2016).

    Parameters
    ----------
    layer : Layer
        The wrapped layer, usually a whole block such as a :class:`~mpizero.nn.TransformerBlock`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> wide = mz.nn.Checkpointed(mz.nn.Linear(2, 1000, bias=False))
    >>> y, cache = wide.forward({"weight": np.ones((2, 1000))}, np.array([[1.0, 2.0]]))
    >>> cache[0]  # the input is all that is kept
    array([[1., 2.]])
    >>> wide.operations((2,))  # the forward pass counts again in the backward pass
    Operations(forward=4000, backward_input=8000, backward_weights=4000)
    """

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Return the layer's output; the returned cache is only ``x`` and ``run``.

        Collective if the layer is split.
        """
        return self.layer.forward(params, x, run)[0], (x, run)

    def backward(self, params: Params, cache: Any, dy: Array, grads: Params) -> Array | None:
        """Run the layer forward again to get its cache, then call its ``backward``. Collective if it is split."""
        x, run = cache
        return self.layer.backward(params, self.layer.forward(params, x, run)[1], dy, grads)

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Run the layer forward again to get its cache, then call its ``backward_input``.

        The second value returned includes that cache, because :meth:`backward_weights` needs it. Collective if the
        layer is split.
        """
        x, run = cache
        inner = self.layer.forward(params, x, run)[1]
        dx, pending = self.layer.backward_input(params, inner, dy)
        return dx, (inner, pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Call the layer's ``backward_weights`` with the cache that :meth:`backward_input` computed.

        Collective if the layer is split.
        """
        inner, inner_pending = pending
        self.layer.backward_weights(params, inner, inner_pending, grads)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the wrapped layer's operations for one sample of ``shape``, its forward pass twice.

        The second forward pass counts as part of ``backward_input``. Not collective.
        """
        once = self.layer.operations(shape)
        return once + Operations(backward_input=once.forward)


@explains
@dataclass(frozen=True, init=False)
class Sequential(Layer):
    """Apply layers in order: each takes the output of the one before it.

    Parameters are named "<layer>.<name in the layer>". No method is collective, unless a layer's is.

    Parameters
    ----------
    layers : mapping of str to Layer, or iterable of Layer
        The layers in the order in which they are applied. Layers that are given without names are named "0", "1", ...

    Examples
    --------
    >>> import mpizero as mz
    >>> net = mz.nn.Sequential([mz.nn.Linear(3, 4), mz.nn.Tanh(), mz.nn.Linear(4, 1)])
    >>> [spec.name for spec in net.specs()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> net.output_shape((3,))
    (1,)
    >>> mz.nn.Sequential({"down": mz.nn.Linear(3, 2), "up": mz.nn.Linear(2, 3)}).specs()[0].name
    'down.weight'
    """

    layers: tuple[tuple[str, Layer], ...]

    def __init__(self, layers: Mapping[str, Layer] | Iterable[Layer]) -> None:
        if isinstance(layers, Layer) or not isinstance(layers, Iterable):
            raise ConfigError(f"Sequential takes a list or mapping of layers, got {layers!r}: give [layer, ...]")
        named = layers.items() if isinstance(layers, Mapping) else ((str(i), layer) for i, layer in enumerate(layers))
        object.__setattr__(self, "layers", tuple(named))
        for name, layer in self.layers:
            if not name or "." in name or not isinstance(layer, Layer):
                raise ConfigError(f"Sequential: {name!r}: {layer!r} must be a layer under a name without dots")

    def children(self) -> dict[str, Layer]:
        """Return the layers by name."""
        return dict(self.layers)

    def forward(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Apply the layers, first to last; return the last output and a list of the layers' caches."""
        caches = []
        for name, layer in self.layers:
            poll(params)
            x, cache = call_located("layer", name, layer.forward, params.get(name, {}), x, run)
            caches.append(cache)
        return x, caches

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the input gradients from the last layer to the first; stop at a layer that returns None.

        Returns the gradient of ``x`` (or None), and what the layers' ``backward_weights`` need.
        """
        gradient: Array | None = dy
        pendings = []
        for (name, layer), layer_cache in zip(reversed(self.layers), reversed(cache), strict=True):
            if gradient is None:
                if any(spec.trainable for spec in layer.specs()):
                    raise ConfigError(f"Sequential: no gradient reaches {name!r}: the layer after it returns none")
                continue
            poll(params)
            inner = params.get(name, {})
            gradient, pending = call_located("layer", name, layer.backward_input, inner, layer_cache, gradient)
            pendings.append(pending)
        return gradient, pendings

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the gradients of all layers' parameters, last layer to first."""
        reached = zip(reversed(self.layers), reversed(cache), pending, strict=False)
        for (name, layer), layer_cache, layer_pending in reached:
            poll(params)
            below = params.get(name, {}), layer_cache, layer_pending, grads.get(name, {})
            call_located("layer", name, layer.backward_weights, *below)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the last layer's output for one sample of ``shape``."""
        for _, layer in self.layers:
            shape = layer.output_shape(shape)
        return shape

    def split(self, group: Group) -> Layer:
        """Return a Sequential of the split forms of the layers, or this one if no layer has a split form."""
        layers = {name: layer.split(group) for name, layer in self.layers}
        return self if all(layers[name] is layer for name, layer in self.layers) else Sequential(layers)

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the operations of all layers for one sample of ``shape``."""
        total = Operations()
        for _, layer in self.layers:
            total, shape = total + layer.operations(shape), layer.output_shape(shape)
        return total

    def trace(self, graph: Graph, name: str, source: NodeOutput) -> NodeOutput:
        """Add the nodes of all layers to the exported computation graph, each fed by the layer before it.

        ``source`` is the input of the first layer. Returns the output of the last layer.
        """
        return traced(graph, name, source, **dict(self.layers))

"""Define the arithmetic of one element for all kernels: optimizers, activations, losses, norms, attention, compression.

CPU and GPU kernels call these functions of scalars, so that each formula is written once. ``T``, where a formula has
it, is the type of its numbers, np.float32 or np.float64. A loss is a float64, whatever the type of the prediction; a
gradient has the prediction's type, and ``scale`` is a factor on the gradient. No literal may change the width of the
arithmetic: a float literal would turn float32 into float64, an integer literal would widen integers. So constants are
NumPy scalars of the width that a formula computes in, or are converted by ``T``.

In the updates of optimizers ``w`` is the weight, ``g`` its gradient, ``m`` and ``v`` are running averages of the
gradient and of its square. Coefficients that are differences or quotients (``1 - beta``, ``lr / (1 - beta**step)``) are
arguments, because they are computed in float64 on the host: in float32, ``1 - 0.999`` would be wrong in its fifth
digit. Conversions to bfloat16 and float16 work on the bits, as integers, and round to nearest even.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.kernels.elementary import exp2_single, exp_double, exponential, hyperbolic_tangent, log1p, logarithm

Scalar = Any
#: A tuple of scalars: kernels read them from their array ``hyper`` once, by :func:`first_five` to :func:`first_eight`.
Scalars = Any


def name_kernel(kernel: Callable[..., Any], name: str, doc: str) -> None:
    """Set the name, by which kernels are found and cached, and the docstring of a function made for a formula."""
    kernel.__name__ = kernel.__qualname__ = name
    kernel.__doc__ = doc


def first_five(hyper: Any) -> Scalars:
    """Return the first five scalars of ``hyper``."""
    return hyper[0], hyper[1], hyper[2], hyper[3], hyper[4]


def first_six(hyper: Any) -> Scalars:
    """Return the first six scalars of ``hyper``."""
    return *first_five(hyper), hyper[5]


def first_seven(hyper: Any) -> Scalars:
    """Return the first seven scalars of ``hyper``."""
    return *first_six(hyper), hyper[6]


def first_eight(hyper: Any) -> Scalars:
    """Return the first eight scalars of ``hyper``."""
    return *first_seven(hyper), hyper[7]


def sgd(w: Scalar, g: Scalar, lr: Scalar, decay: Scalar) -> Scalar:
    """Return the new weight after a step of gradient descent; ``decay * w`` is added to the gradient."""
    return w - lr * (g + decay * w)


def momentum(w: Scalar, g: Scalar, m: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar]:
    """Return the new ``w`` and momentum buffer ``m`` after a step of gradient descent with momentum.

    First ``decay * w`` is added to the gradient; then ``m = factor * m + keep * g`` and ``w -= lr * (of_g * g + of_m *
    m)``. (of_g, of_m) is (0, 1), or (1, momentum) for Nesterov's momentum (Sutskever 2013).
    """
    lr, decay, factor, keep, of_g, of_m = hyper
    g = g + decay * w
    m = factor * m + keep * g
    return w - lr * (of_g * g + of_m * m), m


def adam(w: Scalar, g: Scalar, m: Scalar, v: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar, Scalar]:
    """Return the new ``w``, ``m`` and ``v`` after a step of Adam (Kingma & Ba 2015).

    rest1 = 1 - beta1, rest2 = 1 - beta2, rate = lr / (1 - beta1**step) and correction = 1 / sqrt(1 - beta2**step).
    First ``decay * w`` is added to the gradient.
    """
    decay, beta1, rest1, beta2, rest2, rate, correction, eps = hyper
    g = g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def adamw(w: Scalar, g: Scalar, m: Scalar, v: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar, Scalar]:
    """Return the new ``w``, ``m`` and ``v`` after a step of AdamW (Loshchilov & Hutter 2019).

    rest1 = 1 - beta1, rest2 = 1 - beta2, rate = lr / (1 - beta1**step) and correction = 1 / sqrt(1 - beta2**step).
    ``w`` is multiplied by shrink = 1 - lr * (weight decay).
    """
    shrink, beta1, rest1, beta2, rest2, rate, correction, eps = hyper
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return shrink * w - rate * (m / (math.sqrt(v) * correction + eps)), m, v


def rmsprop(w: Scalar, g: Scalar, v: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar]:
    """Return the new ``w`` and ``v`` after a step of RMSprop (Tieleman & Hinton 2012).

    rest = 1 - alpha. First ``decay * w`` is added to the gradient.
    """
    lr, decay, alpha, rest, eps = hyper
    g = g + decay * w
    v = alpha * v + rest * (g * g)
    return w - lr * (g / (math.sqrt(v) + eps)), v


def lion(w: Scalar, g: Scalar, m: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar]:
    """Return the new ``w`` and ``m`` after a step of Lion (Chen et al. 2023).

    rest1 = 1 - beta1, rest2 = 1 - beta2, and zero is 0 in the parameters' dtype. ``w`` is multiplied by shrink = 1 - lr
    * (weight decay), and then changes by lr times the sign of an average of the gradient; where the average is NaN,
    ``w`` becomes NaN.
    """
    shrink, lr, beta1, rest1, beta2, rest2, zero = hyper
    c = beta1 * m + rest1 * g
    step = lr if c > zero else (-lr if c < zero else c)
    return shrink * w - step, beta2 * m + rest2 * g


def lamb_direction(w: Scalar, g: Scalar, m: Scalar, v: Scalar, hyper: Scalars) -> tuple[Scalar, Scalar, Scalar]:
    """Return LAMB's direction (You et al. 2020), and the new ``m`` and ``v``.

    The direction is Adam's plus ``decay * w``. rest1 = 1 - beta1, rest2 = 1 - beta2, first = 1 / (1 - beta1**step) and
    correction = 1 / sqrt(1 - beta2**step).
    """
    decay, beta1, rest1, beta2, rest2, first, correction, eps = hyper
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    return first * (m / (math.sqrt(v) * correction + eps)) + decay * w, m, v


def lamb_apply(w: Scalar, u: Scalar, rate: Scalar) -> Scalar:
    """Return the new weight after a step along LAMB's direction ``u``; rate = lr * trust ratio."""
    return w - rate * u


def ema(average: Scalar, w: Scalar, rate: Scalar) -> Scalar:
    """Return the new exponential moving average of a weight ``w``: the old one, moved towards ``w`` by ``rate``."""
    return average + rate * (w - average)


def add_scaled(y: Scalar, x: Scalar, factor: Scalar) -> Scalar:
    """Return ``y`` plus ``factor`` times ``x``."""
    return y + factor * x


# The tanh form of GELU is x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x**3); in this form it keeps its
# relative precision for negative x, where 1 + tanh(u) cancels.
_TWICE_ROOT = 1.5957691216057308
_CUBE = 0.044715
_SLOPE_CUBE = 3.0 * _TWICE_ROOT * _CUBE
_NEGATIVE_TWICE_ROOT = -_TWICE_ROOT
_NEGATIVE_TWICE_ROOT_CUBE = -_TWICE_ROOT * _CUBE
# The same for a power of two instead of e.
_POWER = _NEGATIVE_TWICE_ROOT / math.log(2.0)
_POWER_CUBE = _NEGATIVE_TWICE_ROOT_CUBE / math.log(2.0)
# Outside of these the derivative is 0 or 1 to the last bit, while the cube may overflow.
_FLAT = 20.0
_FLAT_SINGLE = 10.0
# From here exp(-2 u) is inf in float32 (2**127.97), so that huge negative x give 0.
_LOWEST_SINGLE = -10.06
# Outside of these the derivative of SiLU is 0 or 1, and exp(-x) is still finite.
_SILU_FLAT = 700.0
_SILU_FLAT_SINGLE = 80.0


def clamped(x: Any, low: Any, high: Any) -> Any:
    """Return the number in [low, high] that is nearest to ``x``; return NaN for NaN."""
    above = low if x < low else x
    return high if above > high else above


def gelu_power(x: Any, T: Any) -> Any:  # noqa: N803
    """Return exp(-2 u) with u = sqrt(2 / pi) * (x + 0.044715 * x**3), a part of :func:`gelu`.

    In float32, ``x`` must be in [-10.06, 10].
    """
    if T is np.float32:
        c = np.float32(x)
        return T(exp2_single(c * (np.float32(_POWER) + np.float32(_POWER_CUBE) * (c * c))))
    return exponential(x * (T(_NEGATIVE_TWICE_ROOT) + T(_NEGATIVE_TWICE_ROOT_CUBE) * (x * x)), T)


def gelu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return the tanh form of GELU of ``x`` (Hendrycks and Gimpel 2016)."""
    if T is np.float32:
        return x / (T(1.0) + gelu_power(clamped(x, T(_LOWEST_SINGLE), T(_FLAT_SINGLE)), T))
    return x / (T(1.0) + gelu_power(x, T))


def gelu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of :func:`gelu` at ``x``."""
    flat = T(_FLAT_SINGLE) if T is np.float32 else T(_FLAT)
    c = clamped(x, -flat, flat)
    power = gelu_power(c, T)
    s = T(1.0) / (T(1.0) + power)
    slope = T(_TWICE_ROOT) + T(_SLOPE_CUBE) * (c * c)
    # power * s is 1 - s without its cancellation.
    return dy * (s + c * slope * (s * (power * s)))


def silu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``x * sigmoid(x)``, computed as x / (1 + exp(-x))."""
    return x / (T(1.0) + exponential(-x, T))


def silu_gradient(x: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of :func:`silu` at ``x``."""
    flat = T(_SILU_FLAT_SINGLE) if T is np.float32 else T(_SILU_FLAT)
    c = clamped(x, -flat, flat)
    power = exponential(-c, T)
    s = T(1.0) / (T(1.0) + power)
    return dy * (s * (T(1.0) + c * (power * s)))


def relu(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``max(x, 0)``; return NaN for NaN."""
    return T(0.0) if x <= T(0.0) else x


def relu_gradient(y: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of ReLU where its value is ``y``: 0 if ``y <= 0``, otherwise ``dy``."""
    return T(0.0) if y <= T(0.0) else dy


def tanh_value(x: Any, T: Any) -> Any:  # noqa: N803
    """Return ``tanh(x)``."""
    return hyperbolic_tangent(x, T)


def tanh_gradient(y: Any, dy: Any, T: Any) -> Any:  # noqa: N803
    """Return ``dy`` times the derivative of tanh where its value is ``y``."""
    return dy * (T(1.0) - y * y)


_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_ONE_BIT, _THIRTEEN, _SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)
_LOW_BITS = np.uint32(0xFFFF)
_BELOW_HALF = np.uint32(0x7FFF)  # one less than half a unit in bfloat16's last place
_QUIET = np.uint32(0x40)

_HALF_SIGN, _HALF_MAGNITUDE = np.uint32(0x8000), np.uint32(0x7FFF)
_HALF_INFINITY, _HALF_NAN = np.uint32(0x7C00), np.uint32(0x7E00)
_HALF_SMALLEST_NORMAL = np.uint32(0x0400)
_OVERFLOW = np.uint32(0x47800000)  # 2**16, infinite in float16
_NORMAL = np.uint32(0x38800000)  # 2**-14; below, float16 is subnormal
_BIAS = np.uint32(0x38000000)  # (127 - 15) << 23
_BELOW_HALF_16 = np.uint32(0xFFF)
_MAGIC = np.float32(0.5)  # its last place is float16's subnormal unit: adding it rounds there
_MAGIC_BITS = np.uint32(0x3F000000)
_NORMAL_VALUE = np.float32(2.0**-14)


def to_bfloat16(x: Scalar) -> Scalar:
    """Return the bits of a float32 rounded to bfloat16; NaN gives a quiet NaN."""
    bits = np.float32(x).view(np.uint32)
    high = bits >> _SIXTEEN
    carry = ((bits & _LOW_BITS) + _BELOW_HALF + (high & _ONE_BIT)) >> _SIXTEEN
    return high | _QUIET if (bits & _MAGNITUDE) > _INFINITY else high + carry


def from_bfloat16(half: Scalar) -> Scalar:
    """Return the float32 value of the bits of a bfloat16, which is exact."""
    return np.uint32(np.uint32(half) << _SIXTEEN).view(np.float32)


def round_bfloat16(x: Scalar) -> Scalar:
    """Return a float32 rounded to the nearest bfloat16, ties to even; NaN gives a quiet NaN."""
    return from_bfloat16(to_bfloat16(x))


def to_float16(x: Scalar) -> Scalar:
    """Return the bits of a float32 rounded to float16: infinite for values too large, subnormal for small ones."""
    bits = np.float32(x).view(np.uint32)
    sign = (bits >> _SIXTEEN) & _HALF_SIGN
    magnitude = bits & _MAGNITUDE
    if magnitude >= _OVERFLOW:
        return sign | (_HALF_NAN if magnitude > _INFINITY else _HALF_INFINITY)
    if magnitude < _NORMAL:
        rounded = np.uint32(magnitude).view(np.float32) + _MAGIC
        return sign | (np.float32(rounded).view(np.uint32) - _MAGIC_BITS)
    odd = (magnitude >> _THIRTEEN) & _ONE_BIT
    return sign | ((magnitude - _BIAS + _BELOW_HALF_16 + odd) >> _THIRTEEN)


def from_float16(half: Scalar) -> Scalar:
    """Return the float32 value of the bits of a float16, which is exact for subnormal values too."""
    sign = (np.uint32(half) & _HALF_SIGN) << _SIXTEEN
    magnitude = np.uint32(half) & _HALF_MAGNITUDE
    if magnitude >= _HALF_INFINITY:
        bits = _INFINITY | ((magnitude - _HALF_INFINITY) << _THIRTEEN)
    elif magnitude < _HALF_SMALLEST_NORMAL:
        value = np.uint32((magnitude << _THIRTEEN) + _NORMAL).view(np.float32) - _NORMAL_VALUE
        bits = np.float32(value).view(np.uint32)
    else:
        bits = (magnitude << _THIRTEEN) + _BIAS
    return np.uint32(sign | bits).view(np.float32)


_HALF = np.float64(0.5)
_ZERO_64 = np.float64(0.0)
_ONE_64 = np.float64(1.0)


def absolute_error_value(prediction: Any, target: Any) -> Any:
    """Return |prediction - target|."""
    return abs(np.float64(prediction) - np.float64(target))


def absolute_error_gradient(prediction: Any, target: Any, scale: Any) -> Any:
    """Return ``scale`` times the sign of prediction - target, which is 0 where both are equal and NaN for NaN."""
    if prediction > target:
        return scale
    return -scale if prediction < target else prediction - target


def huber_value(prediction: Any, target: Any, delta: Any) -> Any:
    """Return half the squared error, or the straight line that continues it where the error exceeds ``delta``."""
    size, limit = abs(np.float64(prediction) - np.float64(target)), np.float64(delta)
    return _HALF * size * size if size <= limit else limit * (size - _HALF * limit)


def huber_gradient(prediction: Any, target: Any, delta: Any, scale: Any) -> Any:
    """Return ``scale`` times the error, limited to [-delta, delta]."""
    return clamped(prediction - target, -delta, delta) * scale


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) of a float64, without overflow and without cancellation."""
    return max(x, _ZERO_64) + log1p(exp_double(-abs(x)), np.float64)


def binary_cross_entropy_value(logit: Any, target: Any, weight: Any) -> Any:
    """Return the loss -weight * target * log(sigmoid(logit)) - (1 - target) * log(1 - sigmoid(logit))."""
    x, t = np.float64(logit), np.float64(target)
    return np.float64(weight) * t * softplus(-x) + (_ONE_64 - t) * softplus(x)


def binary_cross_entropy_gradient(logit: Any, target: Any, weight: Any, scale: Any, T: Any) -> Any:  # noqa: N803
    """Return ``scale`` times the gradient of the loss with respect to the logit, of type ``T``.

    The gradient is (1 - target) * sigmoid(logit) - weight * target * sigmoid(-logit).
    """
    power = exponential(-abs(logit), T)
    large = T(_ONE_64) / (T(_ONE_64) + power)
    small = power * large
    above, below = (large, small) if logit > T(_ZERO_64) else (small, large)
    return ((T(_ONE_64) - target) * above - weight * target * below) * scale


def gaussian_value(mean: Any, log_variance: Any, target: Any, lowest: Any) -> Any:
    """Return (s + (mean - target)**2 * exp(-s)) / 2, where s is the larger of ``log_variance`` and ``lowest``."""
    d, s = np.float64(mean) - np.float64(target), np.float64(lowest if log_variance < lowest else log_variance)
    return _HALF * (s + d * d * exp_double(-s))


def gaussian_gradient(mean: Any, log_variance: Any, target: Any, lowest: Any, scale: Any, T: Any) -> Any:  # noqa: N803
    """Return ``scale`` times the gradients with respect to the mean and to the logarithm of the variance.

    Where ``log_variance`` is below ``lowest``, the second gradient is PyTorch's: the gradient with respect to the
    limited variance, times the derivative of the variance, not limited, with respect to its logarithm.
    """
    s = lowest if log_variance < lowest else log_variance
    d, precision = mean - target, exponential(-s, T)
    slope = exponential(log_variance - s, T)
    return d * precision * scale, T(_HALF) * (T(_ONE_64) - d * d * precision) * slope * scale


#: Number of values that share a scale; a power of two, so that blocks begin where vectors do.
BLOCK = 256
#: The value of one code for a largest magnitude of 1: codes go from -127 to 127. A little less than 1 / 127, so that
#: 127 codes of the largest float32 are no more than that.
UNIT = np.float32((1 - 2.0**-22) / 127)

_SMALLEST_NORMAL = np.float32(2.0**-126)
_ROUNDS = np.float32(1.5 * 2.0**23)  # its last place is 1: adding it rounds to a whole number, to nearest even
_ZERO, _ONE = np.float32(0), np.float32(1)
_NAN = np.float32(np.nan)


def magnitude(x: Scalar) -> Scalar:
    """Return the bits of the magnitude of a float32 as an integer.

    The integers sort like the magnitudes; the integer of a NaN is larger than that of infinity.
    """
    return np.float32(x).view(np.uint32) & _MAGNITUDE


def scale_of(largest: Scalar) -> Scalar:
    """Return the scale of a block of values that are sent as 8-bit integers: the value for which the integer 1 stands.

    The integer 127 then stands for the block's largest magnitude.

    ``largest`` is the block's largest magnitude, as bits (:func:`magnitude`). The scale is 0 if it would be below the
    smallest normal float32, and NaN if the block has a value that is infinite or NaN.
    """
    if largest >= _INFINITY:
        return _NAN
    scale = np.uint32(largest).view(np.float32) * UNIT
    return scale if scale >= _SMALLEST_NORMAL else _ZERO


def inverse_of(scale: Scalar) -> Scalar:
    """Return 1 / scale, the factor that turns values into integers of 8 bits; return 0 if the scale is 0 or NaN."""
    return _ONE / scale if scale > _ZERO else _ZERO


def code_of(x: Scalar, inverse: Scalar) -> Scalar:
    """Return ``x * inverse`` rounded to a whole number, to nearest even, as a float; return 0 for NaN."""
    scaled = x * inverse
    return (scaled + _ROUNDS) - _ROUNDS if scaled == scaled else _ZERO


def inverse_root(mean_square: Any, eps: Any, T: Any) -> Any:  # noqa: N803
    """Return ``1 / sqrt(mean_square + eps)`` as a number of type ``T``."""
    return T(1.0) / T(math.sqrt(mean_square + eps))


def standardized(x: Any, mean: Any, rstd: Any) -> Any:
    """Return ``(x - mean) * rstd``, where ``rstd`` is 1 / (standard deviation)."""
    return (x - mean) * rstd


def scaled(standard: Any, gamma: Any, beta: Any) -> Any:
    """Return ``standard * gamma + beta``, where ``standard`` comes from :func:`standardized`."""
    return standard * gamma + beta


def layernorm_gradient(g: Any, standard: Any, mean_g: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of one input x of layer normalization.

    ``standard`` is (x - mean) * rstd with rstd = 1 / (standard deviation), and ``g`` is dy * gamma. ``mean_g`` and
    ``mean_gs`` are the means of g and of g * standard over the row.
    """
    return rstd * ((g - mean_g) - standard * mean_gs)


def rmsnorm_gradient(g: Any, standard: Any, mean_gs: Any, rstd: Any) -> Any:
    """Return the gradient of one input x of root-mean-square normalization.

    ``standard`` is x * rstd with rstd = 1 / (root mean square), and ``g`` is dy * gamma. ``mean_gs`` is the mean of g *
    standard over the row.
    """
    return rstd * (g - standard * mean_gs)


def visible_keys_in_tile(query: Any, offset: Any, keys: Any) -> Any:
    """Return how many of a tile's ``keys`` keys query number ``query`` sees under the causal mask: the first ones.

    Query 0 of the tile is ``offset`` positions after key 0 in the sequence.
    """
    visible = query + 1 + offset
    if visible < 0:
        return 0
    return visible if visible < keys else keys


def rescaled(total: Any, factor: Any, part: Any) -> Any:
    """Return ``total * factor + part``: rescale a sum of online softmax to a new maximum, and add one tile's part."""
    return total * factor + part


def cross_entropy(total: Any, largest: Any, logit: Any) -> Any:
    """Return the loss of one row, -log softmax(x)[target], in float64.

    ``total`` is the sum of exp(x - largest) over the row's logits x, ``largest`` the largest logit, and ``logit`` the
    logit of the target.
    """
    return logarithm(total, np.float64) + (np.float64(largest) - np.float64(logit))


def cross_entropy_gradient(probability: Any, hit: Any, scale: Any) -> Any:
    """Return ``scale`` times the gradient of the loss with respect to one logit.

    ``probability`` is the softmax of the logit; ``hit`` is 1 for the logit of the target and 0 for the others.
    """
    return (probability - hit) * scale


def visible_keys(query: Any, queries: Any, keys: Any) -> Any:
    """Return how many keys query number ``query`` of ``queries`` sees under the causal mask: the first ones.

    The last query sees all ``keys`` keys, and every other query sees one key fewer than the next query (at least 0).
    """
    visible = query + 1 + keys - queries
    return visible if visible > 0 else 0


def softmax_gradient(p: Any, dp: Any, dot: Any, scale: Any) -> Any:
    """Return the gradient of one score of a query, where p = softmax(scale * scores).

    ``p`` is the score's probability, ``dp`` the gradient of the probability, and ``dot`` the sum of p * dp over all
    keys of the query.
    """
    return scale * (p * (dp - dot))


def is_finite(x: Scalar) -> bool:
    """Tell whether ``x`` is neither infinite nor NaN; only then is ``x - x`` equal to itself."""
    difference = x - x
    return bool(difference == difference)


def inside(index: Any, rows: Any) -> Any:
    """Tell whether ``index`` is the index of a row in a table of ``rows`` rows: ``0 <= index < rows``."""
    return (index >= 0) & (index < rows)

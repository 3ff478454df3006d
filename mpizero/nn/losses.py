"""Compute losses: of elements of the target, of whole samples, and of classes; targets may have weights and masks.

Every loss takes a target array, or a dictionary of arrays that :class:`WeightedTarget` parses. An :class:`ElementLoss`
is computed for every element of a target: squared and absolute errors, likelihoods. :class:`RelativeL2Loss` is the
relative error of whole samples, as used for neural operators, and :class:`CrossEntropy` is the loss of class numbers.
:func:`loss_for` finds a loss by the name that models and configuration files use.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import number, positive, require
from mpizero._util.names import explains, nearest
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.elementary import logarithm
from mpizero.nn.arrays import namespace, require_array, require_floats, require_numbers, vector
from mpizero.types import Array, Loss

_KEYS = ("target", "weight", "mask")


@dataclass(frozen=True)
class WeightedTarget:
    """Hold a target, and optional weights and a mask of its samples or elements.

    Attributes
    ----------
    values : Array
        The target itself.
    weight : Array or None
        Numbers >= 0, of the target's shape or of the shape of its leading axes: an array (samples,) weighs whole
        samples. None means weight 1 everywhere.
    mask : Array or None
        Booleans, of a shape that ``weight`` may have; where the mask is False, the weight is 0. None masks nothing.
    where : str
        The loss's name, for error messages.
    """

    values: Any
    weight: Any
    mask: Any
    where: str

    @classmethod
    def of(cls, target: Any, where: str) -> WeightedTarget:
        """Parse ``target``, an array or a dictionary ``{"target": ..., "weight": ..., "mask": ...}``.

        The dictionary may lack "weight", "mask" or both. ``where`` is the loss's name. Raises :class:`DataError` if the
        dictionary lacks "target" or has another key.
        """
        if not isinstance(target, Mapping):
            require_array(target, where, "target")
            return cls(target, None, None, where)
        if odd := [key for key in target if key not in _KEYS]:
            raise DataError(
                f'{where}: takes {{"target": ..., "weight": ..., "mask": ...}}, the target has the key '
                f"{odd[0]!r}{nearest(str(odd[0]), _KEYS)}"
            )
        if "target" not in target:
            raise DataError(f'{where}: the key "target" is missing from the target, which has {sorted(target)}')
        require_array(target["target"], where, 'target["target"]')
        return cls(target["target"], target.get("weight"), target.get("mask"), where)

    def weights(self, shape: tuple[int, ...]) -> Array | None:
        """Return the weight of each element as a float64 array of ``shape``, 0 where the mask is False.

        ``shape`` is the shape of the target's elements. Returns None if there is neither a weight nor a mask.
        """
        if self.weight is None and self.mask is None:
            return None
        weight = 1.0 if self.weight is None else self._aligned(self._checked_weight(), "weight", shape)
        mask = True if self.mask is None else self._aligned(self._checked_mask(), "mask", shape)
        xp = namespace(self.values)
        return xp.ascontiguousarray(xp.broadcast_to(xp.asarray(mask * weight, np.float64), shape))

    def sample_weights(self, samples: int) -> tuple[Array | None, WeightedTarget]:
        """Separate weights and masks of whole samples from those of elements within samples.

        Returns the weights of samples, from the weight and the mask of shape (samples,), or None if neither has this
        shape; and a target with weight and mask of other shapes.
        """
        weight, mask = (getattr(array, "ndim", 0) == 1 for array in (self.weight, self.mask))
        of_samples = replace(self, weight=self.weight if weight else None, mask=self.mask if mask else None)
        of_elements = replace(self, weight=None if weight else self.weight, mask=None if mask else self.mask)
        return of_samples.weights((samples,)), of_elements

    def _checked_weight(self) -> Array:
        require_numbers(self.weight, self.where, "weight")
        if not bool(((self.weight >= 0) & (self.weight < np.inf)).all()):
            raise DataError(
                f"{self.where}: takes finite weights from 0, the weight has values from {self.weight.min()} to "
                f"{self.weight.max()}"
            )
        weight: Array = self.weight.astype(np.float64)
        return weight

    def _checked_mask(self) -> Array:
        require_array(self.mask, self.where, "mask")
        if self.mask.dtype.kind != "b":
            raise DataError(
                f"{self.where}: takes a mask of booleans, True for what counts, the mask has dtype {self.mask.dtype}; "
                'give mask.astype(bool), or numbers as "weight"'
            )
        mask: Array = self.mask
        return mask

    def _aligned(self, array: Array, what: str, shape: tuple[int, ...]) -> Array:
        """Return ``array``, which covers leading axes of ``shape``, with an axis of size 1 for each other axis."""
        if tuple(array.shape) == tuple(self.values.shape) and array.size == math.prod(shape):
            array = array.reshape(shape)  # the target's last axis of size 1 may be missing from the prediction
        if array.ndim < 1 or tuple(array.shape) != shape[: array.ndim]:
            raise DataError(
                f"{self.where}: takes a {what} of the target's shape {shape} or of its leading axes, such as "
                f"{shape[:1]}; the {what} has shape {tuple(array.shape)}"
            )
        return array.reshape(*array.shape, *[1] * (len(shape) - array.ndim))


def times(values: Array, weights: Array | None) -> Array:
    """Return ``values * weights`` in the dtype of ``values``; 0 where the weight is 0, even if the value is NaN or inf.

    ``weights`` has the shape of ``values`` or of its leading axes; if it is None, ``values`` itself is returned.
    """
    if weights is None:
        return values
    xp = namespace(values)
    aligned = weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))
    product = xp.where(aligned != 0, values, values.dtype.type(0)) * aligned  # in float64: a weight may be huge
    cast: Array = product.astype(values.dtype, copy=False)
    return cast


def require_shape(where: str, target: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise :class:`DataError` unless ``target``, a target's shape, is ``shape``, up to a last axis of size 1.

    ``where`` is the loss's name in the message.
    """
    if not shape:
        raise DataError(f"{where}: takes (samples, ...), the prediction is a single number")
    if target != shape and (*target, 1) != shape and target != (*shape, 1):
        raise DataError(
            f"{where}: takes targets of the prediction's shape {shape}, where one of both may lack a last axis of "
            f"size 1; the target has shape {target}"
        )


class ElementLoss(ABC):
    """Compute a loss of each element of the target, averaged over a sample's outputs and summed over samples.

    A subclass computes the losses of all elements (:meth:`losses`) and their gradients (:meth:`gradients`).
    """

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Sum the losses of all samples, in float64.

        Parameters
        ----------
        prediction : Array
            (samples, ...), float32 or float64.
        target : Array or dict
            Real numbers of the prediction's shape (:class:`GaussianNLLLoss`: half of its last axis). Prediction or
            target may have an additional last axis of size 1. A dictionary ``{"target": ..., "weight": ..., "mask":
            ...}`` gives weights and masks of elements, or of whole samples by arrays (samples,).

        Returns
        -------
        loss_sum, weight : float
            The sum over samples of the mean loss of a sample's outputs, and the number of samples. With weights w: the
            sums of w * loss / n and of w / n over all elements, where n is the number of outputs of a sample.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        where = type(self).__name__
        require_floats(prediction, where, "prediction")
        weighted = WeightedTarget.of(target, where)
        require_numbers(weighted.values, where, "target")
        shape = self.target_shape(tuple(prediction.shape))
        require_shape(where, tuple(weighted.values.shape), shape)
        xp = namespace(prediction)
        prediction = xp.ascontiguousarray(prediction)
        targets = xp.ascontiguousarray(weighted.values.reshape(shape), dtype=prediction.dtype)
        weights = weighted.weights(shape)
        self.check_targets(targets, weights)
        losses = xp.empty(shape, np.float64)
        self.losses(prediction, targets, losses)
        samples = shape[0]
        outputs = max(1, targets.size // samples if samples else 1)
        weight = float(samples) if weights is None else float(weights.sum()) / outputs
        return float(times(losses, weights).sum()) / outputs, weight, (prediction, targets, weights, outputs)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        prediction, targets, weights, outputs = cache
        gradient: Array = namespace(prediction).empty_like(prediction)
        self.gradients(prediction, targets, vector(prediction, scale / outputs), gradient)
        return times(gradient, self.prediction_weights(weights))

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the target of a prediction of ``shape``."""
        return shape

    def prediction_weights(self, weights: Array | None) -> Array | None:
        """Return the weights of the prediction's elements from the weights of the target's elements."""
        return weights

    def check_targets(self, targets: Array, weights: Array | None) -> None:  # noqa: B027
        """Raise :class:`DataError` if the loss does not allow the value of a target whose weight is not 0."""

    @abstractmethod
    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the loss of each element of ``targets`` to ``losses``, float64; all arrays are contiguous."""

    @abstractmethod
    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return None, because predicted real numbers have no accuracy."""
        return None


@explains
@dataclass(frozen=True)
class MeanSquaredError(ElementLoss):
    """Compute the squared error, averaged over a sample's outputs and summed over samples.

    Predictions are (samples, ...), float32 or float64, and targets real numbers of the same shape, which may have
    weights and masks, as :meth:`forward` says. The loss has no parameters, and no method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> loss = mz.nn.MeanSquaredError()
    >>> prediction, target = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 4.0], [0.0, 0.0]])
    >>> loss.forward(prediction, target)[:2]  # the sum of the two samples' means, and their number
    (14.5, 2.0)
    >>> loss.forward(prediction, {"target": target, "mask": np.array([True, False])})[:2]
    (2.0, 1.0)
    """

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the squared error of each element to ``losses``."""
        namespace(prediction).square(prediction - targets, out=losses, dtype=np.float64)

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        namespace(prediction).subtract(prediction, targets, out=gradient)
        gradient *= scale1 + scale1


@explains
@dataclass(frozen=True)
class L1Loss(ElementLoss):
    """Compute the absolute error, averaged over a sample's outputs and summed over samples.

    Its gradient is 0 where prediction and target are equal. Predictions and targets are as for
    :class:`MeanSquaredError`. No method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> loss_sum, weight, cache = mz.nn.L1Loss().forward(np.array([[1.0], [3.0]]), np.array([[1.5], [0.0]]))
    >>> loss_sum, weight
    (3.5, 2.0)
    >>> mz.nn.L1Loss().backward(cache)
    array([[-1.],
           [ 1.]])
    """

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the absolute error of each element to ``losses``."""
        loss = kernels.backend(prediction).losses
        loss.absolute_error(prediction.reshape(-1), targets.reshape(-1), losses.reshape(-1))

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        loss = kernels.backend(prediction).losses
        loss.absolute_error_backward(prediction.reshape(-1), targets.reshape(-1), scale1, gradient.reshape(-1))


@explains
@dataclass(frozen=True)
class HuberLoss(ElementLoss):
    """Compute half the squared error up to an error of ``delta``, and the straight line that continues it beyond.

    The loss is averaged over a sample's outputs and summed over samples (Huber, 1964).

    Parameters
    ----------
    delta : float
        The error from which the loss grows linearly, greater than 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> loss_sum, weight, cache = mz.nn.HuberLoss(delta=1.0).forward(np.array([[0.5], [3.0]]), np.zeros((2, 1)))
    >>> loss_sum, weight  # 0.5**2 / 2, and 3 - 1 / 2
    (2.625, 2.0)
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        require("HuberLoss: delta", self.delta, positive)

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the Huber loss of each element to ``losses``."""
        loss, delta = kernels.backend(prediction).losses, vector(prediction, self.delta)
        loss.huber(prediction.reshape(-1), targets.reshape(-1), delta, losses.reshape(-1))

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        loss, delta = kernels.backend(prediction).losses, vector(prediction, self.delta)
        loss.huber_backward(prediction.reshape(-1), targets.reshape(-1), delta, scale1, gradient.reshape(-1))


@explains
@dataclass(frozen=True)
class BCEWithLogitsLoss(ElementLoss):
    """Compute the binary cross-entropy of the sigmoid of logits, averaged over outputs and summed over samples.

    Targets are probabilities from 0 to 1, mostly 0 and 1.

    Parameters
    ----------
    pos_weight : float, sequence of float or None
        Factor on the loss of a target of 1: one number, or one for each output (the last axis). None is a factor of 1.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> loss = mz.nn.BCEWithLogitsLoss(pos_weight=3.0)
    >>> loss_sum, weight, cache = loss.forward(np.array([[0.0], [0.0]]), np.array([[1.0], [0.0]]))
    >>> round(loss_sum, 3), weight  # 3 log 2 + log 2
    (2.773, 2.0)
    """

    pos_weight: Any = None

    def __post_init__(self) -> None:
        if self.pos_weight is None:
            return
        several = isinstance(self.pos_weight, Iterable) and not isinstance(self.pos_weight, str)
        for value in self.pos_weight if several else [self.pos_weight]:
            require("BCEWithLogitsLoss: pos_weight", float(value) if isinstance(value, np.number) else value, positive)
        if several:
            object.__setattr__(self, "pos_weight", tuple(map(float, self.pos_weight)))

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the cross-entropy of each element to ``losses``."""
        logits, factors = self._rows(prediction)
        rows = targets.reshape(logits.shape), factors, losses.reshape(logits.shape)
        kernels.backend(prediction).losses.binary_cross_entropy(logits, *rows)

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        logits, factors = self._rows(prediction)
        rows = targets.reshape(logits.shape), factors, scale1, gradient.reshape(logits.shape)
        kernels.backend(prediction).losses.binary_cross_entropy_backward(logits, *rows)

    def _rows(self, prediction: Array) -> tuple[Array, Array]:
        """Return the logits as rows of outputs, and the factor on positive targets of each output."""
        outputs = prediction.shape[-1] if prediction.ndim > 1 else 1
        pos_weight = 1.0 if self.pos_weight is None else self.pos_weight
        if isinstance(pos_weight, tuple) and len(pos_weight) != outputs:
            raise DataError(
                f"BCEWithLogitsLoss: pos_weight has {len(pos_weight)} numbers, the prediction has {outputs} outputs"
            )
        xp = namespace(prediction)
        factors = xp.full(outputs, 1.0, prediction.dtype) * xp.asarray(pos_weight, prediction.dtype)
        return prediction.reshape(prediction.size // max(1, outputs), outputs), factors

    def check_targets(self, targets: Array, weights: Array | None) -> None:
        """Raise :class:`DataError` if a target whose weight is not 0 is outside [0, 1]."""
        outside = (targets < 0) | (targets > 1)
        if bool((outside if weights is None else outside & (weights != 0)).any()):
            wrong = targets[outside]
            raise DataError(
                f"BCEWithLogitsLoss: takes targets from 0 to 1, the target has values from {wrong.min():g} to "
                f"{wrong.max():g}; for numbers of classes use CrossEntropy"
            )

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Count the elements that are predicted correctly, and all elements whose weight is not 0.

        A prediction is correct if its logit is above 0 and the target above 0.5, or neither is.
        """
        weighted = WeightedTarget.of(target, type(self).__name__)
        shape = tuple(prediction.shape)
        weights = weighted.weights(shape)
        right = (prediction > 0) == (weighted.values.reshape(shape) > 0.5)
        if weights is None:
            return int(right.sum()), right.size
        return int((right & (weights != 0)).sum()), int((weights != 0).sum())


@explains
@dataclass(frozen=True)
class GaussianNLLLoss(ElementLoss):
    """Compute the negative log-likelihood of normal distributions, whose means and variances the model predicts.

    The last axis of the prediction has two numbers for each output: first the means of all outputs, then the natural
    logarithms of their variances. So a model may predict any number, and no layer has to make variances positive. The
    loss of an element is ``(log(v) + (mean - target)**2 / v) / 2``, without the constant log(2 pi) / 2, averaged over
    outputs and summed over samples (Nix and Weigend, 1994). Loss and gradients are those of PyTorch's
    ``gaussian_nll_loss`` with the exponential of the predicted logarithm as variance, also where the variance is
    clamped to ``eps``.

    Parameters
    ----------
    eps : float
        Smallest variance; smaller predicted variances are clamped to it.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> prediction = np.array([[2.0, np.log(4.0)]])  # one sample: mean 2, variance 4
    >>> loss_sum, weight, cache = mz.nn.GaussianNLLLoss().forward(prediction, np.array([[4.0]]))
    >>> round(loss_sum, 3), weight  # (log 4 + 2**2 / 4) / 2
    (1.193, 1.0)
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        require("GaussianNLLLoss: eps", self.eps, positive)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the target of a prediction of ``shape``: half of its last axis."""
        if len(shape) < 2 or shape[-1] % 2:
            raise DataError(
                "GaussianNLLLoss: takes predictions (samples, ..., 2 * outputs), the means and then the logarithms of "
                f"the variances; the prediction has shape {shape}"
            )
        return (*shape[:-1], shape[-1] // 2)

    def prediction_weights(self, weights: Array | None) -> Array | None:
        """Return the weights of means and of variances: the target's weights, twice along the last axis."""
        return None if weights is None else namespace(weights).concatenate([weights, weights], axis=-1)

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the loss of each element to ``losses``."""
        rows = self._rows(prediction), self._rows(targets), self._lowest(prediction), self._rows(losses)
        kernels.backend(prediction).losses.gaussian_likelihood(*rows)

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        rows = self._rows(prediction), self._rows(targets), self._lowest(prediction), scale1, self._rows(gradient)
        kernels.backend(prediction).losses.gaussian_likelihood_backward(*rows)

    def _lowest(self, prediction: Array) -> Array:
        return vector(prediction, float(logarithm(self.eps, np.float64)))

    @staticmethod
    def _rows(array: Array) -> Array:
        return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


@explains
@dataclass(frozen=True)
class RelativeL2Loss:
    """Compute ``||prediction - target|| / (||target|| + eps)`` of each sample, summed over samples (Li et al., 2021).

    The norm is the Euclidean one over all outputs of a sample, computed in float64. Weights and masks of whole samples
    (arrays (samples,)) weigh samples. Weights and masks of elements weigh the squares inside both norms, as quadrature
    weights do; a sample whose elements all have weight 0 has weight 0. The gradient is 0 where prediction and target
    are equal.

    Parameters
    ----------
    eps : float
        Added to the norm of the target. With ``eps=0``, a target whose norm is 0 raises :class:`DataError`.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> prediction, target = np.array([[3.0, 3.0]]), np.array([[3.0, 4.0]])
    >>> mz.nn.RelativeL2Loss().forward(prediction, target)[:2]  # 1 / 5
    (0.2, 1.0)
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        require("RelativeL2Loss: eps", self.eps, number())

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Sum the relative errors of all samples, in float64.

        Parameters
        ----------
        prediction : Array
            (samples, ...), float32 or float64.
        target : Array or dict
            Real numbers of the prediction's shape; prediction or target may have an additional last axis of size 1. Or
            a dictionary ``{"target": ..., "weight": ..., "mask": ...}``.

        Returns
        -------
        loss_sum, weight : float
            The sum of the samples' relative errors, and the number (the sum of the weights) of samples.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        difference, targets, roots, of_samples = self.terms(prediction, target)
        weights = namespace(prediction).ones(len(prediction)) if of_samples is None else of_samples
        if roots is not None:
            weights = weights * (roots != 0).reshape(len(roots), -1).any(axis=1)
        difference = times(difference, roots)
        sums = self.square_sums(difference), self.square_sums(times(targets, roots))
        loss, weight, slopes = self.totals(*sums, weights)
        return loss, weight, (difference, roots, slopes)

    def terms(self, prediction: Array, target: Any) -> tuple[Array, Array, Array | None, Array | None]:
        """Return errors, targets and the roots of the elements' weights, in the prediction's shape; weights of samples.

        Weights are None where there are none.
        """
        where = type(self).__name__
        require_floats(prediction, where, "prediction")
        weighted = WeightedTarget.of(target, where)
        require_numbers(weighted.values, where, "target")
        shape = tuple(prediction.shape)
        require_shape(where, tuple(weighted.values.shape), shape)
        xp = namespace(prediction)
        of_samples, of_elements = weighted.sample_weights(shape[0])
        inside = of_elements.weights(shape)
        targets = xp.asarray(weighted.values, dtype=prediction.dtype).reshape(shape)
        return prediction - targets, targets, None if inside is None else xp.sqrt(inside), of_samples

    @staticmethod
    def square_sums(values: Array) -> Array:
        """Return the sum of the squares of each sample, in float64."""
        xp = namespace(values)
        rows = xp.ascontiguousarray(values).reshape(len(values), values.size // max(1, len(values)))
        sums: Array = xp.empty(len(rows), np.float64)
        kernels.backend(rows).losses.row_square_sums(rows, sums)
        return sums

    def totals(self, errors: Array, sizes: Array, weights: Array) -> tuple[float, float, Array]:
        """Return loss sum and weight, and the factor of each sample's errors in the gradient.

        By sample, ``errors`` and ``sizes`` are sums of the squares of errors and of targets, ``weights`` the weights.
        """
        xp = namespace(errors)
        errors, sizes = xp.sqrt(errors), xp.sqrt(sizes) + self.eps
        self._require_size(sizes, weights)
        counted = weights != 0
        factors = xp.where(counted, weights, 0.0) / xp.where(counted, sizes, 1.0)
        loss = float(xp.where(counted, errors * factors, 0.0).sum())
        slopes = xp.where(counted & (errors > 0), factors / xp.where(errors > 0, errors, 1.0), 0.0)
        return loss, float(weights.sum()), slopes

    def _require_size(self, sizes: Array, weights: Array) -> None:
        zero, where = (sizes == 0) & (weights != 0), type(self).__name__
        if bool(zero.any()):
            raise DataError(
                f"{where}: the target of sample {int(zero.argmax())} of {len(sizes)} given together is 0 everywhere, "
                "so no error is relative to it; leave the sample out by a mask, or give the loss an eps, such as "
                f"{where}(eps=1e-8)"
            )

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        difference, roots, slopes = cache
        return times(times(difference, roots), slopes * scale)

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return None, because predicted real numbers have no accuracy."""
        return None


@explains
@dataclass(frozen=True)
class CrossEntropy:
    """Compute softmax and the negative log-likelihood of integer targets; negative targets are ignored.

    Predictions are logits (..., classes), float32 or float64, and targets class numbers (...), as :meth:`forward` says.
    The loss has no parameters, and no method is collective.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> logits = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> loss_sum, weight, cache = mz.nn.CrossEntropy().forward(logits, np.array([0, 0, -1]))
    >>> round(loss_sum, 3), weight  # two targets count
    (2.254, 2.0)
    >>> mz.nn.CrossEntropy().backward(cache).round(3)
    array([[-0.119,  0.119],
           [-0.881,  0.881],
           [ 0.   ,  0.   ]])
    >>> mz.nn.CrossEntropy().correct(logits, np.array([0, 0, -1]))
    (1, 2)
    """

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Sum the losses of all targets that are not negative, in float64.

        Parameters
        ----------
        prediction : Array
            Logits, (..., classes).
        target : Array or dict
            Class numbers, integers below ``classes``, of shape (...). A negative target is ignored. A dictionary
            ``{"target": ..., "weight": ..., "mask": ...}`` weighs targets or whole samples.

        Returns
        -------
        loss_sum, weight : float
            The sum of the losses, and the number (the sum of the weights) of the targets that are not negative.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        require_floats(prediction, "CrossEntropy", "prediction")
        if prediction.ndim < 1:
            raise DataError("CrossEntropy: takes logits of (..., classes), the prediction is a single number")
        classes = prediction.shape[-1]
        targets, weights = self.as_targets(target, prediction.shape[:-1], classes)
        xp = namespace(prediction)
        logits = xp.ascontiguousarray(prediction.reshape(targets.size, classes))
        losses = xp.empty(targets.size, np.float64)
        kernels.backend(logits).losses.softmax_cross_entropy(logits, targets, losses)
        return *self.totals(losses, targets, weights), (logits, targets, weights, prediction.shape)

    def as_targets(self, target: Any, shape: tuple[int, ...], classes: int) -> tuple[Array, Array | None]:
        """Return the targets as a contiguous flat int64 array, negative where they are ignored, and their weights.

        ``shape`` is the shape that the target must have. Targets of weight 0 are ignored, too. The weights are a flat
        float64 array, or None. Raises :class:`DataError` if the target has another shape, is not of integers, or holds
        a number that is not below ``classes``.
        """
        weighted = WeightedTarget.of(target, "CrossEntropy")
        values = weighted.values
        if values.shape != shape or values.dtype.kind not in "iu":
            raise DataError(
                f"CrossEntropy: takes class numbers, integers of shape {tuple(shape)}, for logits of shape "
                f"{(*shape, classes)}; the target is {values.dtype} of shape {tuple(values.shape)}"
            )
        xp, weights = namespace(values), weighted.weights(tuple(shape))
        targets: Array = xp.ascontiguousarray(values.reshape(-1), dtype=np.int64)
        if weights is not None:
            weights = weights.reshape(-1)
            targets = xp.where(weights != 0, targets, -1)
        if targets.size and int(targets.max()) >= classes:
            raise DataError(f"CrossEntropy: target {int(targets.max())} is not below the number of classes, {classes}")
        return targets, weights

    @staticmethod
    def totals(losses: Array, targets: Array, weights: Array | None) -> tuple[float, float]:
        """Return the weighted sum of ``losses`` and the sum of the weights.

        ``targets`` and ``weights`` come from :meth:`as_targets`.
        """
        counted = targets >= 0
        if weights is None:
            return float(losses.sum()), float(counted.sum())
        return float(times(losses, weights).sum()), float((weights * counted).sum())

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        logits, targets, weights, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        loss = kernels.backend(logits).losses
        loss.softmax_cross_entropy_backward(logits, targets, vector(logits, scale), gradient)
        return times(gradient, weights).reshape(shape)

    def correct(self, prediction: Array, target: Any) -> tuple[int, int]:
        """Count the targets whose class has the largest logit, and all targets that are not ignored."""
        targets, _ = self.as_targets(target, prediction.shape[:-1], prediction.shape[-1])
        return int((prediction.argmax(-1).reshape(-1) == targets).sum()), int((targets >= 0).sum())


#: The losses for each task by name; the first is the task's default.
TASKS: Mapping[str, Mapping[str, type[Loss]]] = {
    "classification": {"cross_entropy": CrossEntropy, "bce": BCEWithLogitsLoss},
    "regression": {
        "mse": MeanSquaredError,
        "l1": L1Loss,
        "huber": HuberLoss,
        "relative_l2": RelativeL2Loss,
        "gaussian": GaussianNLLLoss,
    },
}


def loss_for(where: str, task: str, loss: Loss | str | None) -> Loss:
    """Return the loss of a model for ``task``, given by name or as an object with ``forward`` and ``backward``.

    None gives the task's default. ``where`` is the model's name for error messages.

    Raises
    ------
    ConfigError
        The name is unknown or belongs to another task, or the object is no loss.
    """
    of_task = TASKS[task]
    if loss is None:
        return next(iter(of_task.values()))()
    if isinstance(loss, str):
        if loss not in of_task:
            other = [name for name, losses in TASKS.items() if loss in losses]
            known = [name for losses in TASKS.values() for name in losses]
            advice = f"set task={other[0]!r}" if other else f"choose one of {', '.join(known)}{nearest(loss, known)}"
            raise ConfigError(f"{where}: loss={loss!r} does not belong to task={task!r}; {advice}")
        return of_task[loss]()
    if isinstance(loss, type) or not (callable(getattr(loss, "forward", None)) and hasattr(loss, "backward")):
        raise ConfigError(
            f"{where}: loss={loss!r:.80} must be the name of a loss, such as {list(of_task)[-1]!r}, or an object with "
            "forward and backward, such as mpizero.nn.HuberLoss(delta=0.5)"
        )
    return loss

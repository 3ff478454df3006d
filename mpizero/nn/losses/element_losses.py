"""Compute losses that every element of a target has one of: squared and absolute errors, likelihoods."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import positive, require
from mpizero._util.names import explains
from mpizero.errors import DataError
from mpizero.nn.arrays import namespace, require_floats, require_numbers, vector
from mpizero.nn.losses.weighted_target import WeightedTarget, times
from mpizero.types import Array


def require_shape(where: str, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise :class:`DataError` unless a target of shape ``given`` fits ``shape``, up to a last axis of size 1.

    ``where`` is the loss's name in the message.
    """
    if not shape:
        raise DataError(f"{where}: takes (samples, ...), the prediction is a single number")
    if given != shape and (*given, 1) != shape and given != (*shape, 1):
        raise DataError(
            f"{where}: takes targets of the prediction's shape {shape}, where one of both may lack a last axis of "
            f"size 1; the target has shape {given}"
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
            target may have an additional last axis of size 1. A dictionary ``{"target": ..., "weight": ...,
            "mask": ...}`` weighs elements, or whole samples by arrays (samples,).

        Returns
        -------
        loss_sum, weight : float
            The sum over samples of the mean loss of a sample's outputs, and the number of samples. With weights w the
            sum of w * loss / outputs over all elements, and the sum of w / outputs.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        where = type(self).__name__
        require_floats(prediction, where, "prediction")
        given = WeightedTarget.of(target, where)
        require_numbers(given.values, where, "target")
        shape = self.target_shape(tuple(prediction.shape))
        require_shape(where, tuple(given.values.shape), shape)
        xp = namespace(prediction)
        prediction = xp.ascontiguousarray(prediction)
        targets = xp.ascontiguousarray(given.values.reshape(shape), dtype=prediction.dtype)
        weights = given.weights(shape)
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
        """Raise :class:`DataError` if a target that counts is not allowed."""

    @abstractmethod
    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the loss of each element of ``targets`` to ``losses``, float64; all arrays are contiguous."""

    @abstractmethod
    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return None: predictions are not right or wrong."""
        return None


@explains
@dataclass(frozen=True)
class MeanSquaredError(ElementLoss):
    """Compute the squared error, averaged over a sample's outputs and summed over samples.

    Predictions are (samples, ...), float32 or float64, and targets real numbers of the same shape, which may have
    weights and masks, as :meth:`forward` says. It has no parameters, and no method is collective.

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

    Its slope is 0 where prediction and target are equal. Predictions and targets are as for :class:`MeanSquaredError`.
    No method is collective.

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
        loss = kernels.backend(prediction).element_loss
        loss.absolute_error(prediction.reshape(-1), targets.reshape(-1), losses.reshape(-1))

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        loss = kernels.backend(prediction).element_loss
        loss.absolute_error_backward(prediction.reshape(-1), targets.reshape(-1), scale1, gradient.reshape(-1))


@explains
@dataclass(frozen=True)
class HuberLoss(ElementLoss):
    """Compute half the squared error up to an error of ``delta``, and the straight line that continues it beyond.

    It is averaged over a sample's outputs and summed over samples (Huber, 1964).

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
        loss, delta = kernels.backend(prediction).element_loss, vector(prediction, self.delta)
        loss.huber(prediction.reshape(-1), targets.reshape(-1), delta, losses.reshape(-1))

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        loss, delta = kernels.backend(prediction).element_loss, vector(prediction, self.delta)
        loss.huber_backward(prediction.reshape(-1), targets.reshape(-1), delta, scale1, gradient.reshape(-1))


@explains
@dataclass(frozen=True)
class BCEWithLogitsLoss(ElementLoss):
    """Compute the binary cross-entropy of the sigmoid of logits, averaged over outputs and summed over samples.

    Targets are probabilities from 0 to 1, mostly 0 and 1.

    Parameters
    ----------
    pos_weight : float, sequence of float or None
        Factor on the loss of a target of 1: one number, or one for each output (the last axis). None is 1.

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
        kernels.backend(prediction).element_loss.binary_cross_entropy(logits, *rows)

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        logits, factors = self._rows(prediction)
        rows = targets.reshape(logits.shape), factors, scale1, gradient.reshape(logits.shape)
        kernels.backend(prediction).element_loss.binary_cross_entropy_backward(logits, *rows)

    def _rows(self, prediction: Array) -> tuple[Array, Array]:
        """Return the logits as rows of outputs, and the factor on positive targets of each output."""
        outputs = prediction.shape[-1] if prediction.ndim > 1 else 1
        given = 1.0 if self.pos_weight is None else self.pos_weight
        if isinstance(given, tuple) and len(given) != outputs:
            raise DataError(
                f"BCEWithLogitsLoss: pos_weight has {len(given)} numbers, the prediction has {outputs} outputs"
            )
        xp = namespace(prediction)
        factors = xp.full(outputs, 1.0, prediction.dtype) * xp.asarray(given, prediction.dtype)
        return prediction.reshape(prediction.size // max(1, outputs), outputs), factors

    def check_targets(self, targets: Array, weights: Array | None) -> None:
        """Raise :class:`DataError` if a target that counts is not from 0 to 1."""
        outside = (targets < 0) | (targets > 1)
        if bool((outside if weights is None else outside & (weights != 0)).any()):
            found = targets[outside]
            raise DataError(
                f"BCEWithLogitsLoss: takes targets from 0 to 1, the target has values from {found.min():g} to "
                f"{found.max():g}; for numbers of classes use CrossEntropy"
            )

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Count the elements whose logit is above 0 exactly if the target is above 0.5, and all that count."""
        given = WeightedTarget.of(target, type(self).__name__)
        shape = tuple(prediction.shape)
        weights = given.weights(shape)
        right = (prediction > 0) == (given.values.reshape(shape) > 0.5)
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
    outputs and summed over samples (Nix and Weigend, 1994). It is PyTorch's ``gaussian_nll_loss`` of the exponential of
    the predicted logarithm, whose gradients it has also where a variance is limited.

    Parameters
    ----------
    eps : float
        The least variance: smaller ones count as ``eps``.

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
        """Return the weights of means and of variances: those of the target twice along the last axis."""
        return None if weights is None else namespace(weights).concatenate([weights, weights], axis=-1)

    def losses(self, prediction: Array, targets: Array, losses: Array) -> None:
        """Write the loss of each element to ``losses``."""
        rows = self._rows(prediction), self._rows(targets), self._lowest(prediction), self._rows(losses)
        kernels.backend(prediction).element_loss.gaussian_likelihood(*rows)

    def gradients(self, prediction: Array, targets: Array, scale1: Array, gradient: Array) -> None:
        """Write ``scale1[0]`` times the gradient of the sum of all losses to ``gradient``."""
        rows = self._rows(prediction), self._rows(targets), self._lowest(prediction), scale1, self._rows(gradient)
        kernels.backend(prediction).element_loss.gaussian_likelihood_backward(*rows)

    def _lowest(self, prediction: Array) -> Array:
        return vector(prediction, math.log(self.eps))

    @staticmethod
    def _rows(array: Array) -> Array:
        return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])

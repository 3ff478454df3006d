"""Compute losses as a sum and a weight, so that the sums and weights of the parts of a batch can be added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero.errors import DataError
from mpizero.names import explains
from mpizero.nn.layer import namespace, require_array, require_floats, require_numbers, vector
from mpizero.types import Array


@explains
@dataclass(frozen=True)
class CrossEntropy:
    """Compute softmax and the negative log-likelihood of integer targets; negative targets are ignored."""

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Sum the losses of all targets that are not negative, in float64.

        Parameters
        ----------
        prediction : Array
            Logits, (..., classes).
        target : Array
            Class numbers, integers below ``classes``, of shape (...). A negative target is ignored.

        Returns
        -------
        loss_sum, weight : float
            The sum of the losses, and the number of targets that are not negative.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        require_floats(prediction, "CrossEntropy", "prediction")
        if prediction.ndim < 1:
            raise DataError("CrossEntropy: takes logits of (..., classes), the prediction is a single number")
        classes = prediction.shape[-1]
        targets = self.as_targets(target, prediction.shape[:-1], classes)
        xp = namespace(prediction)
        logits = xp.ascontiguousarray(prediction.reshape(targets.size, classes))
        losses = xp.empty(targets.size, np.float64)
        kernels.backend(logits).loss.softmax_cross_entropy(logits, targets, losses)
        return float(losses.sum()), float((targets >= 0).sum()), (logits, targets, prediction.shape)

    def as_targets(self, target: Array, shape: tuple[int, ...], classes: int) -> Array:
        """Return ``target`` as a contiguous flat int64 array.

        ``shape`` is the shape that the target must have. Raises :class:`DataError` if the target has another shape, is
        not of integers, or holds a number that is not below ``classes``.
        """
        require_array(target, "CrossEntropy", "target")
        if target.shape != shape or target.dtype.kind not in "iu":
            raise DataError(
                f"CrossEntropy: takes class numbers, integers of shape {tuple(shape)}, for logits of shape "
                f"{(*shape, classes)}; the target is {target.dtype} of shape {tuple(target.shape)}"
            )
        if target.size and int(target.max()) >= classes:
            raise DataError(f"CrossEntropy: target {int(target.max())} is not below the number of classes, {classes}")
        targets: Array = namespace(target).ascontiguousarray(target.reshape(-1), dtype=np.int64)
        return targets

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        logits, targets, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        loss = kernels.backend(logits).loss
        loss.softmax_cross_entropy_backward(logits, targets, vector(logits, scale), gradient)
        return gradient.reshape(shape)


@explains
@dataclass(frozen=True)
class MeanSquaredError:
    """Compute the squared error, averaged over a sample's outputs and summed over samples."""

    def forward(self, prediction: Array, target: Array) -> tuple[float, float, Any]:
        """Sum the losses of all samples, in float64.

        Parameters
        ----------
        prediction : Array
            (samples, ...).
        target : Array
            Real numbers of the prediction's shape. Prediction or target may have an additional last axis of size 1.

        Returns
        -------
        loss_sum, weight : float
            The sum of the losses, and the number of samples.
        cache : Any
            The intermediate results that :meth:`backward` needs.
        """
        require_floats(prediction, "MeanSquaredError", "prediction")
        require_numbers(target, "MeanSquaredError", "target")
        given, shape = tuple(target.shape), tuple(prediction.shape)
        if given != shape and (*given, 1) != shape and given != (*shape, 1):
            raise DataError(
                f"MeanSquaredError: takes targets of the prediction's shape {shape}, where one of both may lack a last "
                f"axis of size 1; the target has shape {given}"
            )
        xp = namespace(prediction)
        difference = prediction - xp.asarray(target, dtype=prediction.dtype).reshape(prediction.shape)
        samples = prediction.shape[0]
        outputs = prediction.size // samples if samples else 1
        loss = float(xp.square(difference, dtype=np.float64).sum()) / outputs
        return loss, float(samples), (difference, outputs)

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        difference, outputs = cache
        gradient: Array = difference * difference.dtype.type(2.0 * scale / outputs)
        return gradient

"""Compute the cross-entropy of scores of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.names import explains
from mpizero.errors import DataError
from mpizero.nn.arrays import namespace, require_floats, vector
from mpizero.nn.losses.weighted_target import WeightedTarget, times
from mpizero.types import Array


@explains
@dataclass(frozen=True)
class CrossEntropy:
    """Compute softmax and the negative log-likelihood of integer targets; negative targets are ignored.

    Predictions are logits (..., classes), float32 or float64, and targets class numbers (...), as :meth:`forward` says.
    It has no parameters, and no method is collective.

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
        kernels.backend(logits).loss.softmax_cross_entropy(logits, targets, losses)
        return *self.totals(losses, targets, weights), (logits, targets, weights, prediction.shape)

    def as_targets(self, target: Any, shape: tuple[int, ...], classes: int) -> tuple[Array, Array | None]:
        """Return the targets as a contiguous flat int64 array, -1 where they do not count, and their weights.

        ``shape`` is the shape that the target must have. The weights are a flat float64 array, or None. Raises
        :class:`DataError` if the target has another shape, is not of integers, or holds a number that is not below
        ``classes``.
        """
        given = WeightedTarget.of(target, "CrossEntropy")
        values = given.values
        if values.shape != shape or values.dtype.kind not in "iu":
            raise DataError(
                f"CrossEntropy: takes class numbers, integers of shape {tuple(shape)}, for logits of shape "
                f"{(*shape, classes)}; the target is {values.dtype} of shape {tuple(values.shape)}"
            )
        xp, weights = namespace(values), given.weights(tuple(shape))
        targets: Array = xp.ascontiguousarray(values.reshape(-1), dtype=np.int64)
        if weights is not None:
            weights = weights.reshape(-1)
            targets = xp.where(weights != 0, targets, -1)
        if targets.size and int(targets.max()) >= classes:
            raise DataError(f"CrossEntropy: target {int(targets.max())} is not below the number of classes, {classes}")
        return targets, weights

    @staticmethod
    def totals(losses: Array, targets: Array, weights: Array | None) -> tuple[float, float]:
        """Return the sum of ``losses`` and its weight; ``targets`` and ``weights`` come from :meth:`as_targets`."""
        counted = targets >= 0
        if weights is None:
            return float(losses.sum()), float(counted.sum())
        return float(times(losses, weights).sum()), float((weights * counted).sum())

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        logits, targets, weights, shape = cache
        gradient: Array = namespace(logits).empty_like(logits)
        loss = kernels.backend(logits).loss
        loss.softmax_cross_entropy_backward(logits, targets, vector(logits, scale), gradient)
        return times(gradient, weights).reshape(shape)

    def correct(self, prediction: Array, target: Any) -> tuple[int, int]:
        """Count the targets whose class has the largest logit, and all targets that count."""
        targets, _ = self.as_targets(target, prediction.shape[:-1], prediction.shape[-1])
        return int((prediction.argmax(-1).reshape(-1) == targets).sum()), int((targets >= 0).sum())

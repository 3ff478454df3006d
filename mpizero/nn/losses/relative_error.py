"""Compute the relative error of whole samples, as it is used for neural operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import number, require
from mpizero._util.names import explains
from mpizero.errors import DataError
from mpizero.nn.arrays import namespace, require_floats, require_numbers
from mpizero.nn.losses.element_losses import require_shape
from mpizero.nn.losses.weighted_target import WeightedTarget, times
from mpizero.types import Array


@explains
@dataclass(frozen=True)
class RelativeL2Loss:
    """Compute ``||prediction - target|| / (||target|| + eps)`` of each sample, summed over samples (Li et al., 2021).

    The norm is the Euclidean one over all outputs of a sample, computed in float64. Weights and masks of whole samples
    (arrays (samples,)) weigh samples. Those of elements weigh the squares inside both norms, as quadrature weights do;
    a sample of which no element counts has weight 0. The gradient is 0 where prediction and target are equal.

    Parameters
    ----------
    eps : float
        Added to the norm of the target. With 0 a target whose norm is 0 is an error.

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
        where = type(self).__name__
        require_floats(prediction, where, "prediction")
        given = WeightedTarget.of(target, where)
        require_numbers(given.values, where, "target")
        shape = tuple(prediction.shape)
        require_shape(where, tuple(given.values.shape), shape)
        xp, samples = namespace(prediction), shape[0]
        flat = samples, prediction.size // max(1, samples)
        of_samples, of_elements = given.sample_weights(samples)
        inside = of_elements.weights(shape)
        roots = None if inside is None else xp.sqrt(inside).reshape(flat)
        targets = xp.asarray(given.values, dtype=prediction.dtype).reshape(flat)
        difference = xp.ascontiguousarray(times(prediction.reshape(flat) - targets, roots))
        errors = self._norms(difference)
        sizes = self._norms(xp.ascontiguousarray(times(targets, roots))) + self.eps
        weights = xp.ones(samples) if of_samples is None else of_samples
        if roots is not None:
            weights = weights * (roots != 0).any(axis=1)
        self._require_size(sizes, weights)
        counted = weights != 0
        shares = xp.where(counted, weights, 0.0) / xp.where(counted, sizes, 1.0)
        loss = float(xp.where(counted, errors * shares, 0.0).sum())
        slopes = xp.where(counted & (errors > 0), shares / xp.where(errors > 0, errors, 1.0), 0.0)
        return loss, float(weights.sum()), (difference, roots, slopes, shape)

    @staticmethod
    def _norms(rows: Array) -> Array:
        """Return the Euclidean norm of each row, in float64."""
        xp = namespace(rows)
        sums = xp.empty(len(rows), np.float64)
        kernels.backend(rows).element_loss.row_square_sums(rows, sums)
        norms: Array = xp.sqrt(sums)
        return norms

    @staticmethod
    def _require_size(sizes: Array, weights: Array) -> None:
        zero = (sizes == 0) & (weights != 0)
        if bool(zero.any()):
            raise DataError(
                f"RelativeL2Loss: the target of sample {int(zero.argmax())} of {len(sizes)} given together is 0 "
                "everywhere, so no error is relative to it; leave the sample out by a mask, or give the loss an eps, "
                "such as RelativeL2Loss(eps=1e-8)"
            )

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, in the shape of the prediction."""
        difference, roots, slopes, shape = cache
        gradient: Array = times(times(difference, roots), slopes * scale)
        return gradient.reshape(shape)

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return None: predictions are not right or wrong."""
        return None

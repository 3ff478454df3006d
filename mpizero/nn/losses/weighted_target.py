"""Take targets with weights and masks: every loss of this package is given an array, or a dictionary of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero._util.names import nearest
from mpizero.errors import DataError
from mpizero.nn.arrays import namespace, require_array, require_numbers
from mpizero.types import Array

_KEYS = ("target", "weight", "mask")


@dataclass(frozen=True)
class WeightedTarget:
    """Hold a target, and the weights and the mask that say how much each sample or element of it counts.

    Attributes
    ----------
    values : Array
        The target itself.
    weight : Array or None
        Real numbers from 0 of the shape of the target's elements, or of its leading axes only: (samples,) weighs whole
        samples. None is a weight of 1 everywhere.
    mask : Array or None
        Booleans of such a shape; what is False is left out as if its weight were 0. None leaves nothing out.
    where : str
        The loss's name, for error messages.
    """

    values: Any
    weight: Any
    mask: Any
    where: str

    @classmethod
    def of(cls, target: Any, where: str) -> WeightedTarget:
        """Take ``target``, an array or a dictionary ``{"target": ..., "weight": ..., "mask": ...}``.

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
        found: Array = xp.ascontiguousarray(xp.broadcast_to(xp.asarray(mask * weight, np.float64), shape))
        return found

    def sample_weights(self, samples: int) -> tuple[Array | None, WeightedTarget]:
        """Separate what weighs samples from what weighs elements within them.

        Returns the weights (samples,) of the arrays that have the axis of samples only, or None; and a target with the
        other arrays.
        """
        alone = [getattr(array, "ndim", 0) == 1 for array in (self.weight, self.mask)]
        of_samples = WeightedTarget(
            self.values, self.weight if alone[0] else None, self.mask if alone[1] else None, self.where
        )
        of_elements = WeightedTarget(
            self.values, None if alone[0] else self.weight, None if alone[1] else self.mask, self.where
        )
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
        if tuple(array.shape) == tuple(self.values.shape):
            array = array.reshape(shape)  # the target's last axis of size 1 may be missing from the prediction
        if array.ndim < 1 or tuple(array.shape) != shape[: array.ndim]:
            raise DataError(
                f"{self.where}: takes a {what} of the target's shape {shape} or of its leading axes, such as "
                f"{shape[:1]}; the {what} has shape {tuple(array.shape)}"
            )
        return array.reshape(*array.shape, *[1] * (len(shape) - array.ndim))


def times(values: Array, weights: Array | None) -> Array:
    """Return ``values * weights`` in the dtype of ``values``, and 0 where the weight is 0, also for NaN and inf.

    ``weights`` has the shape of ``values`` or fewer axes at the end; None returns ``values``.
    """
    if weights is None:
        return values
    xp = namespace(values)
    aligned = weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))
    product = xp.where(aligned != 0, values, values.dtype.type(0)) * aligned  # in float64: a weight may be huge
    cast: Array = product.astype(values.dtype, copy=False)
    return cast

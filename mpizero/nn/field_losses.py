"""Define losses of fields, as sums over spatial tiles: of elements, and relative to the norms of whole samples.

:class:`FieldLoss` takes the losses of :mod:`mpizero.nn.losses` apart into sums over tiles, which are added by the
binary tree. So a loss has the same bits however space is cut over ranks. With :class:`H1Loss` it compares the
differences of neighbouring positions as well, and fetches those that other ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np

from mpizero._util.checks import flag, number, require
from mpizero._util.names import explains
from mpizero._util.pytree import map_leaves
from mpizero.errors import ConfigError, DataError
from mpizero.nn.fields import on_each, require_field
from mpizero.nn.losses import CrossEntropy, ElementLoss, RelativeL2Loss, times
from mpizero.nn.space import WHOLE, Space
from mpizero.nn.space_losses import LossWithGradient, SpaceLoss, numbers_from_zero, scaled_gradient
from mpizero.types import Array, Loss

#: Losses that a :class:`FieldLoss` computes by spatial tiles.
IN_SPACE = (ElementLoss, CrossEntropy, RelativeL2Loss, SpaceLoss)


@explains
@dataclass(frozen=True)
class H1Loss(RelativeL2Loss):
    """Compute the relative error of fields and of their differences in space, inside a :class:`FieldLoss`.

    It is :class:`RelativeL2Loss` with the norm ``sqrt(sum u**2 + sum_axes sum ((u[i + 1] - u[i]) / h)**2)``, where
    ``h`` is the distance of neighbours, so that steep places count: the loss with which neural operators are often
    trained (Li et al., *Learning dissipative dynamics in chaotic systems*, 2022). Weights of positions weigh the
    squares; the weight of a difference is the geometric mean of the weights of its two positions, so where a mask
    leaves out one of the two there is no difference.

    Parameters
    ----------
    eps : float
        Added to the norm of the target.
    lengths : float or tuple of float
        Length of the field along each axis of space, for all axes or by axis; ``h`` is the length over the extent.
    periodic : bool
        Whether the first position of an axis is a neighbour of the last one.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> loss = mz.nn.FieldLoss(mz.nn.H1Loss(lengths=2.0))  # of two positions: h is 1
    >>> target = np.array([[[2.0], [1.0]]])
    >>> total, weight, _ = loss.forward(target - 1, target)  # the difference of neighbours has no error
    >>> round(total**2, 3)  # (1 + 1) / (2**2 + 1**2 + (1 - 2)**2)
    0.333
    """

    lengths: float | tuple[float, ...] = 1.0
    periodic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in on_each(self.lengths, 1):
            require("H1Loss: lengths", length, number(above=True))
        require("H1Loss: periodic", self.periodic, flag)

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Raise :class:`ConfigError`: only a :class:`FieldLoss` knows which positions are neighbours."""
        raise ConfigError("H1Loss compares neighbours in space; wrap it, loss=mpizero.nn.FieldLoss(H1Loss(...))")

    def distances(self, extents: tuple[int, ...]) -> list[float]:
        """Return the distance of neighbours along each axis of a field.

        Raises
        ------
        DataError
            If the field has another number of axes than there are lengths.
        """
        lengths = on_each(self.lengths, len(extents))
        if len(lengths) != len(extents):
            raise DataError(f"H1Loss: lengths={self.lengths} must have a number for each of {len(extents)} axes")
        return [length / n for length, n in zip(lengths, extents, strict=True)]


@explains
@dataclass(frozen=True)
class SumLoss(SpaceLoss):
    """Add losses of fields, each with a factor, inside a :class:`FieldLoss`.

    The mean loss is ``sum(factor * mean)``. So losses should weigh samples alike: where masks or weights give a
    micro-batch another part of a loss's weight than of the first one's, its mean there counts as much as the first one.

    Parameters
    ----------
    losses : sequence of Loss
        What a :class:`FieldLoss` takes, another sum included: a :class:`RelativeL2Loss` of the data and a
        :class:`ResidualLoss`, for example.
    factors : sequence of float
        The factors, not all 0.

    Raises
    ------
    ConfigError
        If a loss does not add up over positions, or there are not as many factors.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> both = mz.nn.SumLoss([mz.nn.MeanSquaredError(), mz.nn.L1Loss()], [1.0, 0.5])
    >>> total, weight, _ = mz.nn.FieldLoss(both).forward(np.full((1, 4, 1), 3.0), np.zeros((1, 4, 1)))
    >>> total / weight  # 9 + 0.5 * 3
    10.5
    """

    losses: tuple[Any, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", on_each(self.losses, 1))
        object.__setattr__(self, "factors", numbers_from_zero("SumLoss: factors", self.factors, "each loss"))
        for one in self.losses:
            _require_in_space("SumLoss", one)
        if (count := len(self.losses)) != len(self.factors):
            raise ConfigError(f"SumLoss: {count} losses have {len(self.factors)} factors; give each loss a factor")

    def on_space(
        self, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
    ) -> LossWithGradient:
        """Return the sum of the losses in units of the first one's weight, and its gradient. Collective."""
        total, first, parts = 0.0, 0.0, list[Any]()
        for one, factor in zip(self.losses, self.factors, strict=True):
            part, weight, slope = _on_space(one, space, prediction, target, along, extents)
            first = first if parts else weight
            share = factor * first / weight if weight else 0.0
            total += share * part
            parts.append((share, slope))

        def gradient(scale: float) -> Array:
            found = [slope(scale * share) for share, slope in parts]
            return np.asarray(sum(found[1:], found[0]))

        return total, first, gradient


@explains
@dataclass(frozen=True)
class FieldLoss:
    """Compute a loss of fields as a sum over spatial tiles, so that its bits do not depend on how space is cut.

    Each tile has a loss of its own, weighted by its number of positions; the losses of all tiles are added by the
    binary tree. The mean over samples and positions is that of ``loss``. If ``loss`` is relative to the norms of
    samples, the squares in each norm are summed in this way. Predictions are (samples, space, outputs), targets what
    ``loss`` takes; targets, weights and masks with axes of space have the prediction's positions. In a domain group the
    forward pass is collective.

    Parameters
    ----------
    loss : ElementLoss, CrossEntropy, RelativeL2Loss or SpaceLoss
        A loss that averages over the elements of a sample, adds up over its positions, or is relative to the norm of a
        sample, such as :class:`H1Loss`; or :class:`SpectralLoss`, :class:`ResidualLoss` or :class:`SumLoss`.
    weights : sequence of float or None
        Weights of the positions along the first axis of space, such as cosines of latitudes, which are divided by their
        mean. None weighs all alike.

    Raises
    ------
    ConfigError
        If the loss does not add up over positions, or a weight is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> prediction = np.array([[[1.0], [2.0], [4.0]]])  # one sample of three positions
    >>> total, weight, _ = mz.nn.FieldLoss(mz.nn.MeanSquaredError()).forward(prediction, np.zeros((1, 3, 1)))
    >>> total / weight
    7.0
    >>> loss = mz.nn.FieldLoss(mz.nn.MeanSquaredError(), weights=[0.5, 1.0, 0.5])
    >>> total, weight, _ = loss.forward(prediction, np.zeros((1, 3, 1)))
    >>> total / weight  # (0.5 * 1 + 1 * 4 + 0.5 * 16) / 2
    6.25
    """

    loss: Loss
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require_in_space("FieldLoss", self.loss)
        if self.weights is not None:
            values = numbers_from_zero("FieldLoss: weights", self.weights, "each position along the first axis")
            object.__setattr__(self, "weights", values)

    @property
    def _space(self) -> Space:
        return WHOLE

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Return this rank's share of the loss sum and of the weight, and the cache for :meth:`backward`.

        Without a domain group, the shares are the whole.
        """
        prediction = require_field(prediction, None, "FieldLoss")
        extents = self._space.extents(prediction, self)
        map_leaves(partial(_require_positions, prediction.shape[:-1]), target)
        total, weight, cache = _on_space(self.loss, self._space, prediction, target, self._along(extents), extents)
        first = float(self._space.rank == 0)
        return total * first, weight * first, cache

    def _along(self, extents: tuple[int, ...]) -> Array | None:
        """Return the weights of this rank's positions along the first axis of space; None if all are alike."""
        if self.weights is None:
            return None
        if len(self.weights) != extents[0]:
            raise DataError(
                f"FieldLoss: {len(self.weights)} weights are given for {extents[0]} positions along the first axis"
            )
        weights = np.array(self.weights)
        along: Array = (weights * (len(weights) / weights.sum()))[self._space.box(extents)[0]]
        return along.reshape(-1, *(1,) * (len(extents) - 1))

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Return ``scale`` times the gradient of the loss sum, at this rank's positions. Not collective."""
        return np.asarray(cache(scale))

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return how many predictions are right and how many there are, at this rank's positions; None if unknown."""
        return cast("tuple[int, int] | None", cast(Any, self.loss).correct(prediction, target))


def _on_space(
    loss: Any, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
) -> LossWithGradient:
    """Return loss sum and weight of the whole field, and the gradient as a function of a factor. Collective."""
    if isinstance(loss, SpaceLoss):
        return loss.on_space(space, prediction, target, along, extents)
    if isinstance(loss, RelativeL2Loss):
        return _relative(loss, space, prediction, target, along, extents)
    if along is not None:
        target = _weighted(target, along, prediction)
    caches, sums = [], []
    for tile in space.tiles(extents):
        place, count = (slice(None), *tile), prod(part.stop - part.start for part in tile)
        loss_sum, weight, cache = 0.0, 0.0, None
        if count:
            part = map_leaves(partial(_of_tile, place), target)
            try:
                loss_sum, weight, cache = loss.forward(np.ascontiguousarray(prediction[place]), part)
            except DataError:
                loss.forward(prediction, target)  # so that the error names the shapes of the field, not those of a tile
                raise
        factor = count if isinstance(loss, ElementLoss) else 1
        sums.append((loss_sum * factor, weight * factor))
        caches.append((place, factor, cache))
    total, weight = space.sum_of_tiles(np.array(sums), "loss")

    def gradient(scale: float) -> Array:
        found: Array = np.empty_like(prediction)
        for place, factor, inner in caches:
            if inner is not None:
                found[place] = loss.backward(inner, scale * factor)
        return found

    return float(total), float(weight), gradient


def _relative(
    loss: RelativeL2Loss, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
) -> LossWithGradient:
    """Return what :func:`_on_space` does, of a loss that is relative to the norm of each sample."""
    difference, targets, roots, of_samples = loss.terms(prediction, target)
    roots = np.ones(prediction.shape) if roots is None else roots
    if along is not None:
        roots = roots * np.sqrt(along)[..., None]
    errors, sizes = [times(difference, roots)], [times(targets, roots)]
    values = times(errors[0], roots)
    if isinstance(loss, H1Loss):
        fields = [np.where(roots != 0, one, 0) for one in (difference, targets)]
        x = np.concatenate([*fields, roots.astype(difference.dtype)], axis=-1)
        for error, size, part in _slopes(loss, space, x, extents):
            errors, sizes, values = [*errors, error], [*sizes, size], values + part
    sums = [
        [sum(loss.square_sums(one[(slice(None), *tile)]) for one in terms) for terms in (errors, sizes, [roots])]
        for tile in space.tiles(extents)
    ]
    squares, norms, counts = space.sum_of_tiles(np.array(sums), "loss")
    weights = (1.0 if of_samples is None else of_samples) * (counts != 0)
    total, weight, factors = loss.totals(squares, norms, weights)
    return total, weight, scaled_gradient(values, factors)


def _slopes(loss: H1Loss, space: Space, x: Array, extents: tuple[int, ...]) -> list[tuple[Array, Array, Array]]:
    """Return, for each axis, the slopes of errors, those of targets, and the axis's part of the gradient.

    Slopes are differences of neighbours over their distance, times the root of the weight. The channels of ``x`` are
    errors, targets, and the roots of the positions' weights. Collective over a domain.
    """

    def around(axis: int, first: int, stop: int) -> tuple[int, int]:
        return (first - 1, stop + 1) if stop > first else (0, 0)

    modes = ["periodic" if loss.periodic else "zeros"] * len(extents)  # zeros outside have no weight
    wide, found = space.fetch(x, extents, space.wanted(extents, around), "H1Loss", modes), []
    inside = [slice(None), *(slice(1, -1) for _ in extents)]
    for axis, distance in enumerate(loss.distances(extents), start=1):
        pair = [wide[(*inside[:axis], side, *inside[axis + 1 :])] for side in (slice(-1), slice(1, None))]
        (*low, before), (*high, after) = (np.split(one, 3, axis=-1) for one in pair)
        slopes = [(b - a) * x.dtype.type(1 / distance) for a, b in zip(low, high, strict=True)]
        weight = before * after
        flux = np.moveaxis(slopes[0] * weight * x.dtype.type(1 / distance), axis, 0)
        ends = (slice(None),) * axis
        error, size = ((slope * np.sqrt(weight))[(*ends, slice(1, None))] for slope in slopes)
        found.append((error, size, np.moveaxis(flux[:-1] - flux[1:], 0, axis)))
    return found


def _weighted(target: Any, along: Array, prediction: Array) -> dict[str, Any]:
    """Return the target as a mapping whose "weight" is multiplied by ``along``, weights of the first axis of space."""
    given = dict(target) if isinstance(target, Mapping) else {"target": target}
    weight = np.asarray(1.0 if given.get("weight") is None else given["weight"], np.float64)
    axes, positions = max(weight.ndim, prediction.ndim - 1), prediction.shape[:-1]
    aligned = weight.reshape(*weight.shape, *(1,) * (axes - weight.ndim))
    product = aligned * along.reshape(1, *along.shape, *(1,) * (axes - len(positions)))
    return given | {"weight": np.broadcast_to(product, (*positions, *product.shape[len(positions) :]))}


def _require_in_space(where: str, loss: Any) -> None:
    if not isinstance(loss, IN_SPACE):
        raise ConfigError(
            f"{where}: {loss!r:.80} is no loss that adds up over positions; give one that averages over elements, such "
            "as MeanSquaredError(), or RelativeL2Loss(), CrossEntropy() or a SumLoss, with the FieldLoss around it all"
        )


def _require_positions(positions: tuple[int, ...], x: Any) -> None:
    """Raise :class:`DataError` unless targets or weights have ``positions``, samples first, or their leading axes."""
    shape = np.shape(x)
    if shape[: len(positions)] != positions[: len(shape)]:
        raise DataError(
            f"FieldLoss: targets and weights are given at the samples and positions of the prediction, {positions}; "
            f"one of them has shape {shape}"
        )


def _of_tile(place: tuple[slice, ...], x: Any) -> Any:
    """Return the positions ``place`` of an array of targets or weights."""
    return np.ascontiguousarray(x[place[: np.ndim(x)]]) if np.ndim(x) > 1 else x

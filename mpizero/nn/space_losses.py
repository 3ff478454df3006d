"""Define losses that see how a field varies in space: by its Fourier modes, and by the residual of an equation.

Both stand inside a :class:`mpizero.nn.FieldLoss`, which gives them the space of the field: the whole of it, or the part
of a rank (:class:`SpaceLoss`). :class:`SpectralLoss` takes the truncated transform of the spectral convolution.
:class:`ResidualLoss` takes differences of neighbouring positions, which it fetches from the ranks that have them. What
is added up over space has one partial sum for each tile, added by the binary tree.

[Note: derivatives of a residual] The residual of an equation is the user's function, which has no backward pass. At
each position it depends on few numbers. Each of them in turn gets an imaginary part so small that it changes no real
part; the imaginary part of the residual, divided by it, is the derivative, to full precision (Squire and Trapp, *Using
complex variables to estimate derivatives of real functions*, 1998). That holds for analytic functions;
:class:`_Analytic` refuses all others. The function is called with one tile at a time, so that its bits do not depend on
the cut of space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpizero._util.checks import flag, is_whole, number, require
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError
from mpizero.kernels.spectral import analyse, field_bases, synthesize
from mpizero.layout.fields import Box
from mpizero.nn.arrays import require_numbers
from mpizero.nn.fields import on_each
from mpizero.nn.losses import RelativeL2Loss, WeightedTarget, require_shape, times
from mpizero.nn.space import Space
from mpizero.types import Array

#: Loss sum and weight of a whole field, and a function that returns a number times the gradient.
LossWithGradient = tuple[float, float, Callable[[float], Array]]


class SpaceLoss(ABC):
    """Define a loss of fields that a :class:`mpizero.nn.FieldLoss` computes with the space of the field."""

    @abstractmethod
    def on_space(
        self, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
    ) -> LossWithGradient:
        """Return loss sum and weight of the whole field, and the gradient as a function of a factor. Collective.

        ``prediction`` and ``target`` are this rank's part of a field with the given ``extents``, ``along`` the weights
        of its positions along the first axis, if there are any.
        """

    def forward(self, prediction: Array, target: Any) -> tuple[float, float, Any]:
        """Raise :class:`ConfigError`: only a :class:`mpizero.nn.FieldLoss` knows the space."""
        name = type(self).__name__
        raise ConfigError(f"{name} is a loss of whole fields; wrap it, loss=mpizero.nn.FieldLoss({name}(...))")

    def backward(self, cache: Any, scale: float = 1.0) -> Array:
        """Raise :class:`ConfigError`, as :meth:`forward`."""
        raise ConfigError(f"{type(self).__name__} is computed by mpizero.nn.FieldLoss alone")

    def correct(self, prediction: Array, target: Any) -> tuple[int, int] | None:
        """Return None, because predicted real numbers have no accuracy."""
        return None


@explains
@dataclass(frozen=True)
class SpectralLoss(SpaceLoss):
    """Compute the weighted squared error of the Fourier modes of a field, inside a :class:`~mpizero.nn.FieldLoss`.

    A sample's loss is ``sum_k weights[round(|k|)] * |e_k|**2``, averaged over channels, where ``e_k`` are the Fourier
    coefficients of the error, ``numpy.fft.fftn(error) / positions``, and k its wavenumbers: whole numbers from
    ``-frequencies`` to ``frequencies`` on each axis. With weight 1 it is the mean squared error of the part of the
    error that these modes make up (Parseval's theorem). Weights that grow with the wavenumber let small scales count:
    ``(1 + numpy.arange(n)**2.0)**s`` is the square of the Sobolev norm of order s. Higher frequencies do not count, so
    add another loss (:class:`~mpizero.nn.SumLoss`). Fields are taken as periodic. Targets may have weights or a mask of
    samples, but none of positions.

    Parameters
    ----------
    frequencies : int or tuple of int
        Highest wavenumber, for all axes of space or by axis; less than half of the extent.
    weights : sequence of float or None
        Weight of the modes whose wavenumbers have the norm 0, 1, 2, ..., rounded; those of norms beyond the last one
        have weight 0. None is 1 for all.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x = np.arange(8) / 8
    >>> error = (1 + 2 * np.cos(2 * np.pi * x))[None, :, None]  # the modes 0 and +-1, of size 1
    >>> for weights in (None, [0.0, 1.0]):
    ...     loss = mz.nn.FieldLoss(mz.nn.SpectralLoss(2, weights))
    ...     total, weight, _ = loss.forward(error, np.zeros((1, 8, 1)))
    ...     print(round(total / weight, 12))
    3.0
    2.0
    """

    frequencies: int | tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = self.frequencies if isinstance(self.frequencies, tuple) else (self.frequencies,)
        if not given or not all(is_whole(one, 0) for one in given):
            raise ConfigError(
                f"SpectralLoss: frequencies={self.frequencies!r} is not allowed; give a whole number >= 0, or one for "
                "each axis of space"
            )
        if self.weights is not None:
            values = numbers_from_zero("SpectralLoss: weights", self.weights, "each rounded norm of wavenumbers")
            object.__setattr__(self, "weights", values)

    def _factors(self, highest: tuple[int, ...], positions: int) -> Array:
        """Return by basis function of three axes its weight in the loss: (functions of axis 1, of 2, of 3).

        A cosine or a sine of a frequency that is not 0 stands for the modes of both signs.
        """
        last = len(highest) - 1
        waves = [
            [0, *(np.repeat(range(1, k + 1), 2) if axis == last else [*range(1, k + 1)] * 2)]
            for axis, k in enumerate(highest)
        ]
        norms = np.meshgrid(*[[0]] * (2 - last), *waves, indexing="ij")
        shells = np.rint(np.sqrt(sum(k * k for k in norms))).astype(int)
        weights = np.zeros(shells.max() + 1)
        weights[:] = 1.0 if self.weights is None else (*self.weights, *weights)[: len(weights)]
        return np.asarray(weights[shells] * 2.0 ** sum(k > 0 for k in norms) / float(positions**2))

    def on_space(
        self, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
    ) -> LossWithGradient:
        """Return loss sum and weight, and the gradient as a function of a factor. Collective over a domain."""
        values, of_samples, of_elements = _parsed("SpectralLoss", target, prediction)
        if along is not None or of_elements.weight is not None or of_elements.mask is not None:
            raise DataError("SpectralLoss: a mode has no position; give weights and masks of whole samples alone")
        require_shape("SpectralLoss", values.shape, prediction.shape)
        highest = on_each(self.frequencies, len(extents))
        if len(highest) != len(extents) or any(2 * k >= n for k, n in zip(highest, extents, strict=True)):
            raise DataError(
                f"SpectralLoss: frequencies={self.frequencies} do not fit a field of {extents} positions; give a "
                "number less than half of the extent for each axis"
            )
        error = prediction - values.astype(prediction.dtype).reshape(prediction.shape)
        bases = field_bases(extents, [2 * k + 1 for k in highest], space.box(extents), prediction.dtype)
        nodes = np.stack([analyse(error, bases, boxes) for boxes in space.boxes(extents)])
        shards = space.shards(len(bases[-1]))
        sums = space.all_gather(space.reduce_scatter(nodes, 3, shards, "loss"), 3, shards, "loss")
        factors = self._factors(highest, prod(extents))[..., None] / prediction.shape[-1]
        losses = RelativeL2Loss.square_sums(sums * np.sqrt(factors))
        slopes = synthesize((2 * factors * sums).astype(prediction.dtype), bases)
        loss = float(times(losses, of_samples).sum())
        return loss, float(of_samples.sum()), scaled_gradient(slopes.reshape(prediction.shape), of_samples)


#: Ufuncs that are analytic functions, whose complex values have derivatives as imaginary parts.
_FUNCTIONS = """
    add subtract multiply divide matmul negative positive reciprocal power float_power square sqrt exp exp2 expm1 log
    log2 log10 log1p sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh
""".split()  # noqa: SIM905
#: What is added to a number to find a derivative; a power of two, so dividing by it is exact.
_STEP = 2.0**-60


class _Analytic(np.ndarray[Any, Any]):
    """Compute by analytic functions alone, and refuse others: an absolute value, a maximum, a comparison."""

    def __array_function__(self, function: Any, *given: Any) -> Any:
        if function.__module__ == "numpy.linalg":
            raise _no_derivative(f"linalg.{function.__name__}")
        return super().__array_function__(function, *given)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        parts = any(isinstance(one, _Analytic) and one.dtype.kind != "c" for one in inputs)
        if parts or ufunc.__name__ not in _FUNCTIONS:
            raise _no_derivative("real" if parts else ufunc.__name__)
        plain = [one.view(np.ndarray) if isinstance(one, _Analytic) else one for one in inputs]
        if settings.get("out"):
            settings["out"] = tuple(one.view(np.ndarray) for one in settings["out"])
        found = getattr(ufunc, method)(*plain, **settings)
        return found.view(_Analytic) if isinstance(found, np.ndarray) else found


def _no_derivative(name: str) -> ConfigError:
    return ConfigError(
        f"ResidualLoss: the residual calls numpy.{name}, which has no derivative everywhere; use arithmetic, powers, "
        "roots, exp, log and trigonometric functions"
    )


@explains
@dataclass(frozen=True)
class ResidualLoss(SpaceLoss):
    """Compute the mean square of an equation's residual, inside a :class:`~mpizero.nn.FieldLoss`.

    ``residual`` is called with arrays (samples, space, channels) of finite differences of the predicted field, in the
    order of ``terms``, and returns the residual, (samples, space, any channels). ``"u"`` is the field itself, ``"x"``,
    ``"y"`` and ``"z"`` are central differences along the first, second and third axis, ``"xx"`` the second difference,
    ``"xy"`` the difference along both axes, and so on: at most two letters for each axis. The term ``"target"`` is the
    target, of any channels, at the same positions: a forcing, coefficients, a state before. Beyond the ends of an axis
    that is not periodic there are no neighbours, so if a difference is taken along it, the residual is not computed at
    its ends. The loss is the mean over the other positions, weighted as a :class:`~mpizero.nn.FieldLoss` does, and over
    the channels of the residual. Weights and masks of a target are those of samples or of positions (samples, space).

    The function has no backward pass: its derivatives are found by complex arguments. It must be made of NumPy's
    arithmetic, powers, roots, exponential and trigonometric functions, position by position; ``abs``, ``maximum`` or
    comparisons are refused, and means or shifts over positions. It is called once and then once for each term and
    channel, by tiles, and does not write to what it gets. Two further calls, with a few changed values of the first
    sample, find out whether it is a function of the position alone.

    Parameters
    ----------
    residual : callable
        The function.
    terms : tuple of str
        Its arguments.
    spacing : float or tuple of float
        Distance of neighbours, for all axes of space or by axis.
    periodic : bool or tuple of bool
        Whether the first position of an axis is a neighbour of the last one, for all axes or by axis.

    Raises
    ------
    ConfigError
        If a setting is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> def burgers(u, slope, curvature):
    ...     return u * slope - 0.1 * curvature
    >>> equation = mz.nn.ResidualLoss(burgers, ("u", "x", "xx"), spacing=0.5)
    >>> u = np.array([0.0, 1.0, 4.0]).reshape(1, 3, 1)  # in the middle: slope 4, curvature 8
    >>> total, weight, _ = mz.nn.FieldLoss(equation).forward(u, np.zeros((1, 3, 1)))
    >>> round(total / weight, 12)  # (1 * 4 - 0.1 * 8)**2
    10.24
    """

    residual: Callable[..., Any]
    terms: tuple[str, ...]
    spacing: float | tuple[float, ...] = 1.0
    periodic: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        if not callable(self.residual):
            raise ConfigError(f"ResidualLoss: residual={self.residual!r:.80} must be a function of the terms")
        terms = tuple(self.terms) if isinstance(self.terms, tuple | list) else ()
        if any(term != "target" and not _orders(str(term)) for term in terms) or not set(terms) - {"target"}:
            raise ConfigError(
                f'ResidualLoss: terms={self.terms!r} is not allowed; give a tuple such as ("u", "x", "xx", "xy", '
                '"target"), with at most two letters for each axis'
            )
        object.__setattr__(self, "terms", terms)
        for one in on_each(self.spacing, 1):
            require("ResidualLoss: spacing", one, number(above=True))
        for one in on_each(self.periodic, 1):
            require("ResidualLoss: periodic", one, flag)

    def _stencils(self, extents: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[float], list[bool]]:
        """Return the orders of differences of all terms of the field, the spacing and what is periodic, by axis."""
        axes = len(extents)
        orders = [_orders(term) for term in self.terms if term != "target"]
        spacing, periodic = list(on_each(self.spacing, axes)), list(on_each(self.periodic, axes))
        if len(spacing) != axes or len(periodic) != axes or any(any(one[axes:]) for one in orders):
            raise DataError(
                f"ResidualLoss: terms={self.terms}, spacing={self.spacing} and periodic={self.periodic} do not fit a "
                f"field of {axes} axes; axes are x, y and z, and settings are numbers for all or one for each axis"
            )
        return [one[:axes] for one in orders], spacing, periodic

    def on_space(
        self, space: Space, prediction: Array, target: Any, along: Array | None, extents: tuple[int, ...]
    ) -> LossWithGradient:
        """Return loss sum and weight, and the gradient as a function of a factor. Collective over a domain."""
        orders, spacing, periodic = self._stencils(extents)
        values, of_samples, of_elements = _parsed("ResidualLoss", target, prediction)
        inside = of_elements.weights(prediction.shape[:-1])
        weights = np.ones(prediction.shape[:-1]) if inside is None else inside
        weights = times(weights, of_samples) if along is None else times(weights, of_samples) * along
        wide = [any(one[axis] for one in orders) for axis in range(len(extents))]
        modes = ["periodic" if one else "zeros" for one in periodic]

        def around(axis: int, first: int, stop: int) -> tuple[int, int]:
            return (first - wide[axis], stop + wide[axis]) if stop > first else (0, 0)

        def fetched(x: Array) -> Array:
            return space.fetch(x, extents, space.wanted(extents, around), "residual", modes)

        field = fetched(prediction)
        found = [_difference(field, one, wide, spacing) for one in orders]
        if prediction.size:
            self._require_pointwise(found, values)
        slopes, sums = np.zeros((len(found), *prediction.shape), prediction.dtype), []
        for place in _inner_tiles(space, extents, [w and not p for w, p in zip(wide, periodic, strict=True)]):
            one = (slice(None), *place)
            parts = [np.ascontiguousarray(x[one]) for x in [*found, values]]
            here = np.ascontiguousarray(weights[one])
            loss = 0.0
            if here.size:
                loss, slopes[(slice(None), *one)] = self._on_tile(parts[:-1], parts[-1], here)
            sums.append((loss, float(here.sum())))
        total = space.sum_of_tiles(np.array(sums), "loss")
        # The adjoint of a difference is the difference itself, with the other sign where its order is odd.
        channels = prediction.shape[-1]
        field = fetched(np.concatenate(slopes, axis=-1))
        gradient = np.zeros_like(prediction)
        for first, term in enumerate(orders):
            part = field[..., first * channels : (first + 1) * channels]
            gradient += (-1) ** sum(term) * _difference(part, term, wide, spacing)
        return float(total[0]), float(total[1]), scaled_gradient(gradient, np.ones(len(prediction)))

    def _require_pointwise(self, found: list[Array], values: Array) -> None:
        """Raise :class:`ConfigError` if the residual at a position depends on others, which a tile may not have."""
        first, seen = (slice(1),) * (values.ndim - 1), []
        for change in (0, 0.125):
            parts = [np.tile(x[first], [*(2 for _ in first), 1]) for x in [*found, values]]
            for x in parts[: len(found) + (values.dtype.kind == "f")]:  # numbers of a kind stay what they are
                x[first] -= change * (1 + abs(x[first]))  # which leaves whole numbers from 0 valid as indices
            with np.errstate(all="ignore"):
                y = self._called(parts[:-1], parts[-1], found[0].dtype)
            seen.append(y.reshape(-1, y.shape[-1]))
        largest = max(float(np.max(np.abs(y), initial=0, where=np.isfinite(y))) for y in seen)
        before, after = (y[1:] for y in seen)
        if not np.allclose(before, after, rtol=0, atol=1e-5 * largest, equal_nan=True):  # products may round by address
            raise ConfigError(
                "ResidualLoss: the residual at a position depends on others, or changes from call to call; it gets one "
                'tile of positions at a time: take differences from terms such as "x" or "xx", and no means or shifts'
            )

    def _on_tile(self, found: list[Array], values: Array, weights: Array) -> tuple[float, Array]:
        """Return the weighted sum of a tile's squared residuals, and its derivatives by each term."""
        residual = self._called(found, values, found[0].dtype)
        outputs = residual.shape[-1]
        loss = float(RelativeL2Loss.square_sums(times(residual, np.sqrt(weights))).sum()) / outputs
        above = times(residual, weights) * (2 / outputs)
        slopes = np.empty((len(found), *found[0].shape), residual.dtype)
        wide = np.result_type(residual.dtype, np.complex64)
        for term, channel in np.ndindex(len(found), found[0].shape[-1]):
            moved = [one.astype(wide).view(_Analytic) for one in found]
            moved[term].imag[..., channel] = _STEP
            turned = self._called(moved, values, wide)
            # What is masked may be NaN.
            slopes[(term, ..., channel)] = (np.where(above != 0, turned.imag, 0) / _STEP * above).sum(axis=-1)
        return loss, slopes

    def _called(self, found: Sequence[Array], values: Array, dtype: Any) -> Array:
        """Return the residual, checked."""
        rows = iter(found)
        given = [(values if term == "target" else next(rows)).view() for term in self.terms]
        shape = found[0].shape[:-1]
        for one in given:
            one.flags.writeable = False
        try:
            y = np.asarray(self.residual(*given))
        except (TypeError, ValueError) as error:
            error.add_note(
                f"ResidualLoss calls it with the terms {self.terms}, read-only arrays {(*shape, 'channels')} of a tile "
                "of positions; what depends on the position can be a channel of the target"
            )
            raise
        if y.dtype.kind not in f"f{np.dtype(dtype).kind}" or y.shape[:-1] != shape or not y.shape[-1]:
            raise DataError(
                f"ResidualLoss: the residual returned {y.dtype} of shape {y.shape}; expected real numbers "
                f"(samples, space, channels), {shape} and at least one channel"
            )
        if y.dtype.kind == "f" and np.dtype(dtype).kind == "c":
            raise ConfigError(
                "ResidualLoss: the residual is real for complex arguments, so it has no derivative; do not take real "
                "parts or convert what it is given, and use all terms"
            )
        return np.asarray(y, dtype)


def scaled_gradient(values: Array, factors: Array) -> Callable[[float], Array]:
    """Return a gradient as a function: a number times ``values`` times the factor of each sample."""
    return lambda scale: times(values, factors * scale)


def numbers_from_zero(where: str, given: Any, each: str) -> tuple[float, ...]:
    """Return finite numbers from 0, not all 0, as a tuple; raise :class:`ConfigError` for anything else.

    ``where`` names the setting in the message, ``each`` what has a number.
    """
    checked = np.array(given, object)
    if checked.ndim != 1 or not all(isinstance(one, int | float | np.number) for one in checked):
        raise ConfigError(f"{where}={' '.join(repr(given).split()):.80}: expected a list with a number for {each}")
    values = tuple(require(where, float(one), number()) for one in checked)
    require(f"{where}, their sum", sum(values), number(above=True))
    return values


def _parsed(where: str, target: Any, prediction: Array) -> tuple[Array, Array, WeightedTarget]:
    """Return the target's values, the weights of samples, and what weights and masks of elements there are."""
    weighted = WeightedTarget.of(target, where)
    require_numbers(weighted.values, where, "target")
    if weighted.values.shape[:-1] != prediction.shape[:-1]:
        raise DataError(
            f"{where}: takes targets (samples, space, channels) at the positions of the prediction of shape "
            f"{prediction.shape}; the target has shape {weighted.values.shape}"
        )
    of_samples, of_elements = weighted.sample_weights(len(prediction))
    return weighted.values, np.ones(len(prediction)) if of_samples is None else of_samples, of_elements


def _orders(term: str) -> tuple[int, ...]:
    """Return the orders of a term's differences along three axes; () if there is no such term."""
    found = tuple(term.count(letter) for letter in "xyz")
    return (0, 0, 0) if term == "u" else found if 0 < sum(found) == len(term) and max(found) <= 2 else ()


def _difference(x: Array, orders: Sequence[int], wide: Sequence[bool], spacing: Sequence[float]) -> Array:
    """Return the central differences of a field that has another position at both ends of each axis of ``wide``."""
    for axis, (order, more, h) in enumerate(zip(orders, wide, spacing, strict=True), start=1):
        before, middle, after = (
            x[(slice(None),) * axis + (slice(first, x.shape[axis] - 2 + first),)] if more else x for first in range(3)
        )
        if order == 1:
            x = (after - before) * x.dtype.type(1 / (2 * h))
        elif order == 2:
            x = (before + after - 2 * middle) * x.dtype.type(1 / h**2)
        else:
            x = middle
    return x


def _inner_tiles(space: Space, extents: tuple[int, ...], cropped: Sequence[bool]) -> list[Box]:
    """Return of each of this rank's tiles its positions in the rank's part, without the ends of axes in ``cropped``."""
    box, found = space.box(extents), []
    for tile in space.tiles(extents):
        rows = zip(tile, box, extents, cropped, strict=True)
        ends = [(max(at.start, c - part.start), min(at.stop, n - c - part.start)) for at, part, n, c in rows]
        found.append(tuple(slice(low, max(low, high)) for low, high in ends))
    return found

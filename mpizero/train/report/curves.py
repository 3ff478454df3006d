"""Draw figures of steps as curves; long ones as a line of means and a band from the least to the largest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpizero.train.report.markup import Markup
from mpizero.train.report.picture import COLOURS, SKIPPED, label_amounts, label_steps, picture

#: A curve of more points is drawn in so many groups of neighbouring points.
MOST_POINTS, GROUPS = 1000, 500
#: Marks on an axis that are drawn at most.
MOST_MARKS = 200
#: The ratio of large values to small ones, but for the outer per cent, from which an axis is logarithmic.
_WIDE = 50.0
#: The ratio of the longest curve's last step to the shortest one's from which steps are on a logarithmic axis.
_UNEVEN = 10.0
#: The share of the least values that a logarithmic axis may leave out, and the ratio from which it does.
_OUTER, _FAR = 0.005, 10.0


class Marks(NamedTuple):
    """Hold steps that are marked on the axis: skipped ones, and the first ones after a resume."""

    skipped: Sequence[int] = ()
    resumed: Sequence[int] = ()
    colour: str = SKIPPED


@dataclass(frozen=True)
class Curve:
    """Hold one curve: values by step, of which those that are not finite leave gaps.

    Attributes
    ----------
    steps, values : sequence of float
        Its points.
    colour : str
        Its colour.
    dots : bool
        Whether points are drawn as dots, for values that only some steps have.
    name : str
        What it is, for a reader.
    marks : Marks
        The steps of its run that are marked on the axis.
    """

    steps: Sequence[float]
    values: Sequence[float]
    colour: str = COLOURS[0]
    dots: bool = False
    name: str = ""
    marks: Marks = Marks()


class Envelope(NamedTuple):
    """Hold a curve in groups of neighbouring points: each group's mean step, and the range and mean of its values."""

    steps: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def envelope(steps: Sequence[float], values: Sequence[float], groups: int = GROUPS) -> Envelope:
    """Return a curve in at most ``groups`` groups of about equally many finite points."""
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    good = np.isfinite(y)
    x, y = x[good], y[good]
    starts = np.unique(np.linspace(0, len(x), min(groups, len(x)), endpoint=False).astype(np.int64))
    if not len(x):
        return Envelope(x, y, y, y)
    sizes = np.diff(np.append(starts, len(x)))
    return Envelope(
        np.add.reduceat(x, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.add.reduceat(y, starts) / sizes,
        np.maximum.reduceat(y, starts),
    )


def draw_curves(name: str, label: str, curves: Sequence[Curve], quantity: str, *, wide: bool = False) -> Markup:
    """Return the picture of some curves, named as in :func:`picture`; ``wide`` allows a logarithmic axis.

    ``quantity`` is what the vertical axis shows, with its unit.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for curve in curves:
            _draw_curve(axes, curve)
        label_amounts(axes.yaxis, logarithmic=wide and _is_wide(curves))
        low, high = axes.yaxis.get_data_interval()
        if 0 < high <= low * (1 + 1e-9):
            axes.set_ylim(0, 1.25 * high)
        if (limit := lower_end(curves, wide=wide)) is not None:
            axes.set_ylim(bottom=limit)
        axes.set_ylabel(quantity)
        label_steps(axes, logarithmic=is_uneven(curves))
        for marks in {curve.marks.colour: curve.marks for curve in curves}.values():
            _draw_marks(axes, marks)

    return picture(name, label, draw)


def _draw_marks(axes: Any, marks: Marks) -> None:
    line = "#888888" if marks.colour == SKIPPED else marks.colour
    for step in _thinned(marks.resumed):
        axes.axvline(step - 0.5, color=line, linestyle=":", linewidth=1)
    if skipped := _thinned(marks.skipped):
        size = 6 if len(skipped) <= 10 else 4
        place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(skipped, [0.03] * len(skipped), "^", color=marks.colour, markersize=size, **place)


def is_uneven(curves: Sequence[Curve]) -> bool:
    """Return whether some curves are so much shorter than others that steps are on a logarithmic axis."""
    ends = [max(curve.steps) for curve in curves if curve.steps]
    return bool(ends) and min(ends) > 0 and max(ends) > _UNEVEN * min(ends)


def lower_end(curves: Sequence[Curve], *, wide: bool) -> float | None:
    """Return where a logarithmic axis ends so that a few tiny values do not stretch it; None if there are none."""
    if not wide or not _is_wide(curves):
        return None
    values = _finite(curves)
    low = float(np.quantile(values[values > 0], _OUTER))
    return low / 2 if np.min(values) < low / _FAR else None


def _draw_curve(axes: Any, curve: Curve) -> None:
    style: dict[str, Any] = {"color": curve.colour}
    if curve.dots:
        style |= {"linestyle": "--", "linewidth": 0.9}
        style |= {"marker": "o", "markersize": 3.5 if len(curve.steps) <= 40 else 2}
    if len(curve.steps) <= MOST_POINTS:
        if len(curve.steps) == 1:
            style["marker"] = "o"
        axes.plot(curve.steps, curve.values, **style)
        return
    found = envelope(curve.steps, curve.values)
    axes.fill_between(found.steps, found.low, found.high, color=curve.colour, alpha=0.25, linewidth=0)
    axes.plot(found.steps, found.mean, color=curve.colour)


def _finite(curves: Sequence[Curve]) -> npt.NDArray[np.float64]:
    values = np.concatenate([np.asarray(curve.values, np.float64) for curve in curves] or [np.zeros(0)])
    finite: npt.NDArray[np.float64] = values[np.isfinite(values)]
    return finite


def _is_wide(curves: Sequence[Curve]) -> bool:
    values = _finite(curves)
    if not len(values) or np.mean(values > 0) < 0.99:
        return False
    low, high = np.quantile(values[values > 0], (0.01, 0.99))
    return bool(high / low > _WIDE)


def _thinned(steps: Sequence[int]) -> list[int]:
    """Return at most :data:`MOST_MARKS` of the steps, evenly chosen."""
    return list(steps[:: max(1, -(-len(steps) // MOST_MARKS))])

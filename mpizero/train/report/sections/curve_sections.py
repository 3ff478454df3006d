"""Compose the curves of one or several runs, each run in its colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpizero.train.report.curves import GROUPS, MOST_POINTS, Curve, Marks, draw_curves, is_uneven, lower_end
from mpizero.train.report.history import RunHistory
from mpizero.train.report.markup import Markup, element, figure, joined, key, section
from mpizero.train.report.picture import COLOURS, INK, VALIDATION

#: Figures that have a place of their own, or none.
_PLACED = {"step", "loss", "validation_loss", "learning_rate", "gradient_norm", "bytes_sent", "memory", "bucket_mb"}
#: What titles of pictures say beside the quantity.
_CHECKED, _UNCLIPPED = " (validation)", ", before clipping"
#: Other figures that are drawn at most.
_MOST_OTHERS = 8


def colour_of(number: int) -> str:
    """Return the colour of a run."""
    return COLOURS[number % len(COLOURS)]


def curve_section(histories: Sequence[RunHistory], *above: Markup) -> Markup:
    """Return the pictures of all figures that steps and validations have, for all runs; ``above`` precedes them."""
    drawn = [_losses(histories), *_single(histories)]
    return section("Curves", *above, *_notes(histories), element("div", *drawn, class_="pictures"), name="curves")


def _colour(histories: Sequence[RunHistory], number: int) -> str:
    return colour_of(number) if len(histories) > 1 else INK


def _curve(histories: Sequence[RunHistory], number: int, name: str, *, dots: bool = False) -> Curve:
    """Return the curve of a figure of a run, with the marks of that run."""
    history = histories[number]
    marks = Marks([skip.step for skip in history.skips], [resume.first for resume in history.resumes])
    if len(histories) > 1:
        marks = marks._replace(colour=colour_of(number))
    return Curve(*history.series(name), _colour(histories, number), dots=dots, name=history.name, marks=marks)


def _notes(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    several, told = len(histories) > 1, []
    if any(history.skips for history in histories):
        colour = "in the colour of their run" if several else "red"
        told.append(f"Triangles on the axis are skipped steps ({colour}).")
    if any(history.resumes for history in histories):
        told.append("Dotted lines are resumes.")
    if any(len(history.records.steps) > MOST_POINTS for history in histories):
        told.append(
            f"Curves of more than {MOST_POINTS:,} steps are drawn in {GROUPS} groups of neighbouring steps: the line "
            "is the mean of each group, and the pale band goes from its least to its largest value."
        )
    if told:
        yield element("p", " ".join(told))


def _losses(histories: Sequence[RunHistory]) -> Markup:
    numbers = range(len(histories))
    curves = [_curve(histories, number, "loss") for number in numbers]
    for number in numbers:
        checked = _curve(histories, number, "validation_loss", dots=True)
        if checked.steps:
            curves.append(checked if len(histories) > 1 else replace(checked, colour=VALIDATION))
    if not any(value == value for curve in curves for value in curve.values):
        begun = any(curve.steps for curve in curves)
        return element("p", "No loss was finite." if begun else "No step has been recorded yet.")
    validated = any(curve.dots for curve in curves)
    caption = "The loss of the training is the mean over the global batch."
    if validated and len(histories) > 1:
        caption += " Lines: training; dots, dashed: validation."
    names = [(INK, "training"), (VALIDATION, "validation (dots, dashed)")] if validated and len(histories) == 1 else []
    return _drawn("loss", "Loss", curves, histories, caption, *([key(names)] if names else []), wide=True)


def _drawn(
    place: str,
    title: str,
    curves: Sequence[Curve],
    histories: Sequence[RunHistory],
    caption: str,
    *more: Markup,
    wide: bool,
) -> Markup:
    """Return a picture with its title above, and what is special about its axes below."""
    notes = [caption] if caption else []
    if (limit := lower_end(curves, wide=wide)) is not None:
        notes.append(f"The axis ends at {limit:.1g}: smaller values, of less than one step in a hundred, are below it.")
    if is_uneven(curves):
        notes.append("Steps are on a logarithmic axis, as the runs have very different lengths.")
    if without := [history.name for history in histories if history.name not in {curve.name for curve in curves}]:
        notes.append(f"Not recorded by {', '.join(without)}.")
    label = f"Curve: {title} by step. {_range(curves)}"
    quantity = title.removesuffix(_CHECKED).removesuffix(_UNCLIPPED)
    if not (quantity.isascii() and quantity.isprintable()):
        quantity = ""  # matplotlib's font may not have its characters; the page's has, where the title stands
    drawn = draw_curves(place, label, curves, quantity[:1].lower() + quantity[1:], wide=wide)
    return figure(joined([element("p", title, class_="title"), drawn]), " ".join(notes), *more)


def _single(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    known = {"learning_rate": "Learning rate", "gradient_norm": f"Norm of the gradient{_UNCLIPPED}"}
    names = dict.fromkeys(name for history in histories for name in history.figures())
    rates = [name for name in names if name.endswith("_per_second")]
    others = [name for name in names if name not in _PLACED and name not in rates]
    for place, name in enumerate([*known, *rates, *others[:_MOST_OTHERS]]):
        title = known.get(name, name.replace("_per_second", " a second").replace("_", " "))
        title = title[:1].upper() + title[1:]
        # whether all runs have the figure in no steps but those that were followed by a validation
        checked = all(set(h.series(name)[0]) <= set(h.series("validation_loss")[0]) for h in histories)
        curves = []
        for number, history in enumerate(histories):
            curve = _curve(histories, number, name, dots=2 * len(history.series(name)[0]) < len(history.records.steps))
            if any(value == value for value in curve.values):
                curves.append(curve)
        if curves:
            caption = "Recorded with each validation." if checked else ""
            title += _CHECKED if checked else ""
            yield _drawn(f"curve-{place}", title, curves, histories, caption, wide=name == "gradient_norm")
    if others[_MOST_OTHERS:]:
        yield element("p", f"Not drawn: {', '.join(others[_MOST_OTHERS:])}. They are in the metrics of the run.")


def _range(curves: Sequence[Curve]) -> str:
    told = []
    for curve in curves:
        values = [value for value in curve.values if value == value]
        if values:
            name = f"{curve.name}{', validation' if curve.dots else ''}"
            ends = f"from {values[0]:.4g} to {values[-1]:.4g}"
            told.append(f"{name}: {ends}, least {min(values):.4g}, largest {max(values):.4g}")
    return "; ".join(told)

"""Compose the curves of one or several runs, each run in its colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpizero.train.report.curves import GROUPS, MOST_POINTS, Curve, Marks, draw_curves
from mpizero.train.report.markup import Markup, element, figure, section
from mpizero.train.report.picture import COLOURS
from mpizero.train.report.story import RunStory

#: Figures that have a place of their own, or none.
_PLACED = {"step", "loss", "validation_loss", "learning_rate", "gradient_norm", "bytes_sent", "memory", "bucket_mb"}
#: Other figures that are drawn at most.
_MOST_OTHERS = 8


def colour_of(number: int) -> str:
    """Return the colour of a run."""
    return COLOURS[number % len(COLOURS)]


def curve_section(stories: Sequence[RunStory], *above: Markup) -> Markup:
    """Return the pictures of all figures that steps and validations have, for all runs; ``above`` precedes them."""
    drawn = [_losses(stories), *_single(stories)]
    return section("Curves", *above, *_notes(stories), element("div", *drawn, class_="pictures"))


def _marks(stories: Sequence[RunStory]) -> Marks:
    skipped = sorted({skip.step for story in stories for skip in story.skips})
    return Marks(skipped, sorted({resume.first for story in stories for resume in story.resumes}))


def _notes(stories: Sequence[RunStory]) -> Iterator[Markup]:
    marks, told = _marks(stories), []
    if marks.skipped:
        told.append("Red triangles on the axis are skipped steps" + (" of any run." if len(stories) > 1 else "."))
    if marks.resumed:
        told.append("Dotted lines are resumes.")
    if any(len(story.records.steps) > MOST_POINTS for story in stories):
        told.append(
            f"Curves of more than {MOST_POINTS:,} steps are drawn in {GROUPS} groups of neighbouring steps: the line "
            "is the mean of each group, and the pale band goes from its least to its largest value."
        )
    if told:
        yield element("p", " ".join(told))


def _losses(stories: Sequence[RunStory]) -> Markup:
    curves = []
    for number, story in enumerate(stories):
        curves.append(Curve(*story.series("loss"), colour_of(number)))
    for number, story in enumerate(stories):
        steps, values = story.series("validation_loss")
        if steps:
            colour = colour_of(number) if len(stories) > 1 else COLOURS[1]
            curves.append(Curve(steps, values, colour, dots=True))
    if not any(value == value for curve in curves for value in curve.values):
        begun = any(curve.steps for curve in curves)
        return element("p", "No loss was finite." if begun else "No step has been recorded yet.")
    checked = any(curve.dots for curve in curves)
    caption = "Loss of the training (line), the mean over the global batch"
    caption += ", and of the validation (dots, dashed)." if checked else "."
    drawn = draw_curves(
        "loss", f"Curve of the loss by step. {_range(stories, 'loss')}", curves, _marks(stories), wide=True
    )
    return figure(drawn, caption)


def _single(stories: Sequence[RunStory]) -> Iterator[Markup]:
    known = {"learning_rate": "Learning rate", "gradient_norm": "Norm of the gradient"}
    names = dict.fromkeys(name for story in stories for name in story.figures())
    rates = [name for name in names if name.endswith("_per_second")]
    others = [name for name in names if name not in _PLACED and name not in rates]
    for place, name in enumerate([*known, *rates, *others[:_MOST_OTHERS]]):
        title = known.get(name, name.replace("_", " "))
        title = title[:1].upper() + title[1:]
        curves = []
        for number, story in enumerate(stories):
            steps, values = story.series(name)
            if any(value == value for value in values):
                curves.append(Curve(steps, values, colour_of(number), dots=2 * len(steps) < len(story.records.steps)))
        if curves:
            label = f"Curve: {title} by step. {_range(stories, name)}"
            drawn = draw_curves(f"curve-{place}", label, curves, _marks(stories), wide=name == "gradient_norm")
            yield figure(drawn, f"{title}.")
    if others[_MOST_OTHERS:]:
        yield element("p", f"Not drawn: {', '.join(others[_MOST_OTHERS:])}. They are in the metrics of the run.")


def _range(stories: Sequence[RunStory], name: str) -> str:
    told = []
    for story in stories:
        values = [value for value in story.series(name)[1] if value == value]
        if values:
            of = f"{story.name}: " if len(stories) > 1 else ""
            told.append(
                f"{of}from {values[0]:.4g} to {values[-1]:.4g}, least {min(values):.4g}, largest {max(values):.4g}"
            )
    return "; ".join(told)

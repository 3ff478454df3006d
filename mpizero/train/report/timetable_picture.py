"""Draw the timetable of a pipeline: as planned, and as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpizero.train.events import PipelineCell, PipelineTimetable
from mpizero.train.report.markup import Markup
from mpizero.train.report.picture import COLOURS, label_amounts, picture

#: The colour of each kind of work, and its name on the page.
WORK = {
    "forward": (COLOURS[0], "forward pass"),
    "backward": (COLOURS[1], "backward pass"),
    "backward_input": (COLOURS[1], "backward pass: gradients of inputs"),
    "backward_weights": (COLOURS[2], "backward pass: gradients of parameters"),
}
#: Cells that a picture shows at most; their numbers are shown up to fewer.
MOST_CELLS, MOST_NUMBERS = 6000, 160


def kinds(cells: Sequence[PipelineCell]) -> list[str]:
    """Return the kinds of work of some cells, in the order of :data:`WORK`."""
    present = {cell.work for cell in cells}
    return [work for work in WORK if work in present]


def draw_timetable(name: str, label: str, found: PipelineTimetable) -> Markup:
    """Return the picture of a timetable, one row a stage; cells have the numbers of their micro-batches if they fit."""
    stages = 1 + max(cell.stage for cell in (*found.planned, *found.measured))

    rows = max(0.7, min(0.3 * stages, 4.0))
    size = (7.0, 1.6 + 2 * rows)

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1)
        figure.subplots_adjust(top=1 - 0.3 / size[1], hspace=1.0 / rows)
        _draw_cells(above, found.planned, stages)
        _draw_cells(
            below, [cell._replace(start=1e3 * cell.start, end=1e3 * cell.end) for cell in found.measured], stages
        )
        above.set_title("planned, in units of a forward pass", loc="left", fontsize=9.5)
        below.set_title("measured, in milliseconds", loc="left", fontsize=9.5)

    return picture(name, label, draw, size)


def _draw_cells(axes: Any, cells: Sequence[PipelineCell], stages: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    whole = max((cell.end for cell in cells), default=1.0)
    for work in kinds(cells):
        for chunk in sorted({cell.chunk // stages % 2 for cell in cells}):
            boxes = [_box(cell) for cell in cells if cell.work == work and cell.chunk // stages % 2 == chunk]
            if boxes:
                shape = Path.make_compound_path(*(Path(box, closed=True) for box in boxes))
                style = {"facecolor": WORK[work][0], "alpha": 0.6 if chunk else 0.9, "edgecolor": "white"}
                axes.add_patch(PathPatch(shape, **style, linewidth=0.6))
    if len(cells) <= MOST_NUMBERS:
        for cell in cells:
            if cell.end - cell.start > 0.018 * whole:
                axes.text(
                    (cell.start + cell.end) / 2, cell.stage, str(cell.micro), ha="center", va="center",
                    color="white", fontsize=7.5,
                )  # fmt: skip
    axes.set_xlim(0, whole)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages))
    axes.set_ylabel("stage")
    axes.grid(visible=False)
    label_amounts(axes.xaxis)


def _box(cell: PipelineCell) -> list[tuple[float, float]]:
    low, high = cell.stage - 0.42, cell.stage + 0.42
    return [(cell.start, low), (cell.end, low), (cell.end, high), (cell.start, high), (cell.start, low)]

"""Timetables of pipeline schedules, computed by the library's simulation."""

from __future__ import annotations

from drawings.canvas import EMPTY, PALE, Canvas
from mpizero.layout import Costs, Simulation, build_schedule, simulate
from mpizero.layout.schedules import label

ROW = 30
#: Colour and name of each kind of instruction.
KINDS = {
    "forward": ("#8ecae6", "forward"),
    "backward": ("#f6c177", "backward"),
    "backward_input": ("#f6dfb5", "input half"),
    "backward_weights": ("#9bd3a7", "weight half"),
}


def timetable(canvas: Canvas, run: Simulation, top: float, column: float) -> None:
    """Draw a row for each stage with a box for each instruction; a second is ``column`` wide."""
    for stage, timed in enumerate(run.events):
        y = top + ROW * stage
        canvas.text(10, y + 19, f"{stage}", anchor="start", color=PALE)
        canvas.box(30, y, column * run.makespan, ROW - 4, EMPTY)
        for instruction, start, end in timed:
            width, color = column * (end - start), KINDS[instruction.kind][0]
            canvas.box(30 + column * start, y, width, ROW - 4, color, label(run, instruction)[1:])


def legend(canvas: Canvas, top: float) -> None:
    """Draw the colour of each kind of instruction."""
    for number, (color, said) in enumerate(KINDS.values()):
        canvas.box(30 + 112 * number, top, 18, 18, color)
        canvas.text(54 + 112 * number, top + 14, said, anchor="start")


def draw() -> str:
    """Return the drawing of two schedules."""
    canvas = Canvas(322, "1F1B waits for a quarter of the time, the zero-bubble schedule for a tenth.")
    for number, name in enumerate(("1f1b", "zero_bubble")):
        schedule = build_schedule(name, 3, 6)
        run = simulate(schedule, Costs.uniform(schedule.chunks))
        top = 34 + 134 * number
        canvas.text(10, top - 12, name, anchor="start", bold=True)
        canvas.text(470, top - 12, f"{run.bubble_share:.0%} of the time waited", anchor="end", color=PALE)
        timetable(canvas, run, top, 18)
    legend(canvas, 288)
    return canvas.svg()

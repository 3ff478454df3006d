"""Timetables of two pipeline schedules, computed by the library's simulation."""

from __future__ import annotations

from drawings.canvas import EMPTY, PALE, Canvas
from mpizero.layout import Costs, build_schedule, simulate

STAGES, MICROS, COLUMN, ROW = 3, 6, 18, 30
#: Colour and name of each kind of instruction.
KINDS = {
    "forward": ("#8ecae6", "forward"),
    "backward": ("#f6c177", "backward"),
    "backward_input": ("#f6dfb5", "input half"),
    "backward_weights": ("#9bd3a7", "weight half"),
}


def draw() -> str:
    """Return the drawing."""
    canvas = Canvas(322, "1F1B waits for a quarter of the time, the zero-bubble schedule for a tenth.")
    for number, name in enumerate(("1f1b", "zero_bubble")):
        schedule = build_schedule(name, STAGES, MICROS)
        run = simulate(schedule, Costs.uniform(schedule.chunks))
        top = 34 + 134 * number
        canvas.text(10, top - 12, name, anchor="start", bold=True)
        canvas.text(470, top - 12, f"{run.bubble_share:.0%} of the time waited", anchor="end", color=PALE)
        for stage, timed in enumerate(run.events):
            y = top + ROW * stage
            canvas.text(10, y + 19, f"{stage}", anchor="start", color=PALE)
            canvas.box(30, y, COLUMN * run.makespan, ROW - 4, EMPTY)
            for instruction, start, end in timed:
                width = COLUMN * (end - start)
                canvas.box(30 + COLUMN * start, y, width, ROW - 4, KINDS[instruction.kind][0], f"{instruction.micro}")
    for number, (color, said) in enumerate(KINDS.values()):
        canvas.box(30 + 112 * number, 288, 18, 18, color)
        canvas.text(54 + 112 * number, 302, said, anchor="start")
    return canvas.svg()

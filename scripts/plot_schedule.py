"""Show the timetable of a pipeline schedule as text, and as a picture (SVG)."""

from __future__ import annotations

import argparse
from pathlib import Path

from drawings.canvas import PALE, Canvas
from drawings.pipeline import ROW, legend, timetable

from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES, Costs, Simulation, build_schedule, schedules, simulate


def draw(simulation: Simulation) -> str:
    """Return a picture of a simulated schedule: a row for each stage, a box for each instruction."""
    schedule = simulation.schedule
    column = 22 / min((e.end - e.start for events in simulation.events for e in events if e.end > e.start), default=1)
    told = (
        f"{schedule.name}: {schedule.micro_batches} micro-batches, bubble {100 * simulation.bubble_share:.1f} %, "
        f"caches held {', '.join(map(str, simulation.caches))}"
    )
    below = 34 + ROW * schedule.stages
    canvas = Canvas(below + 56, told, max(480.0, 40 + column * simulation.makespan))
    canvas.text(10, 22, told, anchor="start", bold=True)
    timetable(canvas, simulation, 34, column)
    canvas.text(30, below + 14, f"{simulation.makespan:g} s", anchor="start", color=PALE)
    legend(canvas, below + 28)
    return canvas.svg()


def seconds(text: str) -> tuple[float, float, float]:
    """Parse three numbers of seconds: of a forward pass, and of the input and weight halves of a backward pass."""
    try:
        forward, inputs, weights = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three numbers with commas: seconds of a chunk's forward and of its backward's input and "
            "weight half"
        ) from None
    return forward, inputs, weights


def main() -> None:
    """Print the timetable of the chosen schedule; with ``--output`` also write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", choices=SCHEDULES)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--virtual", type=int, help="chunks a stage (2 for interleaved and zero_bubble_v, else 1)")
    parser.add_argument(
        "--costs",
        type=seconds,
        default=(1.0, 1.0, 1.0),
        metavar="F,B,W",
        help="seconds of a chunk's forward and of its backward's input and weight half (default 1,1,1)",
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a message (default 0)")
    parser.add_argument("--unit", type=float, help="seconds a column of the text")
    parser.add_argument("--output", type=Path, help="write this picture")
    options = parser.parse_args()
    forward, inputs, weights = options.costs
    several = options.schedule in {"interleaved", "zero_bubble_v"}
    virtual = options.virtual if options.virtual is not None else 1 + several
    try:
        schedule = build_schedule(options.schedule, options.stages, options.micro_batches, virtual)
        simulation = simulate(schedule, Costs.uniform(schedule.chunks, forward, inputs, weights, options.latency))
        print(schedules.timetable(simulation, options.unit))
        if options.output is not None:
            options.output.write_text(draw(simulation), encoding="utf-8")
            print(options.output)
    except (ConfigError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

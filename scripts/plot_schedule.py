"""Show the timetable of a pipeline schedule as text, and as a picture (which needs matplotlib)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpizero.errors import ConfigError
from mpizero.layout import SCHEDULES, Costs, Simulation, build_schedule, simulate
from mpizero.layout.schedules import label, timetable

#: Matplotlib's default colours, by kind of instruction.
COLOURS = {"forward": "C0", "backward": "C2", "backward_input": "C9", "backward_weights": "C8"}


def draw(simulation: Simulation, output: Path) -> None:
    """Write a picture of a simulated schedule to ``output``: one line per stage, one box per instruction.

    Instructions of later chunks of a stage are paler.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("matplotlib is missing: pip install 'mpizero[plot]'")
    schedule = simulation.schedule
    count = max(len(events) for events in simulation.events)
    figure = Figure(figsize=(min(4 + 0.25 * count, 40), 1.5 + 0.4 * schedule.stages), layout="constrained")
    axes = figure.subplots()
    named = set()
    for stage, events in enumerate(simulation.events):
        chunks = schedule.chunks_of(stage)
        for event in events:
            kind, chunk, _ = event.instruction
            axes.barh(
                stage,
                event.end - event.start,
                left=event.start,
                height=0.9,
                color=COLOURS[kind],
                alpha=1 - 0.5 * chunks.index(chunk) / len(chunks),
                edgecolor="white",
                label="" if kind in named else kind.replace("_", ", "),
            )
            named.add(kind)
            middle = (event.start + event.end) / 2
            axes.text(middle, stage, label(simulation, event.instruction)[1:], ha="center", va="center", fontsize=6)
    axes.set(xlabel="seconds", ylabel="stage", xlim=(0, simulation.makespan), ylim=(schedule.stages - 0.5, -0.5))
    axes.set_yticks(range(schedule.stages))
    axes.set_title(
        f"{schedule.name}: {schedule.micro_batches} micro-batches, bubble {100 * simulation.bubble_share:.1f} %, "
        f"caches held {', '.join(map(str, simulation.caches))}",
        fontsize=9,
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, frameon=False, fontsize=8)
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        sys.exit(f"{output}: {error}")
    print(output)


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
        print(timetable(simulation, options.unit))
    except ConfigError as error:
        parser.error(str(error))
    if options.output is not None:
        draw(simulation, options.output)


if __name__ == "__main__":
    main()

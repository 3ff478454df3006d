"""Define the command ``mpizero report``: its options and its output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpizero._util.text import show
from mpizero.errors import ExitStatus


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero report`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "report",
        help="draw what a run, or several, have recorded, as one HTML file that needs nothing else",
        description="Write a page about a run: how it ended, findings in words, curves, seconds by phase and rank, "
        "memory beside its plan, layout, the pipeline's timetable, checkpoints, environment and configuration. Several "
        "runs are drawn over one another, with what differs between their configurations. Runs may be training. Needs "
        "matplotlib (extra plot).",
        epilog="Example: python -m mpizero report run -o run.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run")
    parser.add_argument("-o", "--output", metavar="FILE", help="what to write (default: report.html in the first RUN)")
    parser.add_argument("--force", action="store_true", help="replace FILE even if it is no report of mpizero")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the report, print its path, and return the exit status."""
    from mpizero.tools.report.page import report

    show(str(report(options.runs, options.output, force=options.force)))
    return int(ExitStatus.OK)

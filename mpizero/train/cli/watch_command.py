"""Define the command ``mpizero watch``: its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero watch`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "watch",
        help="follow a run in a terminal: loss curve, validation, speed, time left, skipped steps, checkpoints",
        description="Show a run that trains, from what it records in its folder, and end when it has ended; Ctrl-C "
        "ends before. Where standard output is no terminal, print a line whenever something is new.",
        epilog="Example: python -m mpizero watch run",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of a run; it may have recorded nothing yet")
    parser.add_argument("--once", action="store_true", help="show the run as it is now, and end")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=2.0, help="seconds between two looks (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Follow a run, and return the exit status."""
    from mpizero._util.checks import number
    from mpizero.tools.report.watch import watch
    from mpizero.train.config.checks import check_option

    check_option("--interval", options.interval, number(0.1, 3600.0))
    return watch(options.folder, once=options.once, interval=options.interval)

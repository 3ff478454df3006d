"""Define the command ``mpizero replay``: its options and its output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from mpizero._util.text import show
from mpizero.errors import ExitStatus
from mpizero.train.cli.options import add_json


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero replay`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "replay",
        help="evaluate the samples of a skipped step again, and tell where the first value is not finite",
        description="Run the samples that a skipped step of `train` has left forward and backward, in one process, and "
        "print the least, the largest and the norm of every block's output and of every gradient.",
        epilog="Example: python -m mpizero replay run/bad_steps/step_00000123",
    )
    parser.add_argument("dump", metavar="DUMP", help="the folder of a bad step, as RUN/bad_steps/step_00000123")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="whose parameters to take (default: the run's newest from before the step, else the start values)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate the samples of a skipped step again, print the result, and return the exit status."""
    from mpizero.tools import replay

    found = replay.replay(options.dump, options.checkpoint, lambda line: show(line, sys.stderr))
    show(replay.as_json(found) if options.json else replay.report(found))
    return int(ExitStatus.OK)

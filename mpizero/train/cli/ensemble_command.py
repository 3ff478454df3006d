"""Define the command ``mpizero ensemble``: its options and its output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from mpizero._util.text import show
from mpizero.errors import ExitStatus
from mpizero.tools.ensemble import COMPLETE, SUMMARY, summarize_members
from mpizero.train.cli.options import add_json


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero ensemble`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "ensemble",
        help="summarize the members of an ensemble, which may have run as separate jobs",
        description=f"Read the outcome of every member in RUN, write the summary RUN/{SUMMARY}, and print it. The exit "
        "status is 0 only if all members are complete.",
        epilog="Example: python -m mpizero ensemble run --members 8",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of the ensemble")
    parser.add_argument(
        "--members", type=int, metavar="N", help="number of members (default: up to the last with a folder)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Summarize an ensemble, print the summary, and return the exit status."""
    found = summarize_members(options.folder, options.members)
    if options.json:
        show(json.dumps(found))
    else:
        for one in found["members"]:
            error = f": {one['error']}" if "error" in one else ""
            show(f"member {one['member']}  {one['status']}{error}")
        for name, figures in found["figures"].items():
            show(f"{name}  " + ", ".join(f"{key} {value:.6g}" for key, value in figures.items()))
    complete = all(one["status"] == COMPLETE for one in found["members"])
    return int(ExitStatus.OK if complete else ExitStatus.RANK_FAILED)

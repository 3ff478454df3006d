"""Define the command line of ``mpizero verify``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpizero.train.cli.options import add_json, add_overrides


def add_verify(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero verify`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "verify",
        help="run one training on several layouts and name the first number that differs",
        description="Train a few steps on every layout, compare every bit with one process, and name the first step, "
        "tensor and rank that differ, and the probable cause. Without mpiexec the ranks are threads. Status 1 if a "
        "layout differs. Tensor and context groups are compared with one process that computes in the same tiles; "
        "where none can (groups of 3 ranks), within a tolerance.",
        epilog="Example: python -m mpizero verify config.toml --layouts '2; zero3*4; pipeline=2, data=2; tensor=2'",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="what to train")
    add_overrides(parser)
    parser.add_argument("--layouts", metavar="'A; B'", help="which (default: all kinds on --ranks)")
    parser.add_argument("--ranks", metavar="N", type=int, help="(default: those of mpiexec, else 2 threads)")
    parser.add_argument("--steps", metavar="K", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--tolerance", metavar="T", type=float, help="relative (default: 16 epsilon of the type a doubling of sums)"
    )
    add_json(parser)
    parser.set_defaults(run=run)

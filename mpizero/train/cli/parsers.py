"""Define the command lines of ``mpizero train``, ``generate``, ``plan`` and ``doctor``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpizero.train.cli.options import add_json, add_layout_options, add_overrides, add_training

Run = Callable[[argparse.Namespace], int]


def add_train(commands: Any, run: Run) -> None:
    """Add ``mpizero train`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "train",
        help="train a model as a TOML file describes it; runs under mpiexec or srun",
        description="Train a model. Ends with one line of JSON on standard output; metrics, checkpoints and the "
        "marker run_complete go into the run's folder. SIGUSR1, SIGUSR2, SIGTERM, a file STOP in that folder or the "
        "coming end of the job's time: save and exit with status 75.",
        epilog="Example: mpiexec -n 8 python -m mpizero train config.toml --set train.steps=500",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="what to train")
    add_training(parser)
    parser.set_defaults(run=run)


def add_generate(commands: Any, run: Run) -> None:
    """Add ``mpizero generate`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "generate",
        help="write text with a trained language model",
        description="Write text, byte by byte. The same seed gives the same text. Under mpiexec the ranks share the "
        "model: each holds its part of the parameters, whatever layout the checkpoint was written by.",
        epilog='Example: python -m mpizero generate run --prompt "def " --length 400',
    )
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help="a run's folder (newest checkpoint), or one")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="what the text starts with")
    parser.add_argument("--length", metavar="N", type=int, default=200, help="bytes to write (default: %(default)s)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0 takes the likeliest (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k", metavar="K", type=int, default=40, help="choose among the K likeliest; 0: all (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the choices (default: %(default)s)")
    add_layout_options(parser)
    parser.add_argument(
        "--strategy", metavar="NAME", default="zero3", help="how replicas hold parameters (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def add_plan(commands: Any, run: Run) -> None:
    """Add ``mpizero plan`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "plan",
        help="tell the memory, messages and work of a training on so many ranks, without starting any",
        description="Compute what every rank would hold, send and do. Nothing is started and no model is made: one "
        "block of each kind runs once, to see what it keeps. With --memory-per-node: status 1 if it does not fit.",
        epilog="Example: python -m mpizero plan config.toml --ranks 64 --ranks-per-node 16 --memory-per-node 120GB",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="what would be trained")
    parser.add_argument("--ranks", metavar="N", type=int, required=True, help="how many there would be")
    parser.add_argument("--ranks-per-node", metavar="K", type=int, help="of one node (default: all on one)")
    add_overrides(parser)
    parser.add_argument("--memory-per-node", metavar="BYTES", help="what a node has: 64e9, 64GB, 60GiB")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--gflops", metavar="G", type=float, help="of a rank (default: 50)")
    speed.add_argument(
        "--machine", metavar="FILE", help="also expect seconds, on what `mpizero bench machine` has measured"
    )
    parser.add_argument("--timetable", action="store_true", help="print what every stage of a pipeline does when")
    add_json(parser)
    parser.set_defaults(run=run)


def add_doctor(commands: Any, run: Run) -> None:
    """Add ``mpizero doctor`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "doctor",
        help="look at MPI, cores, shared memory, HDF5 and kernels, and say how to mend what is wrong",
        description="Try what training needs. Run it the way you would train, to see what training would see.",
        epilog="Example: mpiexec -n 8 python -m mpizero doctor",
    )
    add_json(parser)
    parser.add_argument(
        "--report",
        action="store_true",
        help="print a block to copy into a report of a fault, without names of users and hosts",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove shared memory of killed jobs of yours, on every node, if unused"
    )
    parser.set_defaults(run=run)

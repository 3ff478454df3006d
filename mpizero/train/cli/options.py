"""Define command line options that several commands have: ``--set``, ``--json``, and the parallel layout of a model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpizero.errors import ConfigError

_SIZES = {
    "pipeline": "stages that the model's blocks are cut into",
    "tensor": "ranks that split each layer",
    "context": "ranks that split each sequence",
}


def add_layout_options(parser: argparse.ArgumentParser, *, schedule: bool = False) -> None:
    """Add ``--pipeline``, ``--tensor``, ``--context``, ``--data`` and ``--order`` to a parser.

    With ``schedule``, add ``--schedule`` and ``--virtual-stages`` too.
    """
    group = parser.add_argument_group("layout over the ranks of mpiexec")
    for name, meaning in _SIZES.items():
        group.add_argument(f"--{name}", metavar="N", type=int, default=1, help=f"{meaning} (default: 1)")
    group.add_argument("--data", metavar="N", type=int, default=-1, help="replicas; -1: all remaining ranks (default)")
    group.add_argument(
        "--order",
        metavar="A,B,C",
        default="pipeline,tensor,data",
        help="the axes, slowest first (default: %(default)s)",
    )
    if schedule:
        from mpizero.layout import SCHEDULES

        group.add_argument(
            "--schedule", metavar="NAME", default="1f1b", help=f"{', '.join(SCHEDULES)} (default: %(default)s)"
        )
        group.add_argument(
            "--virtual-stages", metavar="N", type=int, default=1, help="parts a stage, for interleaved (default: 1)"
        )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands that read a configuration file."""
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="replace a setting of the file; a TOML value, or a bare word; may be given many times. optimizer.name is "
        "sgd, adam, adamw, rmsprop, lion, lamb, muon, soap, l-bfgs, cg or newton-cg",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training that are not in its configuration file."""
    add_overrides(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint, on any number of ranks and with any layout; damaged ones are passed "
        "over and moved to earlier/; with one that exists and cannot be opened, end with status 65 and touch nothing",
    )
    parser.add_argument(
        "--resume-from",
        metavar="STEP",
        type=whole_number,
        help="continue from the checkpoint of this step; later ones are moved to earlier/ in the run's folder",
    )
    parser.add_argument(
        "--override",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="changed",
        help="with --resume: change a setting that determines the result, such as optimizer.lr, which is "
        "recorded; may be given many times",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, for commands that can print their result as one line of JSON."""
    parser.add_argument("--json", action="store_true", help="one line for programs")


def whole_number(text: str) -> int:
    """Convert the text of an option to a whole number >= 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If the text is not such a number.
    """
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number >= 0")
    return int(text)


def layout_of(options: argparse.Namespace, **settings: Any) -> Any:
    """Make the :class:`~mpizero.train.config.components.ParallelSection` that the options describe.

    ``settings`` are further settings of the section, for which there are no options.

    Raises
    ------
    ConfigError
        If an option is wrong. The message names the option.
    """
    from mpizero.train.config.components import ParallelSection

    names = ("pipeline", "tensor", "data", "context", "order", "schedule", "virtual_stages")
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    with named_as_options():
        return ParallelSection(**given, **settings)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Rewrite an error about a setting that the ``with`` block raises as one about an option of the command line.

    The setting ``parallel.tensor = 3`` becomes ``--tensor 3``.
    """
    from mpizero.train.config.checks import SettingError

    try:
        yield
    except SettingError as error:
        text = re.sub(r"\bparallel\.(\w+)( =)?", lambda found: f"--{found[1].replace('_', '-')}", error.message)
        raise ConfigError(text) from None

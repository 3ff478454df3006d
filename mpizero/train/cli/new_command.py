"""Define the command ``mpizero new``: its options and its output."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import Any

from mpizero._util.text import show
from mpizero.errors import ConfigError, ExitStatus


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero new`` to the commands; ``run`` executes it, given the parsed options."""
    from mpizero.tools.projects import listed

    parser = commands.add_parser(
        "new",
        help="write a small project that trains as it is, to begin with",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a folder with a configuration, a model, data, tests, batch scripts for Slurm and a README.\n"
        f"Kinds:\n\n{listed()}",
        epilog="Example: mpizero new digits --kind torch && cd digits && cat README.md",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a folder that is new or empty")
    parser.add_argument("--kind", metavar="KIND", help="of project, see above")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a project, print how to go on, and return the exit status."""
    from mpizero.tools import projects
    from mpizero.tools.projects import KINDS

    if options.kind is None:
        raise ConfigError(f"mpizero new: --kind is missing; {projects.choices()}")
    folder = projects.new_project(options.folder, options.kind)
    show(f"{folder}: {KINDS[options.kind].summary}. Its README.md leads on:")
    for told in projects.missing(options.kind):
        show(f"mpizero: {told}")
    build = KINDS[options.kind].build
    for command in filter(None, (f"cd {shlex.quote(options.folder)}", build, *projects.FIRST_COMMANDS)):
        show(f"  {command}")
    return int(ExitStatus.OK)

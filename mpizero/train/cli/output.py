"""Print the output of commands, with control characters in it escaped."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import TextIO

from mpizero.text import printable


def show(text: str, file: TextIO | None = None) -> None:
    """Print a report or a line to standard output, or to ``file``, with control characters escaped."""
    print(printable(text, keep="\n"), file=file, flush=True)


def accept_all_characters() -> None:
    """Make standard output and error escape the characters that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to write colours to a stream: to terminals, unless the environment says otherwise.

    ``NO_COLOR`` forbids them and ``FORCE_COLOR`` asks for them anywhere, where not empty; ``TERM=dumb`` is a terminal
    that has none. Ranks of Open MPI write to a terminal of its own, wherever the output goes.
    """
    if environment.get("NO_COLOR") or environment.get("FORCE_COLOR"):
        return not environment.get("NO_COLOR")
    return environment.get("TERM") != "dumb" and "OMPI_COMM_WORLD_RANK" not in environment and stream.isatty()

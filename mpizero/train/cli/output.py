"""Print the output of commands, with control characters in it escaped."""

from __future__ import annotations

import io
import sys
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

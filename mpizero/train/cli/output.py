"""Print the output of commands, fit for a terminal whatever it quotes."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from mpizero.text import printable


def show(text: str, file: TextIO | None = None) -> None:
    """Print a report or a line on standard output, or on ``file``."""
    print(printable(text, keep="\n"), file=file, flush=True)


def accept_all_characters() -> None:
    """Let standard output and error escape what their encoding does not have, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

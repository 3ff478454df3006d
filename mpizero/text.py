"""Print on terminals and in logs: escape control characters, so that any text can be printed safely."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from typing import TextIO
from unicodedata import category

#: Unicode categories that are escaped: control characters (escape sequences begin with one), invisible formatting marks
#: (which reverse the direction of writing, or hide in names), halves of surrogate pairs, line and paragraph separators,
#: and code points that are private or not assigned.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNUSUAL = re.compile(r"[^ -~]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with control characters and invisible characters escaped.

    Letters, marks, symbols and spaces of all scripts stay. The escapes have the syntax of JSON and TOML (``\n``,
    ``\u001b``, ``\U000e0001``). Backslashes are not escaped, so a text that already contains escapes, such as a JSON
    document, keeps its meaning.

    Parameters
    ----------
    text : str
        Anything: names, keys, values, messages of other libraries.
    keep : str
        Characters that are not escaped, such as ``"\n"`` in a report of several lines.
    """
    return _UNUSUAL.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    if category(character) not in _ESCAPED:
        return character
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def notice(text: str) -> None:
    """Write one line to standard error: "mpizero: " and ``text`` with its control characters escaped."""
    print(f"mpizero: {printable(text)}", file=sys.stderr, flush=True)


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

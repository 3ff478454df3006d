"""Escape control characters, so that any text can be printed safely on a terminal or in a log."""

from __future__ import annotations

import re
import sys
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

"""Make any text fit for a terminal, a log line and an error message."""

from __future__ import annotations

import re
import sys
from unicodedata import category

#: Controls (escape sequences begin with one), invisible marks (they turn the direction of writing, or hide in names),
#: halves of surrogate pairs, separators of lines and paragraphs, and code points that are no characters.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNUSUAL = re.compile(r"[^ -~]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with everything escaped that a terminal would obey or not show.

    Not collective. Letters, marks, symbols and spaces of all scripts stay. The escapes are those of JSON and TOML
    (``\n``, ``\u001b``, ``\U000e0001``), so that a JSON document means the same afterwards; what is escaped already
    stays as it is.

    Parameters
    ----------
    text : str
        Anything: names, keys, values, messages of other libraries.
    keep : str
        Characters that stay all the same: ``"\n"`` for a report of several lines.
    """
    return _UNUSUAL.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    if category(character) not in _ESCAPED:
        return character
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def notice(text: str) -> None:
    """Write a line that begins with the package's name to standard error, fit for a terminal."""
    print(f"mpizero: {printable(text)}", file=sys.stderr, flush=True)

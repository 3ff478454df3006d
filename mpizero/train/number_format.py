"""Format numbers, ages and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpizero.text import printable

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def amount(value: float) -> str:
    """Format a number with four digits and a prefix such as "k" or "M", for example "1.5 G"; append the unit to it."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}"


def age(seconds: float) -> str:
    """Format an age such as "3 h ago", in the largest unit (s, min, h, d) of which it has at least two."""
    scale, unit = next(((s, u) for s, u in _AGES if seconds >= 2 * s), _AGES[-1])
    return f"{max(0, seconds) / scale:.0f} {unit} ago"


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Format rows of cells as a table; the columns with the indices ``left`` are left-aligned, others right-aligned."""
    return joined(aligned(rows, left))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format rows of cells as the lines of a table, aligned as by :func:`columns`; the lines are not joined."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def joined(lines: Iterable[str]) -> str:
    """Join lines to one text; control characters and line breaks inside a line are escaped."""
    return "\n".join(map(printable, lines))


def duration(seconds: float) -> str:
    """Format a length of time: "2.5 ms", "3.2 s", "5 min 20 s" or "3 h 5 min"."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
    return f"{hours // 24} d {hours % 24} h"

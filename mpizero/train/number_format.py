"""Format numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpizero.text import printable

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def amount(value: float) -> str:
    """Return a number in four digits, with the prefix of its unit, which may follow at once."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}"


def age(seconds: float) -> str:
    """Return how long ago something was, in the largest unit of which there are two."""
    scale, unit = next(((s, u) for s, u in _AGES if seconds >= 2 * s), _AGES[-1])
    return f"{max(0, seconds) / scale:.0f} {unit} ago"


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows of cells as aligned lines; columns stand on the right, except those in ``left``."""
    return joined(aligned(rows, left))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of :func:`columns`."""
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
    """Return lines as the text of a report, in which every line is one line, whatever it quotes."""
    return "\n".join(map(printable, lines))

"""Write tables: aligned for a terminal, in Markdown, and into a page between marks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def aligned(head: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a table whose first ``left`` columns, and a last one without a title, begin at one place each."""
    lines = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1

    def cell(number: int, text: str) -> str:
        flush = number < left or (number == last and not head[-1])
        return text.ljust(widths[number]) if flush else text.rjust(widths[number])

    return "\n".join("  ".join(cell(*pair) for pair in enumerate(line)).rstrip() for line in lines)


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(map(str, row))} |" for row in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def between(text: str, begin: str, end: str, content: str, page: str | Path) -> str:
    """Return the text of a page in which ``content`` takes the place of what is between two marks.

    End the script if a mark is missing; ``page`` names the page then.
    """
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        sys.exit(f"{page}: expected {begin} and then {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"

"""Draw a curve with characters: dots of Braille, or stars where a terminal has no other characters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

#: Bits of the dots of a Braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def terminal_curve(
    steps: Sequence[float], values: Sequence[float], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Return a curve as ``height`` lines of at most ``width`` characters, with its least and largest value at the left.

    Neighbouring points are joined; values that are not finite are left out. There are no lines without a finite value,
    or if there is no room.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not points or height < 3:
        return []
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns, rows = width - margin, height - 1
    if columns < 10:
        return []
    wide, tall = (1, 1) if ascii_only else (2, 4)
    cells = [[0] * columns for _ in range(rows)]
    for x, y in _joined_dots(points, columns * wide, rows * tall):
        cells[y // tall][x // wide] |= 1 if ascii_only else _DOTS[y % tall][x % wide]
    bar, corner, line = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    found = []
    for number, row in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == rows - 1 else ""
        drawn = "".join(" " if not dots else "*" if ascii_only else chr(0x2800 + dots) for dots in row)
        found.append(f"{label.rjust(margin - 2)} {bar}{drawn}".rstrip())
    foot = f" step {points[0][0]:,.0f} to {points[-1][0]:,.0f} "
    return [*found, f"{' ' * (margin - 1)}{corner}{foot.center(columns, line)}"[:width]]


def _joined_dots(points: Sequence[tuple[float, float]], width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield the column and the row of each dot of a curve: those of its points, and of the lines between them."""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    before: tuple[int, float] | None = None
    for step, value in points:
        x = round((step - first) / (last - first or 1) * (width - 1))
        y = (high - value) / (high - low or 1) * (height - 1)
        x_before, y_before = before or (x, y)
        above = round(y_before)
        for column in range(min(x_before + 1, x), x + 1):
            row = round(y + (y_before - y) * (x - column) / (x - x_before or 1))
            yield from ((column, dot) for dot in range(min(row, above + 1), max(row + 1, above)))
            above = row
        before = x, y

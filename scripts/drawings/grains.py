"""Grains of a global batch on three ranks, and the tree in whose order their gradients are added."""

from __future__ import annotations

from drawings.canvas import PALE, RANKS, Canvas

GRAINS, OWNERS = 8, (0, 0, 0, 1, 1, 1, 2, 2)


def draw() -> str:
    """Return the drawing."""
    canvas = Canvas(340, "Eight grains on three ranks: partial sums inside of a rank, and sums of what ranks send.")
    step, left, floor = 56, 44, 250

    def place(level: int, position: int) -> tuple[float, float]:
        first, last = position << level, ((position + 1) << level) - 1
        return left + step * (first + last) / 2, floor - 62 * level

    for level in range(1, 4):
        for position in range(GRAINS >> level):
            for child in (2 * position, 2 * position + 1):
                canvas.line([place(level - 1, child), place(level, position)], color=PALE)
    for level in range(4):
        for position in range(GRAINS >> level):
            owners = set(OWNERS[position << level : (position + 1) << level])
            x, y = place(level, position)
            if level:
                canvas.disc(x, y, 15, RANKS[owners.pop()] if len(owners) == 1 else "white")
                canvas.text(x, y + 5, "+", bold=True)
            else:
                canvas.box(x - 22, y - 16, 44, 36, RANKS[OWNERS[position]], f"g{position}")
    canvas.text(left + step * 3.5, 30, "sum of all gradients, divided once", bold=True)
    for rank in range(3):
        mine = [number for number, owner in enumerate(OWNERS) if owner == rank]
        x = left + step * (mine[0] + mine[-1]) / 2
        canvas.text(x, floor + 42, f"rank {rank}")
    canvas.text(left + step * 3.5, 318, "coloured: added inside of a rank; white: what ranks send is added", color=PALE)
    return canvas.svg()

"""Who holds what: parameters, gradients and optimizer state of DDP and ZeRO-1, 2 and 3 on three ranks."""

from __future__ import annotations

from drawings.canvas import EMPTY, PALE, RANKS, Canvas

KINDS = ("parameters", "gradients", "optimizer state")
#: How many of the three kinds, from the last one on, are sharded.
SHARDED = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def draw() -> str:
    """Return the drawing."""
    canvas = Canvas(470, "DDP holds everything on every rank; ZeRO-1, 2 and 3 shard one, two, three kinds of arrays.")
    for column, kind in enumerate(KINDS):
        canvas.text(144 + 132 * column, 24, kind, bold=True)
    for row, (strategy, sharded) in enumerate(SHARDED.items()):
        top = 40 + 100 * row
        canvas.text(6, top + 44, strategy, anchor="start", bold=True)
        for rank in range(3):
            canvas.text(74, top + 16 + 28 * rank, f"{rank}", color=PALE, anchor="end")
            for column in range(3):
                for shard in range(3):
                    held = column < 3 - sharded or shard == rank
                    x = 84 + 132 * column + 40 * shard
                    canvas.box(x, top + 28 * rank, 40, 22, RANKS[shard] if held else EMPTY)
    canvas.text(240, 456, "rows: ranks 0 to 2; coloured: held all the time", color=PALE)
    return canvas.svg()

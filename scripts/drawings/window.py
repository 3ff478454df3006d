"""One node of three ranks: shared windows for gradients and parameters, and what peers of two nodes send."""

from __future__ import annotations

from drawings.canvas import PALE, RANKS, Canvas


def draw() -> str:
    """Return the drawing."""
    canvas = Canvas(470, "Ranks of a node write gradients side by side into shared memory, and each updates one slice.")
    canvas.text(240, 24, "a node: three ranks, one copy of the parameters", bold=True)
    lefts = [60 + 130 * rank for rank in range(3)]
    for rank, x in enumerate(lefts):
        canvas.box(x, 44, 100, 38, RANKS[rank], f"rank {rank}")
        canvas.line([(x + 50, 82), (x + 50, 112)], arrows=1)
    for x in lefts:
        for slice_ in range(3):
            canvas.box(x + 34 * slice_, 142, 33, 28, RANKS[slice_])
    for slice_ in range(3):
        for x in lefts:
            canvas.line([(x + 34 * slice_ + 16, 170), (lefts[slice_] + 50, 236)], color=PALE)
        canvas.box(lefts[slice_] + 10, 238, 80, 42, RANKS[slice_], "add, then|update")
        canvas.line([(lefts[slice_] + 50, 280), (lefts[slice_] + 50, 336)], arrows=1)
    for rank, x in enumerate(lefts):
        canvas.box(x - 15, 340, 130, 28, RANKS[rank], f"slice {rank}")
    for x in lefts:
        canvas.line([(x + 50, 392), (x + 50, 424)], arrows=2)
    canvas.caption(12, 132, "window of gradients: each rank writes its own segment")
    canvas.caption(12, 212, "after a barrier each rank adds its slice of all segments")
    canvas.caption(12, 320, "window of parameters: written in place, read by all")
    canvas.text(240, 446, "other nodes: the peer, the rank of the same number, is sent", color=PALE)
    canvas.text(240, 463, "sums of a slice and new values; nothing else is sent", color=PALE)
    return canvas.svg()

"""A checkpoint of four ranks, which three ranks with another strategy read."""

from __future__ import annotations

from drawings.canvas import EMPTY, PALE, RANKS, Canvas

#: Whole arrays of the drawing's file, and their lengths.
ARRAYS = (("/parameters/w", 240), ("/parameters/b", 120), ("/optimizer/m/w", 240), ("/optimizer/m/b", 120))


def draw() -> str:
    """Return the drawing."""
    canvas = Canvas(460, "Four ranks write their ranges of whole arrays into one file, and three ranks read others.")
    for rank in range(4):
        canvas.box(20 + 114 * rank, 16, 98, 38, RANKS[rank], f"rank {rank} of 4")
        canvas.line([(69 + 114 * rank, 54), (69 + 114 * rank, 84)], arrows=1)
    canvas.box(20, 88, 440, 224, "white")
    canvas.text(34, 108, "state.h5, an HDF5 file of whole arrays", anchor="start", bold=True)
    for number, (name, length) in enumerate(ARRAYS):
        y = 122 + 46 * number
        canvas.text(34, y + 24, name, anchor="start")
        for part in range(4):
            canvas.box(160 + part * length / 4, y + 6, length / 4, 26, RANKS[part])
    canvas.box(20, 324, 440, 32, EMPTY, "manifest.json: names, shapes, checksums; written last")
    for rank in range(3):
        canvas.line([(89 + 152 * rank, 356), (89 + 152 * rank, 386)], arrows=1)
        canvas.box(20 + 152 * rank, 390, 136, 38, EMPTY, f"rank {rank} of 3")
    canvas.text(240, 449, "the file knows no ranks: any number of them, any strategy", color=PALE)
    return canvas.svg()

"""Draw what ranks hold and send: ZeRO's stages, windows of a node, grains, the grid of ranks, a checkpoint."""

from __future__ import annotations

from drawings.canvas import EMPTY, PALE, RANKS, Canvas
from mpizero.layout import Axes

KINDS = ("parameters", "gradients", "optimizer state")
#: How many of the three kinds, from the last one on, are sharded.
SHARDED = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
GRAINS, OWNERS = 8, (0, 0, 0, 1, 1, 1, 2, 2)
#: Whole arrays of the drawing's file, and their lengths.
ARRAYS = (("/parameters/w", 240), ("/parameters/b", 120), ("/optimizer/m/w", 240), ("/optimizer/m/b", 120))


def zero_stages() -> str:
    """Return the drawing of what DDP and ZeRO-1, 2 and 3 hold on three ranks."""
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


def window() -> str:
    """Return the drawing of a node's windows for gradients and parameters, and of what peers of two nodes send."""
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


def grains() -> str:
    """Return the drawing of grains on three ranks, and of the tree in whose order their gradients are added."""
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


def grid() -> str:
    """Return the drawing of 2 stages x 2 parts x 2 replicas; which rank is where is the library's own computation."""
    canvas = Canvas(404, "Ranks of two replicas: tensor groups inside of a stage, stages below each other.")
    axes = Axes.build(8, pipeline=2, tensor=2)
    middle = {}
    for rank in range(8):
        stage, part, replica, _ = axes.coordinates(rank)
        x, y = 20 + 240 * replica + 120 * part, 70 + 150 * stage
        canvas.box(x, y, 84, 64, RANKS[2 * stage + part], f"rank {rank}|{('left', 'right')[part]} half")
        middle[stage, part, replica] = x + 42, y
    for replica in range(2):
        canvas.text(122 + 240 * replica, 26, f"replica {replica}", bold=True)
        canvas.text(122 + 240 * replica, 46, f"grains {4 * replica} to {4 * replica + 3}", color=PALE)
        for stage in range(2):
            (x, y), (right, _) = middle[stage, 0, replica], middle[stage, 1, replica]
            canvas.line([(x + 42, y + 32), (right - 42, y + 32)], arrows=2)
            canvas.text((x + right) / 2, y + 24, "t")
        for part in range(2):
            x, y = middle[0, part, replica]
            canvas.line([(x - 12, y + 64), (x - 12, y + 150)], arrows=1)
            canvas.line([(x + 12, y + 150), (x + 12, y + 64)], arrows=1)
            canvas.text(x, y + 112, "p")
    for stage in range(2):
        canvas.text(243, 102 + 150 * stage, "d", bold=True)
    lines = (
        "t  tensor groups: sums of partial products, in every block",
        "p  pipelines: activations down, their gradients up",
        "d  ranks of one colour: gradients, ZeRO's shards",
        "stage 0 above, stage 1 below",
    )
    for number, line in enumerate(lines):
        canvas.text(16, 324 + 20 * number, line, anchor="start")
    return canvas.svg()


def checkpoint() -> str:
    """Return the drawing of a checkpoint of four ranks, which three ranks with another strategy read."""
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

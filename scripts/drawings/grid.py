"""Eight ranks as 2 stages x 2 tensor parts x 2 replicas, and what they send each other."""

from __future__ import annotations

from drawings.canvas import PALE, RANKS, Canvas
from mpizero.layout import Axes


def draw() -> str:
    """Return the drawing; which rank is where is the library's own computation."""
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

"""Draw the README's picture: different results of one training, and tokens a second, beside other libraries.

Every figure is read from a table of docs/measurements.md, which names the command that measured it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drawings.canvas import PALE, Canvas

ROOT = Path(__file__).resolve().parents[2]
BITS, SPEED = "The same training on 1, 2 and 4 ranks", "Speed beside PyTorch and DeepSpeed"
#: Okabe and Ito's colours, which people tell apart whatever their colour vision, by the first word of a name.
COLOURS = {"mpizero": "#0072b2", "PyTorch": "#e69f00", "DeepSpeed": "#999999"}
WIDTH, LINE = 640, 24
#: Left edges of the bars of both parts, and the lengths of the longest.
LEFT, RIGHT = (164, 60), (436, 150)


def page(section: str) -> str:
    """Return a section of docs/measurements.md."""
    whole = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    return whole.partition(f"\n## {section}\n")[2].partition("\n## ")[0]


def table(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section, without its head."""
    found = re.search(r"^\|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", page(section), re.MULTILINE)
    if found is None:
        sys.exit(f"docs/measurements.md has no table in a section {section!r}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def results() -> list[tuple[str, int]]:
    """Return how many different results each library has."""
    found = []
    for name, count, *_ in table(BITS):
        library = re.match(r"mpizero|PyTorch [\d.]+, (\w+)", name)
        if library is None:
            sys.exit(f"docs/measurements.md, {BITS}: unknown row {name!r}")
        found.append((f"PyTorch {library[1]}" if library[1] else "mpizero, all four", int(count.split()[0])))
    return found


def rates() -> list[tuple[str, int, int, int]]:
    """Return the tokens a second of each library: median, least and largest."""
    found = []
    for name, rate, *_ in table(SPEED):
        numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", rate)]
        if name.startswith(tuple(COLOURS)):
            found.append((name.replace("ZeroRedundancyOptimizer", "ZeroRedundancy"), *numbers))
    return found


def bar(canvas: Canvas, left: float, row: int, length: float, name: str) -> None:
    """Draw a bar and its name, in the colour of the library."""
    y = 64 + LINE * row
    canvas.text(left - 10, y + 14, name, anchor="end")
    canvas.box(left, y, length, LINE - 6, COLOURS[re.split(r"\W", name)[0]])


def draw() -> str:
    """Return the picture as SVG; every figure in it is a cell of docs/measurements.md."""
    counts, speeds = results(), rates()
    canvas = Canvas(64 + LINE * len(speeds) + 8, "Results and speed beside other libraries", WIDTH)
    rounds = "".join(re.findall(r"--rounds (\d+)", page(SPEED))[:1])
    for x, y, words, bold in (
        (8, 24, "Different results of a", True),
        (8, 44, "training on 1, 2, 4 ranks", True),
        (LEFT[0] + 106, 24, "Tokens a second, 2 ranks of one node", True),
        (LEFT[0] + 106, 44, f"medians of {rounds} rounds, with their range", False),
    ):
        canvas.text(x, y, words, anchor="start", bold=bold)
    (left, longest), most = LEFT, max(count for _, count in counts)
    for row, (name, count) in enumerate(counts):
        bar(canvas, left, row, longest * count / most, name)
        canvas.text(left + longest * count / most + 8, 78 + LINE * row, str(count), anchor="start")
    (left, longest), most = RIGHT, max(high for *_, high in speeds)
    for row, (name, rate, low, high) in enumerate(speeds):
        y, (middle, least, largest) = 73 + LINE * row, (left + longest * rate / most for rate in (rate, low, high))
        bar(canvas, left, row, middle - left, name)
        canvas.line([(least, y - 4), (least, y + 4), (least, y), (largest, y), (largest, y - 4), (largest, y + 4)])
        canvas.text(left + longest + 6, y + 5, f"{rate:,}", anchor="start")
    notes = ("CPU, float32, a GPT, AdamW.", "Here mpizero shares memory,", "the others use sockets (gloo).")
    for row, note in enumerate(notes, len(speeds) - len(notes)):
        canvas.text(8, 78 + LINE * row, note, anchor="start", color=PALE)
    return canvas.svg()

"""Draw which rank holds which part of the model: a box for each rank, one group of boxes for each replica."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mpizero.train.events import VisitStart
from mpizero.train.report.markup import Markup, element, joined, key
from mpizero.train.report.picture import SECOND_COLOURS


def draw_layout(start: VisitStart) -> Markup:
    """Return the drawing: tables of stages and parts, the ranks coloured by their nodes."""
    places = [_place(start, rank) for rank in range(start.ranks)]
    replicas: dict[int, dict[tuple[int, Any], int]] = defaultdict(dict)
    for rank, (replica, stage, part) in enumerate(places):
        replicas[replica][stage, part] = rank
    stages = sorted({stage for _, stage, _ in places})
    parts = sorted({part for _, _, part in places})
    if len(stages) == len(parts) == 1:
        boxes = element("div", *(_box(start, rank) for rank in range(start.ranks)), class_="ranks")
        drawing = element("div", boxes, class_="replicas wide")
    else:
        drawing = element(
            "div",
            *(_replica(start, number, held, stages, parts) for number, held in sorted(replicas.items())),
            class_="replicas wide",
        )
    return joined([drawing, _nodes(start)])


def _place(start: VisitStart, rank: int) -> tuple[int, int, tuple[int, int]]:
    """Return a rank's replica, stage and parts."""
    at = {axis: ranks[rank] for axis, ranks in start.coordinates.items() if rank < len(ranks)}
    return at.get("data", 0), at.get("pipeline", 0), (at.get("tensor", 0), at.get("context", 0))


def _replica(
    start: VisitStart,
    number: int,
    held: dict[tuple[int, Any], int],
    stages: Sequence[int],
    parts: Sequence[tuple[int, int]],
) -> Markup:
    head = element("tr", element("td"), *(element("th", _part_name(start, part), scope="col") for part in parts))
    rows = [
        element(
            "tr",
            element("th", f"stage {stage}", scope="row"),
            *(element("td", _box(start, held[stage, part]) if (stage, part) in held else "") for part in parts),
        )
        for stage in stages
    ]
    return element("table", element("caption", f"replica {number}"), head, *rows, class_="replica")


def _part_name(start: VisitStart, part: tuple[int, int]) -> str:
    names = []
    if _size(start, "tensor") > 1:
        names.append(f"part {part[0]}")
    if _size(start, "context") > 1:
        names.append(f"places {part[1]}")
    return ", ".join(names) or "whole blocks"


def _size(start: VisitStart, axis: str) -> int:
    return 1 + max(start.coordinates.get(axis, [0]), default=0)


def _box(start: VisitStart, rank: int) -> Markup:
    node = start.nodes[rank] if rank < len(start.nodes) else 0
    return element(
        "span", f"rank {rank}", class_="rank", style=f"border-color:{_colour(node)}", title=f"rank {rank}, node {node}"
    )


def _nodes(start: VisitStart) -> Markup:
    """Return the meaning of the colours: the host and the ranks of each node."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(start.nodes):
        ranks[node].append(rank)
    hosts = dict(enumerate(start.hosts))
    return key(
        (_colour(node), f"node {node} ({hosts.get(node, '?')}): ranks {_ranges(held)}")
        for node, held in sorted(ranks.items())
    )


def _colour(node: int) -> str:
    return SECOND_COLOURS[node % len(SECOND_COLOURS)]


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers with "to" for those that follow one another, such as "0 to 3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def described_layout(start: VisitStart) -> str:
    """Return the layout in words, such as "8 ranks: 2 stages x 2 tensor parts x 2 replicas, zero2, 1 node"."""
    names = {"pipeline": "stages", "tensor": "tensor parts", "context": "context parts", "data": "replicas"}
    sizes = [(size, name) for axis, name in names.items() if (size := _size(start, axis)) > 1]
    ranks = "1 rank" if start.ranks == 1 else f"{start.ranks} ranks"
    product = " x ".join(f"{size} {name}" for size, name in sizes)
    nodes = len(set(start.nodes))
    return f"{ranks}{': ' if product else ''}{product}, {start.strategy}, on {nodes} node{'s' if nodes > 1 else ''}"

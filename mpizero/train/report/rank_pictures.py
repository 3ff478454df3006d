"""Draw what ranks do and hold as stacked bars, one or two a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpizero.train.report.markup import Markup
from mpizero.train.report.measures import WAITING, MeanPhases, MemoryTable
from mpizero.train.report.picture import COLOURS, GREY, OTHERS, SECOND_COLOURS, label_amounts, picture

#: Ranks that one picture shows at most.
MOST_RANKS = 64
#: The colour of each phase: passes have those of the pipeline's timetable.
_PHASES = {
    "forward": COLOURS[0],
    "backward": COLOURS[1],
    "layers' messages": COLOURS[4],
    "local sums": COLOURS[3],
    "reduction": COLOURS[5],
    "optimizer": COLOURS[6],
    "publication": COLOURS[7],
    "agreement": "#44aa99",
    WAITING: GREY,
}
#: The colour of each part of memory.
_PARTS = dict(
    zip(
        ("parameters", "gradients", "optimizer state", "group buffers", "snapshot", "samples", "residuals", "buffers")
        + ("exchange buffers", "activations", "working arrays", "messages"),
        (*SECOND_COLOURS, *COLOURS),
        strict=False,
    )
)


class Bars(NamedTuple):
    """Hold stacked bars: for each part its name, its colour, and its length by rank; ``pale`` ones are hatched."""

    parts: Sequence[tuple[str, str, Sequence[float]]]
    pale: bool = False


def phase_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each phase, which is the same on all pages."""
    return _fixed(names, _PHASES)


def part_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each part of memory, which is the same on all pages."""
    return _fixed(names, _PARTS)


def _fixed(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the known colours, and dark grey for other names."""
    return {name: known.get(name, OTHERS) for name in names}


def chosen_ranks(keys: Sequence[float]) -> list[int]:
    """Return the ranks that a picture shows: all, or evenly chosen ones with those of the least and largest key."""
    count = len(keys)
    if count <= MOST_RANKS:
        return list(range(count))
    ranks = {count * number // (MOST_RANKS - 2) for number in range(MOST_RANKS - 2)}
    return sorted(ranks | {min(range(count), key=keys.__getitem__), max(range(count), key=keys.__getitem__)})


def draw_phases(name: str, label: str, found: MeanPhases) -> Markup:
    """Return the picture of seconds by phase and rank, with waiting in grey at the end of each bar."""
    tints = phase_colours(found.phases)
    ranks = chosen_ranks(found.waiting)
    unit, scale = ("ms", 1e3) if max(found.seconds) < 1 else ("s", 1.0)
    parts = [
        (phase, tints[phase], [scale * taken[rank] for rank in ranks])
        for phase, taken in found.phases.items()
        if any(taken)
    ]
    return _draw_bars(name, label, [Bars(parts)], ranks, unit)


def draw_memory(name: str, label: str, found: MemoryTable) -> Markup:
    """Return the picture of memory by part and rank: the plan hatched, and what was counted below it."""
    tints = part_colours(found.parts)
    ranks = chosen_ranks(
        [planned for planned, _ in found.totals()] or [sum(c) for c in zip(*found.counted.values(), strict=True)]
    )
    rows = [
        Bars(
            [
                (part, tints[part], [float(sizes[part][rank]) for rank in ranks])
                for part in found.parts
                if part in sizes
            ],
            pale,
        )
        for sizes, pale in ((found.planned, True), (found.counted, False))
        if sizes
    ]
    return _draw_bars(name, label, rows, ranks, "B")


def _draw_bars(name: str, label: str, rows: Sequence[Bars], ranks: Sequence[int], unit: str) -> Markup:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        height = 0.8 / len(rows)
        for number, row in enumerate(rows):
            places = [place - 0.4 + height * (number + 0.5) for place in range(len(ranks))]
            left = [0.0] * len(ranks)
            for _, colour, lengths in row.parts:
                style: Mapping[str, Any] = {"color": colour}
                if row.pale:
                    style = {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.6}
                axes.barh(places, lengths, 0.9 * height, left=left, **style)
                left = [start + length for start, length in zip(left, lengths, strict=True)]
        every = max(1, -(-len(ranks) // 16))
        axes.set_yticks(range(len(ranks))[::every], [f"{rank}" for rank in ranks[::every]])
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.set_ylabel("rank")
        axes.grid(visible=False, axis="y")
        label_amounts(axes.xaxis, unit)

    bar = 0.3 if len(ranks) <= 16 else 0.12
    return picture(name, label, draw, (5.2, 0.7 + bar * max(3, len(ranks))))

"""Write the HTML of a report, and draw its figures as SVG inside the page.

Plain strings are escaped when they are inserted into HTML; only :class:`Markup` is inserted unchanged. :func:`picture`
draws with matplotlib. Each kind of figure has a function: :func:`draw_curves` draws metrics by step, long curves as a
line of means and a band from the least to the largest value; :func:`draw_phases` and :func:`draw_memory` draw the time
and the memory of ranks as stacked bars, one or two for each rank; :func:`draw_layout` draws which rank holds which part
of the model, with a box for each rank and a group of boxes for each replica; :func:`draw_timetable` draws the timetable
of a pipeline, planned and measured.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpizero._util.text import amount, printable
from mpizero.errors import UnsupportedError
from mpizero.guard.reports import rank_ranges
from mpizero.tools.report.history import WAITING, MeanPhases, MemoryTable
from mpizero.train.events import PipelineCell, PipelineTimetable, SessionStart

#: The most rows that are shown instead of being folded.
_FEW = 4
#: The most folded rows, so that a page stays small.
_MOST_FOLDED = 500
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_NUMBER = re.compile(r"(< )?-?\d[\d,.]*(e[+-]\d+)?( [%a-zA-Zµ]{1,3})?")


class Markup(str):
    """Hold text that is HTML already."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Markup:
    """Join texts, and escape those that are not :class:`Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else escape(printable(part, keep="\n")) for part in parts))


def element(name: str, *content: str, **attributes: object) -> Markup:
    """Return an HTML element; attributes that are None are left out, and "_" in attribute names becomes "-"."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{joined([str(value)])}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{attribute_text}>{joined(content)}</{name}>")


def listed(items: Iterable[str]) -> Markup:
    """Return an unordered HTML list of ``items``."""
    return element("ul", *(element("li", item) for item in items))


def breakable(text: str) -> Markup:
    """Return the text as HTML; inside its words, lines may only be broken after "/" and "_" and inside hashes."""
    if isinstance(text, Markup):
        return text
    hashed = _HASH.sub(lambda match: "<wbr>".join(re.findall(".{16}", match[0])), joined([text]))
    return Markup(re.sub("([/_])(?=[^<])", r"\1<wbr>", hashed))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table that scrolls sideways if it is too wide; the first cell of each row is the row's heading.

    ``head`` is empty for a table of names and values. Columns of numbers are aligned to the right.
    """
    rows = list(rows)
    classes = [_class_of(column) for column in zip(*(rows or [head]), strict=True)] if head else [None, None]
    names = zip(head, classes, strict=True) if head else ()
    top = element("thead", element("tr", *(element("th", cell, scope="col", class_=c) for cell, c in names)))
    body = (
        element(
            "tr",
            element("th", breakable(row[0]), scope="row", class_=classes[0]),
            *(element("td", breakable(cell), class_=c) for cell, c in zip(row[1:], classes[1:], strict=True)),
        )
        for row in rows
    )
    inner = element("table", top if head else "", element("tbody", *body), class_=None if head else "facts")
    # No caption element: it would be as narrow as the table, and scroll with it.
    return joined([element("p", caption, class_="title"), scrolling(inner, caption)])


def _class_of(cells: Sequence[str]) -> str | None:
    """Return the CSS class of a column: "n" for numbers, "t" for long text, None for other columns."""
    if all(_NUMBER.fullmatch(cell) or cell in ("", "-", "…") for cell in cells):
        return "n"
    return "t" if any(len(cell) > 24 for cell in cells) else None


def scrolling(content: Markup, label: str, more: str = "") -> Markup:
    """Return an element whose content scrolls sideways if it is too wide; ``more`` are further CSS classes."""
    return element("div", content, class_=f"wide {more}".strip(), tabindex=0, role="region", aria_label=label)


def long_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], ends: int = 6) -> Markup:
    """Return a table of the first and the last rows, with the others folded below; few rows are all in one table."""
    if len(rows) <= 2 * ends + _FEW:
        return table(caption, head, rows)
    between = rows[ends:-ends]
    gap = ("…", *[""] * (len(head) - 1))
    which = f"{caption}: the first {ends} and the last {ends} of {len(rows):,}"
    excerpt = table(which, head, [*rows[:ends], gap, *rows[-ends:]])
    left_out = len(between) - _MOST_FOLDED
    title = f"The {len(between):,} between them" + (f", but for the last {left_out:,}" if left_out > 0 else "")
    return joined([excerpt, folded(title, table(title, head, between[:_MOST_FOLDED]))])


def folded(title: str, *content: str) -> Markup:
    """Return content that is shown after a click on its title; empty if there is no content."""
    inner = joined(content)
    return element("details", element("summary", title), inner) if inner else Markup("")


def definitions(meanings: Iterable[tuple[str, str]]) -> Markup:
    """Return an HTML list of words, each with its meaning below."""
    return element("dl", *(part for word, text in meanings for part in (element("dt", word), element("dd", text))))


def figure(picture: Markup, caption: str, *more: str) -> Markup:
    """Return a figure: a picture, further content (``more``) such as a table of its numbers, and a caption."""
    below = element("figcaption", caption) if caption else Markup("")
    return element("figure", picture, *more, below)


def section(title: str, *content: str, level: int = 2, name: str | None = None) -> Markup:
    """Return a section with its heading; empty if there is no content. Links refer to the section by ``name``."""
    inner = joined(content)
    return element("section", element(f"h{level}", title), inner, id=name) if inner else Markup("")


def key(names: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend of colours from pairs ``(colour, name)``, with a spot of each colour."""
    return element("ul", *(element("li", spot(colour), name) for colour, name in names), class_="key")


def spot(colour: str) -> Markup:
    """Return a small spot of a colour for a legend."""
    return element("span", style=f"background:{colour}", class_="spot", aria_hidden="true")


#: Colours that people with any kind of colour vision tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#6a51a3", "#7a3b12")
#: Colours that are not in :data:`COLOURS`, for pictures on the same page whose colours mean something else.
SECOND_COLOURS = ("#332288", "#117733", "#aa4499", "#999933", "#882255", "#5b8fa8", "#8c6d5a", "#3d3d5c")
#: The colours of training and validation curves on a page of a single run.
INK, VALIDATION = "#222222", "#c2417c"
#: The colour of phases and parts of memory without a colour of their own.
OTHERS = "#444444"
#: The colours of waiting, and of marks at skipped steps.
GREY, SKIPPED = "#c9c9c9", "#b00020"
#: Size of a picture in inches: small, so that its text stays readable on a narrow page.
SIZE = (5.2, 3.0)
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "lines.linewidth": 1.2,
}
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| xmlns(:\w+)?=\"[^\"]*\"", re.DOTALL)
_COORDINATES = re.compile(r'(?<= d=")[^"]*')
_DIGITS = re.compile(r"(\.\d\d)\d+")
_FONTS = re.compile(r"font-family: [^;\"]*(; )?")
_NAMES = re.compile(r'(\bid="|\bhref="#|url\(#)')


def picture(name: str, label: str, draw: Callable[[Any], None], size: tuple[float, float] = SIZE) -> Markup:
    """Return a drawing as an SVG element.

    Parameters
    ----------
    name : str
        Name of the picture in the page, made of letters, digits and "-".
    label : str
        Description of the picture for readers who cannot see it.
    draw : callable
        Function that draws into the matplotlib figure that it gets as argument.
    size : tuple of float
        Width and height in inches.

    Raises
    ------
    UnsupportedError
        If matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        message = "a report needs matplotlib, which is not installed: pip install 'mpizero[plot]'"
        raise UnsupportedError(message) from None
    text = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size)
        width, height = size  # margins in inches: matplotlib's own layouts draw everything twice to find them
        figure.subplots_adjust(0.85 / width, 0.52 / height, 1 - 0.3 / width, 1 - 0.1 / height)
        draw(figure)
        figure.savefig(text, format="svg", transparent=True)
    return _embedded(text.getvalue(), name, label)


def _embedded(svg: str, name: str, label: str) -> Markup:
    """Convert an SVG file to an element of a page, with names unique on the page and coordinates of few digits."""
    svg = _DROPPED.sub("", svg[svg.index("<svg") :]).replace("xlink:href=", "href=")
    svg = _COORDINATES.sub(lambda match: _DIGITS.sub(r"\1", match[0]), svg)
    svg = _FONTS.sub("", svg)  # the page's CSS sets the font
    svg = _NAMES.sub(rf"\1{name}-", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    inner = svg[svg.index(">") + 1 :]
    return Markup(f'<svg role="img" aria-label="{joined([label])}" {box[0] if box else ""}>{inner}')


def label_steps(axes: Any, *, logarithmic: bool = False) -> None:
    """Label the horizontal axis with step numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel("step (logarithmic)" if logarithmic else "step")
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=7))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def label_amounts(axis: Any, unit: str = "", *, logarithmic: bool = False) -> None:
    """Label an axis with short numbers, each with ``unit``, such as "B" or "ms"."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if logarithmic:
        axis.axes.set_yscale("log")
        axis.set_minor_formatter(NullFormatter())
        low, high = axis.get_data_interval()
        subs = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=7))
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _brief(value, unit)))


def _brief(value: float, unit: str) -> str:
    """Format a number on an axis in few characters, such as "20,000", "2 M", "1.5 MB" or "0.002"."""
    if not unit and 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{amount(value)}{unit}".strip() if abs(value) >= 10_000 else f"{value:.4g} {unit}".strip()


#: A curve of more than MOST_POINTS points is drawn as GROUPS groups of neighbouring points.
MOST_POINTS, GROUPS = 1000, 500
#: The most markers that are drawn on an axis.
MOST_MARKERS = 200
#: An axis is logarithmic if the ratio of the 99th to the first percentile of its values exceeds this number.
_WIDE = 50.0
#: Steps are on a logarithmic axis if the last step of the longest curve exceeds that of the shortest by this factor.
_UNEVEN = 10.0
#: A logarithmic axis leaves out the fraction _OUTER of the least values if the least is _FAR times below the others.
_OUTER, _FAR = 0.005, 10.0


class Markers(NamedTuple):
    """Hold the steps that are marked on the axis: skipped steps, and the first step after each resume."""

    skipped: Sequence[int] = ()
    resumed: Sequence[int] = ()
    colour: str = SKIPPED


@dataclass(frozen=True)
class Curve:
    """Hold one curve: values by step; values that are not finite leave gaps.

    Attributes
    ----------
    steps, values : sequence of float
        Coordinates of the curve's points.
    colour : str
        Colour of the curve.
    dots : bool
        Whether points are drawn as dots, for values that only some steps have.
    name : str
        Name of the run that the curve belongs to.
    markers : Markers
        The steps of the curve's run that are marked on the axis.
    """

    steps: Sequence[float]
    values: Sequence[float]
    colour: str = COLOURS[0]
    dots: bool = False
    name: str = ""
    markers: Markers = Markers()


class Envelope(NamedTuple):
    """Hold a curve as groups of neighbouring points: mean step of each group, and range and mean of its values."""

    steps: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def envelope(steps: Sequence[float], values: Sequence[float], groups: int = GROUPS) -> Envelope:
    """Cut a curve into at most ``groups`` groups of about equally many finite points."""
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    good = np.isfinite(y)
    x, y = x[good], y[good]
    starts = np.unique(np.linspace(0, len(x), min(groups, len(x)), endpoint=False).astype(np.int64))
    if not len(x):
        return Envelope(x, y, y, y)
    sizes = np.diff(np.append(starts, len(x)))
    return Envelope(
        np.add.reduceat(x, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.add.reduceat(y, starts) / sizes,
        np.maximum.reduceat(y, starts),
    )


def draw_curves(name: str, label: str, curves: Sequence[Curve], quantity: str, *, wide: bool = False) -> Markup:
    """Return the picture of some curves; ``wide`` allows a logarithmic vertical axis.

    ``name`` and ``label`` are those of :func:`picture`. ``quantity`` is the label of the vertical axis.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for curve in curves:
            _draw_curve(axes, curve)
        label_amounts(axes.yaxis, logarithmic=wide and _is_wide(curves))
        low, high = axes.yaxis.get_data_interval()
        if 0 < high <= low * (1 + 1e-9):
            axes.set_ylim(0, 1.25 * high)
        if (limit := lower_end(curves, wide=wide)) is not None:
            axes.set_ylim(bottom=limit)
        axes.set_ylabel(quantity)
        label_steps(axes, logarithmic=is_uneven(curves))
        for markers in {curve.markers.colour: curve.markers for curve in curves}.values():
            _draw_markers(axes, markers)

    return picture(name, label, draw)


def _draw_markers(axes: Any, markers: Markers) -> None:
    line = "#888888" if markers.colour == SKIPPED else markers.colour
    for step in _thinned(markers.resumed):
        axes.axvline(step - 0.5, color=line, linestyle=":", linewidth=1)
    if skipped := _thinned(markers.skipped):
        size = 6 if len(skipped) <= 10 else 4
        on_axis = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(skipped, [0.03] * len(skipped), "^", color=markers.colour, markersize=size, **on_axis)


def is_uneven(curves: Sequence[Curve]) -> bool:
    """Return whether curves differ so much in length that the axis of steps must be logarithmic."""
    ends = [max(curve.steps) for curve in curves if curve.steps]
    return bool(ends) and min(ends) > 0 and max(ends) > _UNEVEN * min(ends)


def lower_end(curves: Sequence[Curve], *, wide: bool) -> float | None:
    """Return the lower limit of a logarithmic axis that leaves out a few tiny values; None if no value is tiny."""
    if not wide or not _is_wide(curves):
        return None
    values = _finite(curves)
    low = float(np.quantile(values[values > 0], _OUTER))
    return low / 2 if np.min(values) < low / _FAR else None


def _draw_curve(axes: Any, curve: Curve) -> None:
    style: dict[str, Any] = {"color": curve.colour}
    if curve.dots:
        style |= {"linestyle": "--", "linewidth": 0.9}
        style |= {"marker": "o", "markersize": 3.5 if len(curve.steps) <= 40 else 2}
    if len(curve.steps) <= MOST_POINTS:
        if len(curve.steps) == 1:
            style["marker"] = "o"
        axes.plot(curve.steps, curve.values, **style)
        return
    grouped = envelope(curve.steps, curve.values)
    axes.fill_between(grouped.steps, grouped.low, grouped.high, color=curve.colour, alpha=0.25, linewidth=0)
    axes.plot(grouped.steps, grouped.mean, color=curve.colour)


def _finite(curves: Sequence[Curve]) -> npt.NDArray[np.float64]:
    values = np.concatenate([np.asarray(curve.values, np.float64) for curve in curves] or [np.zeros(0)])
    finite: npt.NDArray[np.float64] = values[np.isfinite(values)]
    return finite


def _is_wide(curves: Sequence[Curve]) -> bool:
    values = _finite(curves)
    if not len(values) or np.mean(values > 0) < 0.99:
        return False
    low, high = np.quantile(values[values > 0], (0.01, 0.99))
    return bool(high / low > _WIDE)


def _thinned(steps: Sequence[int]) -> list[int]:
    """Return at most :data:`MOST_MARKERS` of the steps, evenly chosen."""
    return list(steps[:: max(1, -(-len(steps) // MOST_MARKERS))])


#: The most ranks that one picture shows.
MOST_RANKS = 64
#: The colour of each phase; forward and backward have the colours of the pipeline's timetable.
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
    """Hold stacked bars: for each part, its colour and its length on each rank; ``pale`` bars are hatched."""

    parts: Sequence[tuple[str, Sequence[float]]]
    pale: bool = False


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each phase or part of memory, equal on all pages; other names are dark grey."""
    known = _PHASES | _PARTS
    return {name: known.get(name, OTHERS) for name in names}


def chosen_ranks(keys: Sequence[float]) -> list[int]:
    """Return the ranks that a picture shows: all, or evenly chosen ones and those with the least and largest key."""
    count = len(keys)
    if count <= MOST_RANKS:
        return list(range(count))
    ranks = {count * number // (MOST_RANKS - 2) for number in range(MOST_RANKS - 2)}
    return sorted(ranks | {min(range(count), key=keys.__getitem__), max(range(count), key=keys.__getitem__)})


def draw_phases(name: str, label: str, means: MeanPhases) -> Markup:
    """Return the picture of seconds by phase and rank, with waiting in grey at the end of each bar."""
    tints = colours_of(means.phases)
    ranks = chosen_ranks(means.waiting)
    unit, scale = ("ms", 1e3) if max(means.seconds) < 1 else ("s", 1.0)
    present = {phase: taken for phase, taken in means.phases.items() if any(taken)}
    parts = [(tints[phase], [scale * taken[rank] for rank in ranks]) for phase, taken in present.items()]
    return _draw_bars(name, label, [Bars(parts)], ranks, unit)


def draw_memory(name: str, label: str, memory: MemoryTable) -> Markup:
    """Return the picture of memory by part and rank: planned bytes hatched, and counted bytes below."""
    tints = colours_of(memory.parts)
    planned = [planned for planned, _ in memory.totals()]
    ranks = chosen_ranks(planned or [sum(sizes) for sizes in zip(*memory.counted.values(), strict=True)])
    rows = []
    for sizes, pale in ((memory.planned, True), (memory.counted, False)):
        present = [part for part in memory.parts if part in sizes]
        if sizes:
            rows.append(Bars([(tints[part], [float(sizes[part][rank]) for rank in ranks]) for part in present], pale))
    return _draw_bars(name, label, rows, ranks, "B")


def _draw_bars(name: str, label: str, rows: Sequence[Bars], ranks: Sequence[int], unit: str) -> Markup:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        height = 0.8 / len(rows)
        for number, row in enumerate(rows):
            positions = [position - 0.4 + height * (number + 0.5) for position in range(len(ranks))]
            left = [0.0] * len(ranks)
            for colour, lengths in row.parts:
                style: Mapping[str, Any] = {"color": colour}
                if row.pale:
                    style = {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.6}
                axes.barh(positions, lengths, 0.9 * height, left=left, **style)
                left = [start + length for start, length in zip(left, lengths, strict=True)]
        every = max(1, -(-len(ranks) // 16))
        axes.set_yticks(range(len(ranks))[::every], [f"{rank}" for rank in ranks[::every]])
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.set_ylabel("rank")
        axes.grid(visible=False, axis="y")
        label_amounts(axes.xaxis, unit)

    bar = 0.3 if len(ranks) <= 16 else 0.12
    return picture(name, label, draw, (5.2, 0.7 + bar * max(3, len(ranks))))


def draw_layout(start: SessionStart) -> Markup:
    """Return a drawing of the parallel layout: tables of stages and parts, with ranks coloured by node."""
    coordinates = [_coordinates(start, rank) for rank in range(start.ranks)]
    replicas: dict[int, dict[tuple[int, Any], int]] = defaultdict(dict)
    for rank, (replica, stage, part) in enumerate(coordinates):
        replicas[replica][stage, part] = rank
    stages = sorted({stage for _, stage, _ in coordinates})
    parts = sorted({part for _, _, part in coordinates})
    if len(stages) == len(parts) == 1:
        boxes = [element("div", *(_rank_box(start, rank) for rank in range(start.ranks)), class_="ranks")]
    else:
        boxes = [_replica(start, number, ranks, stages, parts) for number, ranks in sorted(replicas.items())]
    return joined([element("div", *boxes, class_="replicas wide"), _nodes(start)])


def _coordinates(start: SessionStart, rank: int) -> tuple[int, int, tuple[int, int]]:
    """Return a rank's coordinates in the layout: replica, pipeline stage, and (tensor, context) position."""
    at = {axis: ranks[rank] for axis, ranks in start.coordinates.items() if rank < len(ranks)}
    return at.get("data", 0), at.get("pipeline", 0), (at.get("tensor", 0), at.get("context", 0))


def _replica(
    start: SessionStart,
    number: int,
    ranks: dict[tuple[int, Any], int],
    stages: Sequence[int],
    parts: Sequence[tuple[int, int]],
) -> Markup:
    head = element("tr", element("td"), *(element("th", _part_name(start, part), scope="col") for part in parts))
    rows = [
        element(
            "tr",
            element("th", f"stage {stage}", scope="row"),
            *(element("td", _rank_box(start, ranks[stage, part]) if (stage, part) in ranks else "") for part in parts),
        )
        for stage in stages
    ]
    return element("table", element("caption", f"replica {number}"), head, *rows, class_="replica")


def _part_name(start: SessionStart, part: tuple[int, int]) -> str:
    names = []
    if _size(start, "tensor") > 1:
        names.append(f"part {part[0]}")
    if _size(start, "context") > 1:
        names.append(f"{'box' if start.layout.get('domain') else 'positions'} {part[1]}")
    return ", ".join(names) or "whole blocks"


def _size(start: SessionStart, axis: str) -> int:
    return 1 + max(start.coordinates.get(axis, [0]), default=0)


def _rank_box(start: SessionStart, rank: int) -> Markup:
    node = start.nodes[rank] if rank < len(start.nodes) else 0
    colour, title = f"border-color:{_colour(node)}", f"rank {rank}, node {node}"
    return element("span", f"rank {rank}", class_="rank", style=colour, title=title)


def _nodes(start: SessionStart) -> Markup:
    """Return the legend of colours: the host and the ranks of each node."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(start.nodes):
        ranks[node].append(rank)
    hosts = dict(enumerate(start.hosts))
    return key(
        (_colour(node), f"node {node} ({hosts.get(node, '?')}): ranks {_listed(of_node)}")
        for node, of_node in sorted(ranks.items())
    )


def _colour(node: int) -> str:
    return SECOND_COLOURS[node % len(SECOND_COLOURS)]


def _listed(ranks: Sequence[int]) -> str:
    """Format ascending numbers, with "to" for ranges, such as "0 to 3, 8"."""
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in rank_ranges(ranks))


def described_layout(start: SessionStart) -> str:
    """Return the layout in words, such as "8 ranks: 2 stages x 2 tensor parts x 2 replicas, zero2, on 1 node"."""
    names = {"pipeline": "stages", "tensor": "tensor parts", "context": "context parts", "data": "replicas"}
    if cut := start.layout.get("domain"):
        names["context"] = f"boxes of space ({' x '.join(map(str, cut))})"
    sizes = [(size, name) for axis, name in names.items() if (size := _size(start, axis)) > 1]
    ranks = "1 rank" if start.ranks == 1 else f"{start.ranks} ranks"
    product = " x ".join(f"{size} {name}" for size, name in sizes)
    nodes, sharing = len(set(start.nodes)), start.layout.get("shard_nodes")
    where = f"on {nodes} node{'s' if nodes > 1 else ''}{f' in groups of {sharing}' if sharing else ''}"
    return f"{ranks}{': ' if product else ''}{product}, {start.strategy}, {where}"


#: The colour of each kind of work, and its name on the page.
WORK = {
    "forward": (COLOURS[0], "forward pass"),
    "backward": (COLOURS[1], "backward pass"),
    "backward_input": (COLOURS[1], "backward pass: gradients of inputs"),
    "backward_weights": (COLOURS[2], "backward pass: gradients of parameters"),
}
#: The most cells of a timetable that are drawn, and the most that are drawn with numbers.
MOST_CELLS, MOST_NUMBERS = 6000, 160


def kinds(cells: Sequence[PipelineCell]) -> list[str]:
    """Return the kinds of work of timetable cells, in the order of :data:`WORK`."""
    present = {cell.work for cell in cells}
    return [work for work in WORK if work in present]


def draw_timetable(name: str, label: str, timetable: PipelineTimetable) -> Markup:
    """Return the picture of a timetable, one row per stage; cells show their micro-batch's number if it fits."""
    stages = 1 + max(cell.stage for cell in (*timetable.planned, *timetable.measured))

    rows = max(0.7, min(0.3 * stages, 4.0))
    size = (7.0, 1.6 + 2 * rows)

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1)
        figure.subplots_adjust(top=1 - 0.3 / size[1], hspace=1.0 / rows)
        measured = [cell._replace(start=1e3 * cell.start, end=1e3 * cell.end) for cell in timetable.measured]
        _draw_cells(above, timetable.planned, stages)
        _draw_cells(below, measured, stages)
        above.set_title("planned, in units of a forward pass", loc="left", fontsize=9.5)
        below.set_title("measured, in milliseconds", loc="left", fontsize=9.5)

    return picture(name, label, draw, size)


def _draw_cells(axes: Any, cells: Sequence[PipelineCell], stages: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    total = max((cell.end for cell in cells), default=1.0)
    for work in kinds(cells):
        for chunk in sorted({cell.chunk // stages % 2 for cell in cells}):
            boxes = [_outline(cell) for cell in cells if cell.work == work and cell.chunk // stages % 2 == chunk]
            if boxes:
                shape = Path.make_compound_path(*(Path(box, closed=True) for box in boxes))
                style = {"facecolor": WORK[work][0], "alpha": 0.6 if chunk else 0.9, "edgecolor": "white"}
                axes.add_patch(PathPatch(shape, **style, linewidth=0.6))
    if len(cells) <= MOST_NUMBERS:
        for cell in cells:
            if cell.end - cell.start > 0.018 * total:
                axes.text(
                    (cell.start + cell.end) / 2, cell.stage, str(cell.micro), ha="center", va="center",
                    color="white", fontsize=7.5,
                )  # fmt: skip
    axes.set_xlim(0, total)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages))
    axes.set_ylabel("stage")
    axes.grid(visible=False)
    label_amounts(axes.xaxis)


def _outline(cell: PipelineCell) -> list[tuple[float, float]]:
    low, high = cell.stage - 0.42, cell.stage + 0.42
    return [(cell.start, low), (cell.end, low), (cell.end, high), (cell.start, high), (cell.start, low)]

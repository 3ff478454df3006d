"""Draw with matplotlib into SVG that stands inside a page of HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from mpizero._util.text import amount
from mpizero.errors import UnsupportedError
from mpizero.train.report.markup import Markup, joined

#: Colours that people with any kind of colour vision tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#6a51a3", "#7a3b12")
#: Others than :data:`COLOURS`, for pictures on the same page whose colours mean something else.
SECOND_COLOURS = ("#332288", "#117733", "#aa4499", "#999933", "#882255", "#5b8fa8", "#8c6d5a", "#3d3d5c")
#: The colour of a run that is alone on its page, and of its validation.
INK, VALIDATION = "#222222", "#c2417c"
#: The colour of what has none of its own.
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
        Name of the picture in the page, of letters, digits and "-".
    label : str
        What the picture shows, for people who do not see it.
    draw : callable
        Function that draws into the matplotlib figure that it is given.
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
        raise UnsupportedError(
            "a report needs matplotlib, which is not installed: pip install 'mpizero[plot]'"
        ) from None
    text = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size)
        width, height = size  # margins in inches: matplotlib's own layouts draw everything twice to find them
        figure.subplots_adjust(0.85 / width, 0.52 / height, 1 - 0.3 / width, 1 - 0.1 / height)
        draw(figure)
        figure.savefig(text, format="svg", transparent=True)
    return _embedded(text.getvalue(), name, label)


def _embedded(svg: str, name: str, label: str) -> Markup:
    """Make an SVG file an element of a page: names that no other picture has, no more digits than one sees."""
    svg = _DROPPED.sub("", svg[svg.index("<svg") :]).replace("xlink:href=", "href=")
    svg = _COORDINATES.sub(lambda found: _DIGITS.sub(r"\1", found[0]), svg)
    svg = _FONTS.sub("", svg)  # the page has one for all
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
    """Label an axis with short numbers; ``unit`` follows each, such as "B" or "ms"."""
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
    """Format a number of an axis in few characters, such as "20,000", "2 M", "1.5 MB" or "0.002"."""
    if not unit and 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{amount(value)}{unit}".strip() if abs(value) >= 10_000 else f"{value:.4g} {unit}".strip()

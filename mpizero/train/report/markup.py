"""Write HTML: plain strings are escaped wherever they are put in, only :class:`Markup` is taken as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mpizero.text import printable


class Markup(str):
    """Hold text that is HTML already."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Markup:
    """Join texts, of which those that are no :class:`Markup` are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(printable(part, keep="\n")) for part in parts))


def element(name: str, *content: str, **attributes: object) -> Markup:
    """Return an element with its content; attributes that are None are left out, and "_" in their names is "-"."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{joined([str(value)])}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(content)}</{name}>")


def listed(items: Iterable[str]) -> Markup:
    """Return an unordered list."""
    return element("ul", *(element("li", item) for item in items))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table, which scrolls sideways where it is too wide; the first cell of a row is the row's heading.

    ``head`` is empty for a table of names and values.
    """
    top = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head))) if head else ""
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    inner = joined([element("caption", caption), Markup(top), element("tbody", *body)])
    return element("div", element("table", inner), class_="wide", tabindex=0, role="region", aria_label=caption)


def figure(picture: Markup, caption: str, *more: str) -> Markup:
    """Return a figure of a picture, its caption, and ``more`` after that, such as a table of its numbers."""
    return element("figure", picture, element("figcaption", caption), *more)


def section(title: str, *content: str, level: int = 2) -> Markup:
    """Return a section with its heading; nothing if there is no content."""
    inner = joined(content)
    return element("section", element(f"h{level}", title), inner) if inner else Markup("")


def key(names: Iterable[tuple[str, str]]) -> Markup:
    """Return the meaning of colours: a list of ``(colour, name)``, with a spot of each colour."""
    return element("ul", *(element("li", spot(colour), name) for colour, name in names), class_="key")


def spot(colour: str) -> Markup:
    """Return a spot of a colour."""
    return element("span", style=f"background:{colour}", class_="spot", aria_hidden="true")

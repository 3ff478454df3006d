"""Write HTML: plain strings are escaped wherever they are put in, only :class:`Markup` is taken as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from mpizero._util.text import printable

#: Rows that are too few to be folded.
_FEW = 4
#: Folded rows at most, so that a page stays small.
_MOST_FOLDED = 500
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_NUMBER = re.compile(r"(< )?-?\d[\d,.]*(e[+-]\d+)?( [%a-zA-Zµ]{1,3})?")


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


def breakable(text: str) -> Markup:
    """Return a text that lines may break after "/" and "_", and inside hashes, but in no word."""
    if isinstance(text, Markup):
        return text
    hashed = _HASH.sub(lambda found: "<wbr>".join(re.findall(".{16}", found[0])), joined([text]))
    return Markup(re.sub("([/_])(?=[^<])", r"\1<wbr>", hashed))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table, which scrolls sideways where it is too wide; the first cell of a row is the row's heading.

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
    """Return the class of a column: "n" for numbers, "t" for long text."""
    if all(_NUMBER.fullmatch(cell) or cell in ("", "-", "…") for cell in cells):
        return "n"
    return "t" if any(len(cell) > 24 for cell in cells) else None


def scrolling(content: Markup, label: str, more: str = "") -> Markup:
    """Return content that scrolls sideways where it is too wide, with shadows where there is more."""
    return element("div", content, class_=f"wide {more}".strip(), tabindex=0, role="region", aria_label=label)


def long_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], ends: int = 6) -> Markup:
    """Return a table of the first and the last rows, and the others folded below it; whole if there are few rows."""
    if len(rows) <= 2 * ends + _FEW:
        return table(caption, head, rows)
    between = rows[ends:-ends]
    gap = ("…", *[""] * (len(head) - 1))
    shown = table(
        f"{caption}: the first {ends} and the last {ends} of {len(rows):,}", head, [*rows[:ends], gap, *rows[-ends:]]
    )
    left_out = len(between) - _MOST_FOLDED
    title = f"The {len(between):,} between them" + (f", but for the last {left_out:,}" if left_out > 0 else "")
    return joined([shown, folded(title, table(title, head, between[:_MOST_FOLDED]))])


def folded(title: str, *content: str) -> Markup:
    """Return content that is shown after a click on its title; nothing if there is no content."""
    inner = joined(content)
    return element("details", element("summary", title), inner) if inner else Markup("")


def figure(picture: Markup, caption: str, *more: str) -> Markup:
    """Return a figure of a picture, its caption, and ``more`` after that, such as a table of its numbers."""
    below = element("figcaption", caption) if caption else Markup("")
    return element("figure", picture, *more, below)


def section(title: str, *content: str, level: int = 2, name: str | None = None) -> Markup:
    """Return a section with its heading; nothing if there is no content. ``name`` is that of links to it."""
    inner = joined(content)
    return element("section", element(f"h{level}", title), inner, id=name) if inner else Markup("")


def key(names: Iterable[tuple[str, str]]) -> Markup:
    """Return the meaning of colours: a list of ``(colour, name)``, with a spot of each colour."""
    return element("ul", *(element("li", spot(colour), name) for colour, name in names), class_="key")


def spot(colour: str) -> Markup:
    """Return a spot of a colour."""
    return element("span", style=f"background:{colour}", class_="spot", aria_hidden="true")

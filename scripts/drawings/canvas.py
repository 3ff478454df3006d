"""Draw boxes, lines and text into an SVG, which looks the same wherever it is shown and asks for no font."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: One colour a rank, told apart by people with colour blindness too (Okabe and Ito 2008), and light enough for text.
RANKS = ("#8ecae6", "#f6c177", "#9bd3a7", "#d9b3e6")
INK, PALE, EMPTY, ALERT = "#1f2933", "#66727f", "#eef1f4", "#c0392b"
#: So small that a phone, 400 pixels wide, still shows the words.
WIDTH = 480


class Canvas:
    """Hold the elements of a drawing on white paper, and a sentence that says what it shows."""

    def __init__(self, height: float, said: str, width: float = WIDTH) -> None:
        self._size, self._said = (width, height), said
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = EMPTY, words: str = "") -> None:
        """Draw a box, with words in its middle; ``|`` begins a new line."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{INK}"/>'
        )
        lines = words.split("|") if words else []
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 16 * (number - (len(lines) - 1) / 2) + 4.5, line)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", color: str = INK, bold: bool = False
    ) -> None:
        """Write words; ``anchor`` is "start", "middle" or "end"."""
        weight = ' font-weight="bold"' if bold else ""
        where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text {where} fill="{color}"{weight}>{escape(words)}</text>')

    def caption(self, x: float, y: float, words: str) -> None:
        """Write words that begin at x, on a margin of paper, so that lines may pass below them."""
        margin = 'stroke="white" stroke-width="5" paint-order="stroke"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" fill="{INK}" {margin}>{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], *, color: str = INK, arrows: int = 0) -> None:
        """Draw a line through points, without an arrow, with one at its end, or with two."""
        ends = ' marker-end="url(#tip)"' * (arrows > 0) + ' marker-start="url(#tip)"' * (arrows > 1)
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{ends}/>')

    def disc(self, x: float, y: float, radius: float, fill: str) -> None:
        """Draw a disc."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" stroke="{INK}"/>')

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="sans-serif" font-size="14">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        paper = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
        return "\n".join([head, f"<title>{escape(self._said)}</title>", tip, paper, *self._parts, "</svg>", ""])

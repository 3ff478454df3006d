"""Cut the elements that peers own into what is sent as it is and what is compressed, and into segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpizero.comm.reduce.codecs import Codec
from mpizero.layout import Span

#: Some elements that a rank owns: their position in the concatenation of all that it owns, and their range.
Place = tuple[int, Span]


def places_of(spans: Sequence[Span]) -> list[Place]:
    """Return, for each of ``spans``, its position in the concatenation of all of them, and the span itself.

    Empty spans are left out. Not collective.
    """
    positions = accumulate((span.size for span in spans), initial=0)
    return [(position, span) for position, span in zip(positions, spans, strict=False) if span.size]


def elements_in(places: Sequence[Place]) -> int:
    """Return the number of elements of ``places``. Not collective."""
    return sum(span.size for _, span in places)


def in_forms(
    codec: Codec, owned: Sequence[Sequence[Place]], exact: Sequence[Span]
) -> list[tuple[Codec | None, list[list[Place]]]]:
    """Divide what each peer owns: return the places that are sent as they are, and those that ``codec`` compresses.

    ``exact`` are the ranges, ascending, that are not compressed. Not collective.
    """
    plain: list[list[Place]] = [[] for _ in owned]
    packed: list[list[Place]] = [[] for _ in owned]
    for peer, places in enumerate(owned):
        for position, span in places:
            for part, inside in span.split(exact):
                (plain if inside else packed)[peer].append((position + part.start - span.start, part))
    return [(None, plain), (codec, packed)]


def cut_places(places: Sequence[Place], low: int, high: int) -> list[Place]:
    """Return the parts of ``places`` that lie in ``low:high`` when they are put one after the other. Not collective."""
    parts, passed = [], 0
    for position, span in places:
        start, stop = max(low, passed), min(high, passed + span.size)
        if start < stop:
            inside = Span(start, stop).shift(span.start - passed)
            parts.append((position + inside.start - span.start, inside))
        passed += span.size
    return parts

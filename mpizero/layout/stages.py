"""Cut a sequence of blocks into contiguous pipeline stages: balanced by cost, or at indices that the user gives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb, isfinite

from mpizero._util.checks import is_whole
from mpizero.errors import ConfigError

#: Up to this many ways to cut, :func:`balanced_chunks` compares all of them, which takes some hundredths of a second.
EXHAUSTIVE = 10_000


def balanced_cuts(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut items into contiguous non-empty parts such that the most expensive part is as cheap as possible.

    Costs are compared exactly, as rational numbers, so every process finds the same cuts. If several ways to cut have
    an equally cheap most expensive part, the one with the least sum of the squared costs of its parts is taken. Of
    several with the same sum, the one whose last part starts earliest is taken, then the one whose second-last part
    does, and so on.

    Parameters
    ----------
    costs : sequence of float
        Cost of every item, in any unit; finite and not negative. If all costs are zero, every item counts as 1.
    parts : int
        Number of parts.

    Returns
    -------
    tuple of int
        ``parts + 1`` indices, called cuts: part i holds the items ``cuts[i]`` to ``cuts[i + 1] - 1``.

    Raises
    ------
    ConfigError
        If ``parts`` is less than 1 or more than the number of items, or a cost is negative or not finite.

    Examples
    --------
    >>> from mpizero.layout import balanced_cuts
    >>> balanced_cuts([1, 1, 1, 1, 4], 2)
    (0, 4, 5)
    """
    check_parts(len(costs), parts)
    for item, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise ConfigError(f"the cost of block {item} is {cost!r}; expected a finite number >= 0")
    sums = tuple(accumulate(_integers(costs if any(costs) else [1.0] * len(costs)), initial=0))
    return _most_even(sums, parts, _smallest_maximum(sums, parts))


def balanced_chunks(costs: Sequence[float], stage_of: Sequence[int]) -> tuple[int, ...]:
    """Cut items into contiguous non-empty chunks, of which a stage can have several, such that stages are balanced.

    With one chunk per stage the result is that of :func:`balanced_cuts`. With several chunks per stage, the most
    expensive stage is made as cheap as possible. Of several ways to cut with an equally cheap most expensive stage, the
    one with the least sum of the squared costs of the stages is taken; if there are still several, the one whose most
    expensive chunk is the cheapest. If there are at most ``EXHAUSTIVE`` ways to cut, all are compared. If there are
    more, the search starts from the result of :func:`balanced_cuts` and moves one or two cuts by one item as long as
    the result gets better; the search may then miss the best result. Every process finds the same cuts.

    Parameters
    ----------
    costs : sequence of float
        Cost of every item, as in :func:`balanced_cuts`.
    stage_of : sequence of int
        The stage of every chunk.

    Returns
    -------
    tuple of int
        ``len(stage_of) + 1`` indices: chunk i holds the items ``cuts[i]`` to ``cuts[i + 1] - 1``.

    Raises
    ------
    ConfigError
        If there are more chunks than items, or a cost is negative or not finite.

    Examples
    --------
    >>> from mpizero.layout import balanced_chunks
    >>> balanced_chunks([1, 1, 1, 1, 1, 1], (0, 1, 1, 0))
    (0, 1, 2, 4, 6)
    """
    chunks, items = len(stage_of), len(costs)
    start = balanced_cuts(costs, chunks)
    if len(set(stage_of)) == chunks:
        return start
    sums = tuple(accumulate(_integers(costs if any(costs) else [1.0] * items), initial=0))

    def judged(cuts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        stages = [0] * (max(stage_of) + 1)
        sizes = [sums[b] - sums[a] for a, b in pairwise(cuts)]
        for stage, size in zip(stage_of, sizes, strict=True):
            stages[stage] += size
        return max(stages), sum(total * total for total in stages), max(sizes), cuts

    if comb(items - 1, chunks - 1) <= EXHAUSTIVE:
        return min(judged((0, *inner, items)) for inner in combinations(range(1, items), chunks - 1))[3]
    best = judged(start)
    while (better := min((judged(cuts) for cuts in _moved(best[3])), default=best)) < best:
        best = better
    return best[3]


def _moved(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all cuts made from ``cuts`` by moving one or two inner indices up or down by 1 without an empty chunk.

    ``cuts`` holds the index of each chunk's first item, and the number of items at its end.
    """
    borders = range(1, len(cuts) - 1)
    moves = [((border, by),) for border in borders for by in (-1, 1)]
    pairs = [(*first, *second) for first, second in combinations(moves, 2) if first[0][0] != second[0][0]]
    for move in (*moves, *pairs):
        moved = list(cuts)
        for border, by in move:
            moved[border] += by
        if all(a < b for a, b in pairwise(moved)):
            yield tuple(moved)


def explicit_cuts(cuts: Sequence[int], items: int, parts: int) -> tuple[int, ...]:
    """Check the cuts (first items of parts) that a user gave, and return them with 0 before and ``items`` after them.

    Parameters
    ----------
    cuts : sequence of int
        Either ``parts - 1`` indices, those of the first items of the second part, the third part and so on; or
        ``parts + 1`` indices, with 0 before these and ``items`` after them.
    items, parts : int
        Number of items and of parts.

    Returns
    -------
    tuple of int
        ``parts + 1`` indices: part i holds the items ``cuts[i]`` to ``cuts[i + 1] - 1``.

    Raises
    ------
    ConfigError
        If there are more parts than items, or ``cuts`` does not give ``parts`` non-empty parts.

    Examples
    --------
    >>> explicit_cuts([2], items=5, parts=2)
    (0, 2, 5)
    """
    check_parts(items, parts)
    full = tuple(cuts) if len(cuts) == parts + 1 else (0, *cuts, items)
    wanted = f"expected {parts - 1} ascending indices from 1 to {items - 1}: the first block of every later stage"
    if not all(map(is_whole, full)):
        raise ConfigError(f"cuts={list(cuts)!r} are not all integers; {wanted}")
    if len(full) != parts + 1 or (full[0], full[-1]) != (0, items):
        raise ConfigError(f"cuts={list(cuts)!r} do not cut {items} blocks into {parts} stages; {wanted}")
    for part, (start, stop) in enumerate(pairwise(full)):
        if start >= stop:
            raise ConfigError(
                f"cuts={list(cuts)!r} leave stage {part} of {parts} without a block (from {start} to {stop} of "
                f"{items}); {wanted}"
            )
    return full


def check_parts(items: int, parts: int, what: str = "stages") -> None:
    """Raise an error if ``items`` items cannot be cut into ``parts`` non-empty parts.

    Parameters
    ----------
    items, parts : int
        Number of items, such as the blocks of a model, and of parts.
    what : str
        Name of the parts in the error message, in the plural.

    Raises
    ------
    ConfigError
        If there are more parts than items, or ``parts`` is less than 1. The message says which setting to change.
    """
    if parts < 1:
        raise ConfigError(f"cannot cut {items} layers into {parts} {what}; expected at least 1")
    if parts > items:
        raise ConfigError(
            f"more {what} than layers: {items} layers (blocks) cannot be cut into {parts} {what}; use at most {items} "
            f"(pipeline x virtual stages) or a model with at least {parts} blocks"
        )


def _integers(costs: Sequence[float]) -> list[int]:
    """Return all costs multiplied by the least power of two that makes all of them integers."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _smallest_maximum(sums: Sequence[int], parts: int) -> int:
    """Return the least possible cost of the most expensive part when items are cut into ``parts`` parts.

    ``sums[i]`` is the total cost of the first i items. The function finds, by bisection, the smallest bound with which
    at most ``parts`` parts are needed if each part takes items as long as its cost is not above the bound. If fewer
    parts are needed, a part can be cut further, which does not make the most expensive part more expensive, because no
    cost is negative.
    """
    items = len(sums) - 1
    low = max(b - a for a, b in pairwise(sums))
    high = sums[-1]
    while low < high:
        bound = (low + high) // 2
        start, used = 0, 0
        while start < items and used <= parts:
            start = bisect_left(sums, sums[start] + bound + 1) - 1
            used += 1
        low, high = (low, bound) if used <= parts else (bound + 1, high)
    return low


def _most_even(sums: Sequence[int], parts: int, bound: int) -> tuple[int, ...]:
    """Return the cuts with the least sum of the squared costs of the parts, where no part costs more than ``bound``.

    ``sums[i]`` is the total cost of the first i items. A cut is the index of a part's first item; the number of items
    is returned after the cuts.
    """
    items = len(sums) - 1
    best = [0, *[-1] * items]  # best[n]: least sum of squares when the first n items are cut; -1 if they cannot be
    origins = []
    for part in range(1, parts + 1):
        row, origin = [-1] * (items + 1), [0] * (items + 1)
        for stop in range(part, items - (parts - part) + 1):
            for start in range(stop - 1, part - 2, -1):
                cost = sums[stop] - sums[start]
                if cost > bound:
                    break
                squares = best[start] + cost * cost
                if best[start] >= 0 and (row[stop] < 0 or squares <= row[stop]):
                    row[stop], origin[stop] = squares, start
        best = row
        origins.append(origin)
    cuts = [items]
    for origin in reversed(origins):
        cuts.append(origin[cuts[-1]])
    return tuple(reversed(cuts))

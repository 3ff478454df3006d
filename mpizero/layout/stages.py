"""Cut a sequence of blocks into contiguous pipeline stages: balanced by cost, or where the user says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import comb, isfinite

from mpizero.errors import ConfigError
from mpizero.validation import is_whole

#: Up to this many ways to cut, :func:`balanced_chunks` compares all of them, which takes some hundredths of a second.
EXHAUSTIVE = 10_000


def balanced_cuts(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Cut items into contiguous non-empty parts such that the most expensive part is as cheap as possible.

    Costs are compared exactly, as rational numbers, so every process finds the same cuts. Several cuts may have the
    same smallest maximum. Then the one with the least sum of squared costs (the most even one) is taken, and among
    equals the one whose last parts start earliest.

    Parameters
    ----------
    costs : sequence of float
        Cost of every item, for example seconds or floating-point operations; finite and not negative. If all are
        zero, all count the same.
    parts : int
        Number of parts.

    Returns
    -------
    tuple of int
        ``parts + 1`` numbers: part i is the items ``cuts[i]`` to ``cuts[i + 1] - 1``.

    Raises
    ------
    ConfigError
        If there are more parts than items, or a cost is negative or not finite.

    Examples
    --------
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
    """Cut items into contiguous non-empty chunks, where a stage has several chunks, such that stages are balanced.

    With one chunk per stage this is :func:`balanced_cuts`. Otherwise it makes the most expensive stage as cheap as
    possible, then the stages as even as possible, then the most expensive chunk as cheap as possible. With up to
    ``EXHAUSTIVE`` ways to cut, the best one is found by trying all. With more, the borders of :func:`balanced_cuts`
    are moved, one or two at a time, as long as that helps. Every process finds the same cuts.

    Parameters
    ----------
    costs : sequence of float
        Cost of every item.
    stage_of : sequence of int
        The stage of every chunk.

    Returns
    -------
    tuple of int
        As :func:`balanced_cuts` returns them, for ``len(stage_of)`` chunks.

    Raises
    ------
    ConfigError
        As :func:`balanced_cuts`.

    Examples
    --------
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
    """Yield all cuts that differ from ``cuts`` in one or two borders, moved by one item, without empty chunks."""
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
    """Check the borders between stages that a user gave, and return them in full.

    Parameters
    ----------
    cuts : sequence of int
        Either ``parts - 1`` numbers, the index of the first item of every part but the first; or ``parts + 1`` numbers,
        the same with 0 in front and ``items`` at the end, as :func:`balanced_cuts` returns them.
    items, parts : int
        Number of items and of parts.

    Returns
    -------
    tuple of int
        ``parts + 1`` numbers, as :func:`balanced_cuts` returns them.

    Raises
    ------
    ConfigError
        If there are more parts than items, or the cuts do not give ``parts`` non-empty parts.

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
    """Raise an error if there are more parts than items.

    Parameters
    ----------
    items, parts : int
        Number of layers (blocks) and of parts.
    what : str
        What the parts are called in the message.

    Raises
    ------
    ConfigError
        If there are more parts than items, or no part; the message says what to change.
    """
    if parts < 1:
        raise ConfigError(f"cannot cut {items} layers into {parts} {what}; expected at least 1")
    if parts > items:
        raise ConfigError(
            f"more {what} than layers: {items} layers (blocks) cannot be cut into {parts} {what}; use at most {items} "
            f"(pipeline x virtual stages) or a model with at least {parts} blocks"
        )


def _integers(costs: Sequence[float]) -> list[int]:
    """Multiply all costs by the power of two that makes every one an integer (a float is a fraction over 2**n)."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    common = max(denominator for _, denominator in ratios)
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _smallest_maximum(sums: Sequence[int], parts: int) -> int:
    """Find by bisection the smallest bound under which filling parts greedily needs at most ``parts`` parts.

    If fewer parts are enough, they can be cut further without a higher maximum, because no cost is negative.
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
    """Return the cuts with the least sum of squared costs, among those where no part costs more than ``bound``."""
    items = len(sums) - 1
    best = [0, *[-1] * items]  # least sum of squares of the first items, by how many they are; -1: there is no such cut
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

"""Cutting a model into stages."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ConfigError
from mpizero.layout import balanced_chunks, balanced_cuts
from mpizero.layout.stages import check_parts, explicit_cuts


def loads(costs: list[float], cuts: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, costs[a:b]), Fraction(0)) for a, b in pairwise(cuts)]


def every_cut(items: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, items) for inner in combinations(range(1, items), parts - 1)]


@given(
    st.lists(st.floats(0, 1e6) | st.integers(0, 4).map(float), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_balanced_cuts_have_the_smallest_maximum_and_are_the_most_even_of_those(case: tuple[list[float], int]) -> None:
    costs, parts = case
    cuts = balanced_cuts(costs, parts)
    assert len(cuts) == parts + 1
    assert (cuts[0], cuts[-1]) == (0, len(costs))
    assert all(a < b for a, b in pairwise(cuts))
    found = loads(costs, cuts)
    others = [loads(costs, other) for other in every_cut(len(costs), parts)]
    assert max(found) == min(map(max, others))
    assert sum(x * x for x in found) == min(sum(x * x for x in o) for o in others if max(o) == max(found))


def test_a_hundred_blocks_of_measured_seconds_are_cut_at_once() -> None:
    costs = [1e-3 * (1 + (37 * i % 11) / 7) for i in range(100)]
    cuts = balanced_cuts(costs, 8)
    assert max(map(float, loads(costs, cuts))) < sum(costs) / 8 * 1.1


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_mean_nothing_are_refused(cost: float) -> None:
    with pytest.raises(ConfigError, match="block 1"):
        balanced_cuts([1.0, cost], 1)


def test_more_stages_than_layers_is_an_error_with_the_way_out() -> None:
    for cut in (lambda: balanced_cuts([1.0] * 4, 5), lambda: explicit_cuts([1, 2, 3, 4], 4, 5)):
        with pytest.raises(ConfigError, match="more stages than layers: 4 .* 5 .* at most 4"):
            cut()
    with pytest.raises(ConfigError, match="more chunks than layers: 4 .* 6 chunks"):
        check_parts(4, 6, what="chunks")
    with pytest.raises(ConfigError, match="at least 1"):
        balanced_cuts([1.0], 0)


def test_explicit_cuts_are_the_first_blocks_of_the_later_stages() -> None:
    assert explicit_cuts([2, 3], 6, 3) == (0, 2, 3, 6)
    assert explicit_cuts([0, 2, 3, 6], 6, 3) == (0, 2, 3, 6)
    assert explicit_cuts([], 6, 1) == (0, 6)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([2], r"\[2\] do not cut 6 blocks into 3 stages"),
        ([0, 2, 3, 5], "do not cut 6 blocks"),
        ([3, 3], "stage 1 of 3 without a block"),
        ([4, 2], "stage 1 of 3 without a block"),
        ([0, 2], "stage 0 of 3 without a block"),
        ([2, 6], "stage 2 of 3 without a block"),
        ([2.0, 3], "not all integers"),
        (["block1", 3], "not all integers"),
    ],
)
def test_explicit_cuts_that_leave_a_stage_empty_are_refused(cuts: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explicit_cuts(cuts, 6, 3)


def stage_totals(costs, stage_of, cuts):
    sizes = [sum(costs[a:b]) for a, b in pairwise(cuts)]
    return [sum(size for s, size in zip(stage_of, sizes, strict=True) if s == stage) for stage in sorted(set(stage_of))]


def test_with_one_chunk_a_stage_chunks_are_the_balanced_cuts():
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    assert balanced_chunks(costs, (0, 1, 2)) == balanced_cuts(costs, 3)


def test_the_stages_of_a_v_are_balanced_although_its_chunks_are_not():
    costs = [0.3, 10, 10, 10, 10, 10, 10, 1.2]  # embedding, six blocks, head
    assert stage_totals(costs, (0, 1, 1, 0), balanced_chunks(costs, (0, 1, 1, 0))) == pytest.approx([31.5, 30])


@given(
    st.lists(st.integers(0, 9), min_size=6, max_size=9),
    st.sampled_from([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)]),
)
def test_no_other_cut_has_a_cheaper_most_expensive_stage(costs, stage_of):
    found = max(stage_totals(costs, stage_of, balanced_chunks(costs, stage_of)))
    inner = combinations(range(1, len(costs)), len(stage_of) - 1)
    every = (stage_totals(costs, stage_of, (0, *cuts, len(costs))) for cuts in inner)
    assert not any(costs) or found == min(max(totals) for totals in every)


def test_many_blocks_are_balanced_by_moving_borders():
    costs = [1.0, *[10.0] * 60, 7.0]
    stage_of = (*range(8), *reversed(range(8)))
    cuts = balanced_chunks(costs, stage_of)
    assert max(stage_totals(costs, stage_of, cuts)) <= 80 + 1
    assert all(a < b for a, b in pairwise(cuts))

"""Parts of a node's grains that ranks claim: whole subtrees, each grain once, in rows whose number is known before."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpizero.layout.sum_tree import Folding, cover, dynamic_parts, dynamic_rows, fold_plan, rows_of_part

blocks = st.tuples(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300), st.integers(1, 9))


@given(blocks)
@settings(max_examples=100)
def test_parts_are_subtrees_that_become_smaller_and_hold_each_grain_once(block) -> None:
    start, count, more, workers = block
    parts = dynamic_parts(range(start, start + count), workers)
    assert list(itertools.chain(*parts)) == list(range(start, start + count))
    left = count
    for part in parts:
        assert [node.leaves(start + count + more) for node in cover(part.start, part.stop, start + count + more)] in (
            [part], [range(part.start, part.stop)]
        )  # fmt: skip
        assert len(part) <= max(1, left / (2 * workers))
        left -= len(part)


def test_the_number_of_parts_grows_with_the_logarithm_of_the_number_of_grains() -> None:
    for workers, count in itertools.product((1, 2, 4, 7), (64, 1024, 16384)):
        assert len(dynamic_parts(range(count), workers)) <= 2 * workers * (2 + math.log2(count))


@pytest.mark.slow
@given(blocks, st.randoms())
def test_all_parts_are_claimed_in_no_more_rows_than_told_whoever_claims_them(block, random) -> None:
    """Ranks of very different speeds; a rank with too few rows left stops for good."""
    start, count, more, workers = block
    total, parts = start + count + more, dynamic_parts(range(start, start + count), workers)
    rows = dynamic_rows(parts, workers, total)
    folds = [Folding(total, rows) for _ in range(workers)]
    speeds = [random.random() ** 3 + 1e-3 for _ in folds]
    active = list(range(workers))
    for part in parts:
        while True:
            assert active, "no rank is left to claim"
            worker = random.choices(active, [speeds[w] for w in active])[0]
            if rows_of_part(part) <= rows - len(folds[worker].sums):
                break
            active.remove(worker)
        for grain in part:
            folds[worker].add(grain)
    assert all(fold.rows <= rows for fold in folds)
    assert len(active) >= workers / 2


@pytest.mark.slow
def test_the_number_of_rows_told_is_about_what_some_claims_need() -> None:
    """All choices of parts are tried: the bound is above the need of the worst by one row at most."""
    for count, workers in ((8, 2), (13, 2), (16, 2), (16, 3)):
        parts = dynamic_parts(range(count), workers)
        chosen = (itertools.compress(parts, mask) for mask in itertools.product((0, 1), repeat=len(parts)))
        needed = max(fold_plan([g for part in some for g in part], count).rows for some in chosen)
        assert needed <= dynamic_rows(parts, workers, count) <= needed + 1


def test_many_ranks_need_rows_for_twice_their_share_of_the_parts() -> None:
    parts = dynamic_parts(range(1024), 16)
    assert dynamic_rows(parts, 16, 1024) <= 2 * len(parts) / 16 + 7

"""The canonical tree: whatever the dealing, every leaf is added once and in one order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpizero.layout import Grains, Program, TreeNode, cover, fold_plan, merge, rows_plan, wave_plan

Expression = object  # a leaf number, or a pair of expressions


def canonical(node: TreeNode, total: int) -> Expression:
    """The tree's definition, by recursion."""
    if node.level == 0:
        return node.position
    left, right = TreeNode(node.level - 1, 2 * node.position), TreeNode(node.level - 1, 2 * node.position + 1)
    if right.position << right.level >= total:
        return canonical(left, total)
    return canonical(left, total), canonical(right, total)


def root(total: int) -> Expression:
    level = 0
    while (1 << level) < total:
        level += 1
    return canonical(TreeNode(level, 0), total)


def run(program: Program, rows: Sequence[Expression]) -> Expression:
    stack: list[Expression] = []
    for v in program:
        if v >= 0:
            stack.append(rows[v])
        elif v == -1:
            right = stack.pop()
            stack[-1] = (stack[-1], right)
        else:
            stack[-1] = (stack[-1], rows[-2 - v])
    (result,) = stack
    return result


@given(st.integers(1, 200), st.data())
def test_cover_is_disjoint_complete_and_maximal(total: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    nodes = cover(start, stop, total)
    assert [leaf for node in nodes for leaf in node.leaves(total)] == list(range(start, stop))
    assert len(merge([(node, (i,)) for i, node in enumerate(nodes)], total)) == len(nodes)


@given(st.integers(1, 64), st.integers(1, 9))
def test_covers_of_any_partition_merge_into_the_canonical_root(total: int, parts: int) -> None:
    grains = Grains(total, 1)
    nodes = [n for p in range(parts) for n in cover(*_bounds(grains.assigned(p, parts)), total)]
    ((_, program),) = merge([(node, (i,)) for i, node in enumerate(nodes)], total)
    assert run(program, [canonical(n, total) for n in nodes]) == root(total)


def _bounds(r: range) -> tuple[int, int]:
    return r.start, r.stop


@given(st.integers(1, 70), st.data())
def test_streaming_fold_holds_the_cover_in_a_logarithmic_number_of_rows(total: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    plan = fold_plan(start, stop, total)
    rows: dict[int, Expression] = {}
    for grain, row, additions in plan.folds:
        rows[row] = grain
        for target, source in additions:
            rows[target] = (rows[target], rows[source])
    assert [rows[row] for _, row in plan.held] == [canonical(n, total) for n, _ in plan.held]
    assert [leaf for node, _ in plan.held for leaf in node.leaves(total)] == list(range(start, stop))
    assert plan.rows <= 2 * (stop - start).bit_length() + 1


groups = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.integers(1, 40), groups)
@settings(max_examples=150)
def test_contiguous_dealing_gives_the_canonical_root(total: int, sizes: list[int]) -> None:
    workers = sum(sizes)
    plan = rows_plan([Grains(total, 1).assigned(w, workers) for w in range(workers)], sizes, total)
    held = []
    for fold in plan.folds:
        rows: list[Expression] = [None] * plan.rows
        for grain, row, additions in fold.folds:
            rows[row] = grain
            for target, source in additions:
                rows[target] = (rows[target], rows[source])
        held += rows
    if len(sizes) == 1:
        assert plan.arrivals == len(held)
        assert run(plan.root, held) == root(total)
        return
    arrived, first = [], 0
    for size, programs in zip(sizes, plan.group_programs, strict=True):
        mine = held[first * plan.rows : (first + size) * plan.rows]
        arrived += [run(program, mine) for program in programs]
        first += size
    assert len(arrived) == plan.arrivals
    assert run(plan.root, arrived) == root(total)


@given(st.integers(1, 40), groups)
@settings(max_examples=150)
def test_dealing_in_waves_gives_the_canonical_root(total: int, sizes: list[int]) -> None:
    plan = wave_plan(total, sizes)
    stack: list[Expression] = [None] * plan.rows
    seen: list[int] = []
    for wave in plan.waves:
        seen += [g for g in wave.grains if g is not None]
        arrived: list[Expression] = list(wave.grains)
        if len(sizes) > 1:
            arrived, first = [], 0
            for size, programs in zip(sizes, wave.group_programs, strict=True):
                arrived += [run(program, wave.grains[first : first + size]) for program in programs]
                first += size
        assert len(arrived) == wave.arrivals
        for row, program in wave.merges:  # in place, one after the other, as the kernels do it
            stack[row] = run(program, [*arrived, *stack])
    assert seen == list(range(total))
    assert stack[plan.root] == root(total)
    assert plan.rows <= total.bit_length() + 1


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_one_grain_a_worker_needs_one_row_and_one_buffer(workers: int) -> None:
    assert wave_plan(workers, [workers]).rows == 1
    assert rows_plan([range(w, w + 1) for w in range(workers)], [1] * workers, workers).rows == 1

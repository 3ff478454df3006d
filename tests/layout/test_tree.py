"""The canonical tree: whatever the dealing, every leaf is added once and in one order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpizero.layout import Grains
from mpizero.layout.sum_tree import FoldStep, Program, TreeNode, cover, fold_plan, merge, round_plan, rows_plan

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


def folded(folds: Sequence[FoldStep], rows: list[Expression]) -> list[Expression]:
    """What ``rows`` hold after the steps."""
    for grain, row, targets in folds:
        assert row is not None or targets
        value: Expression = grain
        if row is not None:
            rows[row] = value
        for target in targets:
            value = rows[target] = (rows[target], value)
    return rows


@given(st.integers(1, 70), st.data())
def test_streaming_fold_holds_the_cover_in_a_logarithmic_number_of_rows(total: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    plan = fold_plan(range(start, stop), total, limit=data.draw(st.none() | st.integers(0, 7)))
    rows = folded(plan.folds, [None] * plan.rows)
    assert [rows[row] for _, row in plan.sums] == [canonical(n, total) for n, _ in plan.sums]
    assert [leaf for node, _ in plan.sums for leaf in node.leaves(total)] == list(range(start, stop))
    assert plan.rows <= 2 * (stop - start).bit_length() + 1


@given(st.integers(1, 300), st.integers(0, 9))
def test_without_rows_for_right_children_the_first_k_grains_need_log2_of_k_plus_1_rows(count: int, more: int) -> None:
    """With them one row more where k is a power of two, else as many or one more."""
    fewest, most = fold_plan(range(count), count + more, limit=0), fold_plan(range(count), count + more)
    assert fewest.rows <= (count + 1).bit_length() - 1
    assert fewest.rows <= most.rows <= count.bit_length()
    assert fold_plan(range(count), count + more, limit=fewest.rows).rows == fewest.rows
    assert fold_plan(range(count), count + more, limit=most.rows) == most
    if count > 1 and count & (count - 1) == 0:
        assert (fewest.rows, most.rows) == (count.bit_length() - 1, count.bit_length())


groups = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.integers(1, 40), groups, st.booleans(), st.sampled_from([1, 1, 2, 3, 4]))
@settings(max_examples=50)
def test_contiguous_dealing_gives_the_canonical_root(
    total: int, sizes: list[int], scratch: bool, contexts: int
) -> None:
    """With several contexts, each worker has one part of each of its grains, and none of the parts beside it."""
    owned = [Grains(total, 1).assigned(w, sum(sizes)) for w in range(sum(sizes))]
    assigned = [range(g.start * contexts + c, g.stop * contexts + c, contexts) for g in owned for c in range(contexts)]
    total, sizes = total * contexts, [1] * len(assigned) if scratch and contexts > 1 else [n * contexts for n in sizes]
    plan = rows_plan(assigned, sizes, total, scratch=scratch)
    assert contexts == 1 or plan.rows == max(1, *map(len, owned))
    held = []
    for fold in plan.folds:
        held += folded(fold.folds, [None] * plan.rows)
    # Where a rank takes a scratch array, all ranks have one row less for it.
    used = any(fold.uses_scratch for fold in plan.folds)
    assert plan.rows + used <= rows_plan(assigned, sizes, total).rows
    assert scratch or not used
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
@settings(max_examples=50)
def test_dealing_in_waves_gives_the_canonical_root(total: int, sizes: list[int]) -> None:
    plan = round_plan(total, sizes)
    stack: list[Expression] = [None] * plan.rows
    seen: list[int] = []
    for wave in plan.rounds:
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
    assert round_plan(workers, [workers]).rows == 1
    assert rows_plan([range(w, w + 1) for w in range(workers)], [1] * workers, workers).rows == 1

"""Space is divided into tiles and cut into boxes of whole tiles, whatever its extents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import GridError
from mpizero.layout.fields import TILES, Cut, axis_pieces, bounds, inside, morton, tile_boxes, tree_sum
from mpizero.layout.sum_tree import Leaves, evaluate, leaves_program, round_plan, rows_plan

EXTENTS = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
CUTS = st.integers(1, 3).flatmap(lambda axes: st.tuples(*[st.integers(1, TILES[axes])] * axes))


def counted(space, boxes):
    found = np.zeros(space, int)
    for box in boxes:
        found[box] += 1
    return found


@given(EXTENTS)
def test_tiles_divide_space(space):
    boxes = tile_boxes(space)
    assert len(boxes) == TILES[len(space)] ** len(space)
    assert (counted(space, boxes) == 1).all()


@given(st.integers(1, 300))
def test_a_tile_of_a_coarse_axis_begins_within_a_position_of_where_the_fine_one_does(extent):
    fine, coarse = bounds(extent, 8), bounds(-(-extent // 2), 8)
    assert all(0 <= b - -(-a // 2) <= 1 for a, b in zip(fine, coarse, strict=True))


def test_tiles_are_numbered_by_bits_that_take_turns():
    rows = [[morton((row, column), 4) for column in range(4)] for row in range(4)]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@given(CUTS, st.data())
def test_each_rank_has_whole_tiles_which_few_nodes_of_the_tree_cover(parts, data):
    cut, axes = Cut(parts), len(parts)
    space = data.draw(st.tuples(*[st.integers(1, 30)] * axes))
    assert (counted(space, [cut.box(space, rank) for rank in range(cut.size)]) == 1).all()
    tiles, numbers = tile_boxes(space), []
    for rank in range(cut.size):
        own = [number for node in cut.nodes(rank) for number in node.leaves(len(tiles))]
        inside_box = counted(space, [cut.box(space, rank)])
        assert all(inside_box[tiles[number]].all() for number in own)
        numbers += own
    assert sorted(numbers) == list(range(len(tiles)))


def test_halves_and_quarters_of_space_are_one_node():
    assert [len(Cut(parts).nodes(rank)) for parts in ((2, 1), (2, 2), (4, 4), (2, 2, 2)) for rank in (0, -1)] == [1] * 8


@pytest.mark.parametrize("parts", [(), (9,), (5, 1, 1), (1, 0), (2, 2, 2, 2)])
def test_a_cut_finer_than_the_tiles_is_refused(parts):
    with pytest.raises(GridError, match="at most as many parts as it has tiles"):
        Cut(parts)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(-7, 20), st.integers(0, 15), st.data())
def test_each_wanted_position_is_found_where_it_is(sizes, low, count, data):
    starts = tuple(int(n) for n in np.cumsum([0, *sizes]))
    extent = starts[-1]
    if not extent:
        return
    mode = data.draw(st.sampled_from(["zeros", "periodic", "reflect"]))
    if mode == "reflect":  # as far as a reflection goes
        low, count = max(low, 1 - extent), min(count, 2 * extent - 1 - max(low, 1 - extent))
    axis = [np.arange(a, b) for a, b in pairwise(starts)]
    found = np.full(max(count, 0), -1)
    for piece in axis_pieces(starts, low, low + count, mode):
        first, step = piece.source
        at = [first + step * i for i in range(piece.length)]
        found[piece.target : piece.target + piece.length] = axis[piece.part][at]
    expected = [inside(position, extent, mode) for position in range(low, low + count)]
    assert found.tolist() == [-1 if at is None else at for at in expected]


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_values_are_added_as_the_leaves_of_the_tree(count):
    values = np.random.default_rng(count).normal(size=count)
    assert tree_sum(values, np.add) == evaluate(leaves_program(count), values)


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 5), st.data())
def test_grains_are_added_in_one_order_however_many_parts_they_have(grains, parts, replicas, data):
    """Each grain's sum stands in one of its parts; the others are zero."""
    values = np.random.default_rng(grains).normal(size=grains)
    rows = np.zeros(grains * parts)
    for grain, value in enumerate(values):
        rows[grain * parts + data.draw(st.integers(0, parts - 1))] = value
    expected = evaluate(leaves_program(grains), values)
    leaves, workers = Leaves(grains * parts, parts), replicas * parts
    share = -(-grains // replicas)
    assigned = [
        [grain * parts + part for grain in range(r * share, min((r + 1) * share, grains))]
        for r in range(replicas)
        for part in range(parts)
    ]
    plan = rows_plan(assigned, [workers], leaves)
    stored = np.zeros(workers * plan.rows)
    for worker, folds in enumerate(plan.folds):
        for step in folds.folds:
            value, row = rows[step.grain], step.row
            stored[worker * plan.rows + row] = value
            for target in step.targets:
                stored[worker * plan.rows + target] += value
                value = stored[worker * plan.rows + target]
    assert evaluate(plan.root, stored) == expected

    rounds = round_plan(leaves, [workers])
    stack = np.zeros(rounds.rows)
    for one in rounds.rounds:
        arrived = np.array([0.0 if part is None else rows[part] for part in one.grains])
        for merge in one.merges:
            stack[merge.row] = evaluate(merge.program, np.concatenate([arrived, stack]))
    assert stack[rounds.root] == expected

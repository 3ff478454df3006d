from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.kernels.cpu import update
from tests.kernels.cases import IN_ONE_PASS, ROUNDS, UPDATES
from tests.support.reference import update as reference

DTYPES = (np.float32, np.float64)
PROGRAMS = (
    [0],
    [4],
    [0, -3],
    [3, -2],
    [1, 2, -1],
    [0, -3, 2, -5, -1],
    [0, -3, 2, -5, -1, -6],
    [4, 3, 2, 1, -2, -1, -1, -1],
    ROUNDS,
)


def trees(rows):
    """Expression trees over row numbers: a number, or a pair of trees."""
    return st.recursive(st.integers(0, rows - 1), lambda inner: st.tuples(inner, inner), max_leaves=12)


def program_of(tree, rounds):
    """The program that adds up a tree, and rounds each sum to bfloat16 if it should."""
    if not isinstance(tree, tuple):
        return [tree]
    left, right = (program_of(side, rounds) for side in tree)
    return [*left, *([-2 - right[0]] if len(right) == 1 else [*right, -1]), *[update.ROUND] * rounds]


def value_of(tree, rows, rounds):
    if not isinstance(tree, tuple):
        return rows[tree]
    total = value_of(tree[0], rows, rounds) + value_of(tree[1], rows, rounds)
    if rounds:
        reference.round_bfloat16(total)
    return total


def random_rows(dtype, rows_a=2, rows_b=3, columns=64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (rows_a, columns), (rows_b, columns + 9)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "each sum rounded to bfloat16"])
@given(tree=trees(5), start=st.integers(0, 40), stop=st.integers(0, 60))
def test_a_program_adds_in_the_order_of_its_tree(rounds, tree, start, stop):
    rows_a, rows_b = random_rows(np.float32)
    out = np.full(60, 9, np.float32)
    program, divisor = np.array(program_of(tree, rounds), np.int32), np.array([3], np.float32)
    update.tree_sum(rows_a, 4, rows_b, 11, program, divisor, out, start, stop)
    expected = np.full(60, 9, np.float32)
    rows = [*rows_a[:, 4:64], *rows_b[:, 11:71]]
    expected[start:stop] = (value_of(tree, rows, rounds) / divisor[0])[start:stop]
    assert out.tobytes() == expected.tobytes()


def test_the_result_may_overwrite_one_of_the_rows():
    rows, none = random_rows(np.float32, rows_a=3, columns=5000)[0], np.empty((0, 0), np.float32)
    expected = (rows[0] + rows[1]) + rows[2]
    update.tree_sum(rows, 0, none, 0, np.array([0, -3, -4], np.int32), np.ones(1, np.float32), rows[1], 0, 5000)
    assert rows[1].tobytes() == expected.tobytes()


def test_the_stack_holds_as_many_rows_as_promised():
    rows, none = random_rows(np.float64, rows_a=update.DEPTH, columns=3)[0], np.empty((0, 0))
    program = [*range(update.DEPTH), *[-1] * (update.DEPTH - 1)]
    expected = rows[-1]
    for row in rows[-2::-1]:
        expected = row + expected
    out = np.empty(3)
    update.tree_sum(rows, 0, none, 0, np.array(program, np.int32), np.ones(1), out, 0, 3)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 5000])
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_one_pass_has_the_bits_of_sum_then_update(name, size, dtype):
    slots, scalars = UPDATES[name]
    rows, start = random_rows(dtype, rows_a=5, columns=size + 5)[0], size // 7
    for program in PROGRAMS[:: 1 if size == 7 else 3]:
        row_sum = np.array(program, np.int32), np.array([5], dtype)
        fast = list(np.abs(np.random.default_rng(size).standard_normal((1 + slots, size))).astype(dtype))
        slow, g, hyper = [a.copy() for a in fast], np.zeros(size, dtype), np.array(scalars, dtype)
        getattr(update, f"{name}_tree")(rows, 1, *row_sum, *fast, hyper, start, size)
        update.tree_sum(rows, 1, rows[:0], 0, *row_sum, g, start, size)
        getattr(update, name)(slow[0], g, *slow[1:], hyper, start, size)
        assert [a.tobytes() for a in fast] == [a.tobytes() for a in slow]


@pytest.mark.parametrize("size", [0, 7, 5000])
def test_directions_in_one_pass_have_the_bits_of_sum_then_direction_also_over_a_row(size):
    hyper, row_sum = (
        np.array(UPDATES["lamb_direction"][1], np.float32),
        (np.array([0, -3, 1, -1], np.int32), np.full(1, 5, np.float32)),
    )
    rng = np.random.default_rng(size)
    rows = rng.standard_normal((2, size + 3)).astype(np.float32)
    w, m, v = np.abs(rng.standard_normal((3, size))).astype(np.float32)
    expected = [np.zeros(size, np.float32), m.copy(), v.copy()]
    update.tree_sum(rows, 3, rows[:0], 0, *row_sum, expected[0], 0, size)
    update.lamb_direction(w, *expected, hyper, 0, size)
    u = rows[0, 3:]
    update.lamb_direction_tree(rows, 3, *row_sum, w, u, m, v, hyper, 0, size)
    assert [a.tobytes() for a in (u, m, v)] == [a.tobytes() for a in expected]

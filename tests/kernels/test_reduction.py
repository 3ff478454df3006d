from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpizero.kernels.cpu import reduction
from mpizero.kernels.matmul_tile import fold, sums_of_parts
from mpizero.layout.sum_tree import cover, merge

DTYPES = (np.float32, np.float64)


def node(values, level, index):
    """The definition: a leaf, or left + right, or left alone where right is missing."""
    if level == 0:
        return values[index]
    left = node(values, level - 1, 2 * index)
    return left + node(values, level - 1, 2 * index + 1) if (2 * index + 1) << (level - 1) < len(values) else left


def test_a_sum_has_the_same_bits_wherever_the_range_is_cut_at_nodes():
    size, x = 5000, np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    whole = np.empty(1)
    reduction.tree_square_sums(x, np.array([0]), np.array([size]), whole)
    for cut in (1, 1024, 1537, 4999):
        nodes = [*cover(0, cut, size), *cover(cut, size, size)]
        leaves = [n.leaves(size) for n in nodes]
        parts = np.empty(len(nodes))
        reduction.tree_square_sums(x, np.array([r.start for r in leaves]), np.array([r.stop for r in leaves]), parts)
        ((_, program),) = merge([(n, (i,)) for i, n in enumerate(nodes)], size)
        stack = []
        for code in program:
            if code >= 0:
                stack.append(parts[code])
            else:
                right = stack.pop() if code == -1 else parts[-2 - code]
                stack[-1] = stack[-1] + right
        assert stack == [whole[0]]


def test_squares_of_large_float32_numbers_do_not_overflow():
    x, out = np.full(3, 1e30, np.float32), np.empty(1)
    reduction.tree_square_sums(x, np.array([0]), np.array([3]), out)
    np.testing.assert_allclose(out, 3e60, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_value_that_is_not_finite_is_found(bad):
    for size in (1, 7, 1023, 5000):
        x = np.full(size, np.finfo(np.float32).max, np.float32)
        assert reduction.all_finite(x)
        assert reduction.first_nonfinite(x) == -1
        for place in {0, size // 2, size - 1}:
            y = x.copy()
            y[place:] = bad
            assert not reduction.all_finite(y)
            assert reduction.first_nonfinite(y) == place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 3, 5, 8])
def test_arrays_are_added_in_the_order_of_the_tree(terms, dtype):
    arrays = np.random.default_rng(terms).standard_normal((terms, 3, 5, 4)).astype(dtype)
    expected = node(arrays, (terms - 1).bit_length(), 0)
    for axis, sizes in ((0, (1, 2)), (1, (5,)), (1, (2, 1, 2)), (2, (1, 0, 3))):
        parts = np.split(expected, np.cumsum(sizes)[:-1], axis)
        for given in (arrays, np.asfortranarray(arrays)):
            for part, found in zip(parts, sums_of_parts(list(given), axis, sizes), strict=True):
                assert_array_equal(found, part)
    first = list(arrays)
    fold(np.add, first, first[0])
    assert_array_equal(first[0], expected)

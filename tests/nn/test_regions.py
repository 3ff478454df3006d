"""Each movement of data is proven by its adjoint: <A x, y> = <x, A' y>."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpizero.nn.tensor_parallel import Copy, Expand, Gather, Reduce, Scatter, Split, complete
from tests.nn.groups import on_ranks


@pytest.fixture(params=[1, 2, 5])
def on_every_rank(request):
    """Run a specification ``(group)`` on every rank of a group of threads."""
    return lambda specification: on_ranks(request.param, specification)


def of_all_axes():
    """Axes, and the length of each: fewer than ranks, even and uneven."""
    return product((0, 1, -1), (1, 4, 7))


def arrays(group, shape, whole, seed):
    """Random values: the same on every rank of a whole array, others on each rank of parts or terms."""
    return np.random.default_rng([seed, 0 if whole else group.rank + 1]).normal(size=shape)


def require_adjoint(group, region, x, y, whole):
    """``whole`` says of input and output whether they are the same on every rank, where one counts for all."""
    input_counts, output_counts = (group.rank == 0 or not same for same in whole)
    ax, ay = region.forward(x), region.backward(y)
    assert (ax.shape, ay.shape) == (y.shape, x.shape)
    left, right = np.vdot(ax, y) * output_counts, np.vdot(x, ay) * input_counts
    sums = group.all_reduce(np.array([left, right, np.linalg.norm(x) * np.linalg.norm(y)]))
    assert abs(sums[0] - sums[1]) <= 1e-12 * (abs(sums[0]) + sums[2])
    return ax, ay


def require_same_everywhere(group, array):
    everywhere = group.all_gather(array.reshape(1, -1), 0, [1] * group.size)
    assert (everywhere == everywhere[0]).all(), "whole arrays differ between ranks"


def test_copy_and_reduce_are_adjoint(on_every_rank):
    def specification(group):
        whole, terms = arrays(group, (3, 4), True, 1), arrays(group, (3, 4), False, 2)
        kept, summed = require_adjoint(group, Copy(group), whole, terms, (True, False))
        assert kept is whole
        require_same_everywhere(group, summed)
        summed, kept = require_adjoint(group, Reduce(group), terms, whole, (False, True))
        assert kept is whole
        require_same_everywhere(group, summed)

    on_every_rank(specification)


def test_gather_and_split_are_adjoint(on_every_rank):
    def specification(group):
        for axis, length in of_all_axes():
            region, shape = Gather(group, axis, length), [2, 3, 5]
            shape[axis] = length
            whole = arrays(group, shape, True, 1)
            shape[axis] = region.local_slice.stop - region.local_slice.start
            parts = arrays(group, shape, False, 2)
            joined, own = require_adjoint(group, region, parts, whole, (False, True))
            require_same_everywhere(group, joined)
            np.testing.assert_array_equal(region.take(joined), parts)
            np.testing.assert_array_equal(own, region.take(whole))
            require_adjoint(group, Split(group, axis, length), whole, parts, (True, False))
            np.testing.assert_array_equal(Gather(group, axis, length).forward(own), whole)

    on_every_rank(specification)


def test_expand_and_scatter_are_adjoint(on_every_rank):
    def specification(group):
        for axis, length in of_all_axes():
            region, shape = Expand(group, axis, length), [2, 3, 5]
            shape[axis] = length
            terms = arrays(group, shape, False, 1)
            shape[axis] = region.local_slice.stop - region.local_slice.start
            parts = arrays(group, shape, False, 2)
            joined, own = require_adjoint(group, region, parts, terms, (False, False))
            require_same_everywhere(group, joined)
            scattered, _ = require_adjoint(group, Scatter(group, axis, length), terms, parts, (False, False))
            np.testing.assert_array_equal(scattered, own)
            np.testing.assert_array_equal(scattered, region.take(Reduce(group).forward(terms)))

    on_every_rank(specification)


def test_shared_gradients_are_completed_in_one_message(on_every_rank):
    def specification(group):
        terms = [arrays(group, shape, False, seed) for seed, shape in enumerate([(3,), (), (2, 2), (0,)])]
        sums = [group.all_reduce(term) for term in terms]
        group.counts.clear()
        complete(group, terms, "shared")
        complete(group, [], "nothing")
        assert dict(group.counts) == {"all_reduce": 1}
        for term, total in zip(terms, sums, strict=True):
            np.testing.assert_array_equal(term, total)

    on_every_rank(specification)

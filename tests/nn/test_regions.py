"""Each movement of data is proven by its adjoint: <A x, y> = <x, A' y>."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.nn.tensor_parallel import Copy, Expand, Gather, Reduce, Scatter, Split, complete
from mpizero.testing import parallel_assert, run_in_threads

LENGTHS = [1, 4, 7]  # fewer than ranks, even and uneven


@pytest.fixture(params=[pytest.param("mpi", marks=pytest.mark.mpi), *(f"{n}-threads" for n in (1, 2, 3, 5))])
def groups(request):
    """Run a specification ``(comm, group)`` on every rank."""
    if request.param == "mpi":
        world = request.getfixturevalue("world")
        return lambda specification: specification(world, CommunicatorGroup(world))
    size = int(request.param[0])
    return lambda specification: run_in_threads(size, lambda comm: specification(comm, CommunicatorGroup(comm)))


def on_all_axes(check):
    """Make a specification of a check of one axis and length."""

    def specification(comm, group):
        for axis, length in product((0, 1, -1), LENGTHS):
            check(comm, group, axis, length)

    return specification


def arrays(group, shape, whole, seed):
    """Random values: the same on every rank of a whole array, others on each rank of parts or terms."""
    return np.random.default_rng([seed, 0 if whole else group.rank + 1]).normal(size=shape)


def dot(comm, a, b, whole):
    """The scalar product of distributed arrays: over all ranks, a whole array counted once."""
    total = np.array([np.vdot(a, b)])
    if not whole:
        comm.allreduce(total)
    return float(total[0])


def require_adjoint(comm, region, x, y, whole):
    """``whole`` says of input and output whether they are the same on every rank."""
    ax, ay = region.forward(x), region.backward(y)
    assert ax.shape == y.shape
    assert ay.shape == x.shape
    left, right = dot(comm, ax, y, whole[1]), dot(comm, x, ay, whole[0])
    parallel_assert(comm, abs(left - right) <= 1e-12 * (abs(left) + np.linalg.norm(x) * np.linalg.norm(y)))
    return ax, ay


def require_same_everywhere(comm, array):
    parallel_assert(comm, len(set(comm.allgather_object(array.tobytes()))) == 1, "whole arrays differ between ranks")


def test_copy_and_reduce_are_adjoint(groups):
    def specification(comm, group):
        whole, terms = arrays(group, (3, 4), True, 1), arrays(group, (3, 4), False, 2)
        kept, summed = require_adjoint(comm, Copy(group), whole, terms, (True, False))
        assert kept is whole
        require_same_everywhere(comm, summed)
        summed, kept = require_adjoint(comm, Reduce(group), terms, whole, (False, True))
        assert kept is whole
        require_same_everywhere(comm, summed)

    groups(specification)


def test_gather_and_split_are_adjoint(groups):
    def check(comm, group, axis, length):
        shape = [2, 3, 5]
        shape[axis] = length
        region = Gather(group, axis, length)
        whole = arrays(group, shape, True, 1)
        shape[axis] = region.own.stop - region.own.start
        parts = arrays(group, shape, False, 2)
        joined, own = require_adjoint(comm, region, parts, whole, (False, True))
        require_same_everywhere(comm, joined)
        np.testing.assert_array_equal(region.take(joined), parts)
        np.testing.assert_array_equal(own, region.take(whole))
        require_adjoint(comm, Split(group, axis, length), whole, parts, (True, False))
        np.testing.assert_array_equal(Gather(group, axis, length).forward(own), whole)

    groups(on_all_axes(check))


def test_expand_and_scatter_are_adjoint(groups):
    def check(comm, group, axis, length):
        shape = [2, 3, 5]
        shape[axis] = length
        terms = arrays(group, shape, False, 1)
        region = Expand(group, axis, length)
        shape[axis] = region.own.stop - region.own.start
        parts = arrays(group, shape, False, 2)
        joined, own = require_adjoint(comm, region, parts, terms, (False, False))
        require_same_everywhere(comm, joined)
        scattered, _ = require_adjoint(comm, Scatter(group, axis, length), terms, parts, (False, False))
        np.testing.assert_array_equal(scattered, own)
        np.testing.assert_array_equal(scattered, region.take(Reduce(group).forward(terms)))

    groups(on_all_axes(check))


def test_shared_gradients_are_completed_in_one_message(groups):
    def specification(comm, group):
        terms = [arrays(group, shape, False, seed) for seed, shape in enumerate([(3,), (), (2, 2), (0,)])]
        sums = [group.all_reduce(term) for term in terms]
        group.counts.clear()
        complete(group, terms, "shared")
        assert dict(group.counts) == {"all_reduce": 1}
        for term, total in zip(terms, sums, strict=True):
            np.testing.assert_array_equal(term, total)
        complete(group, [], "nothing")
        assert dict(group.counts) == {"all_reduce": 1}

    groups(specification)

"""What own layers of fields are made of has exact adjoints on every cut, and moves and adds what one process does."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpizero import nn
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import ArgumentError, ConfigError, DataError, GridError
from mpizero.layout.fields import Cut
from mpizero.nn.space import Domain
from mpizero.testing import adjoint_test, run_in_threads

#: Cuts, and fields of odd extents; some have parts that are narrower than the widths below.
FIELDS = [
    ((1,), (9,)),
    ((3,), (13,)),
    ((8,), (8,)),
    ((1, 3), (7, 11)),
    ((2, 2), (9, 5)),
    ((3, 2), (7, 13)),
    ((4, 2), (3, 5)),
    ((2, 2, 2), (5, 7, 3)),
]
WIDTHS = [0, 1, 3, ((2, 0), 1, (0, 4))]


def field(space: tuple[int, ...], seed: int = 0, samples: int = 2, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, *space, channels))


def on_ranks(cut: tuple[int, ...], function: Any) -> list[Any]:
    """Call ``function(domain, comm)`` on the ranks of a domain."""
    return run_in_threads(Cut(cut).size, lambda comm: function(Domain(Cut(cut), CommunicatorGroup(comm)), comm))


def part(cut: tuple[int, ...], rank: int, whole: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(whole[(slice(None), *Cut(cut).box(whole.shape[1:-1], rank))])


def by_axis(widths: Any, axes: int) -> list[tuple[int, int]]:
    return [
        (w, w) if isinstance(w, int) else w for w in ([widths] * axes if isinstance(widths, int) else widths[:axes])
    ]


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(("cut", "space"), FIELDS, ids=str)
def test_a_halo_is_what_lies_around_a_part_and_has_an_adjoint(cut, space, periodic):
    whole, axes = field(space), len(space)
    for widths in WIDTHS:
        sides = by_axis(widths, axes)
        wide = np.pad(whole, [(0, 0), *sides, (0, 0)], mode="wrap" if periodic else "constant")

        def check(domain, comm, sides=sides, wide=wide):
            x = part(cut, domain.rank, whole)
            halo = partial(nn.halo_exchange, widths=sides, periodic=periodic, group=domain)
            back = partial(nn.halo_exchange_adjoint, widths=sides, periodic=periodic, group=domain)
            found, box = halo(x), Cut(cut).box(space, domain.rank)
            here = (slice(p.start, p.stop + b + a) for p, (b, a) in zip(box, sides, strict=True))
            np.testing.assert_array_equal(found, wide[(slice(None), *here)])
            adjoint_test(halo, back, x, np.random.default_rng(comm.rank).normal(size=found.shape), comm, rtol=1e-14)

        on_ranks(cut, check)


@pytest.mark.parametrize(
    ("source", "target", "space"),
    [
        ((3,), (1,), (13,)),
        ((2, 2), (1, 4), (9, 5)),
        ((2, 2), (1, 1), (9, 5)),
        ((1, 3), (3, 1), (2, 7)),
        ((3, 2), (2, 3), (7, 13)),
        ((2, 2, 2), (4, 2, 1), (5, 7, 3)),
        ((1, 1), (1, 1), (4, 3)),
    ],
)
def test_a_field_is_cut_in_another_way_and_back(source, target, space):
    whole = field(space)

    def check(domain, comm):
        x, aim = part(source, domain.rank, whole), part(target, domain.rank, whole)
        there = partial(nn.redistribute, source=None, target=target, group=domain)
        np.testing.assert_array_equal(there(x), aim)
        if Cut(target).size == comm.size:
            np.testing.assert_array_equal(nn.redistribute(aim, target, source, group=domain), x)
        dy = np.random.default_rng(comm.rank).normal(size=aim.shape)
        back = partial(nn.redistribute_adjoint, source=source, target=target, group=domain)
        adjoint_test(there, back, x, dy, comm, rtol=1e-14)

    on_ranks(source, check)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("cut", "space"), FIELDS, ids=str)
def test_a_sum_over_space_has_the_bits_of_one_process_and_an_adjoint(cut, space, dtype):
    u, v = field(space).astype(dtype), field(space, 1, channels=1).astype(dtype)
    fields = u, v

    def weighted(u, v):
        return (u * v).sum(axis=tuple(range(u.ndim - 1)))

    plain, products = nn.domain_sum(u), nn.domain_sum(fields, weighted)
    np.testing.assert_allclose(plain, u.sum(axis=tuple(range(1, u.ndim - 1))), rtol=1e-4)

    def check(domain, comm):
        parts = [part(cut, domain.rank, one) for one in fields]
        np.testing.assert_array_equal(nn.domain_sum(parts[0], group=domain), plain)
        np.testing.assert_array_equal(nn.domain_sum(parts, weighted, group=domain), products)
        if dtype == "f8":
            dy = np.random.default_rng(comm.rank).normal(size=plain.shape)
            back = partial(nn.domain_sum_adjoint, shape=parts[0].shape, group=domain)
            adjoint_test(partial(nn.domain_sum, group=domain), back, parts[0], dy, comm, rtol=1e-14)
        return nn.domain_sum(parts, weighted, group=domain, share=True)

    np.testing.assert_array_equal(sum(on_ranks(cut, check)), products)


def test_a_halo_may_be_wider_than_the_periodic_field():
    u = np.arange(3.0).reshape(1, 3, 1)
    assert nn.halo_exchange(u, [(4, 5)], periodic=True).ravel().tolist() == [2, *[0, 1, 2] * 3, 0, 1]


def test_axes_may_differ_in_what_is_outside():
    x = field((4, 3), samples=1, channels=1)
    found = nn.halo_exchange(x, 1, periodic=(False, True))[0, ..., 0]
    expected = np.pad(np.pad(x[0, ..., 0], [(0, 0), (1, 1)], mode="wrap"), [(1, 1), (0, 0)])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ConfigError, r"widths=\(1, 2, 3\) .* one for each of the 2 axes", lambda x: nn.halo_exchange(x, (1, 2, 3))),
        (ConfigError, r"widths=-1 .* a whole number >= 0", lambda x: nn.halo_exchange(x, -1)),
        (ConfigError, r"widths=\[1, \(1, 2, 3\)\]", lambda x: nn.halo_exchange(x, [1, (1, 2, 3)])),
        (
            ConfigError,
            r"periodic=\(True,\) has 1 values for 2 axes",
            lambda x: nn.halo_exchange(x, 1, periodic=(True,)),
        ),
        (DataError, "takes fields", lambda x: nn.halo_exchange(x[0, 0], 1)),
        (DataError, "fewer than the widths", lambda x: nn.halo_exchange_adjoint(x, 3)),
        (DataError, "has no positions", lambda x: nn.halo_exchange(x[:, :0], 1)),
        (GridError, r"target=\(2, 2\) makes 4 parts .* ranks, 1", lambda x: nn.redistribute(x, None, (2, 2))),
        (GridError, r"source=\(1,\) .* of the field's 2 axes", lambda x: nn.redistribute(x, (1,), None)),
        (DataError, "the same samples and positions", lambda x: nn.domain_sum([x, x[:, 1:]])),
        (DataError, r"has \(1, 3\)", lambda x: nn.domain_sum_adjoint(np.ones(3), x.shape)),
        (ArgumentError, "did you mean 'widths'", lambda x: nn.halo_exchange(x, width=1)),
    ],
)
def test_wrong_uses_are_told(error, message, call):
    with pytest.raises(error, match=message):
        call(field((5, 4), samples=1))


def test_a_part_of_the_wrong_size_is_told_on_all_ranks():
    def wrong(domain, comm):
        with pytest.raises(DataError, match=r"halo_exchange: rank 0 of the domain 1 x 3 .* mesh\.slab"):
            nn.halo_exchange(field((4, 2 + comm.rank)), 1, group=domain)

    on_ranks((1, 3), wrong)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, other, domain: nn.halo_exchange(x, [(1 + other, 0)], group=domain), r"widths=\[\(2, 0\)\]"),
        (lambda x, other, domain: nn.halo_exchange(x, 1, periodic=bool(other), group=domain), r"periodic=\[True\]"),
        (lambda x, other, domain: nn.halo_exchange(x[: 2 - other], 1, group=domain), "1 samples of 3 channels"),
        (lambda x, other, domain: nn.halo_exchange(x[..., other:], 1, group=domain), "2 samples of 2 channels"),
        (lambda x, other, domain: nn.halo_exchange(x.astype("df"[other]), 1, group=domain), "float32"),
        (lambda x, other, domain: nn.halo_exchange_adjoint(x, [(1 - other, other)], group=domain), "widths="),
        (lambda x, other, domain: nn.redistribute(x, None, (1 + other,), group=domain), r"target=\(2,\)"),
        (lambda x, other, domain: nn.domain_sum(x, group=domain, share=bool(other)), "share=True"),
    ],
)
def test_ranks_that_call_it_in_different_ways_are_told_on_all_ranks(call, said):
    def check(domain, comm):
        other = comm.rank
        with pytest.raises(DataError, match="rank 1 of the domain 2 calls it in another way than rank 0") as told:
            call(field((6,)), other, domain)
        return re.search(said, str(told.value)) is not None

    assert on_ranks((2,), check)[1]


def test_a_domain_of_other_axes_is_told():
    def wrong(domain, comm):
        with pytest.raises(DataError, match=r"rank 0 of the domain 3 has an array of 4 axes; .* 1 for one that is not"):
            nn.halo_exchange(field((4, 2)), 1, group=domain)

    on_ranks((3,), wrong)

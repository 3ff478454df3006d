"""The process grid in integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ExitStatus, GridError
from mpizero.layout import AXES, Axes, Coordinates
from mpizero.layout.mesh import order_inside_nodes

SIZES = st.tuples(*[st.integers(1, 4)] * 4)
GRIDS = st.builds(lambda sizes, order: Axes(*sizes, order=tuple(order)), SIZES, st.permutations(AXES))


@pytest.mark.parametrize(("p", "t", "d"), [(1, 1, 8), (2, 3, 4)])
def test_the_default_order_is_the_contract_s_formula(p: int, t: int, d: int) -> None:
    axes = Axes.build(p * t * d, pipeline=p, tensor=t, data=d)
    for rank in range(axes.size):
        place = axes.coordinates(rank)
        assert rank == place.pipeline * t * d + place.tensor * d + place.data


def test_context_is_the_fastest_axis_unless_the_order_says_otherwise() -> None:
    axes = Axes.build(16, pipeline=2, tensor=2, context=2)
    assert axes.group(0, ["context"]) == (0, 1)
    assert axes.group(0, ["data"]) == (0, 2)
    assert axes.group(0, ["data", "context"]) == (0, 1, 2, 3)
    slow = Axes.build(16, pipeline=2, tensor=2, context=2, order="context, pipeline, tensor, data")
    assert slow.group(0, ["context"]) == (0, 8)


def test_a_group_is_ordered_by_the_contract_s_axes_whatever_the_order_of_the_ranks() -> None:
    axes = Axes.build(8, pipeline=2, tensor=2, order="data,tensor,pipeline")
    assert axes.group(0, ["tensor", "pipeline"]) == (0, 2, 1, 3)
    assert axes.group(0, ["pipeline", "tensor"]) == (0, 2, 1, 3)


@given(GRIDS)
def test_coordinates_and_ranks_are_inverse(axes: Axes) -> None:
    places = [axes.coordinates(rank) for rank in range(axes.size)]
    assert len(set(places)) == axes.size
    assert [axes.rank_of(place) for place in places] == list(range(axes.size))


@given(GRIDS, st.lists(st.sampled_from(AXES), unique=True), st.data())
def test_groups_tile_the_world_and_differ_only_in_their_axes(axes: Axes, names: list[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, axes.size - 1))
    group = axes.group(rank, names)
    assert rank in group
    assert len(group) == prod(axes.sizes[name] for name in names)
    assert all(axes.group(other, names) == group for other in group)
    fixed = [name for name in AXES if name not in names]
    here = axes.coordinates(rank)
    assert all(getattr(axes.coordinates(r), name) == getattr(here, name) for r in group for name in fixed)
    assert len({axes.group(r, names) for r in range(axes.size)}) * len(group) == axes.size


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Axes.build(8, pipeline=3), "^8 ranks .* pipeline=3 "),
        (lambda: Axes.build(8, pipeline=2, tensor=2, data=3), "data=3 .* = 12 ranks, but there are 8"),
        (lambda: Axes.build(8, tensor=0), "tensor=0 .* on 8 ranks"),
        (lambda: Axes.build(8, pipeline=-1), "pipeline=-1 .* on 8 ranks"),
        (lambda: Axes.build(8, tensor=2.0), "tensor=2.0 is not allowed"),
        (lambda: Axes.build(8, tensor=True), "tensor=True is not allowed"),
        (lambda: Axes.build(4, tensor=8), "^4 ranks .* tensor=8 "),
        (lambda: Axes.build(0), "world=0"),
        (lambda: Axes.build(8, order="pipeline,tensor,replica"), "unknown 'replica'"),
        (lambda: Axes.build(8, order="pipeline,tensor,data,data"), "repeated 'data'"),
        (lambda: Axes.build(8, order="pipeline,data"), "missing 'tensor'"),
        (lambda: Axes(tensor=0), "tensor=0"),
        (lambda: Axes(order=("pipeline", "tensor", "data", "data")), "order"),
        (lambda: Axes(2, 2, 2).coordinates(8), "rank 8 .* 0 to 7"),
        (lambda: Axes(2, 2, 2).rank_of(Coordinates(0, 2, 0)), "tensor goes from 0 to 1"),
        (lambda: Axes(2, 2, 2).group(0, ["replica"]), "replica"),
        (lambda: Axes(2).describe([0, 0, 0]), "3 numbers.* 2 ranks"),
    ],
)
def test_what_does_not_fit_a_grid_is_refused_with_all_the_numbers(make: Callable[[], object], told: str) -> None:
    with pytest.raises(GridError, match=told) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert caught.value.status == ExitStatus.CONFIG


def test_describe_lists_every_rank_with_its_coordinates_and_node() -> None:
    lines = Axes.build(8, pipeline=2, tensor=2).describe([0, 0, 0, 0, 1, 1, 1, 1]).splitlines()
    assert lines[0].startswith("8 ranks: pipeline=2 x tensor=2 x data=2 x context=1")
    assert lines[1].split() == ["rank", "pipeline", "tensor", "data", "context", "node"]
    assert [[int(value) for value in line.split()] for line in lines[2:]] == [
        [r, r // 4, r // 2 % 2, r % 2, 0, r // 4] for r in range(8)
    ]
    assert "node" not in Axes(2).describe()


def test_an_order_is_found_that_puts_groups_on_one_node():
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    across = Axes(tensor=4, data=2)
    assert order_inside_nodes(across, "tensor", hosts) == "pipeline,data,context,tensor"
    assert not order_inside_nodes(replace(across, order=("pipeline", "data", "context", "tensor")), "tensor", hosts)
    assert not order_inside_nodes(Axes(tensor=8), "tensor", hosts), "a node has no room for it"
    assert not order_inside_nodes(Axes(context=4, data=2), "context", hosts)
    in_turns = [0, 1] * 4
    assert order_inside_nodes(Axes(context=4, data=2), "context", in_turns) == "pipeline,tensor,context,data"
    assert not order_inside_nodes(Axes(tensor=4, data=2), "tensor", in_turns)

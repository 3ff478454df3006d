"""Named parameters in one flat order: units, tied and frozen parameters, ownership."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import LayoutError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, nested, views
from mpizero.types import ParameterSpec


def spec(name: str, *shape: int, tied: str | None = None, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, shape, tied=tied, trainable=trainable)


BLOCKS = {
    "embedding": [spec("table", 7, 3), spec("frozen", 4, trainable=False)],
    "body": [spec("weight", 3, 5), spec("nothing", 0), spec("bias", 11)],
    "head": [spec("norm", 3), spec("projection", 7, 3, tied="embedding.table")],
}


def test_the_flat_order_is_the_declared_order() -> None:
    layout = FlatLayout.build(BLOCKS)
    assert [e.spec.name for e in layout.parameters] == [
        "embedding.table",
        "embedding.frozen",
        "body.weight",
        "body.nothing",
        "body.bias",
        "head.norm",
    ]
    assert layout.size == 21 + 4 + 15 + 11 + 3
    assert [u.span for u in layout.units] == [(0, 25), (25, 51), (51, 54)]


def test_a_tied_use_has_its_own_gradient_slot_and_a_frozen_parameter_has_none() -> None:
    layout = FlatLayout.build(BLOCKS)
    assert [u.gradients for u in layout.units] == [21, 26, 3 + 21]
    (use,) = layout.uses["embedding.table"]
    assert (use.unit, use.offset, use.gradient) == (2, 0, 3)
    assert layout.by_name["embedding.frozen"].gradient == -1


def test_units_below_the_minimum_travel_with_a_neighbour() -> None:
    assert [u.blocks for u in FlatLayout.build(BLOCKS, minimum_unit=26).units] == [("embedding", "body", "head")]
    assert [u.blocks for u in FlatLayout.build(BLOCKS, minimum_unit=10).units] == [("embedding",), ("body", "head")]
    assert len(FlatLayout.build(BLOCKS, one_unit=True).units) == 1


@given(st.booleans(), st.integers(0, 40))
def test_blocks_tile_the_gradients_of_their_unit_each_in_at_most_two_ranges(one_unit: bool, minimum: int) -> None:
    for unit in FlatLayout.build(BLOCKS, one_unit=one_unit, minimum_unit=minimum).units:
        seen = np.full(unit.gradients, "", object)
        for block, ranges in unit.gradient_ranges.items():
            assert len(ranges) <= 2, "its own parameters, and its uses of others'"
            for span in ranges:
                seen[span.start : span.stop] += block
        for entry in unit.entries:
            if entry.gradient >= 0:
                assert set(seen[entry.gradient : entry.gradient + entry.spec.size]) <= {entry.block}
        assert all(seen)


@given(st.integers(1, 9), st.booleans(), st.integers(0, 40), st.integers(0, 5))
def test_owners_tile_parameters_and_gradients(parts: int, one_unit: bool, minimum: int, before: int) -> None:
    blocks = {"first": [spec("weight", before)], **BLOCKS}  # the tied parameter need not be the first
    layout = FlatLayout.build(blocks, one_unit=one_unit, minimum_unit=minimum)
    owners = np.zeros(layout.size, int)
    for part in range(parts):
        for span in layout.shards(part, parts):
            owners[span.start : span.stop] += 1
    assert (owners == 1).all()
    for unit in layout.units:
        seen = np.zeros(unit.gradients, int)
        for part in range(parts):
            for span in layout.gradient_spans(unit, layout.shards(part, parts)):
                seen[span.start : span.stop] += 1
        assert (seen == 1).all()


@given(st.integers(0, 54), st.integers(0, 54))
def test_a_range_of_parameters_is_one_range_of_gradients_without_the_frozen(a: int, b: int) -> None:
    layout = FlatLayout.build(BLOCKS, one_unit=True)
    (unit,) = layout.units
    start, stop = min(a, b), max(a, b)
    trainable = sum(p.size for e, p in layout.pieces(Span(start, stop)) if e.spec.trainable)
    assert unit.gradient_of(stop) - unit.gradient_of(start) == trainable


def test_views_share_the_buffer_and_nest_by_dots() -> None:
    buffer = np.arange(10.0)
    specs = (ParameterSpec("w", (2, 3)), ParameterSpec("b", (3,)), ParameterSpec("c", ()))
    tree = views(buffer, list(zip(("a.w", "a.b", "c"), (0, 6, 9), specs, strict=True)))
    tree["a"]["w"][1, 2] = -1
    assert buffer[5] == -1
    assert tree["c"].shape == ()
    assert nested({"x.y.z": 1, "x.q": 2}) == {"x": {"y": {"z": 1}, "q": 2}}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"a": [spec("w", 2), spec("w", 2)]}, "used twice"),
        ({"a": [spec("w", 2, tied="b.w")], "b": [spec("w", 2)]}, "not an earlier parameter"),
        ({"a": [spec("w", 2)], "b": [spec("v", 3, tied="a.w")]}, "has shape"),
    ],
)
def test_impossible_layouts_name_the_parameters(blocks: dict[str, list[ParameterSpec]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        FlatLayout.build(blocks)

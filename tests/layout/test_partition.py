"""The shard rule, grains and hyperslabs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ConfigError, LayoutError
from mpizero.layout import GrainRule, Grains, Partition
from mpizero.layout.flat import hyperslabs


def test_ten_over_three() -> None:
    assert [(s.start, s.stop) for s in Partition(10, 3)] == [(0, 4), (4, 7), (7, 10)]


@given(st.integers(0, 10**6), st.integers(1, 700))
def test_shards_tile_the_range_and_differ_by_at_most_one(length: int, parts: int) -> None:
    shards = list(Partition(length, parts))
    assert shards[0].start == 0
    assert shards[-1].stop == length
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    sizes = Partition(length, parts).sizes()
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0)])
def test_meaningless_partitions_are_refused_with_their_numbers(length: int, parts: int) -> None:
    with pytest.raises(LayoutError, match=str(length)):
        Partition(length, parts)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 9))
def test_grains_assigned_contiguously_tile_the_batch(samples: int, size: int, parts: int) -> None:
    grains = Grains(samples, size)
    spans = [grains.samples_of(p, parts) for p in range(parts)]
    assert spans[0].start == 0
    assert spans[-1].stop == samples
    assert all(a.stop == b.start for a, b in zip(spans, spans[1:], strict=False))
    assert sum(grains.span(g).stop - grains.span(g).start for g in range(grains.count)) == samples


def test_a_default_grain_is_a_sixteenth_of_the_global_batch_rounded_up() -> None:
    assert [GrainRule().grain_size(samples) for samples in (1, 16, 17, 64, 100)] == [1, 1, 2, 4, 7]
    assert [GrainRule(accumulate=3).grain_size(samples) for samples in (1, 48, 49, 300)] == [3, 3, 6, 21]


def test_a_default_micro_batch_has_no_more_samples_than_fast_products_need() -> None:
    rule = GrainRule(efficient=4)
    assert [rule.grains(samples).count for samples in (8, 64, 65, 256, 1022)] == [8, 16, 17, 64, 256]
    assert GrainRule(accumulate=3, efficient=4).grain_size(1000) == 12
    assert GrainRule(5, efficient=4).grain_size(1000) == 5
    with pytest.raises(ConfigError, match="size"):
        Grains(4, 0)


@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.data())
def test_hyperslabs_cover_a_flat_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    array = np.arange(total).reshape(shape)
    blocks = [array[block].ravel() for block in hyperslabs(shape, start, stop)]
    assert len(blocks) <= max(1, 2 * len(shape) - 1)
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *blocks]), np.arange(start, stop))

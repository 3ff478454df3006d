"""A shuffle by blocks visits every sample once an epoch, in one order on any number of ranks, and reads blocks once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero import data
from mpizero.data.cache import block_order
from mpizero.errors import ConfigError, DataError
from mpizero.testing import run_in_threads


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_an_epoch_has_every_sample_once(length, block, blocks, seed, epoch):
    order = block_order(epoch * length, (epoch + 1) * length, length, seed, block=block, blocks=blocks)
    assert sorted(order.tolist()) == list(range(length))


@given(st.integers(1, 10**12), st.integers(0, 10**15), st.integers(1, 50), st.integers(1, 99), st.integers(1, 9))
def test_any_range_of_the_order_is_found_without_the_rest(length, start, count, block, blocks):
    sizes = {"block": block, "blocks": blocks}
    order = block_order(start, start + count, length, 7, **sizes)
    assert ((order >= 0) & (order < length)).all()
    parts = [block_order(start + i, start + i + 1, length, 7, **sizes)[0] for i in range(count)]
    assert order.tolist() == parts


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 6), st.integers(0, 99))
def test_neighbouring_positions_have_samples_of_few_blocks(length, block, blocks, seed):
    """Cut by its definition: whole groups of blocks follow one another, and share none."""
    numbers = block_order(0, length, length, seed, block=block, blocks=blocks) // block
    seen, start = set(), 0
    while start < length:
        group = set()
        while start < length and (numbers[start] in group or len(group) < blocks):
            group.add(int(numbers[start]))
            start += 1
        assert not group & seen
        seen |= group


def test_the_order_of_a_seed_never_changes():
    assert block_order(0, 11, 11, 0, block=3, blocks=2).tolist() == [8, 0, 1, 6, 7, 2, 9, 3, 4, 10, 5]


def test_every_place_is_equally_likely_for_every_sample():
    counts = np.zeros((8, 8))
    for seed in range(2000):
        counts[np.arange(8), block_order(0, 8, 8, seed, block=2, blocks=2)] += 1
    assert abs(counts - 250).max() < 75  # five standard deviations


@pytest.mark.parametrize(("size", "prefetch"), [(1, 0), (2, 1), (3, 2), (4, 0)])
def test_global_batches_are_the_same_on_any_number_of_ranks(compressed, ranks, size, prefetch):
    def run(comm):
        source = data.BlockShuffledSource(data.Hdf5Source(compressed[0], ["x"], "y"), blocks=3)
        stream = data.batches(source, ranks(comm, 1), 6, steps=40, prefetch=prefetch)
        own = [(x["x"], y) for x, y in stream]
        for x, y in own:
            np.testing.assert_array_equal(x, compressed[1][y], strict=True)
        return [y for _, y in own], source.blocks_read

    found = run_in_threads(size, run)
    batches = [np.concatenate([own[step] for own, _ in found]) for step in range(40)]
    order = block_order(0, 240, 100, 0, block=8, blocks=3)
    assert np.concatenate(batches).tolist() == order.tolist()
    assert all(read <= 13 * 2 + 7 for _, read in found)  # two epochs, and 40 samples of the third, which has two groups


def test_a_block_is_read_once_an_epoch_and_few_are_held(compressed):
    source = data.BlockShuffledSource(data.Hdf5Source(compressed[0], "x", "y"), blocks=3)
    order = source.sample_order(0, 100, 100, 5)
    for start in range(0, 100, 7):  # batches begin in one group of blocks and end in the next
        own = order[start : start + 7]
        np.testing.assert_array_equal(source.samples(own)[1], own)
        assert len(source._cached) <= 3
    assert source.blocks_read == 13


def test_a_split_takes_the_last_samples_and_shuffles_the_others_by_blocks(compressed, ranks):
    whole = data.BlockShuffledSource(data.Hdf5Source(compressed[0], "x", "y"), blocks=2)
    training, validation = whole.split(0.2)
    np.testing.assert_array_equal(validation.samples(range(20))[1], np.arange(80, 100))
    _, y = next(data.batches(training, ranks(), 80))
    assert y.tolist() == block_order(0, 80, 80, 0, block=8, blocks=2).tolist()
    assert training.origin(np.array([3])).tolist() == [3]


def test_sources_above_keep_the_order(compressed, ranks):
    source = data.BlockShuffledSource(data.Hdf5Source(compressed[0], "x", "y"), blocks=2)
    expected = block_order(0, 50, 100, 0, block=8, blocks=2).tolist()
    with data.cached(source, ranks()) as copy:
        for above in (source, copy, data.TransformedSource(copy, lambda x, y, random: (x, y))):
            assert next(data.batches(above, ranks(), 50))[1].tolist() == expected


def test_another_size_of_blocks_is_other_data(compressed):
    source = data.Hdf5Source(compressed[0], "x", "y")
    kinds = [source, *(data.BlockShuffledSource(source, *sizes) for sizes in ((16,), (8,), (16, 4)))]
    assert len({kind.fingerprint for kind in kinds}) == 4


def test_what_cannot_be_shuffled_by_blocks_is_an_error(compressed, numbers):
    class Random(data.Hdf5Source):
        def read(self, indices, *, run):
            return super().read(indices)

    class Uneven(data.Hdf5Source):
        def read(self, indices):
            x, y = super().read(indices)
            return x[:, : 5 - (indices.size < 8)], y

    with pytest.raises(ConfigError, match="Random makes other samples in every epoch: shuffle the source below it"):
        data.BlockShuffledSource(Random(compressed[0], "x", "y"))
    with pytest.raises(DataError, match="expected a source of samples, got list"):
        data.BlockShuffledSource([1])
    for sizes in ({"blocks": 0}, {"block": 0}):
        with pytest.raises(ConfigError, match=next(iter(sizes))):
            data.BlockShuffledSource(numbers(4), **sizes)
    with pytest.raises(DataError, match=r"samples 96 to 99 are .*\(4,\).*, samples read before are .*\(5,\)"):
        data.BlockShuffledSource(Uneven(compressed[0], "x", "y")).samples([0, 99])


def test_the_shape_of_no_samples_is_that_of_the_source(compressed):
    source = data.BlockShuffledSource(data.Hdf5Source(compressed[0], "x", "y"))
    assert source.samples([])[0].shape == (0, 5)
    assert source.blocks_read == 0


def test_rank_0_tells_once_what_a_shuffle_of_all_samples_costs(compressed, ranks, capsys):
    source = data.Hdf5Source(compressed[0], "x", "y")

    def run(comm):
        for _ in range(2):
            data.batches(source.split(0.04)[0], ranks(comm), 10)

    run_in_threads(2, run)
    told = capsys.readouterr().err
    # 96 samples in 12 blocks; a rank's 5 samples are in 12 (1 - (11/12)^5) = 4.2 of them, 19.2 times an epoch.
    assert told.count("blocks of 8 samples") == told.count("each of its 12 blocks about 7 times an epoch") == 1
    assert "BlockShuffledSource" in told
    data.batches(data.BlockShuffledSource(source), ranks(), 10)
    data.batches(source, ranks(), 50)  # 13 (1 - (12/13)^50) = 12.8 of them, twice
    with data.cached(source, ranks()) as copy:
        data.batches(copy, ranks(), 10)
    assert capsys.readouterr().err == ""
    with data.cached(source, ranks(), limit=10) as copy:
        data.batches(copy, ranks(), 10)
    assert "each of its 13 blocks about 6" in capsys.readouterr().err

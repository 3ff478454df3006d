"""Ring attention against dense attention: numbers, gradients, work of each rank, and memory."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from mpizero import nn
from mpizero.layout.flat import nested
from mpizero.nn import context_parallel
from mpizero.nn.context_parallel import RingSelfAttention
from mpizero.testing import taylor_test
from mpizero.types import EVALUATE
from tests.nn.checks import central_difference, require_contract
from tests.nn.groups import TRAINING, cache_bytes, each_block, on_ranks
from tests.traced import traced_peak


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short sequences make many, of all shapes."""
    monkeypatch.setattr(nn.context_parallel, "QUERIES", 3)
    monkeypatch.setattr(nn.context_parallel, "KEYS", 5)


def parameters(layer, rng, dtype=np.float64):
    return {s.name: rng.normal(0, s.shape[0] ** -0.5, s.shape).astype(dtype) for s in layer.specs()}


def whole_pass(layer, flat, x, dy, run=EVALUATE):
    grads = {name: np.full_like(value, np.nan) for name, value in flat.items()}
    y, cache = layer.forward(nested(dict(flat.items())), x, run)
    return y, layer.backward(nested(dict(flat.items())), cache, dy, nested(dict(grads.items()))), grads


def ring_pass(layer, flat, x, dy, ranks, run=EVALUATE):
    """The same from the ranks of a ring, put together; gradients of parameters are added."""
    options = {"dropout": layer.dropout, "site": layer.site}

    def work(group):
        mine = nn.Zigzag(x.shape[1], ranks).positions(group.rank)
        ring = RingSelfAttention(layer.dim, layer.heads, **options, group=group)
        return mine, *whole_pass(ring, flat, np.ascontiguousarray(x[:, mine]), np.ascontiguousarray(dy[:, mine]), run)

    y, dx, grads = np.empty_like(x), np.empty_like(x), {name: 0 for name in flat}
    for mine, part_y, part_dx, part_grads in on_ranks(ranks, work):
        y[:, mine], dx[:, mine] = part_y, part_dx
        grads = {name: grads[name] + part_grads[name] for name in flat}
    return y, dx, grads


def assert_close(found, expected, tolerance):
    """Result, gradient of the input and gradients by name; ``tolerance`` may be a function of a gradient's name."""
    pairs = [(found[0], expected[0], None), (found[1], expected[1], None)]
    for one, other, name in pairs + [(found[2][name], gradient, name) for name, gradient in expected[2].items()]:
        scale = max(np.abs(other).max(), 1e-3)  # gradients that vanish in exact arithmetic are of rounding's size
        assert np.abs(one - other).max() <= (tolerance(name) if callable(tolerance) else tolerance) * scale, name


@pytest.mark.parametrize("run", [EVALUATE, TRAINING])
@pytest.mark.parametrize("length", [48, 31])
def test_ring_attention_equals_dense_attention(length, run, rng, small_tiles):
    layer = nn.CausalSelfAttention(8, 2, dropout=0.3, site=4)
    flat, (x, dy) = parameters(layer, rng), rng.normal(size=(2, 3, length, 8))
    expected = whole_pass(layer, flat, x, dy, run)
    for ranks in (1, 2, 3):
        assert_close(ring_pass(layer, flat, x, dy, ranks, run), expected, 1e-12)


def test_float32_agrees_with_dense_attention_of_float64_as_well_as_dense_attention_does(rng):
    """Sequences of several tiles of the usual size."""
    layer = nn.CausalSelfAttention(32, 2)
    flat, (x, dy) = parameters(layer, rng), rng.normal(size=(2, 1, 1400, 32))
    expected = whole_pass(layer, flat, x, dy)
    arguments = {name: value.astype(np.float32) for name, value in flat.items()}, x.astype("f"), dy.astype("f")
    dense = whole_pass(layer, *arguments)

    def rounding(name):  # gradients of parameters are sums over all places, which round in either form
        if name is None:
            return 1e-6
        gradient = expected[2][name]
        return max(1e-6, 1.5 * np.abs(dense[2][name] - gradient).max() / np.abs(gradient).max())

    for ranks in (2, 4):
        assert_close(ring_pass(layer, *arguments, ranks), expected, rounding)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "run"), [(2, EVALUATE), (3, TRAINING)])
def test_gradients_are_those_of_finite_differences(ranks, run, rng, small_tiles):
    layer = nn.CausalSelfAttention(4, 2, dropout=0.3, site=1)
    flat, (x, dy) = parameters(layer, rng), rng.normal(size=(2, 2, 11, 4))
    _, dx, grads = ring_pass(layer, flat, x, dy, ranks, run)
    point = {**{name: array.copy() for name, array in flat.items()}, "x": x.copy()}

    def value(point=point):
        named = {name: point[name] for name in flat}
        return float((ring_pass(layer, named, point["x"], dy, ranks, run)[0] * dy).sum())

    taylor_test(value, {**grads, "x": dx}, point)
    for name, gradient in {**grads, "x": dx}.items():
        values = point[name].reshape(-1)
        for index in rng.choice(gradient.size, min(gradient.size, 4), replace=False):
            slope = central_difference(value, values[index : index + 1]).item()
            assert gradient.reshape(-1)[index] == pytest.approx(slope, rel=2e-7, abs=1e-7), (name, index)


def test_halves_of_the_backward_pass_make_the_whole(rng, small_tiles):
    x = rng.normal(size=(2, 6, 4))
    on_ranks(2, lambda group: require_contract(RingSelfAttention(4, 2, dropout=0.3, group=group), x, TRAINING))


def test_some_heads_of_a_wider_layer_have_its_masks(rng):
    """As under tensor parallelism: a layer of the second and third head of four."""
    x = rng.normal(size=(2, 10, 3 * 8))
    wide, narrow = nn.CausalSelfAttention(16, 4, dropout=0.4, site=2), nn.CausalSelfAttention(8, 2, dropout=0.4, site=2)
    qkv = np.zeros((2, 10, 3, 4, 4))
    qkv[:, :, :, 1:3] = x.reshape(2, 10, 3, 2, 4)
    whole = wide.attend(qkv.reshape(2, 10, 48), None, TRAINING)[0].reshape(2, 10, 4, 4)[:, :, 1:3].reshape(2, 10, 8)
    np.testing.assert_allclose(narrow.attend(x, None, TRAINING, 1)[0], whole, rtol=1e-12)

    def work(group):
        mine = nn.Zigzag(10, 2).positions(group.rank)
        layer = RingSelfAttention(8, 2, dropout=0.4, site=2, group=group)
        np.testing.assert_allclose(layer.attend(x[:, mine], None, TRAINING, 1)[0], whole[:, mine], rtol=1e-12)

    on_ranks(2, work)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 24, 61])
def test_tiles_cover_what_is_visible_once_and_nothing_that_is_hidden_whole(length, ranks, small_tiles):
    zigzag, seen = nn.Zigzag(length, ranks), np.zeros((length, length), int)
    for rank in range(ranks):
        for source in range(ranks):
            queries, keys = zigzag.positions(rank), zigzag.positions(source)
            for tile in zigzag.tiles(rank, source):
                rows, columns = queries[tile.queries], keys[tile.keys]
                assert (rows[0], columns[0]) == (tile.row, tile.column)
                assert rows.tolist() == list(range(rows[0], rows[0] + len(rows))), "places of one run"
                assert columns.tolist() == list(range(columns[0], columns[0] + len(columns)))
                assert 0 < len(rows) <= 3
                assert 0 < len(columns) <= 5
                assert rows[-1] >= columns[-1], "the last query sees all keys of a tile"
                seen[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] += 1
    assert (seen[np.tri(length, dtype=bool)] == 1).all()
    assert seen.max() == 1


def test_products_really_made_are_even_and_about_half_of_the_square(monkeypatch, rng):
    """Multiplications of all batched products, counted on each rank."""
    ranks, length, dim = 4, 2048, 8
    counted, plain = Counter(), context_parallel.multiply

    def counting(a, b, out):
        counted[threading.current_thread().name] += a.size * b.shape[-1]
        plain(a, b, out)

    layer = nn.CausalSelfAttention(dim, 1)
    flat, x = parameters(layer, rng, np.float32), rng.normal(size=(1, length, dim)).astype(np.float32)
    monkeypatch.setattr(context_parallel, "multiply", counting)
    ring_pass(layer, flat, x, x, ranks)
    monkeypatch.undo()
    work = [counted[f"rank {rank}"] for rank in range(ranks)]
    assert len(set(work)) == 1
    own = on_ranks(ranks, lambda group: RingSelfAttention(dim, 1, group=group).attend_operations(length))
    assert [count.total for count in own] == [2 * made for made in work], "as the layer says"
    square = 7 * length * length * dim  # two products forward, five backward
    assert 0.5 < sum(work) / square < 0.57


def test_a_sequence_four_times_longer_on_four_ranks_keeps_the_same_cache_on_each():
    """Bytes of all arrays that wait for the backward pass, against one rank with a quarter of the sequence."""
    model = nn.GPT(dim=32, layers=2, heads=2, sequence=1024, vocabulary=16)
    params, ids = nn.bind(model, nn.initial_parameters(model)), np.zeros((2, 1024), int)

    def cached(model, x):
        return cache_bytes([cache for *_, cache in each_block(model, params, x)])

    one = cached(model, ids[:, :256])
    four = on_ranks(4, lambda group: cached(nn.context_model(model, group), nn.cut_batch(ids, ids, group)[0]))
    assert len(set(four)) == 1
    rows = 2 * 2 * 256 * 2 * 2 * 4  # a maximum and a share for each layer, sample, place and head
    # Neither keeps probabilities of so long a sequence; attention's output is cached by the projection, in either form.
    assert four[0] == pytest.approx(one + rows, rel=0.02)


@pytest.mark.slow
def test_a_sequence_four_times_longer_on_four_ranks_has_the_same_peak():
    """A whole forward and backward pass, four threads together against four times one process.

    A rank holds a neighbour's keys and values besides, and how they meet decides how many do so at the same time.
    """
    model = nn.GPT(dim=64, layers=2, heads=2, sequence=2048, vocabulary=16)
    named, ids = nn.initial_parameters(model), np.zeros((1, 2048), int)
    one = traced_peak(lambda: nn.loss_and_gradients(model, named, (ids[:, :512], ids[:, :512])))

    def part(group):
        nn.loss_and_gradients(nn.context_model(model, group), named, nn.cut_batch(ids, ids, group))

    neighbours = 2 * ids[:, :512].size * 64 * 4  # in float32
    assert traced_peak(lambda: on_ranks(4, part)) <= 4 * (one + neighbours)

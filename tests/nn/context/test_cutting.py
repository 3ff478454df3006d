"""Sequences are cut in a zigzag: each place on one rank, with the position and the mask that it has in the whole."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.errors import DataError
from mpizero.nn import Dropout, Position, TokenEmbedding, TransformerBlock, Zigzag, bind, context_parallel, cut_batch
from mpizero.nn.context_parallel import ContextDropout, ContextPosition
from tests.nn.groups import BOTH, TRAINING, Apart, Model, cut, on_grid, on_ranks, own_parameters, perturbed, tokens


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_zigzag_gives_every_place_to_one_rank_and_none_one_more_than_another(ranks):
    for length in range(1, 41):
        zigzag = Zigzag(length, ranks)
        places = [zigzag.positions(rank) for rank in range(ranks)]
        assert sorted(np.concatenate(places).tolist()) == list(range(length))
        assert tuple(map(len, places)) == zigzag.sizes
        assert max(zigzag.sizes) == zigzag.longest <= min(zigzag.sizes) + 1
        chunks = np.array_split(np.arange(length), 2 * ranks)
        for rank in range(ranks):
            assert places[rank].tolist() == [*chunks[rank], *chunks[-1 - rank]]


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_causal_mask_loads_all_ranks_evenly_at_every_hop(ranks):
    """Visible pairs of query and key; at each hop every rank works with another rank's keys."""
    length = 2 * ranks * 6
    places = [Zigzag(length, ranks).positions(rank) for rank in range(ranks)]
    pairs = np.array([[(queries[:, None] >= keys).sum() for keys in places] for queries in places])
    assert len(set(pairs[~np.eye(ranks, dtype=bool)].tolist())) == 1
    assert len(set(np.diag(pairs).tolist())) == 1
    assert pairs.sum() == length * (length + 1) // 2


def test_every_array_of_a_tree_is_cut_at_the_places_of_the_rank_into_memory_of_its_own():
    ids = np.arange(2 * 13).reshape(2, 13)
    tree = {"ids": ids, "more": (ids[..., None] * 1.5, None)}
    for rank in range(3):
        x, y = cut_batch(tree, [ids + 1], Apart(rank, 3))
        mine = Zigzag(13, 3).positions(rank)
        for part, whole in ((x["ids"], ids), (x["more"][0], tree["more"][0]), (y[0], ids + 1)):
            np.testing.assert_array_equal(part, whole[:, mine])
            assert part.flags.c_contiguous
            assert not np.shares_memory(part, whole)
        with pytest.raises(DataError, match=r"\(2, 13\) and \(2, 12\)"):
            cut_batch({"ids": ids, "short": ids[:, 1:]}, ids, Apart(rank, 3))


def test_positions_of_parts_are_those_of_the_whole(rng):
    x, w = rng.normal(size=(2, 9, 4)), rng.normal(size=(12, 4))
    whole = Position(12, 4)
    y, cache = whole.forward({"weight": w}, x)
    wanted = {"weight": np.empty((12, 4))}
    whole.backward(w, cache, x, wanted)

    def work(group):
        layer, mine = ContextPosition(12, 4, group=group), Zigzag(9, 2).positions(group.rank)
        part, part_cache = layer.forward({"weight": w}, x[:, mine])
        np.testing.assert_array_equal(part, y[:, mine])
        gradient = {"weight": np.full((12, 4), np.nan)}
        layer.backward({"weight": w}, part_cache, x[:, mine], gradient)
        return gradient["weight"]

    np.testing.assert_allclose(sum(on_ranks(2, work)), wanted["weight"], rtol=1e-14)


@pytest.mark.parametrize("length", [8, 9, 3])
def test_masks_of_parts_are_those_of_the_whole_and_nothing_is_asked_where_nothing_is_dropped(length, rng):
    x = rng.normal(size=(2, length, 5))
    whole = Dropout(0.4, site=2).forward({}, x, TRAINING)[0]

    def work(group):
        layer, mine = ContextDropout(0.4, site=2, group=group), Zigzag(length, 2).positions(group.rank)
        part = x[:, mine]
        assert layer.forward({}, part)[0] is part
        assert ContextDropout(0.0, group=group).forward({}, part, TRAINING)[0] is part
        assert not group.counts
        y, cache = layer.forward({}, part, TRAINING)
        np.testing.assert_array_equal(y, whole[:, mine])
        np.testing.assert_array_equal(layer.backward_input({}, cache, part)[0], whole[:, mine])

    on_ranks(2, work)


def test_masks_and_positions_of_what_is_cut_twice_are_those_of_the_whole():
    """Every element: nothing but the embedding and its dropout."""
    layer, ids = TokenEmbedding(11, 40, 12, 0.4, site=2), tokens(29)[0]
    model = Model({"embedding": layer, "block": TransformerBlock(12, 6)})
    named = perturbed(model)
    expected = layer.forward(bind(model, named)["embedding"], ids, TRAINING)[0]

    def work(tensor, context):
        form = cut(model, tensor, context).blocks["embedding"]
        form = type(form)(form.whole, tensor, sequence=True)
        own = own_parameters(Model({"embedding": form}), named)
        part = cut_batch(ids, ids, context)[0]
        y, _ = form.forward(bind(Model({"embedding": form}), own)["embedding"], part, TRAINING)
        mine = Zigzag(29, context.size).positions(context.rank)
        start = np.cumsum([0, *(len(half) for half in np.array_split(mine, tensor.size))])[tensor.rank]
        np.testing.assert_array_equal(y, expected[:, mine[start : start + y.shape[1]]])

    for sizes in BOTH:
        on_grid(sizes, work)


def test_what_travels_visits_every_rank_once():
    def work(group):
        passed = context_parallel.ring_pass(group, np.array([10 * group.rank]), "")
        seen = [(source, int(a[0])) for source, a, _ in passed]
        assert seen == [((group.rank - hop) % 4, 10 * ((group.rank - hop) % 4)) for hop in range(4)]

    on_ranks(4, work)

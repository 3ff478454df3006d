"""Tiles: a rank that hosts several virtual ranks has the bits of a group with one rank for each of them."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.errors import CollectiveError, ConfigError
from mpizero.nn.virtual_ranks import Meeting, VirtualRanks, run_in_turns
from mpizero.testing import run_in_threads

TILES = 8


def values(tile, shape=(3, 8, 5)):
    return np.random.default_rng(tile).standard_normal(shape).astype("f4")


def every_call(group):
    """What a tile gets from each collective, with parts of unequal length, and shifts within a rank and over ranks."""
    x, sizes = values(group.rank), [(0, 3, 1, 0)[tile % 4] for tile in range(group.size)]
    own = values(group.rank, (2, sizes[group.rank], 3))
    longer = values(group.rank, (2, sum(sizes), 3))
    found = [group.all_reduce(x), group.all_reduce(x[0, 0, :0]), group.all_max(x), group.all_gather(own, -2, sizes)]
    found.append(group.reduce_scatter(longer, 1, sizes))
    for by in (1, -1, 3, group.size, group.size + 2):
        found += group.shift([x, own[:, :0]], by).wait()
    return [(a.dtype, a.shape, a.tobytes()) for a in found]


def hosted(comm, tiles=TILES):
    group = CommunicatorGroup(comm)
    groups = VirtualRanks(group, tiles).groups
    assert [g.rank for g in groups] == list(range(group.rank * len(groups), (group.rank + 1) * len(groups)))
    found = run_in_turns([lambda g=g: every_call(g) for g in groups])
    group.close()
    return found


def test_a_collective_of_tiles_has_the_bits_of_as_many_ranks():
    alone = run_in_threads(TILES, lambda comm: every_call(CommunicatorGroup(comm)))
    for ranks in (1, 2, 4, 8):
        assert sum(run_in_threads(ranks, hosted), []) == alone, ranks
    assert sum(run_in_threads(3, lambda comm: hosted(comm, 6)), []) == run_in_threads(
        6, lambda comm: every_call(CommunicatorGroup(comm))
    )


def test_tiles_that_do_not_make_subtrees_are_refused():
    def refused(comm):
        with pytest.raises(ConfigError, match="6 tiles cannot be hosted by 2 ranks"):
            VirtualRanks(CommunicatorGroup(comm), 6)

    run_in_threads(2, refused)


def test_functions_run_in_turns_and_an_error_ends_all():
    order = []
    meeting = Meeting(2, lambda brought: brought[::-1])

    def member(number):
        order.append(number)
        got = meeting.wait(number, f"from {number}")
        order.append(got)
        return number

    assert run_in_turns([lambda: member(0), lambda: member(1)]) == [0, 1]
    assert order == [0, 1, "from 1", "from 0"]
    ended = []

    def waits():
        try:
            meeting.wait(0, "all_reduce")
        finally:
            ended.append(True)

    def fails():
        raise ValueError("tile 1")

    with pytest.raises(ValueError, match="tile 1"):
        run_in_turns([waits, fails])
    with pytest.raises(CollectiveError, match=r"tile 0 all_reduce at test_tiles.py:\d+ in waits; others"):
        run_in_turns([waits, lambda: None])
    assert ended == [True, True]
    with pytest.raises(CollectiveError, match="for one of 2 tiles of this rank alone"):
        meeting.wait(0, "all_reduce")


def test_functions_that_run_in_turns_see_the_callers_context():
    with np.errstate(over="ignore", invalid="raise"):
        assert run_in_turns([np.geterr, np.geterr]) == [np.geterr()] * 2


def test_tiles_that_call_different_collectives_are_told():
    group = CommunicatorGroup(run_in_threads(1, lambda comm: comm)[0])
    first, second = VirtualRanks(group, 2).groups
    x = np.zeros(3)
    told = r"tile 0 all_reduce\(float64 \(3,\), 'a'\) at test_tiles.py:\d+ in <lambda>; tile 1 .* 'b'"
    with pytest.raises(CollectiveError, match=told):
        run_in_turns([lambda: first.all_reduce(x, "a"), lambda: second.all_reduce(x, "b")])


IDS = np.random.default_rng(0).integers(0, 3, (2, 5, 11))


def trained(comm, model, tiles, *, tensor=1, context=1, pipeline=1, stage=1, **settings):
    replicas = 1 if comm is None else comm.size // (tensor * context * pipeline)
    replica = 0 if comm is None else comm.rank // context % replicas
    own = [np.array_split(a, replicas)[replica] for a in IDS]
    sizes = {"tensor_parallel_size": tensor, "context_parallel_size": context, "pipeline_parallel_size": pipeline}
    with (
        mz.ShardingConfig(comm=comm, micro_batch=2, tiles=tiles, **settings) as config,
        mz.HybridShardedModel(model, config, **sizes, zero_stage=stage, optimizer=mz.AdamW(lr=1e-2)) as sharded,
    ):
        losses = [sharded.train(*own) for _ in range(2)]
        return losses, sharded.parameters_sha256(), sharded.predict(IDS[0]).tobytes(), sharded.evaluate(*own)


@pytest.mark.slow
def test_tiles_of_both_axes_have_the_bits_of_both_groups():
    """Losses, parameters, predictions and evaluations. A tile of four has no item of a vocabulary of three."""
    settings = {"dim": 16, "layers": 2, "heads": 4, "sequence": 11, "vocabulary": 3, "dropout": 0.1}
    model, asked = mz.nn.GPT(**settings, activation_checkpointing=True), {"tensor": 4, "context": 2}
    alone = trained(None, model, asked)
    assert alone[1] != trained(None, model, None)[1], "tiles are not without effect"
    for ranks, layout in (
        (2, {"tensor": 2}),
        (2, {"context": 2, "stage": 3}),
        (4, {"tensor": 2, "pipeline": 2, "stage": 2, "share_node_memory": False}),
        (8, {"tensor": 4, "context": 2, "stage": 0}),
    ):
        found = run_in_threads(ranks, lambda comm, layout=layout: trained(comm, model, asked, **layout))
        assert all(rank == alone for rank in found), (ranks, layout)  # short: the difference itself would fill pages

"""ZeRO-3 over groups of nodes: each group keeps all parameters, gradients are summed over all; the same bits."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

import mpizero as mz
from mpizero.errors import ConfigError, GridError, IntegrityError
from mpizero.layout import Axes
from mpizero.layout.mesh import shard_groups
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import gpt, mlp, part, points, sharded, tokens
from tests.parallel.parallel_layouts import Case, Way, of_first, texts, trained, trained_in_tiles
from tests.parallel.parallel_layouts import gpt as tied_gpt

#: Numbers of ranks, with nodes and groups of nodes.
GROUPS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"ranks_per_node": 1, "shard_nodes": 1}),
    (4, {"ranks_per_node": 1, "shard_nodes": 2}),
    (4, {"ranks_per_node": 2, "shard_nodes": 1, "share_node_memory": False}),
    (6, {"ranks_per_node": 1, "shard_nodes": 3}),
    (8, {"ranks_per_node": 2, "shard_nodes": 2}),
    (8, {"ranks_per_node": 1, "shard_nodes": 2, "share_node_memory": False}),
)


def run(comm: Any, strategy: str = "zero3", steps: int = 3, **settings: Any) -> str:
    """Train on tied parameters, with calls between the steps that read parameters before they have arrived."""
    settings = {"micro_batch": 1, "clip": 0.5, **settings}
    with sharded(strategy, comm, gpt(), mz.AdamW(lr=1e-2), **settings) as model:
        for number in range(steps):
            model.train(*part(comm, *tokens(11, number)))
            if number == 0:
                model.predict(tokens(3)[0])
            elif number == 1:
                model.set_parameters(model.get_parameters())
        return str(model.parameters_sha256())


@pytest.mark.parametrize("settings", [{}, {"wire": "bfloat16", "wire_parameters": True}, {"accumulate": 2}])
def test_groups_of_nodes_have_the_bits_of_one_process(settings: dict[str, Any]) -> None:
    expected = run(None, "ddp", **settings)
    for size, memory in GROUPS:
        assert run_in_threads(size, lambda comm, m=memory: run(comm, **settings, **m)) == [expected] * size, memory


@pytest.mark.mpi
def test_groups_of_nodes_have_the_bits_of_one_process_on_ranks_of_a_job(world: Any) -> None:
    expected = of_first(world, lambda: run(None, "ddp"))
    with world.split(0) as comm:
        for nodes in (n for n in (1, 2, 3, 4) if comm.size % n == 0):
            memory = {"ranks_per_node": max(1, comm.size // 4), "share_node_memory": nodes != 2}
            found = run(comm, shard_nodes=nodes, **memory)
            parallel_assert(world, found == expected, f"{nodes} nodes, {memory}")


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(2, 1, zero=3), Way(1, 2, zero=3), Way(1, 1, context=2, zero=3)])
def test_stages_tensor_and_context_groups_are_replicated_over_groups_of_nodes(way: Way) -> None:
    case = Case(lambda: tied_gpt(layers=2), batches=texts(2, 8), config={"micro_batch": 1, "clip": 0.1})
    expected = trained_in_tiles(case, tensor=way.tensor, context=way.context)
    settings = {"ranks_per_node": 1, "shard_nodes": 2, "share_node_memory": way.context == 1}
    found = run_in_threads(8, lambda comm: trained(case, comm, way, **settings))
    assert {each.sha256 for each in found} == {expected.sha256}


def test_a_rank_keeps_and_sends_what_the_formulas_say() -> None:
    def told(comm: Any, **groups: Any) -> tuple[int, list[float]]:
        """Bytes of gradients, and bytes a parameter: of parameters and state, sent in the group, and to the others."""
        with sharded("zero3", comm, mlp(hidden=(40, 40), outputs=8), ranks_per_node=1, **groups) as model:
            counters = [group.counters for group in (model._engine.grid.shard_group, model._engine.grid.replicas)]
            model.train(*part(comm, *points(4)))
            before = [counter.bytes_by_tag["gather"] for counter in counters]
            model.train(*part(comm, *points(4)))
            sent = [counter.bytes_by_tag["gather"] - b for counter, b in zip(counters, before, strict=True)]
            metadata = model.metadata()
            assert metadata.bytes_on_rank["parameters"] == metadata.formula_bytes["parameters"]
            held = [metadata.bytes_on_rank[kind] for kind in ("parameters", "optimizer state")]
            return metadata.bytes_on_rank["gradients"], [count / model.parameter_count for count in (*held, *sent)]

    (alone, _), *_ = run_in_threads(4, told)
    for gradients, (parameters, state, gathered, copied) in run_in_threads(4, partial(told, shard_nodes=2)):
        assert gradients == pytest.approx(alone, abs=128)
        assert parameters == pytest.approx(4 / 2, rel=0.05)  # a half, as the other group has
        assert state == pytest.approx(8 / 4, rel=0.05)  # a quarter, which nobody else has
        assert gathered == pytest.approx(2 * 4 / 2, rel=0.05)  # all units forward and backward, half of each
        assert copied == pytest.approx(4 / 4, rel=0.05)  # what the rank has updated, to one other rank


def test_a_copy_that_has_changed_by_itself_is_found() -> None:
    def damaged(comm: Any) -> str:
        with sharded("zero3", comm, mlp(), ranks_per_node=1, shard_nodes=2, check_every=1) as model:
            model.train(*part(comm, *points(8)))
            store = model._engine.store
            if comm.rank == 3:  # the copy of what rank 1 owns
                (copy,) = (shard for shard in store.kept_shards if shard.rank == 1)
                store.values[store.stored_span(copy, 0, copy.spans[0]).start] += 1
            comm.barrier()
            with pytest.raises(IntegrityError) as found:
                model.train(*part(comm, *points(8)))
            return str(found.value)

    for message in run_in_threads(4, damaged):
        assert "on rank 3" in message


def test_nodes_are_counted_whether_their_ranks_share_memory_or_not() -> None:
    axes, hosts = Axes(data=8), (0, 0, 1, 1, 0, 0, 1, 1)  # as a launcher deals pairs of ranks to two nodes
    every = tuple(range(8))
    assert shard_groups(axes, hosts, 1) == {every: ((0,), (1,))}
    assert shard_groups(axes, hosts, 1, share=False) == {every: ((0, 1, 4, 5), (2, 3, 6, 7))}
    assert shard_groups(axes, hosts, 5) == shard_groups(axes, hosts, None) == {every: ((0, 1),)}
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert shard_groups(Axes(tensor=2, data=4), (0, 0, 1, 1, 0, 0, 2, 2), 1) == dict.fromkeys(halves, ((0,), (1,)))


def test_groups_that_cannot_be_made_are_refused_with_the_way_out() -> None:
    def make(strategy: str, size: int, **memory: Any) -> None:
        def work(comm: Any) -> None:
            with sharded(strategy, comm, mlp(), **memory):
                pass

        run_in_threads(size, work)

    with pytest.raises(ConfigError, match=r"shard_nodes=2: is for ZeRO-3 \(strategy \"zero3\"\); ZeRO-2 does"):
        make("zero2", 1, shard_nodes=2)
    with pytest.raises(
        GridError, match=r"shard_nodes=2 does not divide the 3 nodes of a data group; choose one of 1, 3"
    ):
        make("zero3", 3, ranks_per_node=1, shard_nodes=2)
    with pytest.raises(GridError, match=r"shard_nodes=1 makes groups of 2, 1 ranks; they must have the same number"):
        make("zero3", 3, ranks_per_node=2, shard_nodes=1)
    with pytest.raises(ConfigError, match=re.escape("shard_nodes=0: expected a whole number >= 1")):
        mz.Mesh(shard_nodes=0)

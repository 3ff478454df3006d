"""The groups of a job with several axes, against the integers they come from."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpizero.comm import ProcessGrid
from mpizero.errors import GridError
from mpizero.layout.mesh import GROUPS, Axes
from mpizero.testing import run_in_threads

ORDERS = (
    "pipeline,tensor,data",
    "pipeline,data,tensor",
    "context,data,tensor,pipeline",
    "data,pipeline,context,tensor",
)


def factorizations(ranks):
    """Every pipeline x tensor x data x context of so many ranks."""
    return [sizes for sizes in product(range(1, ranks + 1), repeat=4) if np.prod(sizes) == ranks]


def grids(ranks):
    """Every factorization, the orders dealt to them in turn."""
    for turn, (p, t, d, c) in enumerate(factorizations(ranks)):
        yield Axes.build(ranks, pipeline=p, tensor=t, data=d, context=c, order=ORDERS[turn % len(ORDERS)])


def members(grid, name):
    """The world ranks of a group, by the communicator itself."""
    group = getattr(grid, name)
    found = group.allgather_object(grid.world.rank)
    assert found[group.rank] == grid.world.rank
    return tuple(found)


def check(world, axes, **options):
    """Compare all that a grid says with the axes."""
    with ProcessGrid.create(world, axes=axes, **options) as grid:
        assert grid.axes == axes
        assert grid.here == axes.coordinates(world.rank)
        for name, differing in GROUPS.items():
            assert members(grid, name) == axes.group(world.rank, differing), name
        data = axes.group(world.rank, ("data", "context"))
        assert grid.data.rank == data.index(world.rank)
        assert (grid.batch is grid.data) == (axes.context == 1)
        assert sorted(grid.order) == list(range(grid.data.size))
        assert grid.order[grid.place] == grid.data.rank
        assert members(grid, "node") == tuple(data[rank] for rank in grid.node_ranks)
        assert members(grid, "peers") == tuple(data[rank] for rank in grid.peer_ranks)
        assert {grid.node.size} == set(grid.group_sizes)
        assert grid.node.shares_memory
        shared = grid.node.allocate_shared(8 * grid.node.size)
        shared.buffer.view(np.int64)[grid.node.rank] = world.rank
        grid.node.node_barrier(shared)
        assert shared.buffer.view(np.int64).tolist() == [data[rank] for rank in grid.node_ranks]
        shared.close()
        return [len(ranks) for ranks in grid.nodes]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("share", [True, False])
def test_groups_are_those_of_the_axes_for_every_factorization(ranks, share):
    def work(world):
        for axes in grids(ranks):
            sizes = check(world, axes, share_node_memory=share)
            assert sizes == ([axes.data * axes.context] if share else [1] * (axes.data * axes.context))

    run_in_threads(ranks, work)


@pytest.mark.mpi
def test_groups_over_mpi_are_those_of_the_axes_for_every_factorization(world):
    """On more than three ranks with nodes simulated too; each factorization then has one kind of memory in turn."""
    memories = ({"share_node_memory": True}, {"share_node_memory": False}, {"ranks_per_node": 2})
    for turn, axes in enumerate(grids(world.size)):
        for memory in memories[:2] if world.size <= 3 else (memories[(turn + world.size // 4) % 3],):
            check(world, axes, **memory)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_a_node_of_the_data_group_is_what_it_has_of_consecutive_ranks(order, per_node):
    def work(world):
        axes = Axes.build(8, pipeline=2, tensor=2, data=2, order=order)
        check(world, axes, ranks_per_node=per_node)
        with ProcessGrid.create(world, axes=axes, ranks_per_node=per_node) as grid:
            data = axes.group(world.rank, ("data", "context"))
            same = len({rank // per_node for rank in data}) == 1
            assert grid.nodes == (((0, 1),) if same else ((0,), (1,)))

    run_in_threads(8, work)


def test_data_groups_may_differ_in_their_nodes_as_long_as_each_is_even(capfd):
    """Nodes 012 and 345 cut only the middle one of the data groups 01, 23, 45."""

    def work(world):
        with ProcessGrid.create(world, axes=Axes(tensor=3, data=2), ranks_per_node=3) as grid:
            return grid.local_size

    assert run_in_threads(6, work) == [2, 2, 1, 1, 2, 2]
    assert "every rank keeps its own copy" not in capfd.readouterr().err


def test_one_uneven_data_group_makes_all_ranks_private_and_says_so_once(capfd):
    """Nodes 0123 and 45 cut the data groups into 012 and 3 | 45."""

    def work(world):
        with ProcessGrid.create(world, axes=Axes(pipeline=2, data=3), ranks_per_node=4) as grid:
            assert members(grid, "peers") == members(grid, "data")
            return grid.nodes

    assert run_in_threads(6, work) == [((0,), (1,), (2,))] * 6
    assert capfd.readouterr().err.count("nodes have 1, 2 ranks of a data group") == 1


def test_groups_of_the_same_ranks_are_one_communicator():
    def work(world):
        with ProcessGrid.create(world, axes=Axes(pipeline=2, data=2)) as grid:
            assert grid.model is grid.pipeline
            assert grid.tensor is grid.context
            assert len(grid.communicators) == 4  # alone (also peers), data, pipeline, node
        with ProcessGrid.create(world, axes=Axes(tensor=4)) as grid:
            assert grid.model is grid.tensor
            assert grid.data is grid.pipeline

    run_in_threads(4, work)


def test_data_parallelism_makes_no_other_groups(ranks):
    def specification(comm):
        with ProcessGrid.create(comm) as grid:
            assert grid.batch is grid.data
            assert grid.here == (0, 0, comm.rank, 0)
            for group in (grid.tensor, grid.context, grid.pipeline, grid.model):
                assert type(group).__name__ == "InMemoryCommunicator"
                assert group.size == 1
            assert grid.tensor_group.size == grid.context_group.size == 1

    ranks(specification)


def test_the_groups_of_split_layers_add_alike_inside_and_between_nodes(ranks):
    def specification(comm):
        size = comm.size // 2 if comm.size % 2 == 0 else comm.size
        for name in ("tensor", "context"):
            axes, seen = Axes.build(comm.size, **{name: size}), set()
            for options in ({}, {"ranks_per_node": 1}, {"ranks_per_node": 2}, {"share_node_memory": False}):
                with ProcessGrid.create(comm, axes=axes, **options) as grid:
                    group = grid.tensor_group if name == "tensor" else grid.context_group
                    line = axes.group(comm.rank, [name])
                    assert (group.rank, group.size) == (line.index(comm.rank), size)
                    x = np.random.default_rng(comm.rank).standard_normal((3, 1000)).astype(np.float32)
                    seen.add(group.all_reduce(x).tobytes())
                    whole = group.all_gather(np.array([[comm.rank]]), 1, [1] * size)
                    assert whole.tolist() == [list(line)]
                    shared = group.size > 1 and getattr(grid, name).shares_memory
                    assert (group.shared_bytes > 0) == shared
            assert len(seen) == 1

    ranks(specification)


@pytest.mark.parametrize("order", ["tensor", "context"])
def test_groups_inside_nodes_share_memory(order):
    def work(world):
        for share, per_node, expected in ((True, None, True), (True, 2, True), (True, 1, False), (False, None, False)):
            axes = Axes.build(
                4, order=f"pipeline,data,{order},{'context' if order == 'tensor' else 'tensor'}", **{order: 2}
            )
            with ProcessGrid.create(world, axes=axes, ranks_per_node=per_node, share_node_memory=share) as grid:
                assert getattr(grid, order).shares_memory == expected

    run_in_threads(4, work)


def test_closing_the_grid_closes_every_group_and_not_the_world(ranks):
    def specification(comm):
        grid = ProcessGrid.create(comm, axes=Axes.build(comm.size, tensor=comm.size))
        group = grid.tensor_group
        assert grid.tensor_group is group
        group.all_reduce(np.ones(3))
        grid.close()
        grid.close()
        comm.barrier()

    ranks(specification)


def test_many_grids_can_be_opened_one_after_the_other(ranks):
    def specification(comm):
        for _ in range(30 if comm.size <= 4 else 10):
            with ProcessGrid.create(comm, axes=Axes.build(comm.size, pipeline=comm.size)) as grid:
                grid.pipeline.barrier()

    ranks(specification)


def test_bytes_of_all_groups_are_counted_once():
    def work(world):
        with ProcessGrid.create(world, axes=Axes(2, 2, 2), share_node_memory=False) as grid:
            before = grid.bytes_sent
            for name in GROUPS:
                group = getattr(grid, name)
                group.allgather(np.zeros(4), np.zeros(4 * group.size))
            assert grid.bytes_sent - before == 32 * (0 + 1 + 1 + 1 + 1 + 3)

    run_in_threads(8, work)


def test_describe_is_a_table_of_coordinates_and_nodes(ranks):
    def specification(comm):
        axes = Axes.build(comm.size, pipeline=comm.size)
        with ProcessGrid.create(comm, axes=axes, ranks_per_node=2, share_node_memory=False) as grid:
            table = grid.describe()
        assert table == axes.describe([rank // 2 for rank in range(comm.size)])
        rows = [line.split() for line in table.splitlines()[-comm.size :]]
        assert [row[0] for row in rows] == [str(rank) for rank in range(comm.size)]

    ranks(specification)


def test_axes_for_another_number_of_ranks_name_all_numbers(ranks):
    def specification(comm):
        with pytest.raises(GridError, match=rf"pipeline=2 x tensor=3 x data=7 x context=1 needs 42 .* has {comm.size}"):
            ProcessGrid.create(comm, axes=Axes(2, 3, 7))

    ranks(specification)
